"""Which tile of a prefill goes where: the planning kernel itself, on a CTA of threads."""

from __future__ import annotations

import heapq
import random
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests" / "support"
PREFILL = ROOT / "csrc" / "prefill_attention"
HEADERS = ("plan_kernel.cuh", "plan_tail.cuh", "plan_shared.cuh", "params.h")
Ticket = tuple[int, ...]
Plan = Callable[..., list[Ticket]]


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed")
    folder = tmp_path_factory.mktemp("prefill")
    for name in HEADERS:  # without those that only CUDA can read
        text = (PREFILL / name).read_text().replace("#include <cuda_runtime.h>", "")
        text = text.replace('#include "../common/ptx.cuh"', "")
        text = text.replace('"../common/', f'"{ROOT}/csrc/common/')
        (folder / name).write_text(text.replace('"../params.h"', f'"{ROOT}/csrc/params.h"'))
    program = folder / "plan"
    command = (compiler, "-std=c++20", "-O1", "-pthread", "-w", "-I", folder, "-I", SUPPORT)
    source = SUPPORT / "prefill_plan.cpp"
    done = subprocess.run([*command, "-o", program, source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

    def tickets(
        lengths: Sequence[tuple[int, int]],
        *,
        ctas: int = 132,
        heads: int = 8,
        group: int = 4,
        window: int = -1,
        split: bool = True,
    ) -> list[Ticket]:
        """Head, sequence, row, first and last block and pieces of each ticket, in their order; the
        program itself checks that nothing is lost, done twice or left in the same place."""
        options = (ctas, heads, group, window, int(split))
        numbers = [number for pair in lengths for number in pair]
        done = subprocess.run(
            [program, *map(str, options), *map(str, numbers)],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return [tuple(map(int, line.split())) for line in done.stdout.splitlines()]

    return tickets


def unevenness(tickets: Sequence[Ticket], ctas: int = 132) -> float:
    """Blocks of the CTA that ends last over the mean, if a block takes the same time everywhere."""
    done = [0] * ctas
    for *_, begin, end, _ in tickets:
        heapq.heapreplace(done, done[0] + end - begin)
    return max(done) * ctas / sum(done)


@pytest.mark.parametrize(
    ("lengths", "most"),
    [
        ([(4096, 4096)], 1.01),
        ([(2048, 2048)] * 4, 1.01),
        ([(16384, 16384)], 1.01),
        ([(512, 8704)], 1.06),
        ([(512, 8704)] * 8, 1.04),
        ([(256, 8448)] * 7, 1.02),
        ([(1024, 9216)] * 5, 1.02),
        ([(320, 4416)] * 2, 1.06),
        ([(64, 8256)], 1.16),
        ([(32, 2080)] * 16, 1.04),
    ],
    ids=str,
)
def test_ctas_end_together(plan: Plan, lengths: list[tuple[int, int]], most: float) -> None:
    assert unevenness(plan(lengths)) < most


def test_only_the_last_wave_of_equal_tiles_is_cut(plan: Plan) -> None:
    tickets = plan([(256, 8448)] * 7)
    whole = [ticket for ticket in tickets if ticket[-1] == 0]
    assert len(whole) == 3 * 132
    assert all(head == 7 for head, *_, pieces in tickets if pieces)
    assert tickets[: len(whole)] == whole
    lengths = [end - begin for *_, begin, end, _ in tickets[len(whole) :]]
    assert lengths == sorted(lengths, reverse=True)


def test_a_last_wave_that_leaves_few_sms_idle_stays_whole(plan: Plan) -> None:
    assert not any(pieces for *_, pieces in plan([(512, 8704)] * 8))


def test_nothing_is_cut_in_deterministic_mode(plan: Plan) -> None:
    for lengths in ([(256, 8448)] * 7, [(64, 8256)]):
        assert not any(pieces for *_, pieces in plan(lengths, split=False))


@pytest.mark.parametrize("seed", range(12))
def test_any_step_is_done_once(plan: Plan, seed: int) -> None:
    """Equal chunks and mixtures, on any number of CTAs; the program checks the plan."""
    rng = random.Random(seed)
    if seed % 2:
        new, cached = rng.choice((40, 256, 777)), rng.choice((900, 4096, 9000))
        lengths = [(new, new + cached + rng.randint(0, 100)) for _ in range(rng.randint(1, 12))]
    else:
        lengths = [
            (new := rng.randint(0, 600), new + rng.choice((0, rng.randint(0, 5000))))
            for _ in range(rng.randint(1, 20))
        ]
    plan(
        lengths,
        ctas=rng.choice((132, 78, 20)),
        heads=rng.choice((1, 2, 3, 8)),
        group=rng.choice((1, 3, 4, 8)),
        window=rng.choice((-1, -1, 700)),
    )
