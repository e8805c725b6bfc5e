"""What was promised, as data: each target is checked against the rows of one result file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.kernels.report import find
from bench.kernels.shapes import (
    DECODE_SHAPES,
    HEADS,
    MAIN_HEADS,
    PREFILL_SHAPES,
    kv_bytes,
)

__all__ = ["PAGED_PEERS", "Verdict", "best_peer", "fastest", "verdicts"]

PAGED_PEERS = (
    "flashinfer-p1",
    "flashinfer-p1-tc",
    "flashinfer-p64-tc",
    "flashinfer-batch",
    "flashinfer-batch-p1",
    "fa3-p64",
    "fa3-p64-sched",
    "fa3-p128",
    "fa3-p128-sched",
)
"""Peers that read KV through a page table, as a server's cache must."""

_MAIN = str(MAIN_HEADS)
_LARGE_BYTES = 500_000_000
_PREFILL_AGAINST_FA3 = {
    "1x4096": 1.0,
    "4x2048": 1.05,
    "1x16384": 0.96,
    "512+8192b1": 0.97,
    "512+8192b8": 0.96,
    "64+8192": 1.0,
    "32+2048b16": 1.15,
}

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Verdict:
    """One target and what was measured.

    ``value`` is None where a row is missing, which is never a pass. ``at_most`` says the sense;
    a ``limit`` of None, that the number was only to be stated.
    """

    what: str
    value: float | None
    limit: float | None
    at_most: bool = True
    unit: str = "x"
    note: str = ""

    @property
    def passed(self) -> bool:
        if self.value is None:
            return False
        if self.limit is None:
            return True
        return self.value <= self.limit if self.at_most else self.value >= self.limit

    def __str__(self) -> str:
        state = "pass" if self.passed else "MISS" if self.value is not None else "not measured"
        shown = "-" if self.value is None else f"{self.value:.3f}{self.unit}"
        note = f" ({self.note})" if self.note else ""
        if self.limit is None:
            state = "stated" if self.passed else state
            return f"{state:12} {self.what}: {shown}{note}"
        sense = "<=" if self.at_most else ">="
        return f"{state:12} {self.what}: {shown}, target {sense} {self.limit:g}{self.unit}{note}"


def verdicts(rows: Rows) -> list[Verdict]:
    """Every target of the kernels, in the order in which they were set."""
    return [
        *_against_floor(rows),
        *_against_best_peer(rows),
        *_against_tgi_default(rows),
        *_deterministic(rows),
        _captured(rows),
        *_prefill(rows),
        *_fp8(rows),
        *_store(rows),
        *_launch(rows),
        *_sm80(rows),
    ]


def best_peer(rows: Rows, op: str, heads: str, shape: str) -> tuple[str, float] | None:
    """Name and time of the fastest paged peer of one shape."""
    found = [(find(rows, op, heads, shape, peer), peer) for peer in PAGED_PEERS]
    measured = [(us, peer) for us, peer in found if us is not None]
    if not measured:
        return None
    us, peer = min(measured)
    return peer, us


def fastest(rows: Rows, op: str, heads: str, shape: str, impls: Sequence[str]) -> float | None:
    """Shortest time of several implementations; None if none was measured."""
    found = (find(rows, op, heads, shape, impl) for impl in impls)
    return min((us for us in found if us is not None), default=None)


def _ratio(top: float | None, bottom: float | None) -> float | None:
    return None if top is None or bottom is None else top / bottom


def _main_bytes(shape: str) -> int:
    return kv_bytes(DECODE_SHAPES[shape], MAIN_HEADS.kv)


def _floor_limit(shape: str) -> float | None:
    size = _main_bytes(shape)
    if shape == "skew":
        return 1.12
    if size >= _LARGE_BYTES:
        return 1.06
    return {134_217_728: 1.15, 16_777_216: 1.6}.get(size)


def _against_floor(rows: Rows) -> Iterator[Verdict]:
    for shape in DECODE_SHAPES:
        limit = _floor_limit(shape)
        if limit is not None:
            ours = find(rows, "decode", _MAIN, shape, "bicl")
            floor = find(rows, "decode", _MAIN, shape, "floor")
            yield Verdict(f"decode {shape} / floor", _ratio(ours, floor), limit)


def _peer_limit(shape: str) -> float:
    if shape == "1x4096":
        return 0.65
    if shape == "skew":
        return 0.9
    return 0.88 if _main_bytes(shape) == 134_217_728 else 0.97


def _against_best_peer(rows: Rows) -> Iterator[Verdict]:
    for heads in map(str, HEADS):
        for shape in DECODE_SHAPES:
            # The shape-by-shape limits were set for the main heads; the others must be faster.
            limit = _peer_limit(shape) if heads == _MAIN else 1.0
            peer = best_peer(rows, "decode", heads, shape)
            ours = find(rows, "decode", heads, shape, "bicl")
            yield Verdict(
                f"decode {heads} {shape} / best paged peer",
                _ratio(ours, peer[1] if peer else None),
                limit,
                note=peer[0] if peer else "no peer was measured",
            )


def _against_tgi_default(rows: Rows) -> Iterator[Verdict]:
    for shape in DECODE_SHAPES:
        ours = find(rows, "decode", _MAIN, shape, "bicl")
        default = find(rows, "decode", _MAIN, shape, "flashinfer-p1")
        yield Verdict(f"decode {shape} / TGI's default", _ratio(ours, default), 0.62)


def _deterministic(rows: Rows) -> Iterator[Verdict]:
    for shape in DECODE_SHAPES:
        fixed = find(rows, "decode", _MAIN, shape, "bicl-deterministic")
        ours = find(rows, "decode", _MAIN, shape, "bicl")
        yield Verdict(f"decode {shape} deterministic / default", _ratio(fixed, ours), 1.08)


def _captured(rows: Rows) -> Verdict:
    """Near-optimal was asked for, without a limit: the worst shape is stated."""
    found = []
    for shape in DECODE_SHAPES:
        other = find(rows, "decode", _MAIN, shape, "bicl-other-lengths")
        ratio = _ratio(other, find(rows, "decode", _MAIN, shape, "bicl"))
        if ratio is not None:
            found.append((ratio, shape))
    value, note = max(found, default=(None, "no shape was measured"))
    return Verdict(
        "decode in a graph captured at other lengths / at its own", value, None, note=note
    )


def _prefill(rows: Rows) -> Iterator[Verdict]:
    for shape in PREFILL_SHAPES:
        ours = find(rows, "prefill", _MAIN, shape, "bicl")
        # Our plan is made once a step, so FA3 may have its metadata made once, too.
        for peers, name, limit in (
            (("fa3-p128", "fa3-p128-sched"), "FA3 on 128-token pages", _PREFILL_AGAINST_FA3[shape]),
            (("fa3-p64", "fa3-p64-sched"), "FA3 on 64-token pages", 1.1),
            (("flashinfer-p1",), "TGI's default", 1.2),
        ):
            theirs = fastest(rows, "prefill", _MAIN, shape, peers)
            what = f"prefill {shape} speed against {name}"
            yield Verdict(what, _ratio(theirs, ours), limit, at_most=False)


def _fp8(rows: Rows) -> Iterator[Verdict]:
    for shape in DECODE_SHAPES:
        if _main_bytes(shape) >= _LARGE_BYTES:
            half = find(rows, "decode", _MAIN, shape, "bicl-fp8")
            full = find(rows, "decode", _MAIN, shape, "bicl")
            yield Verdict(f"decode {shape} fp8 / bf16", _ratio(half, full), 0.58)


def _store(rows: Rows) -> Iterator[Verdict]:
    large = find(rows, "store", _MAIN, "8192", "bicl")
    copy = find(rows, "store", _MAIN, "8192", "copy")
    yield Verdict("store 8192 tokens / copy of the same bytes", _ratio(large, copy), 1.15)
    small = find(rows, "store", _MAIN, "64", "bicl")
    yield Verdict("store 64 tokens", small, 2.0, unit=" us")


def _launch(rows: Rows) -> Iterator[Verdict]:
    add = find(rows, "launch", _MAIN, "eager", "torch.add")
    for impl in ("bicl-store", "bicl-decode"):
        ours = find(rows, "launch", _MAIN, "eager", impl)
        yield Verdict(f"host cost of {impl} / torch.add", _ratio(ours, add), 1.0)


def _sm80(rows: Rows) -> Iterator[Verdict]:
    """No limit was set, only that it runs: the ratio is stated."""
    for op, shapes in (("decode", ("32x4096",)), ("prefill", ("1x4096",))):
        for shape in shapes:
            forced = find(rows, op, _MAIN, shape, "bicl-sm80")
            ours = find(rows, op, _MAIN, shape, "bicl")
            yield Verdict(
                f"{op} {shape} sm_80 path / default",
                _ratio(forced, ours),
                limit=None,
            )
