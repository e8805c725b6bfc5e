"""Pages that come late, damaged or not at all; a process that dies while it writes them."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from bicl.errors import ConfigError
from bicl.frontends.http.chaos.faults import Gate, files_of, replaced, slowed, spoil, torn
from bicl.frontends.http.chaos.rig import PAGE_SIZE, PATIENCE_SECONDS, Lab, Rig, require
from bicl.frontends.http.chaos.victim import LEAST_WRITE_SECONDS
from bicl.frontends.http.chaos.victim import prompts as prompts_of_the_victim

DISK_BYTES = 64 << 20
LENGTH = 5 * PAGE_SIZE + 7
KILLS = 2
VICTIM = "from bicl.frontends.http.chaos.victim import main; main()"


def _on_disk(lab: Lab) -> dict[str, Any]:
    return {"disk_cache_dir": lab.folder, "disk_cache_bytes": DISK_BYTES}


def _damaged(lab: Lab, how: str, reason: str) -> Mapping[str, float]:
    """Files are damaged between their writing and their reading."""
    prompts = [lab.prompt(LENGTH) for _ in range(3)]
    with lab.rig(**_on_disk(lab)) as rig:
        for prompt in prompts:
            rig.ask(prompt)
        rig.forget_host()
        spoil(files_of(rig), how, lab.rng)
        for prompt in prompts:
            rig.ask(prompt)
        failures = rig.tier_stats().failures
        require(failures[reason], f"nothing was counted as {reason}: {dict(failures)}")
        written = len(files_of(rig))
        require(written, "what was computed anew did not go to disk again")
        rig.forget_host()
        answer = rig.ask(prompts[0])
        assert answer.usage is not None
        require(answer.usage.cached_disk_tokens, "the mended pages were not used")
        return {reason: failures[reason], "files mended": written}


def disk_read_short(lab: Lab) -> Mapping[str, float]:
    return _damaged(lab, "short", "short")


def disk_read_empty(lab: Lab) -> Mapping[str, float]:
    return _damaged(lab, "empty", "short")


def disk_read_corrupt(lab: Lab) -> Mapping[str, float]:
    return _damaged(lab, "corrupt", "corrupt")


def disk_read_missing(lab: Lab) -> Mapping[str, float]:
    return _damaged(lab, "missing", "missing")


def disk_read_foreign(lab: Lab) -> Mapping[str, float]:
    """Sound files, but of other tokens: another prompt's pages under this one's names."""
    return _damaged(lab, "foreign", "foreign")


def disk_read_late(lab: Lab) -> Mapping[str, float]:
    """A disk that takes longer than computing does is given up, and what it brings afterwards
    harms nobody."""
    prompt = lab.prompt(LENGTH)
    with lab.rig(**_on_disk(lab)) as rig:
        rig.ask(prompt)
        rig.forget_host()
        rig.tiers.costs.prefill_tokens_per_second = 1e6  # patience: 50 ms
        store = _store(rig)
        with replaced(store, "read", slowed(0.5)):
            answer = rig.ask(prompt)
        assert answer.usage is not None
        require(answer.usage.cached_disk_tokens == 0, "it waited for the disk after all")
        late = rig.tier_stats().failures["late"]
        require(late, "nothing was counted as late")
        rig.ask(prompt)
        return {"late": late}


def disk_full(lab: Lab) -> Mapping[str, float]:
    prompts = [lab.prompt(LENGTH) for _ in range(2)]
    with lab.rig(**_on_disk(lab)) as rig:
        full = OSError(errno.ENOSPC, "no space left on device")
        fired = [0]
        with replaced(_store(rig), "write", torn(lab.rng, 1.0, full, fired)):
            for prompt in prompts:
                rig.ask(prompt)
            rig.forget_host()
        for prompt in prompts:
            rig.ask(prompt)
        stats = rig.tier_stats()
        require(stats.failures["io"] == fired[0] > 0, "refused writes were not counted")
        require(not list(lab.folder.rglob("*.tmp")), "half a file was left behind")
        return {"refused writes": fired[0]}


def disk_in_use(lab: Lab) -> Mapping[str, float]:
    """A second server on the same folder and model is refused; the first goes on."""
    with lab.rig(**_on_disk(lab)) as rig:
        refused = False
        try:
            Rig(lab, _on_disk(lab))
        except ConfigError:
            refused = True
        require(refused, "two servers share a folder")
        rig.ask(lab.prompt(LENGTH))
    return {"refused": 1}


def host_copy_fails(lab: Lab) -> Mapping[str, float]:
    """The copy of some layer raises, in turn each layer's."""
    failures = 0
    with lab.rig() as rig:
        for layer in range(rig.tiers.num_layers):
            prompt = lab.prompt(LENGTH)
            rig.ask(prompt)
            rig.forget_pool()
            gate = Gate(after=layer, fail=RuntimeError("the copy engine failed"))
            gate.open()
            with replaced(rig.tiers.mover, "load", gate.wrap):
                rig.ask(prompt)
            rig.ask(prompt)
        failures = rig.tier_stats().failures["copy"]
        require(failures == rig.tiers.num_layers, f"{failures} failed copies were counted")
    return {"copy": failures}


def host_copy_late(lab: Lab) -> Mapping[str, float]:
    """Each layer comes late: the first ones are computed with while the last ones still copy."""
    prompt = lab.prompt(LENGTH)
    with lab.rig() as rig:
        rig.ask(prompt)
        rig.forget_pool()
        with replaced(rig.tiers.mover, "load", slowed(0.05)):
            answer = rig.ask(prompt)
        assert answer.usage is not None
        require(answer.usage.cached_host_tokens, "nothing came from the host")
        stats = rig.tier_stats()
        require(stats.exposed_seconds > 0, "waiting for the copies was not counted")
        return {"exposed ms": round(1000 * stats.exposed_seconds, 1)}


def host_slot_stale(lab: Lab) -> Mapping[str, float]:
    """A slot's tag says that it holds something else by now."""
    prompt = lab.prompt(LENGTH)
    with lab.rig() as rig:
        rig.ask(prompt)
        rig.forget_pool()
        host = rig.tiers._host
        with rig.tiers._changed:
            host.tags.clear(block.place for block in host._index)
            for block in host._index:
                host.arena.slot(block.place).fill_(0xFF)
        rig.ask(prompt)
        stale = rig.tier_stats().failures["stale"]
        require(stale, "nothing was counted as stale")
        return {"stale": stale}


def save_fails(lab: Lab) -> Mapping[str, float]:
    """Copies to the host raise: pages are served from the pool, and computed when they left it."""
    prompt = lab.prompt(LENGTH)
    fired = [0]
    with lab.rig() as rig:
        error = RuntimeError("the copy engine failed")
        with replaced(rig.tiers.mover, "save", torn(lab.rng, 1.0, error, fired)):
            rig.ask(prompt)
            rig.ask(prompt)
            rig.forget_pool()
        answer = rig.ask(prompt)
        assert answer.usage is not None
        require(answer.usage.cached_tokens == 0, "a page that was never saved came back")
        require(rig.tier_stats().failures["copy"] == fired[0] > 0, "failed saves were not counted")
        rig.forget_pool()
        rig.ask(prompt)
    return {"failed saves": fired[0]}


def host_exhausted(lab: Lab) -> Mapping[str, float]:
    """A host tier of a few pages, under prompts that need many at the same time."""
    prompts = [lab.prompt(LENGTH) for _ in range(4)]
    ten_pages = lab.loaded.dtype.itemsize << 18
    with lab.rig(host_cache_bytes=ten_pages, **_on_disk(lab)) as rig:
        slots = rig.tier_stats().host_slots
        require(slots < 4 * (LENGTH // PAGE_SIZE), f"{slots} slots are enough for all")
        for _ in range(3):
            streams = [rig.submit(prompt) for prompt in prompts]
            for stream, prompt in zip(streams, prompts, strict=True):
                rig.expect(stream, prompt)
            rig.forget_pool()
        evicted = rig.tier_stats().host_evicted_pages
        require(evicted, "nothing was evicted from the host")
        return {"slots": slots, "evicted": evicted}


def kill_during_write_back(lab: Lab) -> Mapping[str, float]:
    """SIGKILL while pages are written to disk; the next server finds only sound ones."""
    torn_files, from_disk = 0, 0
    for number in range(KILLS):
        arguments = (str(lab.folder), lab.loaded.device.type, str(1 + 3 * number))
        victim = subprocess.Popen(
            [sys.executable, "-c", VICTIM, *arguments],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert victim.stdout is not None
            require(victim.stdout.readline(), "the victim did not start")
            time.sleep(lab.rng.uniform(0.0, LEAST_WRITE_SECONDS))
        finally:
            victim.send_signal(signal.SIGKILL)
            victim.wait(PATIENCE_SECONDS)
            victim.stdout.close()  # type: ignore[union-attr]
        torn_files += len(list(lab.folder.rglob("*.tmp")))
        with lab.rig(**_on_disk(lab)) as rig:
            require(not list(lab.folder.rglob("*.tmp")), "half a file was left behind")
            for prompt in prompts_of_the_victim()[:6]:
                answer = rig.ask(prompt)
                assert answer.usage is not None
                from_disk += answer.usage.cached_disk_tokens
            failures = rig.tier_stats().failures
            require(not failures, f"a file was complete by its name only: {dict(failures)}")
    require(torn_files, "no kill met a write")
    require(from_disk, "nothing that was written before a kill was used after it")
    return {"kills": KILLS, "files torn": torn_files, "tokens from disk": from_disk}


def _store(rig: Rig) -> Any:
    assert rig.tiers._disk is not None
    return rig.tiers._disk._store
