"""Plain integers that the loop increments, and the snapshot made of them."""

from __future__ import annotations

import time
from collections import Counter

from bicl.cache.tiers import TierStats
from bicl.frontends.http.engine.config import (
    EngineStats,
    Outcome,
    SparseStats,
    StepKind,
    StepRecord,
)
from bicl.frontends.http.engine.plan import Plan
from bicl.frontends.http.engine.scheduler import Scheduler

__all__ = ["Counters", "record_of"]


class Counters:
    """What happened since start."""

    def __init__(self) -> None:
        self._outcomes: Counter[Outcome] = Counter()
        self._steps: Counter[StepKind] = Counter()
        self._seconds = dict.fromkeys(StepKind, 0.0)
        self._store_seconds = dict.fromkeys(StepKind, 0.0)
        self._prefilled = 0
        self._generated = 0

    def outcome(self, outcome: Outcome) -> None:
        self._outcomes[outcome] += 1

    def step(self, record: StepRecord) -> None:
        self._steps[record.kind] += 1
        self._seconds[record.kind] += record.total_time
        self._store_seconds[record.kind] += record.store_time
        self._generated += record.num_generated
        self._prefilled += record.num_prompt_tokens

    def snapshot(
        self,
        scheduler: Scheduler,
        *,
        queued: int,
        draining: bool,
        healthy: bool,
        graph_misses: int,
        unwidened_prefills: int,
        tiers: TierStats,
        sparse: SparseStats,
    ) -> EngineStats:
        gauges, stats = scheduler.manager.gauges(), scheduler.manager.stats
        return EngineStats(
            queue_size=len(scheduler.waiting) + queued,
            batch_size=len(scheduler.running),
            batch_current_max_tokens=sum(s.max_tokens for s in scheduler.running),
            pages_total=gauges.total_pages,
            pages_free=gauges.free_pages,
            pages_cached=gauges.cached_pages,
            pages_pinned=gauges.pinned_pages,
            pages_in_use=gauges.in_use_pages,
            pages_loading=gauges.loading_pages,
            queried_tokens=stats.queried_tokens,
            hit_tokens=stats.hit_tokens,
            copied_tokens=stats.copied_tokens,
            host_hit_tokens=stats.host_hit_tokens,
            disk_hit_tokens=stats.disk_hit_tokens,
            block_hits=stats.block_hits,
            block_misses=stats.block_misses,
            tag_mismatches=stats.tag_mismatches,
            evicted_pages=stats.evicted_pages,
            evicted_age_ms=stats.evicted_age_ms,
            preemptions=scheduler.preemptions,
            cache_rebuilds=stats.rebuilds,
            steps=sum(self._steps.values()),
            prefill_steps=self._steps[StepKind.PREFILL],
            decode_steps=self._steps[StepKind.DECODE],
            prefill_time=self._seconds[StepKind.PREFILL],
            decode_time=self._seconds[StepKind.DECODE],
            prefill_store_time=self._store_seconds[StepKind.PREFILL],
            decode_store_time=self._store_seconds[StepKind.DECODE],
            finished=self._outcomes[Outcome.FINISHED],
            aborted=self._outcomes[Outcome.ABORTED],
            failed=self._outcomes[Outcome.FAILED],
            prefilled_tokens=self._prefilled,
            generated_tokens=self._generated,
            graph_misses=graph_misses,
            unwidened_prefills=unwidened_prefills,
            tiers=tiers,
            sparse=sparse,
            draining=draining,
            healthy=healthy,
        )


def record_of(
    plan: Plan, num_generated: int, began: float, forwarded: float, store_time: float
) -> StepRecord:
    """A step that ends now. ``began`` and ``forwarded`` (its logits are there) as of
    ``time.perf_counter()``."""
    now = time.perf_counter()
    num_prompt_tokens = sum(chunk.num_prompt_tokens for chunk in plan.chunks)
    return StepRecord(
        kind=StepKind.PREFILL if num_prompt_tokens else StepKind.DECODE,
        num_rows=len(plan.chunks),
        num_tokens=sum(chunk.count for chunk in plan.chunks),
        num_prompt_tokens=num_prompt_tokens,
        num_generated=num_generated,
        forward_time=forwarded - began,
        sample_time=now - forwarded,
        total_time=now - began,
        store_time=store_time,
    )
