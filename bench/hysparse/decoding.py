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

__all__ = [
    "Context",
    "Episode",
    "KeepRows",
    "Observer",
    "Scored",
    "decode_logits",
    "decode_scored",
    "read_context",
]

ROWS_AT_ONCE = {"cpu": 512, "cuda": 2048}
"""Rows whose scores are in memory together: 512 x 9 heads x 8,192 keys are 150 MB."""
LOGITS_AT_ONCE = {"cpu": 256, "cuda": 4096}
"""Rows whose logits are: 4,096 x 49,152 are 800 MB."""

KeepRows = Callable[[int, DecodeRows, slice], torch.Tensor]
"""``(layer, rows, which of the choice's rows they are) -> bool [R, H, T]``."""


class Observer(Protocol):
    """Hooks a model for as long as a context is read."""

    def attach(self, model: Any, context: Context) -> list[Any]:
        """Returns the handles to remove afterwards."""


@dataclass
class Context:
    """A text that was read, and each layer's keys, values and queries, ``[T, H, D]``."""

    ids: torch.Tensor
    keys: dict[int, torch.Tensor] = field(default_factory=dict)
    values: dict[int, torch.Tensor] = field(default_factory=dict)
    queries: dict[int, torch.Tensor] = field(default_factory=dict)

    def first(self, tokens: int) -> Context:
        """Its first ``tokens``, as a view."""
        parts = (
            {layer: rows[:tokens] for layer, rows in own.items()}
            for own in (self.keys, self.values, self.queries)
        )
        return Context(self.ids[:tokens], *parts)


@dataclass(frozen=True)
class Episode:
    """Tokens ``ids`` (int64 ``[R]``) decoded one by one after the first ``prefix`` of a context."""

    prefix: int
    ids: torch.Tensor


@dataclass(frozen=True)
class Scored:
    """What rows made of the token that follows each of them: ``[configurations, episodes, R]``.

    ``loss``: float32, its negative log-likelihood. ``right``: bool, whether it is the likeliest.
    """

    loss: torch.Tensor
    right: torch.Tensor


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
        self._context.queries[rows.layer_idx] = query[0].transpose(0, 1).contiguous()
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
        choices: Sequence[tuple[slice, KeepRows | None]],
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
        self._all_seen = bool((prefixes == len(context.ids)).all())

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
        before = self._a_step_earlier(query, layer) if layer in self._sparse else query
        own = [x[0].transpose(0, 1) for x in (rows.key, rows.value)]
        out = torch.empty_like(query)
        whole = [(slice(0, len(query)), None)]
        for part, keep in self._choices if layer in self._sparse else whole:
            for lot in self._lots(part, key.device.type):
                shared, length = self._shared[lot], self._length[lot]
                kept = None
                if keep is not None:
                    own_rows = slice(lot.start - part.start, lot.stop - part.start)
                    shown = DecodeRows(query[lot], key, shared, length, scale, before[lot])
                    kept = keep(layer, shown, own_rows)
                elif not self._all_seen:
                    kept = (torch.arange(len(key), device=key.device) < shared[:, None])[:, None]
                near = [x[lot] for x in own]
                out[lot] = _attend(query[lot] * scale, key, value, near, kept, self._steps)
        return out[None]

    def _a_step_earlier(self, query: torch.Tensor, layer: int) -> torch.Tensor:
        """Each row's query of the step before; of an episode's first row the context's last."""
        before = query.roll(1, 0)
        first = self._shared[:: self._steps].long()
        before[:: self._steps] = self._context.queries[layer][first - 1]
        return before

    def _lots(self, part: slice, device: str) -> list[slice]:
        """Whole episodes."""
        size = max(1, ROWS_AT_ONCE[device] // self._steps) * self._steps
        begins = range(part.start, part.stop, size)
        return [slice(begin, min(begin + size, part.stop)) for begin in begins]


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    near: Sequence[torch.Tensor],
    kept: torch.Tensor | None,
    steps: int,
) -> torch.Tensor:
    """Rows over keys that they share, and over those of their own episode up to themselves.

    The shared keys are one matrix product for all rows: nothing is copied for an episode.

    Args:
        query: ``[R, Hq, D]``, scaled.
        key, value: ``[T, H, D]``, shared.
        near: keys and values of the rows, ``[R, H, D]`` each.
        kept: bool ``[R, H or 1, T]``, which of the shared keys are read; ``None``: all.
        steps: rows of an episode.
    """
    (rows, _, dims), (total, heads) = query.shape, key.shape[:2]
    group = query.shape[1] // heads
    grouped = query.view(rows, heads, group, dims).transpose(0, 1)  # [H, R, g, D]
    scores = query.new_empty(heads, rows, group, total + steps)
    flat = scores.flatten(1, 2)
    flat[..., :total] = grouped.flatten(1, 2) @ key.permute(1, 2, 0)
    if kept is not None:
        scores[..., :total].masked_fill_(~kept.transpose(0, 1)[:, :, None], -torch.inf)
    near_key, near_value = (x.unflatten(0, (-1, steps)).permute(2, 0, 1, 3) for x in near)
    episodes = near_key.shape[1]
    by_episode = grouped.reshape(heads, episodes, steps * group, dims)
    own = (by_episode @ near_key.transpose(-1, -2)).view(heads, episodes, steps, group, steps)
    future = torch.ones(steps, steps, dtype=torch.bool, device=key.device).triu(1)
    own.masked_fill_(future[:, None], -torch.inf)
    scores[..., total:] = own.flatten(1, 2)
    flat = flat.softmax(dim=-1)
    out = flat[..., :total] @ value.transpose(0, 1)
    own = flat[..., total:].reshape(heads, episodes, steps * group, steps) @ near_value
    out += own.flatten(1, 2)
    return out.view(heads, rows, group, dims).transpose(0, 1).flatten(1, 2)


def decode_logits(
    model: Any,
    context: Context,
    episodes: Sequence[Episode],
    choices: Mapping[str, tuple[int, KeepRows | None]],
    sparse_layers: Sequence[int],
    page_size: int,
) -> dict[str, torch.Tensor]:
    """Logits of every row of every episode under every choice.

    Args:
        episodes: all of one length.
        choices: name to (number of configurations it decides together, how; ``None``: all keys).
        page_size: own rows must lie in recent windows, which are never left out.

    Returns:
        Name to float32 ``[configurations, episodes, R, vocabulary]``.
    """
    hidden = _decode(model, context, episodes, choices, sparse_layers, page_size)
    head = model.get_output_embeddings()
    with torch.inference_mode():
        return {name: head(own).float() for name, own in hidden.items()}


def decode_scored(
    model: Any,
    context: Context,
    episodes: Sequence[Episode],
    targets: torch.Tensor,
    choices: Mapping[str, tuple[int, KeepRows | None]],
    sparse_layers: Sequence[int],
    page_size: int,
) -> dict[str, Scored]:
    """:func:`decode_logits`, scored by ``targets`` (int64 ``[episodes, R]``) at once: the logits of
    many configurations would not fit into memory."""
    hidden = _decode(model, context, episodes, choices, sparse_layers, page_size)
    head = model.get_output_embeddings()
    rows = torch.cat([own.flatten(0, 2) for own in hidden.values()])
    wanted = targets.flatten().repeat(len(rows) // targets.numel())
    loss = torch.empty(len(rows), device=rows.device)
    right = torch.empty(len(rows), dtype=torch.bool, device=rows.device)
    with torch.inference_mode():
        size = LOGITS_AT_ONCE[rows.device.type]
        for begin in range(0, len(rows), size):
            lot = slice(begin, begin + size)
            logits = head(rows[lot]).float()
            own = logits.gather(1, wanted[lot, None])[:, 0]
            loss[lot] = logits.logsumexp(dim=1) - own
            right[lot] = own == logits.amax(dim=1)
    counts = [own.shape[:3] for own in hidden.values()]
    sizes = [count.numel() for count in counts]
    parts = zip(hidden, counts, loss.split(sizes), right.split(sizes), strict=True)
    return {name: Scored(a.view(count), b.view(count)) for name, count, a, b in parts}


def _decode(
    model: Any,
    context: Context,
    episodes: Sequence[Episode],
    choices: Mapping[str, tuple[int, KeepRows | None]],
    sparse_layers: Sequence[int],
    page_size: int,
) -> dict[str, torch.Tensor]:
    """Name to the last layer's ``[configurations, episodes, R, hidden]``."""
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
        hidden = model.get_decoder()(
            input_ids=torch.cat([e.ids for e in episodes]).repeat(count)[None],
            position_ids=(prefixes.repeat_interleave(steps) + step)[None],
            use_cache=True,
            **{cache_argument(model): cache},
        ).last_hidden_state[0]
    shape = (-1, len(episodes), steps, hidden.shape[-1])
    return {name: hidden[span].view(shape) for name, span in spans.items()}
