"""How decode_attention divides a batch among CTAs: the device code itself, on a warp of threads."""

from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests" / "support"
DECODE = ROOT / "csrc" / "decode_attention"
HEADERS = ("schedule.cuh", "share.cuh", "block_source.cuh", "kernel_params.h")


@pytest.fixture(scope="module")
def divide(tmp_path_factory: pytest.TempPathFactory):
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed")
    folder = tmp_path_factory.mktemp("schedule")
    for name in HEADERS:  # without those that only CUDA can read
        text = (DECODE / name).read_text().replace('#include "traits.cuh"', "")
        text = text.replace('"../common/', f'"{ROOT}/csrc/common/')
        (folder / name).write_text(text.replace('"../params.h"', f'"{ROOT}/csrc/params.h"'))
    program = folder / "divide"
    command = (compiler, "-std=c++20", "-O1", "-pthread", "-w", "-I", folder, "-I", SUPPORT)
    source = SUPPORT / "decode_schedule.cpp"
    subprocess.run([*command, "-o", program, source], check=True, capture_output=True, text=True)

    def shares(
        lengths: list[int],
        *,
        grid: int = 128,
        heads: int = 8,
        least: int = 3,
        deterministic: bool = False,
        window: int = -1,
    ) -> list[int]:
        """Blocks of each CTA; the program itself checks that nothing is lost or done twice."""
        options = (grid, heads, least, int(deterministic), window)
        done = subprocess.run(
            [program, *map(str, options), *map(str, lengths)],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        bounds = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
        return [end - begin for begin, end in bounds]

    return shares


@pytest.mark.parametrize("deterministic", [False, True])
def test_every_block_belongs_to_one_share(divide, deterministic: bool) -> None:
    draw = random.Random(7)
    kinds = ((0, 1), (1, 64), (1, 500), (1, 9000), (0, 200))
    for batch in (1, 2, 15, 16, 17, 33, 64, 130, 257):
        low, high = draw.choice(kinds)
        lengths = [draw.randint(low, high) * draw.randint(0, 1) for _ in range(batch)]
        divide(
            lengths,
            grid=draw.choice((1, 7, 60, 128)),
            heads=draw.choice((1, 3, 8)),
            least=draw.choice((1, 3, 7)),
            deterministic=deterministic,
            window=draw.choice((-1, -1, 100)),
        )


def test_even_batches_get_even_shares(divide) -> None:
    assert set(divide([4096] * 32)) == {128}
    assert set(divide([512] * 256, least=7)) == {128}


def test_short_heads_are_charged_as_more(divide) -> None:
    lengths = [64] * 64 + [64 * 100] * 4
    shares = divide(lengths, least=4)
    plain = divide(lengths, least=1)
    assert shares[0] < plain[0]  # the first CTAs end a head with every block
    assert max(shares) >= max(plain)


def test_batches_without_keys_leave_nothing_to_do(divide) -> None:
    assert set(divide([0, 0, 0])) == {0}
