"""Wire types of ``/info``, ``/v1/models`` and ``/cache/...``."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from bicl.frontends.http.schemas.base import Wire

__all__ = ["BiclInfo", "FlushedCache", "Info", "ModelInfo", "ModelsInfo"]


class BiclInfo(Wire):
    """What TGI does not tell."""

    version: str
    model_dtype: str
    model_device_type: str
    reuse_enabled: bool
    cache: dict[str, Any] = Field(description="Backend, block size, tile, type, pages, bytes.")
    reordering_exposed: dict[str, float] = Field(
        default={},
        description="Share of the steps' time so far that writing pages took and nothing hid, at "
        "most; of steps with prompt tokens (prefill) and without (decode).",
    )
    unsupported: dict[str, str] = Field(description="Request fields that are refused, and why.")
    fallbacks: list[str] = Field(description="What runs otherwise than asked for.")
    without_effect: list[str] = Field(description="Flags that were given and change nothing.")


class FlushedCache(Wire):
    """What a flush did."""

    freed_pages: int = Field(description="Pages of the device that are free now.")
    held_pages: int = Field(description="Pages that running requests still hold; nobody else can.")
    dropped_pins: int
    tier_pages: int = Field(description="Pages that left host memory and disk.")


class UnpinRequest(Wire):
    inputs: str = Field(description="The beginning of prompts: text, with its template applied.")
    add_special_tokens: bool = Field(
        default=True, description="As `/generate` does; the chat routes do not."
    )


class PinRequest(UnpinRequest):
    ttl_seconds: float | None = Field(
        default=None, gt=0, description="How long; null: until it is unpinned or flushed."
    )


class PinnedPrefix(Wire):
    """What a pin protects."""

    tokens: int = Field(description="Of `inputs`.")
    pinned_tokens: int = Field(description="Those of them in whole pages that were cached.")


class Unpinned(Wire):
    """Whether there was a pin."""

    unpinned: bool


class Info(Wire):
    model_id: str
    model_sha: str | None
    model_pipeline_tag: str | None
    max_concurrent_requests: int
    max_best_of: int
    max_stop_sequences: int
    max_input_tokens: int
    max_total_tokens: int
    validation_workers: int
    max_client_batch_size: int
    router: str
    version: str = Field(description="The version of TGI whose wire format this is.")
    sha: str | None
    docker_label: str | None
    bicl: BiclInfo


class ModelInfo(Wire):
    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str


class ModelsInfo(Wire):
    object: Literal["list"] = "list"
    data: list[ModelInfo]
