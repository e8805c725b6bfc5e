"""How decode_attention divides a batch among CTAs: the device code itself, on a warp of threads."""

from __future__ import annotations

import math
import random

import pytest
from support.device_code import compile_device_code

HEADERS = ("schedule.cuh", "share.cuh", "block_source.cuh", "kernel_params.h")


@pytest.fixture(scope="module")
def divide(tmp_path_factory: pytest.TempPathFactory):
    run = compile_device_code(
        tmp_path_factory.mktemp("schedule"),
        "decode_schedule",
        "decode_attention",
        HEADERS,
        without=('"traits.cuh"',),
    )

    def shares(
        lengths: list[int],
        *,
        grid: int = 128,
        heads: int = 8,
        team: int | None = None,
        end: int = 0,
        least: int = 3,
        groups: int = 0,
        window: int = -1,
    ) -> list[int]:
        """Blocks of each CTA; the program itself checks that nothing is lost or done twice.

        ``team``: CTAs of one, by default as many as the launcher takes. ``groups``: of the ring,
        in deterministic mode; else 0.
        """
        size = math.gcd(heads, grid) if team is None else team
        bounds = run(grid, heads, size, end, least, groups, window, *lengths)
        return [end - begin for begin, end in bounds]

    return shares


@pytest.mark.parametrize("groups", [0, 1, 2, 4], ids=lambda groups: f"units of {groups}")
def test_every_block_belongs_to_one_share(divide, groups: int) -> None:
    draw = random.Random(7)
    kinds = ((0, 1), (1, 64), (1, 500), (1, 9000), (0, 200))
    for batch in (1, 2, 15, 16, 17, 33, 64, 130, 257):
        low, high = draw.choice(kinds)
        lengths = [draw.randint(low, high) * draw.randint(0, 1) for _ in range(batch)]
        heads = draw.choice((1, 3, 8, 12))
        team = draw.choice([size for size in (1, 2, 3, 4, 8) if heads % size == 0])
        divide(
            lengths,
            grid=draw.choice((1, 5, 7, 16)) * team,
            heads=heads,
            team=team,
            end=draw.choice((0, 2)),
            least=draw.choice((0, 3, 7)),
            groups=groups,
            window=draw.choice((-1, -1, 100)),
        )


def test_even_batches_get_even_shares(divide) -> None:
    assert set(divide([4096] * 32)) == {128}
    assert set(divide([512] * 256, least=7)) == {128}
    assert set(divide([4096] * 32, end=2, least=0)) == {128}
    assert set(divide([16384] * 32)) == {512}


@pytest.mark.parametrize("team", [1, 2, 4, 8])
def test_members_of_a_team_have_equal_shares(divide, team: int) -> None:
    shares = divide([32768] + [2048] * 31, team=team)
    teams = [shares[first : first + team] for first in range(0, len(shares), team)]
    assert all(len(set(members)) == 1 for members in teams)
    assert max(shares) - min(shares) <= 1


def test_short_heads_are_charged_as_more(divide) -> None:
    lengths = [64] * 64 + [64 * 100] * 4
    shares = divide(lengths, least=4)
    plain = divide(lengths, least=1)
    assert shares[0] < plain[0]  # the first CTAs end a head with every block
    assert max(shares) >= max(plain)


@pytest.mark.parametrize("grid", [60, 131, 132])
def test_no_cta_within_a_head_is_left_without_a_part(divide, grid: int) -> None:
    for blocks in (*range(62, 68), *range(126, 136), 197, 264, 300):
        divide([64 * blocks], grid=grid, heads=1, end=2, least=0)
        divide([64 * blocks, 64], grid=grid, heads=1, least=7)


def test_every_head_may_be_charged_for_its_end(divide) -> None:
    lengths = [64 * 8] * 32 + [64 * 64] * 8
    shares = divide(lengths, end=2, least=0)
    assert shares[0] < sum(shares) / 128 < shares[-1]


def test_batches_without_keys_leave_nothing_to_do(divide) -> None:
    assert set(divide([0, 0, 0])) == {0}
