"""Checks the router's claims of cached prefixes where a batch enters the shard.

A rejected claim is lowered in the request itself; TGI's own code then computes the missing tokens,
in further chunks if they do not fit this step.
"""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

from bicl.frontends.tgi.config import overlay_config
from bicl.frontends.tgi.hysparse import shard_sparsity
from bicl.frontends.tgi.page_tags import PageTags, Prompt, TagCounters

__all__ = ["counters", "serve_metrics", "verify_claims"]

logger = logging.getLogger("bicl")

_tags: PageTags | None = None


def counters() -> TagCounters:
    """This shard's counters."""
    return _tags.counters if _tags is not None else TagCounters()


def serve_metrics() -> None:
    """Publish the counters, if a port was given: rank r on port + r."""
    port, rank = overlay_config().metrics_port, int(os.environ.get("RANK", "0"))
    if not port:
        return
    from bicl.metrics import serve_counters

    serve_counters(port + rank, _read, {"rank": str(rank)})


def _read() -> dict[str, tuple[str, float]]:
    now = counters()
    sparsity = shard_sparsity()
    return (sparsity.read() if sparsity is not None else {}) | {
        "bicl_prefix_claimed_tokens": ("Tokens that the router called cached", now.claimed_tokens),
        "bicl_prefix_accepted_tokens": (
            "Of them, those whose pages carried their tokens' tags",
            now.accepted_tokens,
        ),
        "bicl_prefix_rejected_claims": (
            "Requests whose claim of a cached prefix was lowered",
            now.rejected_claims,
        ),
    }


def verify_claims(model_class: Any, batch_class: Any) -> None:
    """Wrap TGI's FlashCausalLM and FlashCausalLMBatch; their subclasses inherit it."""
    global _tags
    tags = _tags = PageTags(overlay_config().block_size)
    from_tokenized = batch_class.from_tokenized.__func__
    generate_token, init_kv_cache = model_class.generate_token, model_class.init_kv_cache

    @functools.wraps(from_tokenized)
    def checked_from_tokenized(cls: Any, pb: Any, tokenizer: Any, inputs: Any, *rest: Any) -> Any:
        for request, token_ids in zip(pb.requests, inputs, strict=True):
            _check(request, token_ids, tags)
        return from_tokenized(cls, pb, tokenizer, inputs, *rest)

    @functools.wraps(generate_token)
    def tagging_generate_token(self: Any, batch: Any) -> Any:
        written = _prefill_spans(batch) if batch.prefilling else []
        result = generate_token(self, batch)
        for prompt, pages, start, end in written:
            tags.record(prompt, pages, start, end)
        return result

    @functools.wraps(init_kv_cache)
    def clearing_init_kv_cache(self: Any, *args: Any, **kwargs: Any) -> Any:
        tags.clear()
        return init_kv_cache(self, *args, **kwargs)

    batch_class.from_tokenized = classmethod(checked_from_tokenized)
    model_class.generate_token = tagging_generate_token
    model_class.init_kv_cache = clearing_init_kv_cache


def _check(request: Any, token_ids: list[int], tags: PageTags) -> None:
    if not request.blocks:  # warm-up
        return
    prompt = Prompt(token_ids, tags.page_size, request.adapter_id)
    claimed = request.cache_len
    accepted = tags.admit(prompt, request.blocks, claimed)
    if accepted == claimed:
        return
    logger.warning(
        "bicl: request %d: the router claims %d cached tokens, but only %d were computed; "
        "the rest is computed now",
        request.id,
        claimed,
        accepted,
    )
    request.cache_len = accepted
    if request.HasField("chunk_len") and not _can_chunk():
        request.chunk_len += claimed - accepted


def _can_chunk() -> bool:
    from text_generation_server.utils.prefill_chunking import get_support_chunking
    from text_generation_server.utils.speculate import get_speculate

    return bool(get_support_chunking()) and not get_speculate()


def _prefill_spans(batch: Any) -> list[tuple[Prompt, list[int], int, int]]:
    """What this step will write of each prompt: taken before it runs, which moves the lengths."""
    spans = []
    for i, request in enumerate(batch.requests):
        if not batch.prefilling_mask[i] or not request.blocks:
            continue
        start = batch.cache_lengths[i]
        end = start + batch.input_lengths[i]
        ids = batch.all_input_ids[i][: batch.prompt_lengths[i]]
        prompt = Prompt(ids, overlay_config().block_size, request.adapter_id)
        spans.append((prompt, list(request.blocks), start, end))
    return spans
