"""What all wire types share: serde's rules (strict, unknown fields ignored), Rust's numbers."""

from __future__ import annotations

import ctypes
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

__all__ = [
    "F32",
    "I32",
    "U32",
    "U64",
    "ErrorResponse",
    "StopStrings",
    "Wire",
    "is_empty",
    "shortest_f32",
]

_F32_MAX = 3.4028234663852886e38


def _to_f32(value: float) -> float:
    """The nearest float32, as serde parses into ``f32``; what overflows stays the largest one."""
    return max(-_F32_MAX, min(_F32_MAX, ctypes.c_float(value).value))


def shortest_f32(value: float | None) -> float | None:
    """The double that prints as the shortest text of this float32 (Rust's way), for JSON.

    NaN and infinities become ``None``: JSON has no word for them, and serde writes ``null``.
    """
    if value is None or value != value or abs(value) > _F32_MAX:
        return None
    single = ctypes.c_float(value).value
    for digits in range(6, 10):
        text = f"{single:.{digits}g}"
        if ctypes.c_float(float(text)).value == single:
            return float(text)
    return single


F32 = Annotated[float, AfterValidator(_to_f32)]
I32 = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
U32 = Annotated[int, Field(ge=0, le=2**32 - 1)]
U64 = Annotated[int, Field(ge=0, le=2**64 - 1)]


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


# OpenAI takes one string, too; TGI only a list.
StopStrings = Annotated[list[str] | None, BeforeValidator(_listed)]


class Wire(BaseModel):
    """Base of requests and responses."""

    model_config = ConfigDict(strict=True, extra="ignore", populate_by_name=True)

    def to_json(self) -> bytes:
        return self.model_dump_json(by_alias=True).encode()


def is_empty(value: Any) -> bool:
    """For ``Field(exclude_if=...)``: response fields that serde leaves out."""
    return value is None or value == []


class ErrorResponse(Wire):
    error: str
    error_type: str
