"""One request on its way through the engine."""

from __future__ import annotations

import time
from enum import IntEnum

from bicl.cache.keys import Namespace, PackedIds, pack_ids
from bicl.cache.radix_nodes import common_tokens
from bicl.cache.sequence import PageCopy, SequencePages
from bicl.cache.tiers import Fetch, Promotion
from bicl.errors import InvalidInputError
from bicl.frontends.http.engine.sampler import SamplingState
from bicl.frontends.http.engine.stream import RequestStream
from bicl.frontends.http.engine.text import Detokenizer, StopCheck
from bicl.frontends.http.request import GenerationRequest, PrefillToken, SparseUsage, Usage
from bicl.sparse.row import SparseRow

__all__ = ["LogitsNeed", "Sequence", "check_ids"]


class LogitsNeed(IntEnum):
    """Which rows of a chunk go through the output layer."""

    NONE = 0
    LAST = 1
    ALL = 2


class Sequence:
    """State of a live request.

    Attributes:
        ids: prompt and generated tokens. The last one is not computed yet.
        num_prompt: tokens of the prompt.
        num_computed: leading tokens whose K and V are in pages.
        pages: held pages.
        row: its row in the runner's page table while it runs; -1 while it waits, when it may hold
            pages that are already on their way to it.
        promotion: what it waits for from disk.
        sought_on_disk, sought_in_host: looked there while it waited.
        prefill: prompt log-probabilities, if asked for.
        sparse: its state under HySparse, if that runs.
    """

    def __init__(
        self,
        request: GenerationRequest,
        stream: RequestStream,
        sampling: SamplingState,
        stop: StopCheck,
        detokenizer: Detokenizer,
        sparse: SparseRow | None = None,
    ) -> None:
        self.request = request
        self.stream = stream
        self.sampling = sampling
        self.stop = stop
        self.detokenizer = detokenizer
        self.sparse = sparse
        self.namespace = Namespace(request.salt, request.adapter_id)
        self.ids = list(request.prompt_ids)
        self.packed_prompt: PackedIds = pack_ids(self.ids)
        self.num_prompt = len(self.ids)
        self.num_computed = 0
        self.pages: SequencePages | None = None
        self.row = -1
        self.prefill: list[PrefillToken] = []
        self.promotion: Promotion | None = None
        self.sought_on_disk = False
        self.sought_in_host = False
        self.num_preemptions = 0
        self.num_retries = 0
        self.arrived = time.monotonic()
        self.admitted: float | None = None
        self.num_cached = 0
        self.num_cached_host = 0
        self.num_cached_disk = 0

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def num_generated(self) -> int:
        return len(self.ids) - self.num_prompt

    @property
    def num_left(self) -> int:
        """Tokens to compute before the next one can be chosen."""
        return len(self.ids) - self.num_computed

    @property
    def wants_prefill_logprobs(self) -> bool:
        """Prompt log-probabilities are still to be computed, so no prefix may be skipped."""
        return self.request.params.decoder_input_details and self.num_generated == 0

    @property
    def max_tokens(self) -> int:
        """Tokens it may grow to."""
        return self.num_prompt + self.request.params.max_new_tokens

    @property
    def outgrows_its_pages(self) -> bool:
        """The token that is being chosen will be computed, and its page is missing."""
        size = len(self.ids)
        return (
            self.num_left == 0
            and self.pages is not None
            and size == self.pages.capacity_tokens
            and size + 1 < self.max_tokens
        )

    @property
    def pending_copies(self) -> tuple[PageCopy, ...]:
        """Page copies to issue before its next step."""
        return () if self.pages is None else self.pages.pending_copies

    @property
    def fetch(self) -> Fetch | None:
        """Pages that its next step must join."""
        return None if self.pages is None else self.pages.fetch

    @property
    def is_arriving(self) -> bool:
        """Pages are still being copied for it."""
        fetch = self.fetch
        return fetch is not None and not fetch.settled

    @property
    def waits_for_disk(self) -> bool:
        """It is not yet faster to compute what is being read."""
        promotion = self.promotion
        return (
            promotion is not None
            and not promotion.settled
            and time.monotonic() < promotion.deadline
        )

    def common_prompt_tokens(self, other: Sequence) -> int:
        """Leading tokens that both prompts have."""
        return common_tokens(self.packed_prompt, other.packed_prompt)

    def note_cached(self) -> None:
        """Remember what its first admission found."""
        if self.pages is not None and self.num_preemptions == 0:
            self.num_cached = self.pages.num_cached_tokens
            self.num_cached_host = self.pages.num_host_tokens
            self.num_cached_disk = self.pages.num_disk_tokens

    def usage(self) -> Usage:
        now = time.monotonic()
        admitted = now if self.admitted is None else self.admitted
        return Usage(
            prompt_tokens=self.num_prompt,
            generated_tokens=self.num_generated,
            cached_tokens=self.num_cached,
            cached_host_tokens=self.num_cached_host,
            cached_disk_tokens=self.num_cached_disk,
            queue_time=admitted - self.arrived,
            inference_time=now - admitted,
            num_preemptions=self.num_preemptions,
            sparse=None if self.sparse is None else _sparse_usage(self.sparse),
        )


def _sparse_usage(row: SparseRow) -> SparseUsage:
    return SparseUsage(
        sparsity_ratio=row.asked,
        text_kind=row.kind,
        tiles_read=row.tiles_read,
        tiles_total=row.tiles_total,
        mass_kept=row.mass_kept,
        entropy=row.entropy,
        entropy_by_group=dict(row.entropy_by_group),
        shadow_steps=row.shadow_steps,
        fallback=row.fallback,
    )


def check_ids(request: GenerationRequest, vocab_size: int) -> None:
    """Refuse a request that no model could answer.

    Raises:
        InvalidInputError: no tokens, none to generate, or ids outside the vocabulary.
    """
    num_prompt, new = len(request.prompt_ids), request.params.max_new_tokens
    if num_prompt == 0 or new < 1:
        raise InvalidInputError(
            f"{num_prompt} prompt tokens, {new} new ones: at least 1 of each is needed"
        )
    lowest, highest = min(request.prompt_ids), max(request.prompt_ids)
    if lowest < 0 or highest >= vocab_size:
        raise InvalidInputError(f"token ids {lowest}..{highest} are outside 0..{vocab_size - 1}")
