"""Reading Nsight Compute's CSV and drawing the picture, without a GPU."""

from dataclasses import replace

import pytest

from bench.kernels.counter_rows import METRICS, STALLS, Case, parse_rows, summarise_case, table
from bench.kernels.counters import CASES
from bench.kernels.plot import draw, over_floor, rates
from bench.kernels.shapes import DECODE_SHAPES, MAIN_HEADS, PREFILL_SHAPES

STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
RANGE = "thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"


def csv_line(cells):
    return ",".join(f'"{cell}"' for cell in cells)


def page(*kernels):
    """A raw page as ncu writes it: its own chatter, names, units, a line a kernel."""
    keys = {**METRICS, **{reason: STALL.format(reason) for reason in STALLS}}
    names = ["ID", "Kernel Name", RANGE, *keys.values()]
    lines = ["==PROF== Connected to process 1", csv_line(names), csv_line(["", "", ""])]
    for index, (name, case, values) in enumerate(kernels):
        numbers = [f"{values.get(key, 0):,}" for key in keys]
        where = f"<default domain>:{case.range_name}:none:none:none:none:none"
        lines.append(csv_line([index, name, where, *numbers]))
    return "\n".join(lines)


DECODE = {
    "time_ns": 120_000,
    "dram_peak_pct": 91.5,
    "dram_read_bytes": 536_900_000,
    "l2_hit_pct": 2.5,
    "l2_sectors": 1600,
    "l2_requests": 400,
    "registers": 168,
    "mean_cycles": 190_000,
    "most_cycles": 200_000,
    "long_scoreboard": 6.0,
    "selected": 1.0,
    "wait": 3.0,
    "membar": 0.01,
}


def test_the_longest_kernel_of_a_case_speaks_for_it():
    text = page(
        ("metadata", CASES[0], {"time_ns": 4_000}),
        ("decode", CASES[0], DECODE),
        ("other", CASES[1], {"time_ns": 900_000}),
    )
    found = summarise_case(CASES[0], parse_rows(text))
    assert found["kernel"] == "decode"
    assert (found["us"], found["other_kernels_us"]) == (120.0, [4.0])
    assert (found["dram_peak_pct"], found["dram_read_mb"]) == (91.5, 536.9)
    assert found["sectors_per_l2_request"] == 4.0
    assert (found["registers"], found["mean_busy_sm"]) == (168, 0.95)


def test_stalls_are_shares_of_the_warps_time():
    found = summarise_case(CASES[0], parse_rows(page(("decode", CASES[0], DECODE))))
    assert found["stalls_pct"] == {"long_scoreboard": 59.9, "wait": 30.0, "selected": 10.0}
    assert next(iter(found["stalls_pct"])) == "long_scoreboard"


def test_the_table_tells_what_warps_wait_for():
    values = DECODE | {"clock_hz": 1.75e9}
    row = summarise_case(CASES[0], parse_rows(page(("decode", CASES[0], values))))
    head, _, told = table([row]).splitlines()
    assert len(head.split("|")) == len(told.split("|"))
    assert "| 120.0 | 1.75 | 537 | 92 % | 2 % | 0 % |" in told
    assert told.endswith("| 168 | 0.950 | long scoreboard 60 %, wait 30 % |")


def test_cases_have_known_shapes():
    shapes = {"decode": DECODE_SHAPES, "prefill": PREFILL_SHAPES}
    assert all(case.shape in shapes[case.op] for case in CASES)
    assert len({str(case) for case in CASES}) == len(CASES)


def test_bulk_copies_issue_no_loads_to_take_a_ratio_of():
    found = summarise_case(CASES[0], parse_rows(page(("decode", CASES[0], DECODE))))
    assert found["sectors_per_load"] is None


def test_a_case_is_not_taken_for_a_longer_one():
    case = Case("decode", "flashinfer-p1", "1x4096", MAIN_HEADS)
    others = (replace(case, impl="flashinfer-p1-tc"), replace(case, op="prefill"))
    for other in others:
        assert summarise_case(case, parse_rows(page(("kernel", other, DECODE)))) is None


def test_a_case_without_kernels_is_missing():
    assert summarise_case(CASES[0], parse_rows(page())) is None


def cell(op, shape, impl, us):
    return {"op": op, "heads": "32/8", "shape": shape, "impl": impl, "us": us}


def test_bars_are_relative_to_the_floor_of_the_same_shape():
    rows = [cell("decode", "1x4096", "floor", 5.0), cell("decode", "1x4096", "bicl", 8.0)]
    assert over_floor(rows, "bicl")[0] == pytest.approx(1.6)
    assert over_floor(rows, "bicl")[1] is None


def test_rates_come_from_the_masks_operations():
    rows = [cell("prefill", "1x4096", "bicl", 231.0)]
    assert rates(rows, "bicl")[0] == pytest.approx(595, abs=1)


def test_a_picture_is_drawn_from_partial_results(tmp_path):
    rows = [
        cell("decode", "1x4096", "floor", 5.0),
        cell("decode", "1x4096", "bicl", 8.0),
        cell("prefill", "1x4096", "fa3-p128", 231.0),
    ]
    draw(rows, {"card": "a card"}, tmp_path / "docs" / "picture.png")
    assert (tmp_path / "docs" / "picture.png").stat().st_size > 1000
