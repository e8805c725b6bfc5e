"""The result file: what a row holds, and that a broken file is refused."""

import json

import pytest

from bench.kernels.report import Report, find, load_report, markdown_table, validate
from bench.timing import Sample

SAMPLE = Sample(median=100.0, p20=98.0, p80=104.0, rounds=11)


@pytest.fixture
def report(tmp_path):
    return Report(tmp_path / "results" / "kernels.json", {"card": "a card"})


def test_rates_follow_from_the_median(report):
    report.add("decode", "32/8", "1x4096", "bicl", SAMPLE, num_bytes=400_000_000)
    report.add("prefill", "32/8", "1x4096", "bicl", SAMPLE, flops=60_000_000_000)
    decode, prefill = report.rows
    assert decode["gbps"] == 4000.0
    assert prefill["tflops"] == 600.0
    assert (decode["us_p20"], decode["us"], decode["us_p80"]) == (98.0, 100.0, 104.0)


def test_a_saved_file_reads_back(report):
    report.add("decode", "32/8", "1x4096", "bicl", SAMPLE, num_bytes=1)
    report.skip("decode 32/8 skew sdpa-cudnn", "needs one length\nfor all")
    report.save()
    document = load_report(report.path)
    assert document["rows"] == report.rows
    assert document["meta"]["skipped"] == {"decode 32/8 skew sdpa-cudnn": "needs one length"}
    assert find(document["rows"], "decode", "32/8", "1x4096", "bicl") == 100.0
    assert find(document["rows"], "decode", "32/8", "1x4096", "fa3-p64") is None


def test_saving_leaves_no_second_file(report):
    report.save()
    assert [path.name for path in report.path.parent.iterdir()] == ["kernels.json"]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"us": 0.0}, "us is 0.0"),
        ({"op": "guess"}, "op 'guess'"),
        ({"gbps": None}, "neither gbps nor tflops"),
        ({"impl": None}, "lacks impl"),
    ],
)
def test_a_broken_row_is_named(change, complaint):
    row = {"op": "decode", "heads": "32/8", "shape": "s", "impl": "bicl", "us": 1.0, "gbps": 2.0}
    row = {key: value for key, value in (row | change).items() if value is not None}
    [problem] = validate({"meta": {}, "rows": [row]})
    assert complaint in problem


def test_a_cell_measured_twice_is_refused(tmp_path):
    row = {"op": "decode", "heads": "32/8", "shape": "s", "impl": "bicl", "us": 1.0, "gbps": 2.0}
    path = tmp_path / "twice.json"
    path.write_text(json.dumps({"meta": {}, "rows": [row, row]}))
    with pytest.raises(ValueError, match="row 1 repeats decode 32/8 s bicl"):
        load_report(path)


def test_a_table_leaves_unmeasured_cells_empty(report):
    report.add("decode", "32/8", "1x4096", "bicl", SAMPLE, num_bytes=1)
    report.add("decode", "32/8", "skew", "fa3-p64", SAMPLE, num_bytes=1)
    lines = markdown_table(report.rows, "decode", "32/8").splitlines()
    assert lines[0] == "| shape | bicl | fa3-p64 |"
    assert lines[2:] == ["| 1x4096 | 100.0 | - |", "| skew | - | 100.0 |"]
