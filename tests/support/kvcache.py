"""Calls of ``flash_attn_with_kvcache`` with every pair of its features, and what is true of them.

Made on the CPU, run on any device: tokens as pages of ours, token-major pages or a padded batch,
NaN wherever no token lies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import accumulate
from itertools import pairwise as neighbours

import torch
from support.cases import pairwise
from support.compare import same_precision_attention

from bicl.attention import reference
from bicl.attention.pool import KVPool, LayerCache
from bicl.cache.layout import PageLayout
from bicl.flash_attn_interface import flash_attn_with_kvcache

HEADS, KV_HEADS = 4, 2
ROOM = 192

CASES = list(
    pairwise(
        kind=("plain", "swizzled", None, 1, 4, 16, 64, 128),
        new=("none", "as many as queries", "fewer"),
        num_q=(1, 5),
        packed=(False, True),
        causal=(True, False),
        window=((-1, -1), (10, -1), (3, 2)),
        chunk=(0, 64, 128),
        softcap=(0.0, 10.0),
        rotary=(None, "pairs", "halves"),
        own_rotary_lengths=(False, True),
        batch_idx=(None, [3, 0, 2]),
        leftpad=(False, True),
    )
)


class Cache:
    """The same tokens as pages of ours (``kind`` "plain" or "swizzled"), as token-major pages of
    ``kind`` tokens or, None, as a padded batch."""

    def __init__(
        self,
        kind: str | int | None,
        lengths: list[int],
        room: int,
        batch_idx: list[int] | None,
        dim: int = 32,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.lengths = lengths
        self.row = batch_idx or list(range(len(lengths)))
        rows = max(self.row) + 1
        self.heads, self.dim = KV_HEADS, dim
        self.key, self.value = torch.randn(2, len(lengths), room, KV_HEADS, dim).to(dtype)
        self.size = room if kind is None else 64 if isinstance(kind, str) else kind
        columns = -(-room // self.size)
        self.layer = None
        if kind is None:
            self.table = None
            pages = torch.arange(rows)[:, None]
        else:
            pages = torch.randperm(rows * columns + 2)[: rows * columns].view(rows, columns)
            self.table = torch.full((rows, columns), -7, dtype=torch.int32)
            for i, length in enumerate(lengths):
                used = -(-min(length + 16, room) // self.size)
                self.table[self.row[i], :used] = pages[self.row[i], :used].int()
        self.pages = pages
        shape = (int(pages.max()) + 1, self.size, KV_HEADS, dim)
        if isinstance(kind, str):
            layout = PageLayout(KV_HEADS, dim, dtype, tile=32, swizzle=kind == "swizzled")
            pool = KVPool([layout], shape[0], "cpu", fill=math.nan)
            self.layer = pool.layers[0]
            self.k_cache = self.v_cache = self.layer
        else:
            self.k_cache, self.v_cache = (torch.full(shape, math.nan, dtype=dtype) for _ in "kv")
        for i, length in enumerate(lengths):
            self.write(i, 0, self.key[i, :length], self.value[i, :length])

    def slots(self, i: int, first: int, count: int) -> torch.Tensor:
        token = torch.arange(first, first + count)
        return self.pages[self.row[i], token // self.size] * self.size + token % self.size

    def write(self, i: int, first: int, key: torch.Tensor, value: torch.Tensor) -> None:
        slots = self.slots(i, first, len(key))
        if self.layer is not None:
            reference.store(self.layer, key, value, slots)
        else:
            self.k_cache.view(-1, self.heads, self.dim)[slots] = key
            self.v_cache.view(-1, self.heads, self.dim)[slots] = value

    def everything(self) -> tuple[torch.Tensor, ...]:
        if self.layer is not None:
            return (self.layer.pages,)
        return (self.k_cache, self.v_cache)


@dataclass(frozen=True)
class Part:
    """One sequence of a call: its rows in the output, and the keys that they may see."""

    rows: slice
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


@dataclass(frozen=True)
class Call:
    """Arguments on the CPU, and the sequences that they hold, rotated and appended already."""

    case: dict[str, object]
    arguments: dict[str, object]
    parts: list[Part]

    def run(self, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
        """Output ``[T, HEADS, dim]`` and LSE ``[HEADS, T]``, on the CPU."""
        moved = {name: _moved(value, device) for name, value in self.arguments.items()}
        if isinstance(moved["k_cache"], LayerCache):
            moved["v_cache"] = moved["k_cache"]
        out, lse = flash_attn_with_kvcache(**moved, return_softmax_lse=True)  # type: ignore[arg-type]
        if not self.case["packed"]:
            query = self.arguments["q"]
            assert isinstance(query, torch.Tensor)
            assert out.shape == query.shape
            assert lse.shape == (query.shape[0], query.shape[2], query.shape[1])
            out, lse = out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
        return out.cpu(), lse.cpu()

    def truth(self, part: Part) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """One row at a time, each over the keys of its own chunk: float32 output and LSE, and
        the output of plain operators in the tensors' dtype."""
        chunk, keys = int(self.case["chunk"]), part.key.shape[0]  # type: ignore[call-overload]
        options = {"scale": part.query.shape[2] ** -0.5, "causal": False}
        options |= {"softcap": self.case["softcap"]}
        out, same = torch.zeros(part.query.shape), torch.zeros_like(part.query)
        lse = torch.full((HEADS, part.query.shape[0]), -math.inf)
        left, right = self.case["window"]  # type: ignore[misc]
        right = 0 if self.case["causal"] else right
        for i in range(part.query.shape[0]):
            position = i + keys - part.query.shape[0]
            low = max(0, position - left) if left >= 0 else 0
            high = min(keys, position + right + 1) if right >= 0 else keys
            if chunk:
                low = max(low, position // chunk * chunk)
                high = min(high, (position // chunk + 1) * chunk)
            if high > low:
                row = slice(i, i + 1)
                seen = part.query[row], part.key[low:high], part.value[low:high]
                out[row], lse[:, row] = reference.attention(*seen, **options)  # type: ignore[arg-type]
                same[row] = same_precision_attention(*seen, **options)  # type: ignore[arg-type]
        return out, lse, same


def make_call(case: dict[str, object], dim: int, dtype: torch.dtype) -> Call:
    """Three sequences of 63, 0 (1 where nothing is appended) and 130 tokens."""
    ours = isinstance(case["kind"], str)
    lengths, num_q = [63, 0, 130], int(case["num_q"])  # type: ignore[call-overload]
    if case["new"] == "none":
        lengths[1] = 1
    cache = Cache(case["kind"], lengths, ROOM, case["batch_idx"], dim, dtype)  # type: ignore[arg-type]
    queries = [num_q, 0, max(1, num_q - 2)] if case["packed"] else [num_q] * 3
    extra = {"none": 0, "as many as queries": num_q, "fewer": max(1, num_q - 3)}[str(case["new"])]
    new = [min(extra, 1), extra, 0] if case["packed"] else [extra] * 3
    query = torch.randn(sum(queries), HEADS, dim).to(dtype)
    key, value = torch.randn(2, sum(new), KV_HEADS, dim).to(dtype)
    starts, new_starts = [0, *accumulate(queries)], [0, *accumulate(new)]
    arguments: dict[str, object] = {
        "q": query if case["packed"] else query.view(3, num_q, HEADS, dim),
        "k_cache": cache.k_cache,
        "v_cache": cache.v_cache,
        "cache_seqlens": _int32(lengths),
        "page_table": cache.table,
        "causal": case["causal"],
        "window_size": case["window"],
        "attention_chunk": case["chunk"],
        "softcap": case["softcap"],
    }
    if case["packed"]:
        arguments |= {"cu_seqlens_q": _int32(starts), "max_seqlen_q": num_q}
    if extra and case["packed"]:
        arguments |= {"k": key, "v": value, "cu_seqlens_k_new": _int32(new_starts)}
    elif extra:
        shape = (3, extra, KV_HEADS, dim)
        arguments |= {"k": key.view(shape), "v": value.view(shape)}
    rotary, first = case["rotary"] if extra else None, lengths
    if rotary:
        angles = torch.rand(ROOM, dim // 4) * 2 * math.pi
        cos, sin = angles.cos(), angles.sin()
        arguments |= {"rotary_cos": cos, "rotary_sin": sin}
        arguments["rotary_interleaved"] = rotary == "pairs"
        if case["own_rotary_lengths"]:
            first = [n // 2 for n in lengths]
            arguments["rotary_seqlens"] = _int32(first)
    if case["batch_idx"]:
        arguments["cache_batch_idx"] = _int32(case["batch_idx"])  # type: ignore[arg-type]
    leftpad = [7, 0, 64] if case["leftpad"] and not ours else [0, 0, 0]
    if any(leftpad):
        arguments["cache_leftpad"] = _int32(leftpad)
    local = case["causal"] or case["window"] != (-1, -1) or case["chunk"]
    parts = []
    for i, (rows, fresh) in enumerate(zip(_slices(starts), _slices(new_starts), strict=True)):
        q, k = query[rows], key[fresh]
        if rotary:
            places = [first[i] + (n if local else 0) for n in range(queries[i])]
            q = _rotate(q, places, cos, sin, rotary == "pairs")
            k = _rotate(k, [first[i] + n for n in range(new[i])], cos, sin, rotary == "pairs")
        old = slice(leftpad[i], lengths[i])
        keys = torch.cat((cache.key[i, old], k))
        parts.append(Part(rows, q, keys, torch.cat((cache.value[i, old], value[fresh]))))
    return Call(case, arguments, parts)


def _slices(starts: list[int]) -> list[slice]:
    return [slice(begin, end) for begin, end in neighbours(starts)]


def _int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _moved(value: object, device: torch.device | str) -> object:
    if isinstance(value, LayerCache):
        return replace(value, pages=value.pages.to(device))
    return value.to(device) if isinstance(value, torch.Tensor) else value


def _rotate(
    rows: torch.Tensor, positions: list[int], cos: torch.Tensor, sin: torch.Tensor, pairs: bool
) -> torch.Tensor:
    """Element by element, in float32."""
    half = cos.shape[1]
    given = rows.float()
    out = given.clone()
    for i, position in enumerate(positions):
        for j in range(half):
            a, b = (2 * j, 2 * j + 1) if pairs else (j, j + half)
            c, s = cos[position, j], sin[position, j]
            out[i, :, a] = given[i, :, a] * c - given[i, :, b] * s
            out[i, :, b] = given[i, :, a] * s + given[i, :, b] * c
    return out.to(rows.dtype)
