"""What the engine is told at start, what it reports while it runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

import torch

from bicl.cache.policy import DEFAULT_POLICY, POLICIES
from bicl.cache.tiers import TierStats
from bicl.errors import ConfigError
from bicl.sparse.config import HySparseConfig
from bicl.sparse.guard import GuardBounds

__all__ = [
    "EngineConfig",
    "EngineObserver",
    "EngineStats",
    "Outcome",
    "SparseStats",
    "StepKind",
    "StepRecord",
]


@dataclass(frozen=True)
class EngineConfig:
    """Limits and sizes of one engine.

    Attributes:
        max_total_tokens: prompt plus new tokens of one request.
        max_batch_prefill_tokens: prompt tokens computed in one step.
        max_batch_size: requests that run at once.
        max_waiting: requests that may wait; one more gets :class:`~bicl.errors.OverloadedError`.
        page_size: tokens a page (64 or 32).
        num_pages: pages of the pool. ``None``: as many as ``cache_memory_bytes`` holds.
        cache_memory_bytes: bytes for the pool. ``None``: enough for ``max_batch_size`` requests
            of ``max_total_tokens``, but no more than 40 % of the free memory.
        kv_dtype: stored dtype; ``None`` is the model's.
        prefix_caching: reuse pages between requests.
        host_cache_bytes: memory of the host tier; 0: none.
        disk_cache_dir: folder of the disk tier below it; ``None``: none.
        disk_cache_bytes: size of the disk tier.
        eviction_policy: of the pool and the tiers, by name.
        cuda_graphs: replay decode steps as CUDA graphs; ignored off CUDA.
        num_threads: torch's intra-op threads for the engine; ``None`` leaves torch's choice.
        hysparse: decode reads a choice of pages; ``None``: all of them.
        guard: when a request then goes back to the full cache.

    Raises:
        ConfigError: a limit is not positive.
    """

    max_total_tokens: int = 2048
    max_batch_prefill_tokens: int = 2048
    max_batch_size: int = 32
    max_waiting: int = 128
    page_size: int = 64
    num_pages: int | None = None
    cache_memory_bytes: int | None = None
    kv_dtype: torch.dtype | None = None
    prefix_caching: bool = True
    host_cache_bytes: int = 0
    disk_cache_dir: Path | None = None
    disk_cache_bytes: int = 0
    eviction_policy: str = DEFAULT_POLICY
    cuda_graphs: bool = True
    num_threads: int | None = None
    hysparse: HySparseConfig | None = None
    guard: GuardBounds = field(default_factory=GuardBounds)

    @property
    def compact(self) -> bool:
        """Sparse layers form a page group of their own and drop tokens."""
        return self.hysparse is not None and self.hysparse.mode == "compact"

    def __post_init__(self) -> None:
        for name in (
            "max_total_tokens",
            "max_batch_prefill_tokens",
            "max_batch_size",
            "max_waiting",
            "num_pages",
            "cache_memory_bytes",
            "num_threads",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")
        self._check_tiers()

    def _check_tiers(self) -> None:
        if self.host_cache_bytes < 0:
            raise ConfigError(
                f"host_cache_bytes is {self.host_cache_bytes}; it must not be below 0"
            )
        if self.disk_cache_dir is not None and not self.host_cache_bytes:
            raise ConfigError(
                "the disk cache is read and written through the host cache; give that a size"
            )
        if self.host_cache_bytes and not self.prefix_caching:
            raise ConfigError(
                "a host cache serves reused prefixes only; give it no size, or allow reuse"
            )
        if self.eviction_policy not in POLICIES:
            raise ConfigError(
                f"eviction_policy {self.eviction_policy!r} is unknown; use one of {list(POLICIES)}"
            )


class Outcome(StrEnum):
    """How a request left the engine."""

    FINISHED = "finished"
    ABORTED = "aborted"
    FAILED = "failed"


class StepKind(StrEnum):
    """TGI's two methods. A step that computes any prompt token counts as prefill."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True)
class StepRecord:
    """One step of the loop. Times in seconds.

    Attributes:
        kind: prefill if any row computed prompt tokens.
        num_rows: requests in the step.
        num_tokens: tokens computed.
        num_prompt_tokens: those of prompts among them, computed for the first time or again.
        num_generated: tokens chosen.
        forward_time: the model, from input tensors to logits (TGI: forward_duration).
        sample_time: sampling, stopping and detokenising (TGI: decode_duration).
        total_time: the whole step (TGI: inference_duration).
        store_time: at most so much of it went into writing pages and was hidden by nothing; see
            :class:`~bicl.attention.store_clock.StoreClock`. A chunk that nobody waited for may
            be told with the step after it.
    """

    kind: StepKind
    num_rows: int
    num_tokens: int
    num_prompt_tokens: int
    num_generated: int
    forward_time: float
    sample_time: float
    total_time: float
    store_time: float = 0.0


class EngineObserver(Protocol):
    """Told what happens, on the engine's thread: must return at once and never raise."""

    def on_admitted(self, queue_time: float, batch_size: int) -> None:
        """A request left the queue after ``queue_time`` seconds; ``batch_size`` now run."""

    def on_step(self, record: StepRecord) -> None:
        """A step ended."""

    def on_outcome(self, outcome: Outcome) -> None:
        """A request left the engine."""


@dataclass(frozen=True)
class SparseStats:
    """What HySparse did since start. NaN: not measured yet.

    Attributes:
        enabled: it runs.
        configured_ratio: of the server.
        actual_ratio, mass_kept: of the last shadow step, mean of its rows.
        tiles_read, tiles_skipped: of one KV head, summed over rows, sparse layers and steps.
        rows: decode rows by path: ``sparse``; dense because ``short`` (nothing to leave out),
            ``little`` (its step could leave out less than choosing costs), ``dense`` (as asked),
            ``fallback``.
        fallbacks: requests that went back to the full cache, by reason.
        shadow_steps: steps in which sampled layers also ran dense.
        stale_pages: pages whose index did not fit them.
        mass_kept_sum, mass_kept_count: over all rows of the shadow steps.
        entropy: of the dense attention in nats, smoothed; by layer group ``first``, ``sparse``,
            ``last``.
        compactions, dropped_pages: compact mode: times that a request's sparse layers gave up
            pages, and how many.
        compact_pages: pages of the sparse layers by state: ``free``, ``cached``, ``in_use``.
    """

    enabled: bool = False
    configured_ratio: float = 0.0
    actual_ratio: float = math.nan
    tiles_read: int = 0
    tiles_skipped: int = 0
    rows: Mapping[str, int] = field(default_factory=dict)
    fallbacks: Mapping[str, int] = field(default_factory=dict)
    shadow_steps: int = 0
    stale_pages: int = 0
    mass_kept_sum: float = 0.0
    mass_kept_count: int = 0
    mass_kept: float = math.nan
    entropy: Mapping[str, float] = field(default_factory=dict)
    compactions: int = 0
    dropped_pages: int = 0
    compact_pages: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class EngineStats:
    """A consistent snapshot. Counters only grow; the others are gauges.

    Attributes:
        queue_size: requests waiting.
        batch_size: requests running.
        batch_current_max_tokens: tokens the running requests may grow to.
        pages_total, pages_free, pages_cached, pages_pinned, pages_in_use: the pool; cached pages
            are in the index and in nobody's use, so that they can be evicted; pinned ones cannot.
        queried_tokens, hit_tokens: prompt tokens looked up and found in the prefix index, by
            first admissions only (a preempted request's return counts as neither);
            ``copied_tokens`` of the hits came by copy of part of a page, ``host_hit_tokens`` and
            ``disk_hit_tokens`` from these tiers.
        pages_loading: pages that copies still write to although their request is gone.
        block_hits, block_misses: prompts' pages that were computed before: found in some tier, and
            held no more.
        tag_mismatches: cached pages that did not carry their tag, and were computed anew.
        evicted_pages: cached pages given up for new ones; ``evicted_age_ms`` is the sum of the
            times since their last use.
        preemptions: times a running request was put back into the queue.
        steps, prefill_steps, decode_steps: forward steps; their seconds in the ``_time`` fields,
            of which writing pages took at most those in the ``_store_time`` fields.
        finished, aborted, failed: requests by outcome.
        prefilled_tokens, generated_tokens: tokens computed and emitted.
        graph_misses: decode steps that a CUDA graph could have taken but none was captured for.
        unwidened_prefills: layers of prefill steps (one count each, however many rows) that read
            fp8 pages at down to half the speed, since their 16-bit copies would not fit.
        sparse: what HySparse did.
        tiers: what the host and disk tiers did and hold.
        cache_rebuilds: times that the pool's bookkeeping contradicted itself and was begun anew.
        draining: new requests are refused.
        healthy: the loop runs.
    """

    queue_size: int = 0
    batch_size: int = 0
    batch_current_max_tokens: int = 0
    pages_total: int = 0
    pages_free: int = 0
    pages_cached: int = 0
    pages_pinned: int = 0
    pages_in_use: int = 0
    pages_loading: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    copied_tokens: int = 0
    host_hit_tokens: int = 0
    disk_hit_tokens: int = 0
    block_hits: int = 0
    block_misses: int = 0
    tag_mismatches: int = 0
    evicted_pages: int = 0
    evicted_age_ms: int = 0
    preemptions: int = 0
    steps: int = 0
    prefill_steps: int = 0
    decode_steps: int = 0
    prefill_time: float = 0.0
    decode_time: float = 0.0
    prefill_store_time: float = 0.0
    decode_store_time: float = 0.0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    prefilled_tokens: int = 0
    generated_tokens: int = 0
    graph_misses: int = 0
    unwidened_prefills: int = 0
    sparse: SparseStats = SparseStats()
    tiers: TierStats = field(default_factory=TierStats)
    cache_rebuilds: int = 0
    draining: bool = False
    healthy: bool = True

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """What ran otherwise than it should since the start, one sentence each."""
        if not self.unwidened_prefills:
            return ()
        return ("prefills read fp8 pages at down to half the speed: 16-bit copies would not fit",)

    @property
    def reordering_exposed(self) -> dict[str, float]:
        """Share of the steps' time so far that writing pages took and nothing hid, at most; by
        kind of step, of which there was one."""
        times = {
            StepKind.PREFILL: (self.prefill_store_time, self.prefill_time),
            StepKind.DECODE: (self.decode_store_time, self.decode_time),
        }
        return {kind: round(store / whole, 5) for kind, (store, whole) in times.items() if whole}
