"""Record what a model's attention layers see, for calibration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel

from bicl.frontends.transformers.geometry import cache_argument
from bicl.frontends.transformers.rows import LayerRows, PagedCache
from bicl.sparse.fit import Recording

__all__ = ["record_attention"]


class _Recorder(PagedCache):
    def __init__(self, layers: Sequence[int], position: torch.Tensor) -> None:
        super().__init__()
        self.recordings: dict[int, Recording] = {}
        self._layers = frozenset(layers)
        self._position = position

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
        if window_left >= 0 or softcap > 0.0:
            self._refuse("calibration of models with sliding windows or capped scores")
        if rows.layer_idx in self._layers:
            self.recordings[rows.layer_idx] = Recording(
                query[0, :, self._position].transpose(0, 1).half(),
                rows.key[0].transpose(0, 1).half(),
                rows.value[0].transpose(0, 1).half(),
                self._position.cpu(),
                scale,
            )
        group = query.shape[1] // rows.key.shape[1]
        key, value = (x.repeat_interleave(group, dim=1) for x in (rows.key, rows.value))
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
        return out.transpose(1, 2)


def record_attention(
    model: PreTrainedModel, ids: torch.Tensor, layers: Sequence[int], position: torch.Tensor
) -> dict[int, Recording]:
    """Run one text through a model loaded with ``attn_implementation="bicl"``.

    Args:
        ids: int64 ``[T]``.
        layers: numbers of the layers to record.
        position: int64 ``[R]``, the tokens whose queries are kept.

    Returns:
        One recording a layer, float16 on the CPU.
    """
    recorder = _Recorder(layers, position.to(ids.device))
    with torch.inference_mode():
        model(
            input_ids=ids[None],
            position_ids=torch.arange(len(ids), device=ids.device)[None],
            use_cache=True,
            logits_to_keep=1,
            **{cache_argument(model): recorder},
        )
    return {
        layer: replace(own, query=own.query.cpu(), key=own.key.cpu(), value=own.value.cpu())
        for layer, own in recorder.recordings.items()
    }
