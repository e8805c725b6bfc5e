"""Targets: a miss is a miss, and what was not measured is no pass."""

import json

import pytest

from bench.kernels.report import validate
from bench.kernels.shapes import DECODE_SHAPES, HEADS, PREFILL_SHAPES
from bench.summary import decode_table, main, prefill_table
from bench.targets import best_peer, verdicts


def row(op, heads, shape, impl, us):
    rate = {"tflops": 1.0} if op == "prefill" else {"gbps": 1.0}
    return {"op": op, "heads": heads, "shape": shape, "impl": impl, "us": us, **rate}


def everything(bicl_us=10.0):
    """Rows in which we need ``bicl_us`` where the floor needs 10 and every peer 20."""
    rows = []
    for heads in map(str, HEADS):
        for shape in DECODE_SHAPES:
            times = {
                "floor": 10.0,
                "bicl": bicl_us,
                "bicl-deterministic": bicl_us,
                "bicl-fp8": bicl_us / 2,
                "bicl-sm80": bicl_us,
                "bicl-other-lengths": bicl_us,
                "flashinfer-p1": 20.0,
                "fa3-p64": 21.0,
            }
            rows += [row("decode", heads, shape, impl, us) for impl, us in times.items()]
    for shape in PREFILL_SHAPES:
        times = {
            "bicl": bicl_us,
            "bicl-sm80": bicl_us,
            "fa3-p64": 20.0,
            "fa3-p128": 20.0,
            "flashinfer-p1": 20.0,
        }
        rows += [row("prefill", "32/8", shape, impl, us) for impl, us in times.items()]
    rows += [row("store", "32/8", "8192", impl, bicl_us) for impl in ("bicl", "copy")]
    rows.append(row("store", "32/8", "64", "bicl", 1.9))
    rows += [
        row("launch", "32/8", "eager", impl, 1.0)
        for impl in ("torch.add", "bicl-store", "bicl-decode")
    ]
    return rows


def test_all_targets_pass_at_the_floor():
    missed = [str(verdict) for verdict in verdicts(everything()) if not verdict.passed]
    assert missed == []


def test_being_slower_than_the_peers_is_a_miss():
    missed = {v.what for v in verdicts(everything(bicl_us=20.5)) if not v.passed}
    assert "decode 32x4096 / floor" in missed
    assert "decode 32/32 32x4096 / best paged peer" in missed
    assert "prefill 1x4096 speed against FA3 on 128-token pages" in missed
    assert "decode 32x4096 fp8 / bf16" not in missed


def test_nothing_measured_means_nothing_passed():
    found = verdicts([])
    assert found
    assert not any(verdict.passed for verdict in found)
    assert all(str(verdict).startswith("not measured") for verdict in found)


def test_a_number_that_was_only_to_be_stated_is_shown_and_not_counted(tmp_path, capsys):
    stated = [str(verdict) for verdict in verdicts(everything()) if verdict.limit is None]
    assert stated == [
        "stated       decode in a graph captured at other lengths / at its own: 1.000x (skew)",
        "stated       decode 32x4096 sm_80 path / default: 1.000x",
        "stated       prefill 1x4096 sm_80 path / default: 1.000x",
    ]
    path = tmp_path / "kernels.json"
    rows = [row for row in everything() if row["impl"] != "bicl-sm80"]
    path.write_text(json.dumps({"meta": {}, "rows": rows}))
    assert main([str(path)]) == 1
    shown = capsys.readouterr().out
    assert "not measured decode 32x4096 sm_80 path / default: -" in shown
    counted = len(verdicts(rows)) - len(stated)
    assert f"{counted} of {counted} targets met" in shown


@pytest.mark.parametrize(
    ("shape", "limit"),
    [("1x4096", 1.6), ("8x4096", 1.15), ("32x4096", 1.06), ("skew", 1.12), ("mix64", 1.06)],
)
def test_limits_over_the_floor_follow_the_bytes(shape, limit):
    found = {verdict.what: verdict for verdict in verdicts([])}
    assert found[f"decode {shape} / floor"].limit == limit


def test_the_best_peer_reads_through_a_page_table():
    rows = [
        row("decode", "32/8", "1x512", "sdpa-cudnn", 1.0),
        row("decode", "32/8", "1x512", "fa3-p64", 3.0),
        row("decode", "32/8", "1x512", "flashinfer-p64-tc", 2.0),
    ]
    assert best_peer(rows, "decode", "32/8", "1x512") == ("flashinfer-p64-tc", 2.0)
    assert best_peer(rows, "decode", "32/8", "skew") is None


def test_the_tables_hold_every_shape():
    rows = everything()
    assert validate({"meta": {}, "rows": rows}) == []
    assert len(decode_table(rows, "32/8").splitlines()) == 2 + len(DECODE_SHAPES)
    assert len(prefill_table(rows, "32/8").splitlines()) == 2 + len(PREFILL_SHAPES)
    widths = {line.count("|") for line in decode_table(rows, "32/8").splitlines()}
    assert len(widths) == 1


def test_a_missed_target_fails_the_command(tmp_path, capsys):
    path = tmp_path / "kernels.json"
    path.write_text(json.dumps({"meta": {"card": "c"}, "rows": everything(bicl_us=20.5)}))
    assert main([str(path)]) == 1
    assert "MISS" in capsys.readouterr().out
    path.write_text(json.dumps({"meta": {"card": "c"}, "rows": everything()}))
    assert main([str(path)]) == 0
