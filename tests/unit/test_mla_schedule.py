"""How mla_decode divides a batch among CTAs: the device code itself, on a warp of threads."""

from __future__ import annotations

import random

import pytest
from support.device_code import compile_device_code


@pytest.fixture(scope="module")
def divide(tmp_path_factory: pytest.TempPathFactory):
    run = compile_device_code(
        tmp_path_factory.mktemp("mla"),
        "mla_schedule",
        "mla_decode",
        ("share.cuh", "params.h"),
        without=(),
    )

    def tiles(teams: int, lengths: list[int]) -> list[int]:
        """Tiles of each team; the program itself checks that nothing is lost or done twice."""
        return [end - begin for begin, end in run(teams, *lengths)]

    return tiles


def test_every_tile_belongs_to_one_team(divide) -> None:
    draw = random.Random(3)
    for batch in (1, 2, 31, 32, 33, 64, 130, 300):
        for high in (1, 64, 500, 9000):
            lengths = [draw.randint(0, high) * draw.randint(0, 1) for _ in range(batch)]
            divide(draw.choice((1, 5, 66, 128, 132)), lengths)


@pytest.mark.parametrize("lengths", [[1], [65], [0], [0, 0, 129, 0], [4096], [64] * 131])
def test_fewer_tiles_than_teams_leave_no_gap_between_parts(divide, lengths: list[int]) -> None:
    tiles = divide(132, lengths)
    total = sum(-(-length // 64) for length in lengths)
    assert tiles == [1] * total + [0] * (132 - total)


def test_shares_differ_by_one_tile_at_most(divide) -> None:
    tiles = divide(128, [32768, *[2048] * 31])
    assert max(tiles) - min(tiles) <= 1
