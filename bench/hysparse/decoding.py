"""Many decode steps of many configurations in one forward pass, as they would run one by one.

A context is read once, densely, as a server prefills a prompt. Then *episodes* continue it: the
tokens of an answer, or of the text itself, each of which is a decode step that chooses its keys
anew with what it may see. Rows of one episode see each other causally; the shared keys go through
the choice. Nothing depends on how many episodes or configurations run together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.nn import functional as F

from bicl.frontends.transformers.geometry import cache_argument
from bicl.frontends.transformers.rows import LayerRows, PagedCache
from bicl.sparse.variants import DecodeRows

__all__ = ["Context", "Episode", "KeepRows", "Observer", "decode_logits", "read_context"]

ROWS_AT_ONCE = {"cpu": 512, "cuda": 2048}
"""Rows whose scores are in memory together: 512 x 9 heads x 8,192 keys are 150 MB."""

KeepRows = Callable[[int, DecodeRows, slice], torch.Tensor]
"""``(layer, rows, which of the choice's rows they are) -> bool [R, H, T]``."""


class Observer(Protocol):
    """Hooks a model for as long as a context is read."""

    def attach(self, model: Any, context: Context) -> list[Any]:
        """Returns the handles to remove afterwards."""


@dataclass
class Context:
    """A text that was read, and each layer's keys and values, ``[T, H, D]``."""

    ids: torch.Tensor
    keys: dict[int, torch.Tensor] = field(default_factory=dict)
    values: dict[int, torch.Tensor] = field(default_factory=dict)

    def first(self, tokens: int) -> Context:
        """Its first ``tokens``, as a view."""
        keys = {layer: rows[:tokens] for layer, rows in self.keys.items()}
        values = {layer: rows[:tokens] for layer, rows in self.values.items()}
        return Context(self.ids[:tokens], keys, values)


@dataclass(frozen=True)
class Episode:
    """Tokens ``ids`` (int64 ``[R]``) decoded one by one after the first ``prefix`` of a context."""

    prefix: int
    ids: torch.Tensor


class _ReadCache(PagedCache):
    def __init__(self, context: Context) -> None:
        super().__init__()
        self._context = context

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
        self._context.keys[rows.layer_idx] = rows.key[0].transpose(0, 1).contiguous()
        self._context.values[rows.layer_idx] = rows.value[0].transpose(0, 1).contiguous()
        group = query.shape[1] // rows.key.shape[1]  # repeated: fp32 has no fused kernel for GQA
        key, value = (x.repeat_interleave(group, dim=1) for x in (rows.key, rows.value))
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
        return out.transpose(1, 2)


def read_context(model: Any, ids: torch.Tensor, observer: Observer | None = None) -> Context:
    """Prefill ``ids`` (int64 ``[T]``); ``observer`` sees every attention layer at work."""
    context = Context(ids)
    handles = observer.attach(model, context) if observer else []
    try:
        with torch.inference_mode():
            model(
                input_ids=ids[None],
                position_ids=torch.arange(len(ids), device=ids.device)[None],
                use_cache=True,
                logits_to_keep=1,
                **{cache_argument(model): _ReadCache(context)},
            )
    finally:
        for handle in handles:
            handle.remove()
    return context


class _DecodeCache(PagedCache):
    """Rows are ordered configuration, episode, token."""

    def __init__(
        self,
        context: Context,
        prefixes: torch.Tensor,
        steps: int,
        choices: Sequence[tuple[slice, KeepRows]],
        sparse_layers: frozenset[int],
    ) -> None:
        super().__init__()
        self._context = context
        self._shared = prefixes.int().repeat_interleave(steps)
        step = torch.arange(steps, device=prefixes.device).repeat(len(prefixes))
        self._length = (self._shared + step + 1).int()
        self._steps = steps
        self._choices = choices
        self._sparse = sparse_layers

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
        layer = rows.layer_idx
        key, value = self._context.keys[layer], self._context.values[layer]
        query = query[0].transpose(0, 1)
        own = [x[0].transpose(0, 1) for x in (rows.key, rows.value)]
        out = torch.empty_like(query)
        lots = max(1, ROWS_AT_ONCE[key.device.type] // self._steps) * self._steps
        for part, keep in self._choices:
            for begin in range(part.start, part.stop, lots):
                lot = slice(begin, min(begin + lots, part.stop))
                shared, length = self._shared[lot], self._length[lot]
                if layer in self._sparse:
                    own_rows = slice(lot.start - part.start, lot.stop - part.start)
                    kept = keep(layer, DecodeRows(query[lot], key, shared, length, scale), own_rows)
                else:
                    seen = torch.arange(len(key), device=key.device) < shared[:, None]
                    kept = seen[:, None].expand(-1, key.shape[1], -1)
                out[lot] = self._attend(query[lot], key, value, own, lot, kept, scale)
        return out[None]

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        own: Sequence[torch.Tensor],
        lot: slice,
        kept: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """``query`` ``[R, Hq, D]`` over kept shared keys and its episode's rows up to itself."""
        steps, group = self._steps, query.shape[1] // key.shape[1]

        def by_episode(rows: torch.Tensor) -> torch.Tensor:
            return rows.unflatten(0, (-1, steps)).transpose(1, 2)

        allowed = by_episode(kept)
        past = torch.ones(steps, steps, dtype=torch.bool, device=key.device).tril()
        mask = torch.cat((allowed, past.expand(*allowed.shape[:2], -1, -1)), dim=3)
        keys, values = (
            torch.cat((far.transpose(0, 1).expand(len(mask), -1, -1, -1), by_episode(near)), dim=2)
            for far, near in zip((key, value), (x[lot] for x in own), strict=True)
        )
        keys, values, mask = (x.repeat_interleave(group, dim=1) for x in (keys, values, mask))
        out = F.scaled_dot_product_attention(by_episode(query), keys, values, mask, scale=scale)
        return out.transpose(1, 2).flatten(0, 1)


def decode_logits(
    model: Any,
    context: Context,
    episodes: Sequence[Episode],
    choices: Mapping[str, tuple[int, KeepRows]],
    sparse_layers: Sequence[int],
    page_size: int,
) -> dict[str, torch.Tensor]:
    """Logits of every row of every episode under every choice.

    Args:
        episodes: all of one length.
        choices: name to (number of configurations it decides together, how).
        page_size: own rows must lie in recent windows, which are never left out.

    Returns:
        Name to float32 ``[configurations, episodes, R, vocabulary]``.
    """
    steps = len(episodes[0].ids)
    for episode in episodes:
        aligned = episode.prefix % page_size == 0
        if len(episode.ids) != steps or steps > (2 * page_size if aligned else page_size):
            raise ValueError(f"episodes must be of one length and within two pages, got {steps}")
    device = context.ids.device
    count = sum(number for number, _ in choices.values())
    rows = steps * len(episodes)
    prefixes = torch.tensor([e.prefix for e in episodes], device=device).repeat(count)
    parts, spans, begin = [], {}, 0
    for name, (number, keep) in choices.items():
        spans[name] = slice(begin, begin + number * rows)
        parts.append((spans[name], keep))
        begin += number * rows
    cache = _DecodeCache(context, prefixes, steps, parts, frozenset(sparse_layers))
    step = torch.arange(steps, device=device).repeat(len(prefixes))
    with torch.inference_mode():
        logits = model(
            input_ids=torch.cat([e.ids for e in episodes]).repeat(count)[None],
            position_ids=(prefixes.repeat_interleave(steps) + step)[None],
            use_cache=True,
            **{cache_argument(model): cache},
        ).logits[0]
    shape = (-1, len(episodes), steps, logits.shape[-1])
    return {name: logits[span].view(shape).float() for name, span in spans.items()}
