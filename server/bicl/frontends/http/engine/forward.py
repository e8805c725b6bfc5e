"""The device's part of a step, and what the bookkeeping learns from it."""

from __future__ import annotations

import logging
import threading

import torch

from bicl.frontends.http.engine.compact import CompactControl
from bicl.frontends.http.engine.plan import Chunk, Plan
from bicl.frontends.http.engine.runner import ModelRunner
from bicl.frontends.http.engine.scheduler import Scheduler
from bicl.frontends.http.engine.sparse import SparseControl

__all__ = ["Forward"]

log = logging.getLogger(__name__)


class Forward:
    """Issues a planned step. On the engine's thread.

    Args:
        runner: owns the device.
        scheduler: made the plan; touched with ``lock`` held only.
        sparse: decides how sparse each row is; None: all are dense.
        lock: the engine's.
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        sparse: SparseControl | CompactControl | None,
        lock: threading.Lock,
    ) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._sparse = sparse
        self._lock = lock

    def __call__(self, plan: Plan) -> tuple[list[Chunk], torch.Tensor]:
        """The chunks that count, and their logits."""
        copies = [c for chunk in plan.chunks for c in chunk.sequence.pending_copies]
        if copies:
            self._runner.copy_pages(copies)
            with self._lock:
                for chunk in plan.chunks:
                    if chunk.sequence.pages is not None and chunk.sequence.pending_copies:
                        self._scheduler.manager.copies_issued(chunk.sequence.pages)
        step = None if self._sparse is None else self._sparse.plan(plan.chunks)
        if self._sparse is None or step is None:
            logits = self._runner.forward(plan.chunks, fetches=plan.fetches)
            self._note_fetched(plan)
            return plan.chunks, logits
        logits = self._runner.forward(
            plan.chunks,
            step.sparsity,
            keep=step.keep,
            watched=step.shadow,
            fetches=plan.fetches,
        )
        self._note_fetched(plan)
        back = self._sparse.finish(plan.chunks)
        if not back:
            return plan.chunks, logits
        # A row that goes back to the full cache computes this token again, too.
        with self._lock:
            for sequence in back:
                assert sequence.sparse is not None
                log.warning("request %s: full cache (%s)", sequence.id, sequence.sparse.fallback)
                self._scheduler.recompute_dense(sequence)
        counts = torch.tensor([chunk.num_logits for chunk in plan.chunks])
        stays = torch.tensor([chunk.sequence not in back for chunk in plan.chunks])
        rows = stays.repeat_interleave(counts).to(logits.device)
        return [c for c in plan.chunks if c.sequence not in back], logits[rows]

    def _note_fetched(self, plan: Plan) -> None:
        """What the step joined can be shared from now on."""
        if plan.fetches:
            with self._lock:
                for chunk in plan.chunks:
                    if chunk.sequence.pages is not None:
                        self._scheduler.manager.fetched(chunk.sequence.pages)
