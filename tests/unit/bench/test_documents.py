"""What README and docs say of a result is what its file says."""

import json
import re
from pathlib import Path

import pytest

from bench import reuse
from bench.kernels.counter_rows import table as counter_table
from bench.kernels.report import find, load_report
from bench.kernels.shapes import DECODE_SHAPES, PREFILL_SHAPES
from bench.summary import decode_table, mla_table, prefill_table
from bench.targets import best_peer, fastest, verdicts
from bench.tgi import summary as tgi

ROOT = Path(__file__).resolve().parents[3]
README = (ROOT / "README.md").read_text()
KERNELS_PAGE = (ROOT / "docs" / "kernels.md").read_text()
HYSPARSE_PAGE = (ROOT / "docs" / "hysparse.md").read_text()
REUSE_PAGE = (ROOT / "docs" / "reuse.md").read_text()
ROWS = load_report(ROOT / "bench" / "results" / "kernels-h200.json")["rows"]
NAMES = {"32768 + 31 x 2048": "skew", "64 x (64 .. 4096)": "mix64"}
CLAIMED = ("bicl", "token-major", "flashinfer-p1")  # DRAM 45 to 82 %, misses 32.7 to 5.1 %
CHUNKS = {
    "512 on 8192": "512+8192b1",
    "512 on 8192, batch 8": "512+8192b8",
    "64 on 8192": "64+8192",
    "32 on 2048, batch 16": "32+2048b16",
}


def rows_of(table: str) -> list[str]:
    return table.splitlines()[2:]


def cells_below(page: str, header: str) -> list[list[str]]:
    """The rows of the table that begins so, without marks of emphasis."""
    lines = page[page.index(header) :].split("\n\n")[0].replace("*", "").splitlines()[2:]
    return [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines]


@pytest.mark.parametrize("table", [decode_table, prefill_table])
def test_the_readmes_kernel_tables_are_those_of_the_summary(table) -> None:
    missing = [row for row in rows_of(table(ROWS, "32/8")) if row not in README]
    assert missing == [], "paste what `python -m bench.summary` prints"


def test_the_readmes_steps_in_tgi_are_those_of_the_summary() -> None:
    steps = tgi.load(ROOT / tgi.DEFAULT)
    missing = [row for row in rows_of(tgi.step_table(steps)) if row not in README]
    assert missing == [], "paste what `python -m bench.tgi.summary` prints"


def test_the_readme_counts_targets_as_the_summaries_do() -> None:
    promised = [verdict for verdict in verdicts(ROWS) if verdict.limit is not None]
    met = sum(verdict.passed for verdict in promised)
    assert f"all {len(promised)} targets ({met} met)" in README
    found = reuse.verdicts(reuse.load(ROOT))
    assert f"({sum(verdict.passed for verdict in found)} of {len(found)} met" in README


def test_the_kernels_page_has_the_files_decode_times() -> None:
    for name, *told in cells_below(KERNELS_PAGE, "| batch x context | floor | decode |"):
        shape = NAMES.get(name, name.replace(" ", ""))
        assert shape in DECODE_SHAPES
        impls = ("floor", "bicl", "bicl-deterministic", "bicl-fp8")
        floor, ours, fixed, half = (find(ROWS, "decode", "32/8", shape, impl) for impl in impls)
        peer = best_peer(ROWS, "decode", "32/8", shape)
        assert peer is not None
        expected = [floor, ours, ours / floor, fixed, half, peer[1], ours / peer[1]]
        digits = (1, 1, 2, 1, 1, 1, 2)
        assert told == [f"{x:.{n}f}" for x, n in zip(expected, digits, strict=True)], name


def test_the_kernels_page_has_the_files_times_over_latents() -> None:
    missing = [row for row in rows_of(mla_table(ROWS)) if row not in KERNELS_PAGE]
    assert missing == [], "paste what `python -m bench.summary` prints"


def test_the_kernels_page_has_the_files_graphs_captured_at_other_lengths() -> None:
    ratios = []
    for shape in DECODE_SHAPES:
        other, own = (
            find(ROWS, "decode", "32/8", shape, impl) for impl in ("bicl-other-lengths", "bicl")
        )
        ratios.append(other / own)
    assert f"takes {min(ratios):.3f} to {max(ratios):.3f} of the time" in KERNELS_PAGE


def test_the_kernels_page_has_the_files_prefill_times() -> None:
    for name, *told in cells_below(KERNELS_PAGE, "| new + cached tokens | BICL | FA3, 128"):
        shape = CHUNKS.get(name, name.replace(" ", ""))
        assert shape in PREFILL_SHAPES
        ours = find(ROWS, "prefill", "32/8", shape, "bicl")
        wide, narrow, stock, half = (
            fastest(ROWS, "prefill", "32/8", shape, impls)
            for impls in (
                ("fa3-p128", "fa3-p128-sched"),
                ("fa3-p64", "fa3-p64-sched"),
                ("flashinfer-p1",),
                ("bicl-fp8",),
            )
        )
        numbers = [float(re.match(r"[\d.]+", cell)[0]) for cell in told]
        expected = [ours, wide, wide / ours, narrow / ours, stock / ours, half]
        for number, value in zip(numbers, expected, strict=True):
            assert number == pytest.approx(value, rel=0.006), f"{name}: {told}"


def test_the_kernels_page_has_the_files_products_with_few_rows() -> None:
    rows = json.loads((ROOT / "bench" / "results" / "linear-h200.json").read_text())["rows"]
    found = {(row["products"], row["rows"]): row for row in rows}
    told = cells_below(KERNELS_PAGE, "| rows | qkv | o | gates and ups |")
    assert len(told) == len({number for _, number in found})
    for number, *cells in told:
        alone = [found[name, int(number)] for name in ("qkv", "o", "gate_up", "down")]
        layer = found["qkv, o, gate_up, down", int(number)]
        expected = [f"{row['of_cublas']:.2f}" for row in alone]
        expected += [f"{layer['us'][form]:.1f}" for form in ("bicl", "cublas")]
        assert cells == [*expected, f"{layer['of_cublas']:.2f}"], number


def test_the_kernels_page_has_the_files_counters() -> None:
    rows = json.loads((ROOT / "bench" / "results" / "counters-h200.json").read_text())["rows"]
    head, rule, *told = counter_table(rows).splitlines()
    assert f"{head}\n{rule}\n" in KERNELS_PAGE
    shown = KERNELS_PAGE[KERNELS_PAGE.index(head) :].split("\n\n")[0].splitlines()[2:]
    assert len(shown) > 1
    assert [line for line in shown if line not in told] == []
    ours = {row["case"]: row for row in rows}
    dram, hit = (
        [ours[f"decode {name} 32x4096 32/8"][key] for name in CLAIMED]
        for key in ("dram_peak_pct", "l2_hit_pct")
    )
    assert "{:.1f} / {:.1f} / {:.1f} %".format(*dram) in README
    assert "{:.1f} / {:.1f} / {:.1f} %".format(*hit) in README


def test_the_hysparse_page_has_the_files_layer_times() -> None:
    result = json.loads((ROOT / "bench" / "results" / "hysparse-h200.json").read_text())
    found = {(row["batch"], row["context"], row["max_k"]): row for row in result["layer"]}
    told = cells_below(HYSPARSE_PAGE, "| batch x context | tiles read | dense |")
    assert len(told) == 10
    for name, tiles, *times, share in told:
        numbers = [int(number) for number in re.findall(r"\d+", name.replace(",", ""))]
        row = found[tuple(numbers) if len(numbers) == 3 else (*numbers, 2048)]
        assert tiles.replace(",", "") == f"{row['kept']} of {row['tiles']}", name
        gain = f"{row['speedup']:.2f}" + (": served dense" if row["served"] == "dense" else "")
        assert times == [f"{row['us']['dense']:.1f}", f"{row['us']['sparse']:.1f}", gain], name
        assert share == f"{row['selection_share']:.0%}".replace("%", " %"), name
    verdicts = [line.split()[0] for line in result["targets"]]
    assert f"{verdicts.count('pass')} of {len(verdicts)} targets" in HYSPARSE_PAGE


def test_the_hysparse_page_has_the_files_times_on_pages_of_32() -> None:
    result = json.loads((ROOT / "bench" / "results" / "hysparse-pages-32-h200.json").read_text())
    rows = [row for row in result["layer"] if row["max_k"] != 512]
    told = cells_below(HYSPARSE_PAGE, "| batch x context, pages of 32 |")
    for row, (name, tiles, *numbers) in zip(rows, told, strict=True):
        assert name.replace(",", "") == f"{row['batch']} x {row['context']}"
        assert tiles.replace(",", "") == f"{row['kept']} of {row['tiles']}"
        expected = [f"{row['us'][way]:.1f}" for way in ("dense", "sparse")]
        expected += [f"{row['speedup']:.2f}", f"{row['selection_share'] * 100:.0f} %"]
        assert numbers == expected, name
    told = cells_below(HYSPARSE_PAGE, "| dense attention of a layer, us |")
    for row, (name, *numbers) in zip(result["pages"], told, strict=True):
        wide, narrow = row["us"]["64"], row["us"]["32"]
        expected = [f"{wide:.1f}", f"{narrow:.1f}", f"{narrow / wide:.2f}"]
        assert (name, [number.replace(",", "") for number in numbers]) == (row["shape"], expected)
    verdicts = [line.split()[0] for line in result["targets"]]
    assert f"{verdicts.count('pass')} of {len(verdicts)} targets are met" in HYSPARSE_PAGE


def test_the_readme_has_the_sparse_times_of_the_default_pages() -> None:
    result = json.loads((ROOT / "bench" / "results" / "hysparse-pages-32-h200.json").read_text())
    rows = [row for row in result["layer"] if row["max_k"] != 512]
    told = cells_below(README, "| batch x context | dense | **sparse** |")
    for row, (name, *numbers) in zip(rows, told, strict=True):
        assert name == f"{row['batch']}x{row['context']}"
        expected = [f"{row['us'][way]:.1f}" for way in ("dense", "sparse")]
        expected += [f"{row['speedup']:.2f}x", f"{row['selection_share'] * 100:.0f} %"]
        assert numbers == expected, name
    step = [result["step"]["us"][way] / 1e3 for way in ("dense", "sparse")]
    told_step = "{:.1f} to {:.1f} ms ({:.2f}x".format(*step, result["step"]["speedup"])
    assert told_step in README
    met = [line.split()[0] for line in result["targets"]].count("pass")
    assert f"Of {len(result['targets'])} targets {met} are met" in README


def test_the_hysparse_page_has_the_files_search() -> None:
    folder = ROOT / "bench" / "results" / "hysparse-tune"
    found = (folder / "tune.md").read_text().splitlines()
    told = cells_below(HYSPARSE_PAGE, found[0])
    assert len(told) == 7
    for cells in told:
        row = "| " + " | ".join(cells) + " |"
        assert row in [line.replace(" *", "") for line in found], row
    chosen = json.loads((folder / "hysparse.json").read_text())
    assert (chosen["hysparse"]["sparsity_ratio"], chosen["hysparse"]["layers"]) == (0.65, "10-28")


def test_the_hysparse_page_has_the_files_newest_windows() -> None:
    rows = json.loads((ROOT / "bench" / "results" / "hysparse-recent.json").read_text())["rows"]
    told = cells_below(HYSPARSE_PAGE, "| newest windows |")
    for name, *errors in told:
        own = [row for row in rows if name == f"{row['kind']}, {row['ratio']:.2f}"]
        assert errors == [f"{100 * row['error']:.2f} %" for row in own], name
    assert len(told) == len({row["kind"] for row in rows})


def test_the_reuse_page_has_the_files_side_streams() -> None:
    result = json.loads((ROOT / "bench" / "results" / "reuse-h200.json").read_text())
    rows = [row for row in result["rows"] if row["case"] == "stores on a side stream"]
    told = cells_below(REUSE_PAGE, "| step | us | side stream |")
    ways = ("attention waits", "attention not early", "product early")
    for row, (name, us, *speeds) in zip(rows, told, strict=True):
        assert name.removesuffix(", prefill").replace(" ", "") == row["shape"].split(",")[0]
        others = [row["others"][f"in line, {way}"]["value"] for way in ways]
        found = [row["value"], *others, row["others"]["in line again"]["value"]]
        assert (us, speeds) == (f"{row['step_us']:,.0f}", [f"{x:.3f}" for x in found]), name


def test_the_reuse_page_has_the_files_cost_of_openmps_threads() -> None:
    rows = json.loads((ROOT / "bench" / "results" / "openmp-cpu.json").read_text())["rows"]
    told = cells_below(REUSE_PAGE, "| before the engine started | seconds |")
    found = [
        [row["case"], f"{row['seconds']:.1f}", f"{row['cpu_seconds']:.1f}", f"{row['sleeps']:,.0f}"]
        for row in rows
    ]
    assert [list(cells) for cells in told] == found
