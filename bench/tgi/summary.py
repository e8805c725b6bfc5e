"""Print the tables of decode steps in TGI's shard and say which targets are met.

``python -m bench.tgi.summary [bench/results/tgi-h200.json]``; exits 1 if a target is missed. The
layout's share and the kernel's come from the rows of ``bench/results/kernels-h200.json``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

DEFAULT = Path("bench/results/tgi-h200.json")
RUNS_BEFORE = ("f1d3e8e", "1cdf4e3", "31d09bb")  # their commits, the latest first
BEFORE = tuple(Path(f"bench/results/tgi-{commit}-h200.json") for commit in RUNS_BEFORE)
KERNELS = Path("bench/results/kernels-h200.json")
HOST_CACHE_STEPS = Path("bench/results/tgi-host-cache-h200.json")
HOST_STEPS = Path("bench/results/tgi-host-cpu.json")
SOAKS = (Path("bench/results/tgi-soak-h200.json"), Path("bench/results/tgi-soak-h200-x2.json"))
LOGITS = Path("bench/results/tgi-logits-h200.json")
LAYERS, HEADS = 32, "32/8"  # of the model whose steps are timed
OURS, HALF, STOCK, CORES = "bicl", "bicl-fp8", "flashinfer-p1", "flashinfer-p1-tc"
TOKEN_MAJOR, CHECKED, HOST_CACHE = "token-major", "bicl-checked", "bicl-host-cache"
GAINS = {"32x4096": 1.3, "8x16384": 1.3, "32x16384": 1.4}  # over TGI's default; else GAIN
GAIN, GAIN_OVER_CORES = 1.2, 1.07
GAIN_OF_FP8 = {"32x4096": 1.15}
PROMISED = [
    f"{batch}x{context}"
    for context in (1024, 4096, 16384)
    for batch in (1, 8, 32, 128)
    if batch * context < 128 * 16384  # whose pages no card of 141 GB holds
]

Steps = Mapping[str, Mapping[str, Mapping[str, Any]]]  # by shape and path


def rows_of(*paths: Path) -> list[Mapping[str, Any]]:
    """The rows of result files."""
    return [row for path in paths for row in json.loads(path.read_text())["rows"]]


def load(path: Path) -> Steps:
    """A file's rows by shape and path."""
    steps: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in rows_of(path):
        steps.setdefault(row["shape"], {})[row["impl"]] = row
    return dict(sorted(steps.items(), key=lambda each: _numbers(each[0])))


def _numbers(shape: str) -> tuple[int, int]:
    batch, context = map(int, shape.split("x"))
    return context, batch


def ratio(step: Mapping[str, Mapping[str, Any]], slow: str, fast: str) -> float | None:
    if slow not in step or fast not in step:
        return None
    return float(step[slow]["us"]) / float(step[fast]["us"])


def step_table(steps: Steps) -> str:
    """The shard's own time of a step, ms, and how many times as long the others take."""
    lines = [
        "| batch x context | BICL | TGI's default | is | tensor cores | is | fp8 pages | gain |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for shape, step in steps.items():
        gains = [(STOCK, OURS), (CORES, OURS), (OURS, HALF)]
        over = ["-" if (r := ratio(step, *g)) is None else f"{r:.2f}x" for g in gains]
        ms = {name: f"{row['us'] / 1000:.2f}" for name, row in step.items()}
        cells = [f"**{ms.get(OURS, '-')}**", ms.get(STOCK, "-"), over[0], ms.get(CORES, "-")]
        cells += [over[1], ms.get(HALF, "-"), over[2]]
        lines.append(f"| {shape} | {' | '.join(cells)} |")
    return "\n".join(lines)


def parts_table(steps: Steps) -> str:
    """Where a step's time goes and where the gain over TGI's default comes from, ms."""
    lines = [
        "| batch x context | before the graph | graph | after it | default: before | graph | after "
        "| gained on the GPU | gained on the host |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for shape, step in steps.items():
        both = [step.get(OURS, {}), step.get(STOCK, {})]
        if not all("graph_us" in row for row in both):
            continue
        parts = [[row[f"{p}_us"] / 1000 for p in ("before", "graph", "after")] for row in both]
        ours, theirs = parts
        gained = theirs[1] - ours[1], theirs[0] + theirs[2] - ours[0] - ours[2]
        cells = [f"{value:.2f}" for value in (*ours, *theirs, *gained)]
        lines.append(f"| {shape} | {' | '.join(cells)} |")
    return "\n".join(lines)


def attention_rows(path: Path) -> Steps:
    """Rows of a layer's decode attention with the model's heads, of the kernels' result file."""
    found: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in rows_of(path):
        if (row["op"], row.get("heads")) == ("decode", HEADS):
            found.setdefault(row["shape"], {})[row["impl"]] = row
    return found


def split_table(steps: Steps, attention: Steps) -> str:
    """What of the gain over TGI's default is whose, ms: the host's, and on the GPU the kernel's
    (the same kernel on token-major pages beside TGI's default), the tiled layout's (our kernel on
    tiled beside token-major pages), and the rest of the graph's: the store."""
    lines = [
        "| batch x context | gained | host work saved | GPU | of that the kernel | the layout "
        "| the store and the rest |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for shape, step in steps.items():
        ours, theirs = step.get(OURS, {}), step.get(STOCK, {})
        layer = attention.get(shape, {})
        if not ("graph_us" in ours and "graph_us" in theirs and TOKEN_MAJOR in layer):
            continue
        tiled, plain, stock = (float(layer[name]["us"]) for name in (OURS, TOKEN_MAJOR, STOCK))
        host = sum(theirs[f"{p}_us"] - ours[f"{p}_us"] for p in ("before", "after"))
        graph = theirs["graph_us"] - ours["graph_us"]
        kernel, layout = (LAYERS * each for each in (stock - plain, plain - tiled))
        parts = (host + graph, host, graph, kernel, layout, graph - kernel - layout)
        cells = [f"{value / 1000:.2f}" for value in parts]
        lines.append(f"| {shape} | {' | '.join(cells)} |")
    return "\n".join(lines)


def host_cache_table(rows: Iterable[Mapping[str, Any]]) -> str:
    """What a host cache costs a decode step, ms: two shards in turns, right after the prompts and
    once their pages are in host memory."""
    found: dict[str, dict[bool, dict[str, float]]] = {}
    for row in rows:
        settled = found.setdefault(row["shape"], {}).setdefault("settled_s" in row, {})
        settled[row["impl"]] = row["us"] / 1000
    lines = [
        "| batch x context | at once: without | with a host cache | is | settled: without | with "
        "| is |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for shape, runs in found.items():
        cells = []
        for run in (runs[False], runs[True]):
            without, beside = run[CHECKED], run[HOST_CACHE]
            cells += [f"{without:.2f}", f"{beside:.2f}", f"{beside / without:.3f}x"]
        lines.append(f"| {shape} | {' | '.join(cells)} |")
    return "\n".join(lines)


def host_steps_table(steps: Steps) -> str:
    """Host time of a step beyond its graph, us, on a CPU: ``python -m bench.tgi.host``."""
    lines = [
        "| rows | TGI's own cache | BICL | claims checked | and a host cache |",
        "|---:|---:|---:|---:|---:|",
    ]
    for shape, step in steps.items():
        cells = [f"{step[name]['us']:.0f}" for name in ("tgi", OURS, CHECKED, HOST_CACHE)]
        lines.append(f"| {shape.partition('x')[0]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def soak_table(rows: Iterable[Mapping[str, Any]]) -> str:
    """What long mixed traffic found, a column for each shard: ``python -m bench.tgi.soak``."""
    columns = [_soak_column(row) for row in rows]
    lines = ["| " + " | ".join(cells) + " |" for cells in zip(SOAK, *columns, strict=True)]
    return "\n".join([lines[0], "|---" * (len(columns) + 1) + "|", *lines[1:]])


SOAK = (
    "",
    "requests, of which cancelled",
    "tokens in shared prefixes; prompts in chunks",
    "drafts taken; written and refused",
    "pages, and times that one was handed out",
    "attention rows compared, of them out of CUDA graphs",
    "relative difference from float32: mean, worst",
    "PyTorch's operations in bf16 on the same keys: mean, worst",
    "run again alone: equal; parted at a near tie",
)


def _soak_column(row: Mapping[str, Any]) -> list[str]:
    ranks = row["differences"]
    compared = [sum(rank[name] for rank in ranks) for name in ("rows", "graph_rows")]
    errors = [
        (max(rank[f"{whose}mean"] for rank in ranks), max(rank[f"{whose}worst"] for rank in ranks))
        for whose in ("", "torch_")
    ]
    cards = "one H200" if row["tensor_parallel"] == 1 else "two H200, tensor parallel"
    chunks = "TGI does not chunk then" if row["speculate"] else f"{row['chunked']:,}"
    ties = f"{row['near_ties']}, at most {row['widest_tie']:.3f}"
    return [
        f"{cards}, drafts (`--speculate {row['speculate']}`)" if row["speculate"] else cards,
        f"{row['requests']:,}, {row['cancelled']:,}",
        f"{row['hit_tokens']:,}; {chunks}",
        f"{row['drafts']:,}; {row['refused']:,}" if row["speculate"] else "-",
        f"{row['pages']:,}, {row['page_lives']:,}",
        f"{compared[0]:,}, {compared[1]:,}",
        *(f"{mean:.4f}, {worst:.4f}" for mean, worst in errors),
        f"{row['compared'] - row['near_ties']}; {ties}",
    ]


def logits_table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Of each way to compute a prompt, how far log-probabilities are from float32's."""
    cells: dict[str, list[str]] = {}
    for row in rows:
        line = cells.setdefault(row["prompt"], [])
        line.append(f"{row['mean']:.3f}, {row['worst']:.2f}")
        if row["impl"] == row["answers_of"]:
            line.append(f"{row['likeliest']} of {row['steps']}")
    head = "| prompts | BICL | its token is float32's | transformers, bf16 "
    head += "| TGI's default | its token is float32's | transformers, bf16 |"
    lines = [head, "|---|" + "---:|" * 6]
    lines += [f"| {how} | " + " | ".join(line) + " |" for how, line in cells.items()]
    return "\n".join(lines)


def soak_rows(*paths: Path) -> list[Mapping[str, Any]]:
    """Of the result files, without drafts first."""
    return sorted(rows_of(*paths), key=lambda row: (row["tensor_parallel"], row["speculate"]))


def verdicts(steps: Steps) -> Iterator[tuple[str, float | None, float]]:
    """What was promised, what was measured (None: not), and the least that meets it."""
    for shape, step in steps.items():
        yield f"{shape} over TGI's default", ratio(step, STOCK, OURS), GAINS.get(shape, GAIN)
        yield f"{shape} over tensor cores", ratio(step, CORES, OURS), GAIN_OVER_CORES
        if shape in GAIN_OF_FP8:
            yield f"{shape} with fp8 pages", ratio(step, OURS, HALF), GAIN_OF_FP8[shape]


def misses_table(*runs: Steps) -> str:
    """Each target that any of the runs missed, in all of them; the first is the one published."""
    found = [{what: (value, least) for what, value, least in verdicts(steps)} for steps in runs]
    missed = [w for w in found[0] if any((run[w][0] or 0) < run[w][1] for run in found)]
    names = " | ".join(("this run", *RUNS_BEFORE)[: len(runs)])
    lines = [f"| target | {names} | aim |"]
    lines.append("|---|" + "---:|" * (len(runs) + 1))
    for what in missed:
        values = " | ".join(f"{run[what][0] or 0:.3f}x" for run in found)
        lines.append(f"| {what} | {values} | {found[0][what][1]} |")
    return "\n".join(lines)


def main() -> int:
    steps = load(Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT)
    split = split_table(steps, attention_rows(KERNELS))
    print(misses_table(steps, *map(load, BEFORE)), end="\n\n")
    soak = soak_table(soak_rows(*SOAKS))
    beside = host_cache_table(rows_of(HOST_CACHE_STEPS))
    host = host_steps_table(load(HOST_STEPS))
    logits = logits_table(rows_of(LOGITS))
    print(step_table(steps), parts_table(steps), split, host, beside, logits, soak, sep="\n\n")
    missed = 0
    print()
    for what, value, least in verdicts({shape: {} for shape in PROMISED} | dict(steps)):
        met = value is not None and value >= least
        missed += not met
        shown = "not measured" if value is None else f"{value:.3f}"
        print(f"{'met   ' if met else 'MISSED'} {what:<32} {shown:>12} (at least {least})")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
