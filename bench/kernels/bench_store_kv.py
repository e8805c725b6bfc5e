"""Store: rows of K and V, views of a fused qkv projection, into pages. Bound by bytes moved.

Slots are what a server produces. 8,192 tokens are a prefill: whole pages in random order. 64 tokens
are a decode step: one token in each of 64 pages. Pages are cold; the rows of a decode step, which
the projection has just written, come from a few buffers that stay in L2. ``copy`` is one contiguous
copy of as many bytes, the least that any cache must move; ``index_put`` is how TGI writes its
token-major cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from bench.kernels.arena import Arena
from bench.kernels.impls import StoreCall
from bench.kernels.report import Report
from bench.kernels.shapes import HEAD_DIM, MAIN_HEADS, STORE_TOKENS, Heads, store_bytes
from bench.timing import Call, compare, num_rotations
from bicl.cache.layout import PageLayout

__all__ = ["run"]

_PAGE = 64
_POOL_SLOTS = 262144
_SOURCES = 16


def run(
    report: Report,
    arena: Arena,
    store: StoreCall,
    *,
    rounds: int,
    log: Callable[[str], None],
    heads: Heads = MAIN_HEADS,
) -> None:
    """Add rows for ``bicl``, ``copy`` and ``index_put``; then the pages are rubbish."""
    for tokens in STORE_TOKENS:
        num_bytes = store_bytes(tokens, heads.kv)
        contest = _contest(arena, store, heads, tokens)
        found = compare(contest, rounds=rounds)
        for name, reason in found.errors.items():
            report.skip(f"store {heads} {tokens} {name}", reason)
        for name, sample in found.samples.items():
            report.add("store", str(heads), str(tokens), name, sample, num_bytes=num_bytes)
        report.save()
        log(f"store {heads} {tokens}: {report.line('store', str(heads), str(tokens))}")


def _contest(arena: Arena, store: StoreCall, heads: Heads, tokens: int) -> dict[str, list[Call]]:
    rotations = min(num_rotations(store_bytes(tokens, heads.kv), arena.num_bytes // 8), 256)
    num_sources = min(rotations, _SOURCES)
    layout = PageLayout(heads.kv, HEAD_DIM, torch.bfloat16)
    layer = arena.tiles(layout, _POOL_SLOTS // _PAGE)
    token_major = arena.token_major(_POOL_SLOTS, 1, heads.kv)
    elements = tokens * heads.kv * HEAD_DIM * 2
    sources = list(_fused(arena, heads, tokens, num_sources))
    slots = _slots(arena, tokens, rotations)
    calls: dict[str, list[Call]] = {"bicl": [], "index_put": [], "copy": []}
    for index, where in enumerate(slots):
        key, value = sources[index % num_sources]
        calls["bicl"].append(partial(store, layer, key, value, where))
        calls["index_put"].append(partial(_index_put, token_major, key, value, where))
        target = arena.flat[index * elements : (index + 1) * elements]
        source = arena.flat[-(index % num_sources + 1) * elements :][:elements]
        calls["copy"].append(partial(target.copy_, source))
    return calls


def _fused(
    arena: Arena, heads: Heads, tokens: int, rotations: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """K and V as views of a fused projection ``[tokens, (query + 2 kv) * head_dim]``."""
    width = heads.query + 2 * heads.kv
    count = tokens * width * HEAD_DIM
    for index in range(rotations):
        fused = arena.flat[-(index + 1) * count :][:count].view(tokens, width, HEAD_DIM)
        yield (
            fused[:, heads.query : heads.query + heads.kv],
            fused[:, heads.query + heads.kv :],
        )


def _slots(arena: Arena, tokens: int, rotations: int) -> list[torch.Tensor]:
    """int64 ``[tokens]`` for each set; pages are distinct within a set."""
    result = []
    for _ in range(rotations):
        pages = torch.randperm(_POOL_SLOTS // _PAGE, device=arena.device)
        if tokens < _PAGE * 2:
            offsets = torch.randint(_PAGE, (tokens,), device=arena.device)
            result.append(pages[:tokens] * _PAGE + offsets)
        else:
            whole = pages[: tokens // _PAGE, None] * _PAGE
            result.append((whole + torch.arange(_PAGE, device=arena.device)).flatten())
    return result


def _index_put(
    cache: tuple[torch.Tensor, torch.Tensor],
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    for pages, rows in zip(cache, (key, value), strict=True):
        pages.view(-1, *rows.shape[1:])[slots] = rows
