"""Makes what the router calls cached true where a batch enters the shard, and keeps account.

A claim counts as far as the pages' tags agree with the prompt. What is missing comes from the
host tier or is computed before the request begins; what the tiers hold beyond the claim is brought
in, and the prefill shortened by it.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from dataclasses import dataclass
from typing import Any

from bicl.cache.keys import ID_BYTES, PackedIds, PageChain, pack_ids
from bicl.cache.tiers import TierStats
from bicl.errors import ConfigError
from bicl.frontends.tgi.catch_up import CatchUp
from bicl.frontends.tgi.claims import ClaimCounters, Claims
from bicl.frontends.tgi.config import overlay_config
from bicl.frontends.tgi.hysparse import shard_sparsity
from bicl.frontends.tgi.kv_cache import unwidened_prefills
from bicl.frontends.tgi.tiers import ShardTiers, make_tiers

__all__ = ["counters", "serve_metrics", "shard_tiers", "verify_claims"]

logger = logging.getLogger("bicl")

_keeper: _Keeper | None = None


def counters() -> ClaimCounters:
    """This shard's counters."""
    return _keeper.claims.counters if _keeper is not None else ClaimCounters()


def shard_tiers() -> ShardTiers | None:
    """This shard's tiers, if it has any."""
    return None if _keeper is None else _keeper.tiers


def serve_metrics() -> None:
    """Publish the counters, if a port was given: rank r on port + r.

    Raises:
        ConfigError: the port cannot be had.
    """
    port, rank = overlay_config().metrics_port, int(os.environ.get("RANK", "0"))
    if not port:
        return
    from bicl.metrics import serve_counters

    def read_tiers() -> TierStats | None:
        tiers = shard_tiers()
        return None if tiers is None else tiers.stats()

    try:
        serve_counters(port + rank, _read, {"rank": str(rank)}, read_tiers)
    except OSError as error:
        raise ConfigError(
            f"BICL_METRICS_PORT={port}: port {port + rank} for shard {rank} cannot be opened "
            f"({error.strerror}); choose another, or 0 for none"
        ) from error


def _read() -> dict[str, tuple[str, float]]:
    now = counters()
    sparsity = shard_sparsity()
    texts = {
        "claimed_tokens": "Tokens that the router called cached",
        "accepted_tokens": "Of them, those whose pages carried their tokens' tags",
        "rejected_claims": "Requests of which that was not so for all",
        "mended_tokens": "Tokens called cached that had to be computed",
        "added_tokens": "Tokens that the router did not know of, from the host and disk tiers",
    }
    return (
        (sparsity.read() if sparsity is not None else {})
        | {f"bicl_prefix_{name}": (text, getattr(now, name)) for name, text in texts.items()}
        | {
            "bicl_unwidened_prefills": (
                "Layers of prefill steps (not of rows) whose fp8 pages could not be widened",
                unwidened_prefills(),
            )
        }
    )


@dataclass
class _Row:
    """A running request: the keys of its whole pages so far, how many of them are recorded, and
    the length at which the next one is whole."""

    chain: PageChain
    pages: list[int]
    packed: bytes
    recorded: int
    next_length: int


class _Keeper:
    """One shard's account of its pages.

    Attributes:
        tiers: pages outside the pool; None: none, or not made yet.
    """

    def __init__(self, page_size: int, catch_up: CatchUp) -> None:
        self.claims = Claims(page_size)
        self.tiers: ShardTiers | None = None
        self._catch_up = catch_up
        self._page_size = page_size
        self._model: Any = None

    def new_pages(self, model: Any) -> None:
        """The pool was made anew."""
        self._model, self.tiers = model, None
        self.claims.clear()

    def admit(self, request: Any, token_ids: list[int]) -> _Row | None:
        """Settle what of a request is cached; changes its ``cache_len`` and ``chunk_len``."""
        if not any(request.blocks):  # warm-up, or the router's health check on page 0
            return None
        chain = self.claims.chain(token_ids, request.adapter_id)
        pages, claimed = list(request.blocks), request.cache_len
        cached = self.claims.verify(chain, pages, claimed)
        whole = -(-cached // self._page_size)
        self.claims.take(pages[whole:])
        if self.tiers is not None:
            self.tiers.claim(pages[whole:])
            if brought := self._bring(request, chain, pages, whole):
                cached = (whole + brought) * self._page_size
        if cached < claimed:
            self._mend(request, token_ids, cached, claimed)
        elif cached > claimed:
            _shorten(request, len(token_ids), cached)
            self.claims.counters.added_tokens += request.cache_len - claimed
        row = _Row(chain, pages, pack_ids(token_ids), 0, self._page_size)
        self._record(row, request.cache_len // self._page_size)
        return row

    def after_step(self, batch: Any, prefilled: int, seconds: float) -> None:
        """Tag the pages that a step completed, and hand them to the tiers.

        Args:
            prefilled: tokens of the step if it was a prefill, else 0; ``seconds``: it took.
        """
        if self.tiers is not None:
            self.tiers.end_step()
            self.tiers.saw_prefill(prefilled, seconds)
        one_token_each = not prefilled and batch.speculative_ids is None
        if one_token_each and getattr(batch, "bicl_quiet_steps", 0) > 0:
            batch.bicl_quiet_steps -= 1
            return
        nearest = self._page_size  # tokens until a row's next page is whole
        rows = zip(batch.stopping_criterias, batch.cache_lengths, strict=True)
        for i, (criteria, length) in enumerate(rows):
            row = getattr(criteria, "bicl_row", None)
            if row is None:
                continue
            if length >= row.next_length:
                self._record_row(row, length // self._page_size, batch.all_input_ids[i])
            nearest = min(nearest, row.next_length - length)
        batch.bicl_quiet_steps = nearest - 1  # other rows come in a batch of their own

    def _bring(self, request: Any, chain: PageChain, pages: list[int], first: int) -> int:
        """Fill pages from the tiers, beginning with the ``first``; how many."""
        assert self.tiers is not None
        last = min(chain.num_pages, len(pages))
        if request.prefill_logprobs:  # every prompt token is to be computed
            last = first
        return self.tiers.bring(chain, pages, first, last)

    def _mend(self, request: Any, token_ids: list[int], cached: int, claimed: int) -> None:
        logger.warning(
            "bicl: request %d: the router claims %d cached tokens, but only %d were computed; "
            "the rest is computed now",
            request.id,
            claimed,
            cached,
        )
        self._catch_up.compute(self._model, request, token_ids, cached, claimed)
        self.claims.counters.mended_tokens += claimed - cached

    def _extend(self, row: _Row, token_ids: list[int], pages: int) -> None:
        """Replies are cached, too: the chain goes on over the tokens that were generated."""
        known = row.chain.num_pages
        start = known * self._page_size
        packed = row.packed[: start * ID_BYTES] + pack_ids(
            token_ids[start : pages * self._page_size]
        )
        row.packed = packed
        row.chain = PageChain(
            PackedIds(packed),
            self._page_size,
            [row.chain.key(known - 1)],
            start=known,
            group=row.chain.group,
        )

    def _record_row(self, row: _Row, whole: int, token_ids: list[int]) -> None:
        """So many pages of a request are whole, those of its reply too."""
        self._record(row, min(whole, row.chain.num_pages))
        if whole > row.chain.num_pages and self.tiers is not None:
            self._extend(row, token_ids, whole)
            self._record(row, whole)

    def _record(self, row: _Row, whole: int) -> None:
        if whole <= row.recorded:
            return
        self.claims.record(row.chain, row.pages, row.recorded, whole)
        if self.tiers is not None:
            self.tiers.save(row.chain, row.pages[row.recorded : whole], row.recorded)
        row.recorded, row.next_length = whole, (whole + 1) * self._page_size


def _shorten(request: Any, prompt_length: int, cached: int) -> None:
    """Raise a request's cache length; its last token is computed in any case."""
    request.cache_len = min(cached, prompt_length - 1)
    if request.HasField("chunk_len"):
        request.chunk_len = min(request.chunk_len, prompt_length - request.cache_len)


def verify_claims(model_class: Any, batch_class: Any) -> None:
    """Wrap TGI's FlashCausalLM and FlashCausalLMBatch; their subclasses inherit it."""
    global _keeper
    from_tokenized = batch_class.from_tokenized.__func__
    generate_token, init_kv_cache = model_class.generate_token, model_class.init_kv_cache
    warmup = model_class.warmup
    keeper = _keeper = _Keeper(overlay_config().block_size, CatchUp(from_tokenized, generate_token))

    @functools.wraps(from_tokenized)
    def checked_from_tokenized(cls: Any, pb: Any, tokenizer: Any, inputs: Any, *rest: Any) -> Any:
        pairs = zip(pb.requests, inputs, strict=True)
        rows = [keeper.admit(request, token_ids) for request, token_ids in pairs]
        batch = from_tokenized(cls, pb, tokenizer, inputs, *rest)
        for criteria, row in zip(batch.stopping_criterias, rows, strict=True):
            criteria.bicl_row = row  # it stays with the request through every filter and merge
        return batch

    @functools.wraps(generate_token)
    def recording_generate_token(self: Any, batch: Any) -> Any:
        if not batch.prefilling and keeper.tiers is None:
            return generate_token(self, batch)  # only prompts are claimed
        tokens = sum(batch.input_lengths) if batch.prefilling else 0
        began = time.perf_counter()
        result = generate_token(self, batch)
        keeper.after_step(batch, tokens, time.perf_counter() - began)
        return result

    @functools.wraps(init_kv_cache)
    def forgetting_init_kv_cache(self: Any, *args: Any, **kwargs: Any) -> Any:
        keeper.new_pages(self)
        return init_kv_cache(self, *args, **kwargs)

    @functools.wraps(warmup)
    def warmup_with_tiers(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = warmup(self, *args, **kwargs)
        try:
            keeper.tiers = make_tiers(self)
        except ConfigError as error:
            from bicl.frontends.tgi.hook import end_process

            end_process(str(error))
        return result

    batch_class.from_tokenized = classmethod(checked_from_tokenized)
    model_class.generate_token = recording_generate_token
    model_class.init_kv_cache = forgetting_init_kv_cache
    model_class.warmup = warmup_with_tiers
