"""What is put into transformers' registries, and how it comes out again."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from bicl.errors import UnsupportedError
from bicl.frontends.transformers.rows import LayerRows

__all__ = ["ATTENTION_NAME", "Registration", "register", "unregister"]

ATTENTION_NAME = "bicl"

# Arguments that some models pass to their attention function and that change the scores.
_SCORE_ARGUMENTS = {"s_aux": "attention sinks", "position_bias": "a position bias"}


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: LayerRows | torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: query ``[B, num_q_heads, T, head_dim]`` in,
    ``[B, T, num_q_heads, head_dim]`` out. ``key`` is what :meth:`PagedCache.update` returned.

    transformers' window of ``W`` tokens counts the query's own; ours counts the keys before it.
    """
    if not isinstance(key, LayerRows):
        raise UnsupportedError(
            'attn_implementation="bicl" keeps keys and values in pages; pass '
            "past_key_values=BiclCache(model) (found no cache, or another one)"
        )
    for name, meaning in _SCORE_ARGUMENTS.items():
        if kwargs.get(name) is not None:
            raise UnsupportedError(f"{type(module).__name__} uses {meaning} ({name})")
    if not getattr(module, "is_causal", True):
        raise UnsupportedError(f"{type(module).__name__} attends in both directions")
    if module.training and kwargs.get("dropout"):
        raise UnsupportedError("attention dropout is not available; call model.eval()")
    out = key.cache.attend(
        key,
        query,
        attention_mask,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window_left=sliding_window - 1 if sliding_window else -1,
        softcap=softcap or 0.0,
    )
    return out, None


def padding_mask(*, attention_mask: torch.Tensor | None = None, **_: Any) -> torch.Tensor | None:
    """transformers' mask function: the 2-D mask as it came, or ``None`` if nothing is masked.
    Causality and windows are the attention function's affair; no 4-D mask is ever built."""
    if attention_mask is None or bool(attention_mask.all()):
        return None
    return attention_mask


class Registration:
    """Returned by :func:`register`; as a context manager it unregisters at the end."""

    def __enter__(self) -> Registration:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        unregister()


def register() -> Registration:
    """Make ``attn_implementation="bicl"`` known to transformers. Idempotent."""
    AttentionInterface.register(ATTENTION_NAME, attention)
    AttentionMaskInterface.register(ATTENTION_NAME, padding_mask)
    return Registration()


def unregister() -> None:
    """Undo :func:`register`. Models that still use the name fail at their next call."""
    # transformers offers no public way to take an entry out of its registries.
    AttentionInterface._global_mapping.pop(ATTENTION_NAME, None)
    AttentionMaskInterface._global_mapping.pop(ATTENTION_NAME, None)
