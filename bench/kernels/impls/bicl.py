"""Our kernels, by the operators that the CUDA backend calls.

``bicl`` is what a server runs. The others change one thing: ``-deterministic`` cuts every sequence
at fixed keys, ``-pdl`` lets a launch overlap the end of the kernel before it, ``-fp8`` stores e4m3,
``-sm80`` takes the path for cards before Hopper, ``-with-plan`` makes the step's plan anew in every
call, ``-no-plan`` does without, ``-other-lengths`` captures its graph while the sequences are half
as long and in reverse order, ``-fp8-in-kernel`` never widens a prefill's fp8 pages ahead of it,
``-p32`` has pages of 32 tokens.
Otherwise a prefill's plan stands before the clock starts, and a decode step's is made within it by
every 32nd call, which stands for a model of 32 layers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch

from bench.kernels.arena import PagedBatch
from bench.kernels.impls import Contestant, Prepared, Registry
from bench.kernels.shapes import HEAD_DIM, kv_bytes
from bicl.attention.cuda import CudaBackend
from bicl.attention.metadata import AttentionMetadata
from bicl.attention.pool import LayerCache
from bicl.attention.widening import PageWidener, PrefillPart
from bicl.cache.layout import PageLayout
from bicl.errors import BackendError
from bicl.ops.cuda import library
from bicl.ops.cuda.decode_attention import decode_attention, plan_bytes, plan_decode
from bicl.ops.cuda.prefill_attention import (
    PrefillPlan,
    plan_prefill,
    prefill_attention,
    workspace_bytes,
)
from bicl.ops.cuda.store_kv import store_kv
from bicl.ops.cuda.workspace import Workspace

__all__ = ["NAME", "PAGE", "decode_calls", "key_value", "pages_of", "register"]

NAME = "bicl"
PAGE = 64
_MAX_PAIRS = 256 * 64
SCALE = HEAD_DIM**-0.5
_FP8 = torch.float8_e4m3fn
_LAYERS = 32  # that share a decode step's plan
_MAX_BYTES = 1 << 34  # that the calls of one such model read; with fewer calls a plan weighs more


def register(registry: Registry) -> None:
    try:
        library.module()
    except BackendError as error:
        raise ImportError(str(error)) from error
    registry.decode += [
        Contestant("bicl", partial(decode_calls, {})),
        Contestant("bicl-deterministic", partial(decode_calls, {"deterministic": True})),
        Contestant("bicl-pdl", partial(decode_calls, {"pdl": True})),
        Contestant("bicl-fp8", partial(decode_calls, {}, dtype=_FP8), element_bytes=1),
        Contestant("bicl-with-plan", partial(decode_calls, {}, layers=1)),
        Contestant("bicl-no-plan", partial(decode_calls, {}, layers=0)),
        Contestant("bicl-other-lengths", partial(decode_calls, {}, captured_at=_other_lengths)),
    ]
    registry.prefill += [
        Contestant("bicl", partial(_prefill, {})),
        Contestant("bicl-with-plan", partial(_prefill, {}, plan_each_call=True)),
        Contestant("bicl-deterministic", partial(_prefill, {"deterministic": True})),
        Contestant("bicl-p32", partial(_prefill, {}, page=32)),
        Contestant("bicl-fp8", partial(_prefill, {}, dtype=_FP8), element_bytes=1),
        Contestant(
            "bicl-fp8-in-kernel", partial(_prefill, {}, dtype=_FP8, widen=False), element_bytes=1
        ),
    ]
    older = {"force_sm80": True}
    registry.sm80_decode.append(Contestant("bicl-sm80", partial(decode_calls, older)))
    registry.sm80_prefill.append(Contestant("bicl-sm80", partial(_prefill, older)))
    registry.layer += [
        Contestant("bicl", partial(_layer, False)),
        Contestant("bicl-pdl", partial(_layer, True)),
    ]
    registry.launch["bicl-run"] = _run_call
    registry.launch["bicl-decode"] = _decode_call
    registry.launch["bicl-store"] = _store_call
    registry.store = store_kv


@cache
def workspace(device: torch.device, deterministic: bool) -> Workspace:
    return Workspace(device, HEAD_DIM, 8, _MAX_PAIRS, deterministic=deterministic)


def pages_of(batch: PagedBatch, dtype: torch.dtype, page: int = PAGE) -> LayerCache:
    layout = PageLayout(batch.heads.kv, HEAD_DIM, dtype, page, tile=page)
    return batch.arena.tiles(layout, batch.num_pages(page))


def decode_calls(
    flags: dict[str, bool],
    batch: PagedBatch,
    dtype: torch.dtype = torch.bfloat16,
    tables: list[torch.Tensor] | None = None,
    layers: int = _LAYERS,
    before: Callable[[int], object] = lambda index: None,
    attend: Callable[..., None] = decode_attention,
    plan_with: Callable[..., None] = plan_decode,
    captured_at: Callable[[PagedBatch], torch.Tensor] = lambda batch: batch.cache_seqlens,
) -> Prepared:
    """Calls over the page tables by turns; every ``layers``-th makes its plan first (0: none has
    one). ``before`` runs ahead of each call, with its table's index; ``attend`` and
    ``plan_with`` are called as ``decode_attention`` and ``plan_decode`` are; ``captured_at`` gives
    the lengths until the calls have been captured."""
    layer = pages_of(batch, dtype)
    tables = batch.page_tables(PAGE) if tables is None else tables
    out = torch.empty_like(batch.query)
    space = workspace(batch.arena.device, flags.get("deterministic", False))
    shared = {key: flag for key, flag in flags.items() if key != "pdl"}
    lengths = captured_at(batch)

    def make_plan(plan: torch.Tensor, table: torch.Tensor) -> None:
        plan_with(plan, layer, table, lengths, num_q_heads=batch.heads.query, **shared)

    def settle() -> None:
        lengths.copy_(batch.cache_seqlens)
        for plan, table in zip(plans, tables, strict=True):
            if plan is not None:
                make_plan(plan, table)

    plans: list[torch.Tensor | None] = [None] * len(tables)
    if layers:
        size = plan_bytes(len(batch.lengths))
        for index, table in enumerate(tables):
            plan = torch.empty(size, dtype=torch.uint8, device=batch.arena.device)
            make_plan(plan, table)
            plans[index] = plan

    def call(index: int, replan: bool) -> torch.Tensor:
        table, plan = tables[index], plans[index]
        before(index)
        if replan and plan is not None:
            make_plan(plan, table)
        attend(
            batch.query,
            layer,
            table,
            lengths,
            space,
            out=out,
            plan=plan,
            scale=SCALE,
            **{**flags, "pdl": flags.get("pdl", False) and not replan},
        )
        return out

    set_bytes = kv_bytes(batch.lengths, batch.heads.kv) * len(tables)
    rounds = min(-(-max(layers, 1) // len(tables)), max(1, _MAX_BYTES // set_bytes))
    calls = [
        partial(call, index % len(tables), layers > 0 and index % layers == 0)
        for index in range(rounds * len(tables))
    ]
    read = partial(key_value, layer, tables[0], batch.lengths)
    return Prepared(calls, read, settle=settle)


def _other_lengths(batch: PagedBatch) -> torch.Tensor:
    halves = [max(1, length // 2) for length in reversed(batch.lengths)]
    return torch.tensor(halves, dtype=torch.int32, device=batch.arena.device)


def _newest(batch: PagedBatch, table: torch.Tensor) -> torch.Tensor:
    """Slot of each sequence's last token, int64 ``[batch]``."""
    last = batch.cache_seqlens.long() - 1
    pages = table.gather(1, (last // PAGE)[:, None])[:, 0].long()
    return pages * PAGE + last % PAGE


def _layer(pdl: bool, batch: PagedBatch) -> Prepared:
    tables = batch.page_tables(PAGE)
    layer = pages_of(batch, torch.bfloat16)
    shape = (len(batch.lengths), batch.heads.kv, HEAD_DIM)
    key, value = (torch.randn_like(batch.query[:, : batch.heads.kv]).view(shape) for _ in range(2))
    slots = [_newest(batch, table) for table in tables]

    def store(index: int) -> None:
        store_kv(layer, key, value, slots[index], pdl=pdl)

    return decode_calls({"pdl": pdl}, batch, tables=tables, before=store)


def _prefill(
    flags: dict[str, bool],
    batch: PagedBatch,
    *,
    dtype: torch.dtype = torch.bfloat16,
    page: int = PAGE,
    plan_each_call: bool = False,
    widen: bool = True,
) -> Prepared:
    layer, metas = pages_of(batch, dtype, page), batch.metadata(page)
    out = torch.empty_like(batch.query)
    tokens, device = batch.query.shape[0], batch.arena.device
    size = workspace_bytes(tokens, len(batch.lengths), batch.heads.group, HEAD_DIM, device)
    space = torch.zeros(size, dtype=torch.uint8, device=device)
    widener = PageWidener(deterministic=not widen)

    def make_plan(part: PrefillPart) -> PrefillPlan:
        return plan_prefill(
            space,
            part.layer,
            batch.cu_seqlens_q,
            batch.cache_seqlens,
            num_tokens=tokens,
            num_q_heads=part.layer.layout.num_kv_heads * batch.heads.group,
            **flags,
        )

    # Of the lengths, so good for every set of pages; parts have equally many heads.
    plan = make_plan(next(widener.parts(batch.query, layer, metas[0])))

    def call(meta: AttentionMetadata) -> torch.Tensor:
        for part in widener.parts(batch.query, layer, meta):
            prefill_attention(
                batch.query[:, part.query_heads],
                part.layer,
                part.page_table,
                batch.cache_seqlens,
                make_plan(part) if plan_each_call else plan,
                out=out[:, part.query_heads],
                scale=SCALE,
            )
        return out

    read = partial(key_value, layer, metas[0].page_table, batch.lengths)
    return Prepared([partial(call, meta) for meta in metas], read, (plan, metas))


def _run_call(batch: PagedBatch) -> Callable[[], object]:
    """What a server pays: the backend's own checks included."""
    layer, meta = pages_of(batch, torch.bfloat16), batch.metadata(PAGE)[0]
    out = torch.empty_like(batch.query)
    backend = CudaBackend()
    backend.plan(meta)
    return partial(backend.run, batch.query, layer, meta, scale=SCALE, out=out)


def _decode_call(batch: PagedBatch) -> Callable[[], object]:
    """The function that the backend holds for a layer, called as the backend does: on the plan that
    the step's layers share, let in early and waiting for the kernel ahead."""
    layer, table = pages_of(batch, torch.bfloat16), batch.page_tables(PAGE)[0]
    space = workspace(batch.arena.device, False)
    plan = torch.empty(plan_bytes(len(batch.lengths)), dtype=torch.uint8, device=batch.arena.device)
    plan_decode(plan, layer, table, batch.cache_seqlens, num_q_heads=batch.heads.query)
    run = space.decode_attention_on(layer, SCALE)
    out = torch.empty_like(batch.query)
    return partial(run, out, None, batch.query, table, batch.cache_seqlens, plan, 3)


def _store_call(batch: PagedBatch) -> Callable[[], object]:
    layer, table = pages_of(batch, torch.bfloat16), batch.page_tables(PAGE)[0]
    rows = torch.randn_like(batch.query[:, : batch.heads.kv])
    return partial(store_kv, layer, rows, rows, _newest(batch, table))


def key_value(
    layer: LayerCache, table: torch.Tensor, lengths: tuple[int, ...], index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V ``[length, heads, head_dim]`` of a sequence, by the layout's own formula."""
    layout = layer.layout
    ids = table[index, : layout.pages_for(lengths[index])].long()
    # torch cannot index fp8 everywhere, so one-byte elements travel as bytes.
    pages = layer.pages if layout.element_bytes > 1 else layer.pages.view(torch.uint8)
    planes = pages[ids].flatten(3)  # [pages, heads, 2, page_size * padded_head_dim]
    offsets = torch.from_numpy(layout.plane_offsets.copy()).to(planes.device)
    rows = planes[..., offsets.flatten()].unflatten(-1, offsets.shape).view(layout.dtype)
    packed = rows.permute(2, 0, 3, 1, 4).flatten(1, 2)[:, : lengths[index], :, : layout.head_dim]
    return packed[0], packed[1]
