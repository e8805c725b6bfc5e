"""Watches a shard under test from the inside: attention against float32, pages against their owner.

Lives in the shard (its ``sitecustomize`` calls :func:`install` when ``TEST_AUDIT`` names a socket)
and answers a driver's ``Auditor``. What attention is compared with shares nothing with our pages:
every key and value is also kept token by token in a plain tensor, and PyTorch's own operations run
over it in float32. Inside CUDA graphs the copies are captured with the step.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, Listener
from typing import Any

import torch

__all__ = ["KEY", "Difference", "install"]

VARIABLE = "TEST_AUDIT"
KEY = b"bicl audit"
MAX_PREFILL_ROWS = 8  # query rows looked at of a longer prompt, its last ones included


@dataclass
class Difference:
    """Of attention's output rows from float32, relative to the row's norm.

    Attributes:
        rows: (query row, layer) pairs compared; ``graph_rows`` of them came out of a CUDA graph.
        worst, mean: of BICL.
        torch_worst, torch_mean: of PyTorch's attention in the model's own dtype, same K and V.
        not_finite: rows with NaN or infinity.
    """

    rows: int = 0
    graph_rows: int = 0
    worst: float = 0.0
    mean: float = 0.0
    torch_worst: float = 0.0
    torch_mean: float = 0.0
    not_finite: int = 0

    def add(self, ours: torch.Tensor, theirs: torch.Tensor, in_graph: bool) -> None:
        count = ours.numel()
        self.not_finite += int((~ours.isfinite()).sum())
        total = self.rows + count
        self.worst = max(self.worst, float(ours.max()))
        self.torch_worst = max(self.torch_worst, float(theirs.max()))
        self.mean = (self.mean * self.rows + float(ours.sum())) / total
        self.torch_mean = (self.torch_mean * self.rows + float(theirs.sum())) / total
        self.rows, self.graph_rows = total, self.graph_rows + count * in_graph


@dataclass
class _Call:
    """One attention call: copies of query and output, and where its keys are."""

    query: torch.Tensor
    out: torch.Tensor
    meta: Any
    scale: float
    window: int
    softcap: float


@dataclass
class _Layer:
    """A watched layer: K and V of every slot, token by token, and its last calls."""

    cache: Any
    key: torch.Tensor
    value: torch.Tensor
    unknown: torch.Tensor  # slots whose contents did not come through a store
    eager: _Call | None = None
    capturing: _Call | None = None
    captured: dict[Any, _Call] = field(default_factory=dict)  # by graph


class _Audit:
    """The shard's side.

    Args:
        every: compare the attention of every n-th step; 0: watch none (lossy caches).
        places: which layers to watch, as shares of the depth.
    """

    def __init__(self, every: int, places: Iterable[float] = (0.0, 0.5, 1.0)) -> None:
        self.every, self.places = every, tuple(places)
        self.difference = Difference()
        self.caches: list[Any] = []
        self.watched: dict[int, _Layer] = {}  # by id of the cache
        self.steps = 0
        self.largest = 0  # query rows of a call outside graphs
        self.replayed: Any = None
        self.cached: dict[int, int] = {}  # by request, tokens that its first step found

    def watch(self, caches: list[Any]) -> None:
        self.caches, self.watched = caches, {}
        if not self.every:
            return
        for index in {round(place * (len(caches) - 1)) for place in self.places if caches}:
            cache = caches[index]
            layout, pages = cache.layer.layout, cache.layer.num_pages
            shape = (pages * layout.page_size, layout.num_kv_heads, layout.head_dim)
            key, value = (
                torch.full(shape, float("nan"), dtype=layout.dtype, device=cache.layer.device)
                for _ in range(2)
            )
            unknown = torch.zeros(shape[0], dtype=torch.bool, device=cache.layer.device)
            self.watched[id(cache)] = _Layer(cache, key, value, unknown)

    def stored(self, cache: Any, key: torch.Tensor, value: torch.Tensor, slots: Any) -> None:
        if (layer := self.watched.get(id(cache))) is not None:
            layer.key[slots] = key
            layer.value[slots] = value
            layer.unknown.index_fill_(0, slots, False)  # no copy from the host: graphs record it

    def brought(self, pages: list[int]) -> None:
        """Pages came from the tiers: what they hold is not known here."""
        for layer in self.watched.values():
            size = layer.cache.layer.layout.page_size
            for page in pages:
                layer.unknown[page * size : (page + 1) * size] = True

    def attended(self, cache: Any, call: _Call) -> None:
        if (layer := self.watched.get(id(cache))) is None:
            return
        if call.query.is_cuda and torch.cuda.is_current_stream_capturing():
            layer.capturing = call
        else:
            layer.eager = call
            self.largest = max(self.largest, call.query.shape[0])

    def end_capture(self, graph: Any) -> None:
        for layer in self.watched.values():
            if layer.capturing is not None:
                layer.captured[graph], layer.capturing = layer.capturing, None

    def begin_step(self) -> None:
        self.replayed = None
        for layer in self.watched.values():
            layer.eager = None

    def end_step(self) -> None:
        self.steps += 1
        if not self.watched or self.steps % self.every:
            return
        in_graph = self.replayed is not None
        for layer in self.watched.values():
            call = layer.captured[self.replayed] if in_graph else layer.eager
            if call is not None:
                self._compare(layer, call, in_graph)

    @torch.inference_mode()
    def _compare(self, layer: _Layer, call: _Call, in_graph: bool) -> None:
        meta, size = call.meta, layer.cache.layer.layout.page_size
        lengths = meta.cache_seqlens.tolist()
        ends = range(1, len(lengths) + 1)
        if meta.cu_seqlens_q is not None:
            ends = meta.cu_seqlens_q.tolist()[1:]
        begin = 0
        for row, (end, length) in enumerate(zip(ends, lengths, strict=True)):
            if length and end > begin:
                places = torch.arange(length, device=call.query.device)
                slots = meta.page_table[row, places // size].long() * size + places % size
                kept = _some(begin, end)
                offsets = torch.tensor([length - end + i for i in kept], device=call.query.device)
                self._compare_rows(layer, call, kept, offsets, slots, in_graph)
            begin = end

    def _compare_rows(
        self,
        layer: _Layer,
        call: _Call,
        kept: list[int],
        offsets: torch.Tensor,
        slots: torch.Tensor,
        in_graph: bool,
    ) -> None:
        if layer.unknown[slots].any():
            return
        query, out = call.query[kept], call.out[kept].float()
        key, value = layer.key[slots], layer.value[slots]
        exact = _attention(query.float(), key.float(), value.float(), offsets, call)
        rounded = _attention(query, key, value, offsets, call).float()
        norm = exact.flatten(1).norm(dim=1).clamp_min(1e-12)
        ours, theirs = ((each - exact).flatten(1).norm(dim=1) / norm for each in (out, rounded))
        self.difference.add(ours, theirs, in_graph)

    def answer(self, command: str, pages: list[int]) -> Any:
        """Runs in the thread of the socket, while the driver leaves the shard idle."""
        if command == "difference":
            return asdict(self.difference)
        if command == "settled":
            from bicl.frontends.tgi import prefixes

            tiers = prefixes.shard_tiers()
            return tiers is None or tiers.settle(0)
        if command == "skipped":
            from bicl.frontends.tgi.hysparse import shard_sparsity

            sparsity = shard_sparsity()
            return 0 if sparsity is None else sparsity.counters.tiles_skipped
        if command == "counters":
            from bicl.frontends.tgi import prefixes

            return asdict(prefixes.counters())
        if command == "cached":
            return self.cached[pages[0]]
        if command == "largest":
            largest, self.largest = self.largest, 0
            return largest
        index = torch.tensor(pages, dtype=torch.int64, device=self.caches[0].layer.device)
        tensors = [cache.layer.pages for cache in self.caches]
        if command == "poison":
            for each in tensors:
                _bits(each)[index] = _bits(torch.full((1,), float("nan")).to(each.dtype)).item()
            return None
        if command == "written":
            full = torch.ones_like(index, dtype=torch.bool)
            for each in tensors:
                full &= _isnan(each[index]).flatten(1).all(1)
            return index[~full].tolist()
        assert command == "digest", command
        sums = [_bits(each)[index].flatten(1).sum(1, dtype=torch.int64) for each in tensors]
        return [tuple(layers) for layers in torch.stack(sums, 1).tolist()]


def _some(begin: int, end: int) -> list[int]:
    """A few rows of a long prompt, its first and last among them."""
    if end - begin <= MAX_PREFILL_ROWS:
        return list(range(begin, end))
    step = (end - begin - 1) / (MAX_PREFILL_ROWS - 1)
    return [begin + round(i * step) for i in range(MAX_PREFILL_ROWS)]


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, offsets: torch.Tensor, call: _Call
) -> torch.Tensor:
    """``[rows, heads, dim]``; row i sees keys up to ``offsets[i]``. In the dtype of what comes."""
    group = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(group, dim=1) for each in (key, value))
    places = torch.arange(key.shape[0], device=query.device)
    seen = (
        places[None] <= offsets[:, None]
        if call.meta.causal
        else torch.ones(len(offsets), len(places), dtype=torch.bool, device=query.device)
    )
    if call.window >= 0:
        seen = seen & (places[None] >= offsets[:, None] - call.window)
    scores = torch.einsum("qhd,khd->hqk", query, key) * call.scale
    if call.softcap:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    scores = scores.float().masked_fill(~seen, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1).to(value.dtype), value)


def _bits(pages: torch.Tensor) -> torch.Tensor:
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[pages.element_size()]
    return pages.view(width)


def _isnan(pages: torch.Tensor) -> torch.Tensor:
    return pages.float().isnan() if pages.element_size() == 1 else pages.isnan()


def install(flash_causal_lm: Any) -> None:
    """Watch the shard whose module this is, if the environment asks for it."""
    address = os.environ.get(VARIABLE)
    if not address:
        return
    from bicl.frontends.tgi.kv_cache import KVCache
    from bicl.frontends.tgi.tiers import ShardTiers

    audit = _Audit(int(os.environ.get("TEST_AUDIT_EVERY", "4")))
    model = flash_causal_lm.FlashCausalLM
    cache: Any = KVCache
    graph: Any = torch.cuda.CUDAGraph
    store, attend = cache.store, cache.attend
    init, generate = model.init_kv_cache, model.generate_token
    replay, capture_end = graph.replay, graph.capture_end

    @functools.wraps(store)
    def watched_store(self: Any, *, key: Any, value: Any, slots: Any, kv_scales: Any) -> None:
        audit.stored(self, key, value, slots)  # first: nothing between store and attention
        store(self, key=key, value=value, slots=slots, kv_scales=kv_scales)

    @functools.wraps(attend)
    def watched_attend(self: Any, query: Any, meta: Any, **options: Any) -> Any:
        out = attend(self, query, meta, **options)
        if id(self) in audit.watched:
            call = _Call(
                query.clone(),
                out.clone(),
                meta,
                options["scale"],
                options["window_left"],
                options["softcap"] or 0.0,
            )
            audit.attended(self, call)
        return out

    @functools.wraps(init)
    def watched_init(self: Any, *arguments: Any, **options: Any) -> None:
        audit.watch([])
        init(self, *arguments, **options)
        audit.watch(self.kv_cache)

    @functools.wraps(generate)
    def watched_generate(self: Any, batch: Any) -> Any:
        audit.begin_step()
        for request in batch.requests if batch.prefilling else ():
            audit.cached.setdefault(request.id, request.cache_len)
        result = generate(self, batch)
        audit.end_step()
        return result

    tiers: Any = ShardTiers
    bring = tiers.bring

    @functools.wraps(bring)
    def watched_bring(self: Any, chain: Any, pages: Any, first: int, last: int) -> int:
        count: int = bring(self, chain, pages, first, last)
        audit.brought(pages[first:last])
        return count

    def watched_capture_end(self: Any) -> None:
        capture_end(self)
        audit.end_capture(self)

    def watched_replay(self: Any) -> None:
        audit.replayed = self
        replay(self)

    cache.store, cache.attend = watched_store, watched_attend
    tiers.bring = watched_bring
    model.init_kv_cache, model.generate_token = watched_init, watched_generate
    graph.replay, graph.capture_end = watched_replay, watched_capture_end
    address += f"-{os.environ.get('RANK', '0')}"
    threading.Thread(target=_serve, args=(audit, address), daemon=True).start()


def _serve(audit: _Audit, address: str) -> None:
    with Listener(address, authkey=KEY) as listener:
        while True:
            with listener.accept() as connection:
                _answer_all(audit, connection)


def _answer_all(audit: _Audit, connection: Connection) -> None:
    while True:
        try:
            command, pages = connection.recv()
        except EOFError:
            return
        try:
            connection.send(audit.answer(command, pages))
        except Exception as error:
            connection.send(error)
