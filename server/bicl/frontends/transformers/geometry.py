"""Ask a model, not its config, what its attention layers look like; refuse what cannot work."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from bicl.cache.layout import PageLayout
from bicl.errors import BiclError, ConfigError
from bicl.frontends.transformers.rows import LayerRows, PagedCache

__all__ = ["LayerGeometry", "ModelGeometry", "cache_argument", "inspect_model"]


@dataclass(frozen=True)
class LayerGeometry:
    """One attention layer. ``window_left``: keys before the query's own; -1 is unlimited."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    window_left: int
    softcap: float


@dataclass(frozen=True)
class ModelGeometry:
    """All attention layers of a model, in order."""

    layers: tuple[LayerGeometry, ...]

    def layouts(self, dtype: torch.dtype, **options: Any) -> list[PageLayout]:
        """One page layout a layer; ``options`` are :class:`PageLayout`'s (page_size, tile, ...).

        Raises:
            LayoutError: the layout cannot hold such a layer.
        """
        return [
            PageLayout(layer.num_kv_heads, layer.head_dim, dtype, **options)
            for layer in self.layers
        ]


def inspect_model(model: PreTrainedModel) -> ModelGeometry:
    """Run one token through a model loaded with ``attn_implementation="bicl"`` and note what each
    of its layers asks for.

    Raises:
        ConfigError: the model is no decoder that pages can serve; the message names the model
            and the reason.
    """
    name = type(model).__name__
    if reason := _reason_from_config(model):
        raise ConfigError(f"{name} cannot run on BICL pages: {reason}")
    recorder = _Recorder()
    token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    try:
        with torch.inference_mode():
            model(
                input_ids=token,
                position_ids=token,
                use_cache=True,
                **{cache_argument(model): recorder},
            )
    except BiclError as error:
        raise ConfigError(f"{name} cannot run on BICL pages: {error}") from error
    except Exception as error:
        # A model that computes attention by itself (ALiBi, own kernels) meets our handle where it
        # expects a tensor; whatever it raises then means the same.
        raise ConfigError(
            f"{name} cannot run on BICL pages: its attention does not go through transformers' "
            f"AttentionInterface ({type(error).__name__}: {error})"
        ) from error
    layers = recorder.seen
    expected = model.config.get_text_config().num_hidden_layers
    if sorted(layers) != list(range(expected)):
        raise ConfigError(
            f"{name} cannot run on BICL pages: {len(layers)} of its {expected} layers are "
            "attention layers with a cache of their own; every layer must be"
        )
    return ModelGeometry(tuple(layers[i] for i in range(expected)))


def cache_argument(model: PreTrainedModel) -> str:
    """Name of the forward argument that takes the cache: it changed within transformers 5."""
    names = inspect.signature(model.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def _reason_from_config(model: PreTrainedModel) -> str | None:
    config = model.config.get_text_config()
    if model.config.is_encoder_decoder:
        return "it is an encoder-decoder"
    if getattr(config, "add_cross_attention", False):
        return "it has cross-attention"
    if getattr(config, "alibi", False):
        return "it uses ALiBi"
    if getattr(config, "attention_chunk_size", None):
        return "it attends within chunks (attention_chunk_size)"
    if config._attn_implementation != "bicl":
        return (
            f'its attn_implementation is "{config._attn_implementation}"; load it with '
            'attn_implementation="bicl" after register(), or call '
            'model.set_attn_implementation("bicl")'
        )
    return None


class _Recorder(PagedCache):
    """Notes what the model asks for and answers zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, LayerGeometry] = {}

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def attend(
        self,
        rows: LayerRows,
        query: torch.Tensor,
        mask: torch.Tensor | None,
        *,
        scale: float,
        window_left: int,
        softcap: float,
    ) -> torch.Tensor:
        if rows.key.shape != rows.value.shape:
            self._refuse(
                f"keys and values of different shapes (layer {rows.layer_idx}: "
                f"{tuple(rows.key.shape)} and {tuple(rows.value.shape)})"
            )
        if rows.layer_idx in self.seen:
            self._refuse(f"two attention calls in one layer ({rows.layer_idx})")
        _, num_kv_heads, _, head_dim = rows.key.shape
        self.seen[rows.layer_idx] = LayerGeometry(
            query.shape[1], num_kv_heads, head_dim, window_left, softcap
        )
        return torch.zeros_like(query.transpose(1, 2))
