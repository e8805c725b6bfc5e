"""Too many requests, requests that go away, steps that fail, pages that are not what they seem."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch

from bicl.errors import CapacityError
from bicl.frontends.http.chaos.faults import Gate, files_of, replaced, slowed, spoil, torn
from bicl.frontends.http.chaos.rig import (
    PAGE_SIZE,
    Answer,
    ChaosError,
    Lab,
    Rig,
    collect,
    likely_of,
    require,
)
from bicl.frontends.http.request import RequestDone, TokenEvent

LENGTH = 5 * PAGE_SIZE + 7
DISK_BYTES = 64 << 20
STORM_ROUNDS = 25


def _on_disk(lab: Lab) -> dict[str, Any]:
    return {"disk_cache_dir": lab.folder, "disk_cache_bytes": DISK_BYTES}


def oracle_sees_a_wrong_page(lab: Lab) -> Mapping[str, float]:
    """The oracle itself: NaN, another page's contents and noise in a cached page are noticed."""
    seen = 0
    damages: tuple[Callable[[torch.Tensor, torch.Tensor], object], ...] = (
        lambda page, other: page.fill_(math.nan),
        lambda page, other: page.copy_(other),
        lambda page, other: page.normal_(),
    )
    for damage in damages:
        prompt = lab.prompt(LENGTH)
        with lab.rig(host_cache_bytes=0) as rig:
            rig.ask(prompt)
            pages = _indexed_pages(rig, prompt)
            with rig.engine._lock:
                for layer in rig.engine._runner.pool.layers:
                    damage(layer.pages[pages[1]], layer.pages[pages[2]].clone())
            try:
                rig.ask(prompt)
            except ChaosError:
                seen += 1
    require(seen == 3, f"{3 - seen} wrong pages went unnoticed")
    return {"noticed": seen}


def page_without_its_tag(lab: Lab) -> Mapping[str, float]:
    """The index names pages that do not carry their tag (never computed, say): they are computed
    anew, counted once, and right from then on."""
    prompt = lab.prompt(LENGTH)
    with lab.rig(host_cache_bytes=0) as rig:
        rig.ask(prompt)
        manager = rig.engine._scheduler.manager
        pages = _indexed_pages(rig, prompt)
        with rig.engine._lock:
            manager.tags.clear(pages[2:])
            for layer in rig.engine._runner.pool.layers:
                layer.pages[pages[2:]] = math.nan
        answer = rig.ask(prompt)
        assert answer.usage is not None
        require(
            answer.usage.cached_tokens == 2 * PAGE_SIZE,
            f"{answer.usage.cached_tokens} tokens were used, of which {2 * PAGE_SIZE} are sound",
        )
        mismatches = manager.stats.tag_mismatches
        require(mismatches, "the mismatch was not counted")
        again = rig.ask(prompt)
        assert again.usage is not None
        require(again.usage.cached_tokens > 2 * PAGE_SIZE, "the pages were not mended")
        return {"tag mismatches": mismatches}


def pool_exhausted(lab: Lab) -> Mapping[str, float]:
    """Twelve requests that grow, in a pool for less than two; one that can never fit."""
    stem = lab.prompt(2 * PAGE_SIZE)
    prompts = [lab.prompt(3 * PAGE_SIZE + n, stem if n % 2 else ()) for n in range(12)]
    with lab.rig(num_pages=8, **_on_disk(lab)) as rig:
        streams = [rig.submit(prompt, 40) for prompt in prompts]
        refused = False
        try:
            rig.submit(lab.prompt(9 * PAGE_SIZE), 2)
        except CapacityError:
            refused = True
        require(refused, "a request that can never fit was let in")
        for stream, prompt in zip(streams, prompts, strict=True):
            rig.expect(stream, prompt, 40)
        stats = rig.engine.snapshot()
        require(stats.preemptions, "nobody had to give way")
        return {"preemptions": stats.preemptions, "evicted": stats.evicted_pages}


def step_fails(lab: Lab) -> Mapping[str, float]:
    """The forward step raises: its requests fail with that error, all others are answered."""
    prompt, stem = lab.prompt(LENGTH), lab.prompt(2 * PAGE_SIZE)
    failed = 0
    with lab.rig(**_on_disk(lab)) as rig:
        for after in range(4):  # prefill in two chunks, then decode
            gate = Gate(after=after, fail=RuntimeError("the device failed"))
            gate.open()
            with replaced(rig.engine._runner, "forward", gate.wrap):
                answer = collect(rig.submit(lab.prompt(LENGTH, stem)))
            require(isinstance(answer.error, RuntimeError), f"it ended with {answer.error!r}")
            failed += 1
            rig.ask(prompt)
        rig.forget_pool()
        rig.ask(lab.prompt(LENGTH, stem))
    return {"failed": failed}


def cancel_at_every_stage(lab: Lab) -> Mapping[str, float]:
    """Cancelled in the queue, while pages come from disk and from the host, in each chunk of the
    prefill and in decode. The prompt is asked again each time, whole."""
    stages: Counter[str] = Counter()
    with lab.rig(**_on_disk(lab)) as rig:
        prompt = lab.prompt(LENGTH)
        rig.ask(prompt)
        runner, mover = rig.engine._runner, rig.tiers.mover
        disk = rig.tiers._disk
        assert disk is not None
        for layer in range(rig.tiers.num_layers):
            rig.forget_pool()
            stages["host"] += _cancelled(rig, prompt, mover, "load", layer)
        for page in range(2):
            rig.forget_host()
            stages["disk"] += _cancelled(rig, prompt, disk._store, "read", page)
        for step in range(5):
            fresh = lab.prompt(LENGTH)
            stages["step"] += _cancelled(rig, fresh, runner, "forward", step)
        stages["queue"] += _cancelled_in_queue(rig, lab.prompt(LENGTH))
        aborted = rig.engine.snapshot().aborted
        require(aborted == sum(stages.values()), f"{aborted} aborts were counted, not {stages}")
    return dict(stages)


def _cancelled(rig: Rig, prompt: tuple[int, ...], owner: Any, method: str, after: int) -> int:
    """Abort a request while a call that it depends on is held up; then let go and ask again."""
    gate = Gate(after=after)
    with replaced(owner, method, gate.wrap):
        stream = rig.submit(prompt)
        gate.wait()
        stream.close()
        if method == "read":  # the engine only waits, and sees it before the read ends
            rig.wait_until(lambda: not rig.engine._live, "the request is gone")
        gate.open()
        rig.wait_until(lambda: not rig.engine._live, "the request is gone")
    rig.check()
    rig.ask(prompt)
    return 1


def _cancelled_in_queue(rig: Rig, prompt: tuple[int, ...]) -> int:
    gate = Gate()
    with replaced(rig.engine._runner, "forward", gate.wrap):
        others = [rig.lab.prompt(PAGE_SIZE + n) for n in range(rig.engine.config.max_batch_size)]
        streams = [rig.submit(other, 20) for other in others]
        gate.wait()
        waiting = rig.submit(prompt)
        waiting.close()
        gate.open()
        for stream, other in zip(streams, others, strict=True):
            rig.expect(stream, other, 20)
    rig.ask(prompt)
    return 1


def everything_at_once(lab: Lab) -> Mapping[str, float]:
    """Rounds of random faults under several clients that share prefixes and hang up at random."""
    seen: Counter[str] = Counter()
    fired = [0]
    rng = lab.rng
    stems = [lab.prompt(rng.choice([33, 64, 100, 130])) for _ in range(4)]
    prompts = [lab.prompt(140 + 7 * n, stems[n % 4]) for n in range(16)]
    with lab.rig(num_pages=24, host_cache_bytes=2 << 20, **_on_disk(lab)) as rig:
        disk = rig.tiers._disk
        assert disk is not None
        faults: list[tuple[Any, str, Callable[..., Any]]] = [
            (rig.tiers.mover, "load", torn(rng, 0.3, RuntimeError("copy"), fired)),
            (rig.tiers.mover, "load", slowed(0.01)),
            (rig.tiers.mover, "save", torn(rng, 0.3, RuntimeError("copy"), fired)),
            (disk._store, "read", torn(rng, 0.3, OSError("disk"), fired)),
            (disk._store, "read", slowed(0.01)),
            (disk._store, "write", torn(rng, 0.5, OSError("disk"), fired)),
        ]
        for number in range(STORM_ROUNDS):
            with ExitStack() as stack:
                for owner, method, wrap in rng.sample(faults, 2):
                    stack.enter_context(replaced(owner, method, wrap))
                _storm(rig, prompts, seen)
            if number % 5 == 4:
                rig.check()
                files = files_of(rig)
                if files:
                    how = rng.choice(["short", "corrupt", "missing", "foreign"])
                    spoil(rng.sample(files, len(files) // 2 + 1), how, rng)
                    rig.forget_host()
            if number % 7 == 6:
                rig.engine.flush_cache()
        failures = rig.tier_stats().failures
        require(fired[0] and sum(failures.values()), "no fault fired")
        require(seen["answered"] and seen["hung up"], f"the storm was one-sided: {dict(seen)}")
        return {**seen, "faults": fired[0], **failures}


def _storm(rig: Rig, prompts: list[tuple[int, ...]], seen: Counter[str]) -> None:
    """Six clients at once; a third of them leave early."""
    rng = rig.lab.rng
    chosen = [rng.choice(prompts) for _ in range(6)]
    truths = [rig.lab.truth(prompt) for prompt in chosen]
    leaves = [rng.randrange(3) if rng.random() < 0.33 else None for _ in chosen]
    streams = [rig.submit(prompt) for prompt in chosen]
    problems: list[BaseException] = []

    def client(number: int) -> None:
        try:
            stream, patience = streams[number], leaves[number]
            if patience is None:
                answer: Answer = collect(stream)
                require(answer.error is None, f"a request failed: {answer.error!r}")
                whole = len(answer.ids) == len(truths[number].ids)
                agrees = truths[number].agrees(answer.ids, answer.likely)
                require(whole and agrees, "a storm's answer differs from a cold run's")
                seen["answered"] += 1
                return
            events = []
            for event, _ in zip(stream, range(patience), strict=False):
                if isinstance(event, RequestDone):
                    break
                assert isinstance(event, TokenEvent)
                events.append(event)
            stream.close()
            ids = [event.token.id for event in events]
            agrees = truths[number].agrees(ids, list(map(likely_of, events)))
            require(agrees, "the beginning of an answer is wrong")
            seen["hung up"] += 1
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=client, args=(n,)) for n in range(len(chosen))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]


def _indexed_pages(rig: Rig, prompt: tuple[int, ...]) -> list[int]:
    """Pool pages that hold the prompt's beginning."""
    manager = rig.engine._scheduler.manager
    with rig.engine._lock, torch.inference_mode():
        seq = manager.acquire(prompt)
        require(seq is not None, "the pool is not idle")
        assert seq is not None
        pages = seq.page_ids[: seq.num_cached_tokens // PAGE_SIZE]
        manager.release(seq, keep=False)
    return pages
