"""Print the tables of decode steps in TGI's shard and say which targets are met.

``python -m bench.tgi.summary [bench/results/tgi-h200.json]``; exits 1 if a target is missed. The
layout's share and the kernel's come from the rows of ``bench/results/kernels-h200.json``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

DEFAULT = Path("bench/results/tgi-h200.json")
KERNELS = Path("bench/results/kernels-h200.json")
LAYERS, HEADS = 32, "32/8"  # of the model whose steps are timed
OURS, HALF, STOCK, CORES = "bicl", "bicl-fp8", "flashinfer-p1", "flashinfer-p1-tc"
TOKEN_MAJOR = "token-major"
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


def load(path: Path) -> Steps:
    """The rows of a result file."""
    steps: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in json.loads(path.read_text())["rows"]:
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
    for row in json.loads(path.read_text())["rows"]:
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


def verdicts(steps: Steps) -> Iterator[tuple[str, float | None, float]]:
    """What was promised, what was measured (None: not), and the least that meets it."""
    for shape, step in steps.items():
        yield f"{shape} over TGI's default", ratio(step, STOCK, OURS), GAINS.get(shape, GAIN)
        yield f"{shape} over tensor cores", ratio(step, CORES, OURS), GAIN_OVER_CORES
        if shape in GAIN_OF_FP8:
            yield f"{shape} with fp8 pages", ratio(step, OURS, HALF), GAIN_OF_FP8[shape]


def main() -> int:
    steps = load(Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT)
    split = split_table(steps, attention_rows(KERNELS))
    print(step_table(steps), parts_table(steps), split, sep="\n\n")
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
