"""``python -m bicl.frontends.tgi.selftest.matrix CPU.json [GPU.json ...]``: the support matrix in
Markdown.

Every mark comes from a case that ran against TGI's real shard: the files are ``--out`` of
``bench.tgi.check``, those of GPUs for the last column.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from bicl.frontends.tgi.selftest.scenarios import SCENARIOS

__all__ = ["FEATURES", "matrix", "rows_of"]

FEATURES: Mapping[str, tuple[str, ...]] = {
    "load, warm-up": (
        "start_and_warm_up",
        "block_size_reaches_the_router",
        "launcher_sees_our_pages",
        "capacity_fills_the_memory_and_no_more",
    ),
    "batches": (
        "one_request",
        "long_prompt_beside_a_short_one",
        "batch_of_four",
        "joining_a_decoding_batch",
        "drafts_cross_pages_that_do_not_follow_each_other",
        "text_that_repeats_itself",
        "health_request_on_page_0",
    ),
    "cancelling": ("cancelling_a_row",),
    "prefixes": (
        "cached_prefix_of_whole_pages",
        "whole_prompt_cached_rewrites_a_shared_slot",
    ),
    "chunks": ("chunked_prompt", "chunked_prompt_beside_a_decoding_row"),
    "poisoned prefixes": (
        "prefix_that_was_never_computed",
        "false_claim_longer_than_a_step",
        "prefix_cancelled_between_chunks",
        "page_reused_for_other_tokens",
    ),
    "host cache": (
        "prefix_from_the_host_tier",
        "reply_from_the_host_tier",
        "chunks_after_the_host_tier",
    ),
    "disk cache": ("prefix_survives_a_restart",),
    "tiles left out": ("tiles_are_left_out",),
    "adapters": ("adapters_side_by_side", "pages_of_another_adapter"),
    "random traffic": ("random_traffic", "every_page_is_accounted_for"),
}
"""Column to the cases that must all hold."""

HEAD = """# Support matrix

Written from the results of the tests with text-generation-inference's real shard (float32, CPU,
`bench/results/tgi-checks-cpu.json`); do not edit. Tokens equal those of plain transformers, or, for
fp8 caches and where tiles are left out, those of the same prompt alone and in one piece. Pages are
full of NaN before they are written. In the column of random traffic, free pages must stay so, and
attention inside the shard is compared with PyTorch's over keys and values kept apart from the pages
(but for the same two). The last column: the same cases in bfloat16 on GPUs with CUDA graphs and our
kernels (`bench/results/tgi-checks-h200*.json`). Tokens there are those of the same prompt alone, of
two GPUs those of one, with adapters those of transformers; or they part at a token that is less
likely by at most twice what bf16 does to plain transformers in that answer.

`yes`: all cases of the column hold. `-`: text-generation-inference does not do it there, or the
row has no adapters, no host cache, no disk cache or no HySparse.
`NO`: a case fails. `?`: not run. `n of m`: so many cases ran there, and held.
"""


ON_CARD = "on an H200"


Rows = Iterable[Mapping[str, str]]


def matrix(on_cpu: Rows, on_card: Rows = ()) -> str:
    """The page, from the rows of the checks; the last result of a case counts."""
    problems, there = (
        {(row["scenario"], row["case"]): row["problem"] for row in rows if "case" in row}
        for rows in (on_cpu, on_card)
    )
    columns = [*FEATURES, ON_CARD]
    rows = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, scenario in SCENARIOS.items():
        known = {"start_and_warm_up", *scenario.cases}
        marks = []
        for cases in FEATURES.values():
            outcomes = [problems.get((name, case)) for case in cases if case in known]
            marks.append(_mark(outcomes))
        marks.append(_part([there.get((name, case)) for case in known]))
        rows.append(f"| {name} | " + " | ".join(marks) + " |")
    return HEAD + "\n" + "\n".join(rows) + "\n"


def rows_of(paths: Iterable[Path]) -> list[Mapping[str, str]]:
    """The rows of result files in the order in which they ran."""
    files = [json.loads(path.read_text()) for path in paths]
    return [row for each in sorted(files, key=lambda f: f["meta"]["date"]) for row in each["rows"]]


def _part(outcomes: list[str | None]) -> str:
    """As below, but tells how many held where not all ran."""
    ran = len(outcomes) - outcomes.count(None)
    if not ran or any(outcomes) or ran == len(outcomes):
        return _mark(outcomes)
    return f"{ran} of {len(outcomes)}"


def _mark(outcomes: list[str | None]) -> str:
    """None: not run; empty: held; else it failed."""
    if not outcomes:
        return "-"
    if any(outcomes):
        return "NO"
    return "?" if None in outcomes else "yes"


if __name__ == "__main__":
    first, *others = map(Path, sys.argv[1:])
    sys.stdout.write(matrix(rows_of([first]), rows_of(others)))
