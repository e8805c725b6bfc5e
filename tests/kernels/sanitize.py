"""A small set of every kernel's paths, for compute-sanitizer (`make sanitize`)."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.cases import Step, build_step
from support.device import DEVICE, decode_step

from bicl.attention.cuda import CudaBackend
from bicl.attention.pool import LayerCache
from bicl.cache.layout import PageLayout
from bicl.ops.cuda import sparse
from bicl.ops.cuda.compact_tokens import compact_tokens
from bicl.ops.cuda.decode_attention import decode_attention
from bicl.ops.cuda.prefill_attention import plan_prefill, prefill_attention, workspace_bytes
from bicl.ops.cuda.workspace import Workspace
from bicl.sparse.index import make_indexes
from bicl.sparse.selection import SelectionRule

SCHEDULES = (
    {},
    {"force_cluster": 1, "force_grid": 5},
    {"force_cluster": 2},
    {"force_cluster": 8},
    {"deterministic": True},
    {"force_sm80": True},
)
LAYOUTS = (
    (PageLayout(2, 128, torch.bfloat16), 4, torch.bfloat16),
    (PageLayout(1, 96, torch.float16, 32, 32), 12, torch.float16),
    (PageLayout(2, 128, torch.float8_e4m3fn), 4, torch.bfloat16),
)


def choose_and_compact(backend: CudaBackend, step: Step, dtype: torch.dtype) -> None:
    meta, layer = step.meta, step.layer
    size, heads = layer.layout.page_size, layer.layout.num_kv_heads
    index = make_indexes({0: layer}, "bounds", dtype)[0]
    sparse.index_pages(layer, index, step.slots)
    last = torch.tensor([0, 65, 765], device="cuda")  # tokens that end the sequences
    backend.store(layer, step.key[last], step.value[last], step.slots[last], bounds=index.vectors)
    rule = SelectionRule(page_size=size, max_k=512, first=1, recent=1, floor=0)
    sparsity = torch.tensor([0.65, 0.65, 0.65, 0.5], device="cuda")
    place = (meta.page_table, meta.cache_seqlens)
    for combine in ("max", "sum", "softmax"):
        scores = sparse.score_tiles(step.query, layer, index, *place, 0.1)
        sparse.select_tiles(scores, *place, sparsity, rule, heads, combine)
        for cluster in (0, 1, 2, 4, 8):
            sparse.choose_tiles(
                step.query,
                layer,
                index,
                *place,
                sparsity,
                rule,
                combine,
                scale=0.1,
                after_store=True,
                force_cluster=cluster,
            )
    positions = torch.arange(0, 700, 5, dtype=torch.int32, device="cuda").expand(heads, -1)
    target = LayerCache(torch.empty_like(layer.pages), layer.layout)
    fresh = torch.arange(-(-positions.shape[1] // size), dtype=torch.int32, device="cuda")
    compact_tokens(layer, meta.page_table[3], positions, target, fresh)


def prefill(backend: CudaBackend, layout: PageLayout, group: int, dtype: torch.dtype) -> None:
    lengths = [(1, 1), (5, 70), (0, 50), (130, 200), (64, 0)]
    step = build_step(lengths, layout, group=group, dtype=dtype, device=DEVICE, filled=False)
    backend.store(step.layer, step.key, step.value, step.slots)
    query, meta = step.query, step.meta
    tokens, batch = query.shape[0], meta.batch_size
    size = workspace_bytes(tokens, batch, group, layout.padded_head_dim, DEVICE)
    for variant in ({}, {"deterministic": True}, {"force_sm80": True}):
        for window in (-1, 40):
            plan = plan_prefill(
                torch.empty(size, dtype=torch.uint8, device=DEVICE),
                step.layer,
                meta.cu_seqlens_q,
                meta.cache_seqlens,
                num_tokens=tokens,
                num_q_heads=query.shape[1],
                window_left=window,
                **variant,
            )  # type: ignore[arg-type]
            out = torch.empty_like(query)
            prefill_attention(
                query, step.layer, meta.page_table, meta.cache_seqlens, plan, out=out, scale=0.1
            )


def main() -> None:
    backend = CudaBackend()
    workspace = Workspace("cuda", 128, 16, 1 << 12, deterministic=True)
    for layout, group, dtype in LAYOUTS:
        step = decode_step(backend, [1, 65, 0, 700], layout, group=group, dtype=dtype)
        meta = step.meta
        for schedule in SCHEDULES:
            for window in (-1, 70):
                out = torch.empty_like(step.query)
                decode_attention(
                    step.query,
                    step.layer,
                    meta.page_table,
                    meta.cache_seqlens,
                    workspace,
                    out=out,
                    scale=0.1,
                    window_left=window,
                    **schedule,
                )  # type: ignore[arg-type]
        backend.gather(step.layer, meta.page_table, meta.cache_seqlens)
        choose_and_compact(backend, step, dtype)
        prefill(backend, layout, group, dtype)
        pages = torch.arange(2, device="cuda")
        backend.copy_pages([step.layer], pages, pages + 2)
    torch.cuda.synchronize()
    print("all kernels ran")


if __name__ == "__main__":
    main()
