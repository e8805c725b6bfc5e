"""Whose prefixes may be used: other adapters, other tenants, other weights."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from bicl.frontends.http.chaos.faults import Gate, replaced
from bicl.frontends.http.chaos.model import tiny_llama
from bicl.frontends.http.chaos.rig import PAGE_SIZE, Lab, Rig, require

LENGTH = 5 * PAGE_SIZE + 7
DISK_BYTES = 64 << 20
TIMED_PROMPTS = 12


def _on_disk(lab: Lab) -> dict[str, Any]:
    return {"disk_cache_dir": lab.folder, "disk_cache_bytes": DISK_BYTES}


def _cached(rig: Rig, prompt: tuple[int, ...], *, salt: str = "", adapter_id: str = "") -> int:
    usage = rig.ask(prompt, salt=salt, adapter_id=adapter_id).usage
    assert usage is not None
    return usage.cached_tokens


def adapter_swap(lab: Lab) -> Mapping[str, float]:
    """An adapter's pages serve that adapter alone, in every tier, and until it is replaced."""
    prompt = lab.prompt(LENGTH)
    with lab.rig(**_on_disk(lab)) as rig:
        for adapter in ("first", "second", ""):
            found = _cached(rig, prompt, adapter_id=adapter)
            require(found == 0, f"adapter {adapter!r} used {found} tokens of another")
        for forget in (rig.forget_pool, rig.forget_host):
            for adapter in ("first", "second", ""):
                forget()
                require(_cached(rig, prompt, adapter_id=adapter), f"{adapter!r} lost its pages")
        report = rig.engine.flush_cache("first")  # another adapter under the same name
        found = _cached(rig, prompt, adapter_id="first")
        require(found == 0, f"{found} tokens of the adapter that was replaced")
        rig.forget_host()
        require(_cached(rig, prompt, adapter_id="second"), "the flush took another's pages")
        require(report.tier_pages, "the flush left the tiers alone")
        return {"flushed": report.freed_pages + report.tier_pages}


def tenant_salts(lab: Lab) -> Mapping[str, float]:
    """Salt a, a, b, none: 0, some, 0, 0 cached tokens, whatever tier would have to bring them."""
    hits = 0
    with lab.rig(**_on_disk(lab)) as rig:
        for forget in (rig.forget_nothing, rig.forget_pool, rig.forget_host):
            prompt = lab.prompt(LENGTH)
            require(_cached(rig, prompt, salt="a") == 0, "a prompt was cached before it was sent")
            forget()
            hits += 1 if _cached(rig, prompt, salt="a") else 0
            for other in ("b", ""):
                forget()
                found = _cached(rig, prompt, salt=other)
                require(found == 0, f"salt {other!r} used {found} tokens of salt 'a'")
    require(hits == 3, "a tenant did not find its own pages")
    return {"own hits": hits}


def weights_changed(lab: Lab) -> Mapping[str, float]:
    """Other weights on the same disk, and other weights in the same process after a flush."""
    prompt, first = lab.prompt(LENGTH), lab.loaded
    with lab.rig(**_on_disk(lab)) as rig:
        rig.ask(prompt)
        rig.forget_host()
    lab.other_weights(tiny_llama(first.device.type, seed=1))
    with lab.rig(**_on_disk(lab)) as rig:
        require(_cached(rig, prompt) == 0, "pages of other weights came from the disk")
        rig.forget_host()
        require(_cached(rig, prompt), "its own pages did not come from the disk")
    lab.other_weights(first)
    with lab.rig(**_on_disk(lab)) as rig:
        require(_cached(rig, prompt), "the first model's pages are gone")
        replacement = tiny_llama(first.device.type, seed=2)
        first.model.load_state_dict(replacement.model.state_dict())
        report = rig.engine.flush_cache()
        lab.forget_truth()
        require(_cached(rig, prompt) == 0, "pages of the old weights survived the flush")
        for forget in (rig.forget_pool, rig.forget_host):
            forget()
            require(_cached(rig, prompt), "its own pages did not come back")
        rig.engine.flush_cache()  # the weights go back, and the folder must not serve these
    first.model.load_state_dict(tiny_llama(first.device.type).model.state_dict())
    lab.forget_truth()
    return {"flushed": report.freed_pages + report.tier_pages}


def tenants_timing_each_other(lab: Lab) -> Mapping[str, float]:
    """Another tenant's prompt costs exactly what one costs that nobody ever sent: the same tokens
    computed in the same steps, with nothing read from any tier. Clock times are shown, not judged.
    """
    work: dict[str, list[tuple[int, ...]]] = {"sent": [], "never": []}
    seconds: dict[str, list[float]] = {"own": [], "sent": [], "never": []}
    with lab.rig(**_on_disk(lab)) as rig:
        for number in range(TIMED_PROMPTS):
            known, fresh = lab.prompt(LENGTH), lab.prompt(LENGTH)
            rig.ask(known, salt="victim")
            if number % 2:
                rig.forget_pool()
            seconds["own"].append(rig.ask(known, salt="victim").seconds)
            for name, prompt in (("sent", known), ("never", fresh)):
                before = _work(rig)
                seconds[name].append(rig.ask(prompt, salt="spy").seconds)
                work[name].append(tuple(b - a for a, b in zip(before, _work(rig), strict=True)))
        require(
            work["sent"] == work["never"],
            f"a spy's request did other work: {work['sent']}, {work['never']}",
        )
        _spy_does_not_wait(rig)
    return {
        f"median ms, {name}": round(1000 * statistics.median(v), 1) for name, v in seconds.items()
    }


def _work(rig: Rig) -> tuple[int, ...]:
    """What a request of this salt costs: steps, tokens computed, pages read."""
    require(rig.tiers.settle(), "the tiers did not come to rest")
    stats, tiers = rig.engine.snapshot(), rig.tier_stats()
    return stats.steps, stats.prefilled_tokens, tiers.loaded_pages, tiers.disk_read_pages


def _spy_does_not_wait(rig: Rig) -> None:
    """While a tenant's prompt is computed, the same prompt of another does not wait for it."""
    prompt = rig.lab.prompt(LENGTH)
    gate = Gate()
    with replaced(rig.engine._runner, "forward", gate.wrap):
        first = rig.submit(prompt, salt="victim")
        gate.wait()
        second = rig.submit(prompt, salt="spy")
        before = rig.engine.snapshot().prefilled_tokens
        gate.open()
        rig.expect(first, prompt)
        rig.expect(second, prompt)
    computed = rig.engine.snapshot().prefilled_tokens - before
    require(computed == 2 * LENGTH, f"two tenants' prompts took {computed} tokens to compute")
