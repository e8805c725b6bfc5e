"""Shapes to test, and steps built from them with everything hostile that a cache may meet.

Data first: dtypes, heads, lengths, FlashAttention 3's own matrices. Then ``build_step``, which
makes a pool full of NaN, scatters the sequences over permuted pages and fills every page table
entry that is not in use with an absurd id. Nothing here knows a backend; CPU and GPU tests share
it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations

import torch

from bicl.attention import reference
from bicl.attention.metadata import AttentionMetadata
from bicl.attention.pool import KVPool, LayerCache
from bicl.cache.layout import PageLayout

LENGTHS = (0, 1, 31, 32, 33, 63, 64, 65, 127, 128, 130, 333, 1000)
GROUPS = (1, 2, 3, 4, 8, 9)
HEAD_DIMS = (32, 64, 80, 96, 100, 120, 128, 256)
PAGES_AND_TILES = ((64, 64), (64, 32), (32, 32))
QUERY_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)

DECODE_LENGTHS: Mapping[str, list[int]] = {
    "edges": [0, 1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 257],
    "alike": [1024] * 8,
    "one": [4097],
    "skewed": [20000, 1, 64, 700, 0, 333, 2049],
    "many": [(37 * i) % 300 for i in range(200)],
    "ramp": [64 * i for i in range(1, 41)],
}

# (queries, keys) of one step each: prefill, extend, decode and empty sequences side by side.
BATCHES: Mapping[str, tuple[tuple[int, int], ...]] = {
    "one token": ((1, 1),),
    "decode, skewed": ((1, 65), (1, 1), (1, 333), (1, 64), (1, 1000), (1, 63)),
    "decode, alike": ((1, 128), (1, 128), (1, 128)),
    "prefill": ((130, 130), (64, 64), (1, 1), (33, 33)),
    "extend": ((5, 69), (70, 134), (2, 65), (63, 127)),
    "mixed": ((1, 65), (70, 134), (0, 100), (1, 333), (64, 0), (31, 31), (1, 0), (0, 0)),
    "more queries than keys": ((70, 5), (3, 1), (65, 64), (1, 2)),
}

PREFILL_LENGTHS: Mapping[str, tuple[tuple[int, int], ...]] = {
    **BATCHES,
    "ragged": ((1, 1), (5, 700), (63, 63), (64, 128), (65, 1000), (130, 130), (0, 50), (300, 777)),
    "chunk on a long prefix": ((512, 4097), (1, 6000), (77, 1111)),
    "short on a long prefix": ((64, 8256),),
    "prompts": ((1500, 1500), (777, 777)),
    "more tiles than CTAs": tuple((n % 70 + 1, n % 70 + n) for n in range(1, 180)),
    "long, short and empty": ((64, 8256), (0, 50), (3, 3), (700, 700), (20, 20), (32, 4128)),
}

# FlashAttention 3, hopper/test_flash_attn.py at 0251105a: output, varlen and kvcache tests.
FA3_LENGTHS = (
    (1, 1), (64, 128), (128, 192), (256, 256), (239, 1), (799, 3), (113, 203), (113, 128),
    (128, 217), (113, 211), (108, 256), (256, 512), (384, 256), (640, 128), (512, 256),
    (1024, 1024), (1023, 1024), (1024, 1023), (4096, 4096), (4224, 4224),
)  # fmt: skip
FA3_VARLEN_LENGTHS = ((1, 3), (2, 1), (511, 1), (3, 513), (307, 256), (2048, 2048))
FA3_KVCACHE_LENGTHS = (
    (1, 128), (1, 339), (3, 1024), (64, 800), (64, 256), (3, 799), (64, 2048), (16, 20000),
    (128, 128), (256, 512), (2048, 3577),
)  # fmt: skip
FA3_PAGE_SIZES = (None, 1, 4, 128)
FA3_HEADS = {"mha": (6, 6), "gqa": (6, 3), "mqa": (6, 1)}

ABSURD_PAGES = (10**9, -1, -(2**31), 2**31 - 1)


def pairwise(**choices: Sequence[object]) -> Iterator[dict[str, object]]:
    """Few combinations in which every pair of values of two names occurs; always the same ones."""
    names = list(choices)
    open_pairs = {
        ((a, i), (b, j))
        for a, b in combinations(names, 2)
        for i in range(len(choices[a]))
        for j in range(len(choices[b]))
    }
    while open_pairs:
        picked: dict[str, int] = {}
        for (a, i), (b, j) in sorted(open_pairs):
            if picked.get(a, i) == i and picked.get(b, j) == j:
                picked |= {a: i, b: j}
        for name in names:
            picked.setdefault(name, 0)
        open_pairs -= set(combinations(((name, picked[name]) for name in names), 2))
        yield {name: choices[name][picked[name]] for name in names}


def sampled(count: int, **choices: Sequence[object]) -> Iterator[dict[str, object]]:
    """Combinations drawn from all there are, for faults that take more than a pair; always the
    same ones."""
    draw = random.Random(0)
    for _ in range(count):
        yield {name: draw.choice(values) for name, values in choices.items()}


@dataclass(frozen=True)
class Step:
    """One step over one layer, and what it was made from.

    Attributes:
        layer: pages with NaN in every slot that no sequence owns.
        meta: the step; its ``slot_mapping`` names the slots of the new tokens, one a query row.
        query: ``[T, num_q_heads, head_dim]``.
        key, value: all tokens of all sequences, ``[sum(keys), H, head_dim]``, before quantisation.
        slots: int64 ``[sum(keys)]``, where they go.
    """

    layer: LayerCache
    meta: AttentionMetadata
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    slots: torch.Tensor


def build_step(
    lengths: Sequence[tuple[int, int]],
    layout: PageLayout,
    *,
    group: int = 1,
    dtype: torch.dtype = torch.float32,
    causal: bool = True,
    device: torch.device | str = "cpu",
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    spare_pages: int = 3,
    fill: float = math.nan,
    filled: bool = True,
    seed: int = 0,
) -> Step:
    """A step of ``lengths`` = (queries, keys) a sequence.

    ``filled``: K and V are in the pages, put there by the reference; else the pages hold ``fill``.
    """
    generator = torch.Generator().manual_seed(seed)
    size = layout.page_size
    pages = [-(-keys // size) for _, keys in lengths]
    num_pages = sum(pages) + spare_pages
    free = torch.randperm(num_pages, generator=generator).tolist()
    width = max(pages, default=0) + 2
    table = torch.tensor(ABSURD_PAGES).repeat(len(lengths) * width)[: len(lengths) * width]
    table = table.view(len(lengths), width).to(torch.int32)
    slots, new_slots = [], []
    for sequence, (queries, keys) in enumerate(lengths):
        owned = [free.pop() for _ in range(pages[sequence])]
        table[sequence, : len(owned)] = torch.tensor(owned, dtype=torch.int32)
        own = [owned[token // size] * size + token % size for token in range(keys)]
        slots += own
        stored = min(queries, keys)
        new_slots += [-1] * (queries - stored) + own[keys - stored :]
    shape = (len(slots), layout.num_kv_heads, layout.head_dim)
    key = torch.randn(shape, generator=generator).to(dtype)
    value = torch.randn(shape, generator=generator).to(dtype)
    starts = [0, *accumulate(queries for queries, _ in lengths)]
    heads = layout.num_kv_heads * group
    query = torch.randn((starts[-1], heads, layout.head_dim), generator=generator).to(dtype)
    pool = KVPool([layout], num_pages, "cpu" if filled else device, fill=fill)
    layer = LayerCache(pool.layers[0].pages, layout, k_scale, v_scale)
    if filled:
        reference.store(layer, key, value, torch.tensor(slots, dtype=torch.int64))
    meta = AttentionMetadata(
        page_table=table.to(device),
        cache_seqlens=torch.tensor([k for _, k in lengths], dtype=torch.int32, device=device),
        cu_seqlens_q=torch.tensor(starts, dtype=torch.int32, device=device),
        slot_mapping=torch.tensor(new_slots, dtype=torch.int64, device=device),
        max_q=max((q for q, _ in lengths), default=0),
        max_k=max((k for _, k in lengths), default=0),
        causal=causal,
    )
    return Step(
        LayerCache(layer.pages.to(device), layout, k_scale, v_scale),
        meta,
        query.to(device),
        key.to(device),
        value.to(device),
        torch.tensor(slots, dtype=torch.int64, device=device),
    )
