"""What must hold. Each case is ``case_<behaviour>(bench)`` and raises AssertionError."""

from __future__ import annotations

import random

from bicl.frontends.tgi.selftest.bench import PREFILL_TOKENS, TOTAL_TOKENS, Bench
from bicl.launcher import watch

__all__ = ["ADAPTERS", "CASES", "CHUNKING", "DISK", "HOST", "PREFIXES", "SPARSE"]

CHUNKING = (
    "chunked_prompt",
    "chunked_prompt_beside_a_decoding_row",
    "prefix_cancelled_between_chunks",
)
"""Cases that TGI itself cannot do without chunked prefill."""

PREFIXES = (
    "cached_prefix_of_whole_pages",
    "whole_prompt_cached_rewrites_a_shared_slot",
    "prefix_that_was_never_computed",
    "false_claim_longer_than_a_step",
    "prefix_cancelled_between_chunks",
    "page_reused_for_other_tokens",
    "random_traffic",
)
"""Cases that claim cached prefixes, which TGI does not do for vision models."""

ADAPTERS = ("adapters_side_by_side", "pages_of_another_adapter")
"""Cases that need adapters, and a host tier for what they share."""

HOST = ("prefix_from_the_host_tier", "reply_from_the_host_tier", "chunks_after_the_host_tier")
"""Cases that need a host tier."""

DISK = ("prefix_survives_a_restart",)
"""Cases that need a disk tier, too."""

SPARSE = ("tiles_are_left_out",)
"""Cases that need HySparse."""


def case_block_size_reaches_the_router(bench: Bench) -> None:
    info = bench.shards.info()
    assert (info.block_size, info.attention_impl) == (bench.router.page_size, "flashdecoding")


def case_launcher_sees_our_pages(bench: Bench) -> None:
    path = str(bench.shards.socket(0))
    assert watch.ask_shard(path) == watch.Info(bench.router.page_size, watch.ATTENTION)


def case_capacity_fills_the_memory_and_no_more(bench: Bench) -> None:
    """TGI counts pages by their nominal size; pages with padded heads are larger."""
    size = bench.router.page_size
    padded = -(-bench.model.head_dim // size) * size
    rows = bench.model.num_layers * bench.model.num_kv_heads // len(bench.shards.processes)
    page_bytes = rows * padded * 2 * size * bench.kv_bytes
    warm_up_pages = -(-(TOTAL_TOKENS - 1 + bench.router.speculate) // size)
    pages = bench.num_tokens // size - warm_up_pages
    assert pages == bench.free_bytes // page_bytes


def case_one_request(bench: Bench) -> None:
    sequence = bench.sequence(bench.prompt(70))
    bench.router.prefill(sequence)
    bench.check(sequence)


def case_batch_of_four(bench: Bench) -> None:
    sequences = [bench.sequence(bench.prompt(n)) for n in (1, 64, 65, 130)]
    bench.router.prefill(*sequences)
    bench.check(*sequences)


def case_joining_a_decoding_batch(bench: Bench) -> None:
    first, second = bench.sequence(bench.prompt(50)), bench.sequence(bench.prompt(90))
    bench.router.prefill(first)
    bench.router.decode(5)
    bench.router.prefill(second)
    bench.check(first, second)


def case_cancelling_a_row(bench: Bench) -> None:
    sequences = [bench.sequence(bench.prompt(n)) for n in (30, 80, 140)]
    bench.router.prefill(*sequences)
    bench.router.decode(3)
    bench.router.cancel(sequences[1])
    bench.router.release(sequences[1])
    late = bench.sequence(bench.prompt(100))  # on the pages just given back
    bench.router.prefill(late)
    bench.check(sequences[0], sequences[2], late)


def case_cached_prefix_of_whole_pages(bench: Bench) -> None:
    size = 2 * bench.router.page_size
    first = bench.sequence(bench.prompt(size + 20))
    bench.router.prefill(first)
    bench.router.finish()
    second = bench.sequence(first.prompt[:size] + bench.prompt(30, 1), first.pages[:2])
    bench.router.prefill(second, cached=size)
    assert "the router claims" not in bench.shards.log()
    bench.check(second)


def case_whole_prompt_cached_rewrites_a_shared_slot(bench: Bench) -> None:
    size = 2 * bench.router.page_size
    first = bench.sequence(bench.prompt(size, 2))
    bench.router.prefill(first)
    bench.router.finish()
    reader = bench.sequence(first.prompt + bench.prompt(10, 3), first.pages[:2])
    bench.router.prefill(reader, cached=size)
    bench.router.decode(2)
    again = bench.sequence(first.prompt, first.pages[:2])
    bench.router.prefill(again, cached=size - 1)
    bench.check(reader, again)


def case_chunked_prompt(bench: Bench) -> None:
    sequence = bench.sequence(bench.prompt(134))
    bench.router.prefill(sequence, chunk=31)
    bench.check(sequence)


def case_chunked_prompt_beside_a_decoding_row(bench: Bench) -> None:
    first, second = bench.sequence(bench.prompt(40)), bench.sequence(bench.prompt(190))
    bench.router.prefill(first)
    bench.router.decode(2)
    bench.router.prefill(second, chunk=50)
    bench.check(first, second)


def case_drafts_cross_pages_that_do_not_follow_each_other(bench: Bench) -> None:
    """With speculation every step writes and rewrites slots past the end, across page edges; they
    come from the page table, whose ids are shuffled. (A5)"""
    size, pattern = bench.router.page_size, bench.prompt(7, 23)
    first = bench.sequence((pattern * 30)[: size + 20], new_tokens=1)
    bench.router.prefill(first)
    bench.router.finish()
    shared = first.pages[:1] if bench.prefixes else []
    prompt = (pattern * 30)[: 2 * size - 5]
    sequence = bench.sequence(prompt, shared, new_tokens=24)
    bench.router.prefill(sequence, cached=len(shared) * size)
    bench.check(sequence)
    bench.router.release(first)


def case_text_that_repeats_itself(bench: Bench) -> None:
    """Where there are drafts, some are right: a step then gives several tokens."""
    before = bench.router.accepted_drafts
    sequence = bench.sequence(bench.prompt(24, 31) * 3, new_tokens=20)
    bench.router.prefill(sequence)
    bench.check(sequence)
    if bench.router.speculate and bench.model.repeats:
        assert bench.router.accepted_drafts > before


def case_health_request_on_page_0(bench: Bench) -> None:
    sequence = bench.sequence(bench.prompt(60))
    bench.router.prefill(sequence)
    bench.router.decode(4)
    bench.router.health()
    bench.check(sequence)


def case_prefix_that_was_never_computed(bench: Bench) -> None:
    """What the router can claim after a prefill that failed or was dropped: it is mended, counted
    and told."""
    size, auditor = 2 * bench.router.page_size, bench.shards.auditor()
    before = [each["rejected_claims"] for each in auditor.counters()]
    sequence = bench.sequence(bench.prompt(size + 25, 4))
    bench.router.prefill(sequence, cached=size)
    bench.check(sequence)
    assert [each["rejected_claims"] for each in auditor.counters()] == [n + 1 for n in before]
    auditor.close()
    assert f"claims {size} cached tokens, but only 0 were computed" in bench.shards.log()


def case_false_claim_longer_than_a_step(bench: Bench) -> None:
    """What is missing is computed in steps that the shard was warmed up for."""
    size, before = bench.router.page_size, PREFILL_TOKENS + 100
    claimed = -(-before // size) * size
    sequence = bench.sequence(bench.prompt(claimed + 9, 15))
    auditor = bench.shards.auditor()
    auditor.largest_steps()
    bench.router.prefill(sequence, cached=claimed)
    assert max(auditor.largest_steps()) <= PREFILL_TOKENS or bench.lossy
    auditor.close()
    bench.check(sequence)


def case_prefix_cancelled_between_chunks(bench: Bench) -> None:
    size = 2 * bench.router.page_size
    dropped = bench.sequence(bench.prompt(size + 40, 5))
    other = bench.sequence(bench.prompt(20, 6))
    bench.router.prefill(other)
    bench.router.prefill(dropped, chunk=bench.router.page_size + 9)
    bench.router.cancel(dropped)
    second = bench.sequence(dropped.prompt[:size] + bench.prompt(12, 7), dropped.pages[:2])
    bench.router.prefill(second, cached=size)
    bench.check(other, second)
    told = f"claims {size} cached tokens, but only {bench.router.page_size} were computed"
    assert told in bench.shards.log()


def case_page_reused_for_other_tokens(bench: Bench) -> None:
    """A page's new owner wipes its tag, so a stale claim on it is caught."""
    size = bench.router.page_size
    first = bench.sequence(bench.prompt(size + 1, 8))
    bench.router.prefill(first)
    bench.router.finish()
    second = bench.sequence(bench.prompt(size + 5, 9), first.pages[:1])
    bench.router.prefill(second)
    bench.router.finish()
    third = bench.sequence(first.prompt[:size] + bench.prompt(9, 10), first.pages[:1])
    bench.router.prefill(third, cached=size)
    bench.check(third)


def case_random_traffic(bench: Bench) -> None:
    """Joins, chunks, shared prefixes and cancellations in random order."""
    chooser, size = random.Random(17), bench.router.page_size
    base = bench.prompt(2 * size, 11)
    first = bench.sequence(base, new_tokens=2)
    bench.router.prefill(first)
    bench.router.finish()
    done = []
    for number in range(12):
        tail = bench.prompt(chooser.randrange(1, size + 30), 100 + number)
        shared = chooser.randrange(3)
        prompt = base[: shared * size] + tail
        pages = first.pages[:shared]
        sequence = bench.sequence(prompt, pages, chooser.randrange(1, 7))
        chunk = min(len(tail), chooser.randrange(1, 60)) if bench.router.chunks else None
        bench.router.prefill(sequence, cached=shared * size, chunk=chunk)
        if chooser.random() < 0.25 and not sequence.finished:
            bench.router.cancel(sequence)
        else:
            done.append(sequence)
        if bench.router.running:
            bench.router.decode()
    bench.check(*done)


def case_long_prompt_beside_a_short_one(bench: Bench) -> None:
    """Far beyond every window, in models that mix windowed and full layers, too. (A51)"""
    sequences = [bench.sequence(bench.prompt(n, 12), new_tokens=6) for n in (1100, 5)]
    bench.router.prefill(*sequences)
    bench.check(*sequences)


def case_adapters_side_by_side(bench: Bench) -> None:
    sequences = []
    for adapter in (*bench.model.adapters, ""):
        sequences.append(bench.sequence(bench.prompt(75, 13)))
        sequences[-1].adapter = adapter
    bench.router.prefill(*sequences)
    bench.check(*sequences)
    assert len({tuple(each.tokens) for each in sequences}) == len(sequences)


def case_pages_of_another_adapter(bench: Bench) -> None:
    """Each adapter finds its own pages in the host tier, and no other's. (A11)"""
    size, (ours, other) = 2 * bench.router.page_size, bench.model.adapters
    prompt = bench.prompt(size + 20, 14)
    for adapter, held in ((ours, 0), (other, 0), (ours, size), ("", 0), (other, size)):
        sequence = bench.sequence(prompt)
        sequence.adapter = adapter
        bench.expect_held(sequence, held)
        bench.check(sequence)


def case_prefix_from_the_host_tier(bench: Bench) -> None:
    """The router claims nothing: its index forgot, and the pages hold something else now."""
    size = 2 * bench.router.page_size
    first = bench.sequence(bench.prompt(size + 20, 16))
    bench.router.prefill(first)
    bench.check(first)
    bench.shards.auditor().poison(first.pages)
    second = bench.sequence(first.prompt[:size] + bench.prompt(30, 17))
    bench.expect_held(second, size)
    whole = bench.sequence(first.prompt[:size])
    bench.expect_held(whole, size - 1)
    bench.check(second, whole)


def case_reply_from_the_host_tier(bench: Bench) -> None:
    """A conversation's second turn: the router knows the first prompt, the tier also the reply."""
    size, said = bench.router.page_size, [0]
    for seed in range(200, 300):
        first = bench.sequence(bench.prompt(size + 40, seed), new_tokens=40)
        bench.router.prefill(first)
        bench.router.finish()
        said = first.prompt + first.tokens
        if bench.model.can_be_text(said):
            break
        bench.router.release(first)
    second = bench.sequence(said + bench.prompt(10, 19), first.pages[:1])
    held = (len(said) - 1) // size * size  # the last token was chosen, not computed
    bench.expect_held(second, held, cached=size)
    bench.check(second)


def case_chunks_after_the_host_tier(bench: Bench) -> None:
    size = 2 * bench.router.page_size
    first = bench.sequence(bench.prompt(size + 5, 20))
    bench.router.prefill(first)
    bench.check(first)
    other = bench.sequence(bench.prompt(25, 21))
    bench.router.prefill(other)
    second = bench.sequence(first.prompt[:size] + bench.prompt(90, 22))
    chunk = size + 40 if bench.router.chunks else None
    bench.expect_held(second, size, chunk=chunk)
    bench.check(other, second)


def case_every_page_is_accounted_for(bench: Bench) -> None:
    """Long mixed traffic; attention is compared inside the shard while it runs."""
    from bicl.frontends.tgi.selftest.soak import Soak

    result = Soak(bench, requests=100).run()
    compared = sum(each["rows"] for each in result["differences"])
    assert compared or bench.lossy


def case_prefix_survives_a_restart(bench: Bench) -> None:
    """In files of every rank's own pages, found again and checked by a new process."""
    size = 2 * bench.router.page_size
    first = bench.sequence(bench.prompt(size + 20, 24))
    bench.router.prefill(first)
    bench.check(first)
    bench.restart()
    second = bench.sequence(first.prompt[:size] + bench.prompt(30, 25))
    bench.expect_held(second, size)
    bench.check(second)


def case_tiles_are_left_out(bench: Bench) -> None:
    """By rows long enough, in every one of their decode steps; a short one beside them is dense."""
    auditor = bench.shards.auditor()
    before = auditor.tiles_skipped()
    sequences = [bench.sequence(bench.prompt(n, 26), new_tokens=20) for n in (1000, 700, 40)]
    bench.router.prefill(*sequences)
    bench.check(*sequences)
    skipped = [now - then for now, then in zip(auditor.tiles_skipped(), before, strict=True)]
    auditor.close()
    assert min(skipped) > 20 * (1000 + 700) // bench.router.page_size // 3, skipped
    assert "full cache from now on" not in bench.shards.log()


CASES = {
    name.removeprefix("case_"): function
    for name, function in list(globals().items())
    if name.startswith("case_")
}
