"""Which tile of a prefill goes where: the planning kernel itself, on a CTA of threads."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence

import pytest
from support.device_code import compile_device_code

HEADERS = ("plan_kernel.cuh", "plan_tail.cuh", "plan_shared.cuh", "params.h")
Ticket = tuple[int, ...]
Plan = Callable[..., list[Ticket]]


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    run = compile_device_code(
        tmp_path_factory.mktemp("prefill"),
        "prefill_plan",
        "prefill_attention",
        HEADERS,
        without=("<cuda_runtime.h>", '"../common/ptx.cuh"'),
    )

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
        numbers = [number for pair in lengths for number in pair]
        return run(ctas, heads, group, window, int(split), *numbers)

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
