"""Targets of reuse: a miss is a miss, and what was not measured is no pass."""

import json
import random

from bench.reuse import GPU, LOOKUP, RATES, REPLAYS, verdicts
from bench.serving.__main__ import rows_of_run
from bench.serving.reordering import Traffic, compared, exposed_ns


def everything(good: bool) -> dict:
    def row(case, pass_value, fail_value, **more):
        return {"case": case, "value": pass_value if good else fail_value, **more}

    at_least = {
        "prefill with reordering": 0.98,
        "no hits, index": 0.99,
        "no hits, index and host tier": 0.99,
        "host hit, first token": 5.0,
        "host hit, bandwidth": 0.8,
        "three turns": 1.0,
    }
    gpu = [row(case, limit, limit - 0.01) for case, limit in at_least.items()]
    gpu += [
        row("exposed reordering, all", 0.013, 0.014),
        row("exposed reordering, decode", 0.005, 0.006),
        row("exposed reordering in a decode step", 0.005, 0.006),
        row("in flight", 1.0, 2.0),
    ]
    rates = [
        {"case": case, "trace": "t", "tokens": 1, "points_from_ideal": 0.9 if good else 1.1}
        for case in ("hit rate, GPU only", "hit rate, GPU + host", "hit rate, GPU + host + disk")
    ]
    us = 125.0 if good else 1000.0
    names = ("acquire", "acquire_branched", "acquire_with_tiers", "lookup", "lookup_branched")
    lookup = [{"tokens": 50_000, **{f"{name}_us": {"median": us} for name in names}}]
    replay = [row("trace replay, pool only", 1.0, 0.9, ideal=0.5, hit_rate=0.491 if good else 0.4)]
    return {GPU: gpu, RATES: rates, **dict.fromkeys(REPLAYS, replay), LOOKUP: lookup}


def test_all_targets_pass_at_their_limits() -> None:
    assert [str(v) for v in verdicts(everything(True)) if not v.passed] == []


def test_every_target_can_be_missed() -> None:
    assert [str(v) for v in verdicts(everything(False)) if v.passed] == []


def test_nothing_measured_means_nothing_passed() -> None:
    found = verdicts({})
    assert len(found) == len(verdicts(everything(True)))
    assert not any(v.passed for v in found)


def test_every_decode_shape_is_held_to_the_limit() -> None:
    name = "exposed reordering in a decode step"
    rows = [{"case": name, "value": v, "shape": "1x1024"} for v in (0.004, 0.006)]
    found = [v for v in verdicts({GPU: rows}) if v.what == name]
    assert [v.passed for v in found] == [True, False]


def test_stores_cost_what_is_exposed_longer_than_without_them() -> None:
    """Of steps as long as nobody watches them, in the mixture that came then."""
    steps = [(0, 50, False), (100, 180, True), (180, 260, True)]
    watched = [(0, 60, False), (100, 300, True)]
    kernels = [(10, 20, True), (15, 30, False), (110, 140, True), (200, 210, False)]
    plain, stored = Traffic(steps, [], {}), Traffic(watched, kernels, {})
    bare = Traffic(watched, [(12, 14, True), (110, 112, True)], {})
    prefill, decode = 5 - 2, 30 - 2
    assert compared(plain, stored, bare, [False])["value"] == prefill / 50
    assert compared(plain, stored, bare, [True])["value"] == decode / 80
    both = compared(plain, stored, bare, [True, False])
    assert abs(both["value"] - (prefill + 2 * decode) / 210) < 1e-12
    unseen = Traffic(watched[:1], kernels, {})
    assert "value" not in compared(plain, unseen, bare, [True])


def test_exposed_is_what_no_other_kernel_covers() -> None:
    rng = random.Random(3)
    for _ in range(200):
        stores, others = (
            sorted((a, a + rng.randrange(1, 9)) for a in (rng.randrange(60) for _ in range(n)))
            for n in (rng.randrange(4), rng.randrange(12))
        )
        covered = {t for begin, end in others for t in range(begin, end)}
        expected = sum(t not in covered for begin, end in stores for t in range(begin, end))
        assert exposed_ns(stores, others) == expected


def test_rows_of_an_earlier_run_say_of_which(tmp_path) -> None:
    first = {"date": "d1", "commit": "c1", "sources": {}, "command": "x1", "card": "H200"}
    path = tmp_path / "result.json"
    path.write_text(json.dumps({"meta": first, "rows": [{"case": "a", "value": 1.0}]}))
    (row,) = rows_of_run(path)
    assert (row["case"], row["run"]["commit"], row["run"]["command"]) == ("a", "c1", "x1")
    path.write_text(json.dumps({"meta": {**first, "commit": "c2"}, "rows": [row]}))
    assert rows_of_run(path) == [row]  # the run that measured it, not the one that kept it
