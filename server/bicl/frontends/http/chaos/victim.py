"""A server that is killed while it writes.

It serves prompts that its killer knows, writes slowly, and says so when it is about to write a page
after some others are on disk: a signal that follows soon meets that page.
"""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

from bicl.frontends.http.chaos.model import FIRST_ID, VOCAB_SIZE, tiny_llama
from bicl.frontends.http.chaos.rig import Lab, Rig

__all__ = ["LEAST_WRITE_SECONDS", "main", "prompts"]

SEED = 20
NUM_PROMPTS = 100

SLICE_BYTES = 8192
SLICE_SECONDS = 0.01
LEAST_WRITE_SECONDS = 0.05
"""Of a page: it is several slices long."""


def prompts() -> list[tuple[int, ...]]:
    """In the order in which they are served."""
    rng = random.Random(SEED)
    return [
        tuple(rng.randrange(FIRST_ID, VOCAB_SIZE) for _ in range(150)) for _ in range(NUM_PROMPTS)
    ]


def main() -> None:
    """``FOLDER DEVICE PAGES`` on the command line: so many are written before it says so. Never
    returns by itself before a minute is over."""
    folder, device, pages = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    config = {"disk_cache_dir": folder, "disk_cache_bytes": 64 << 20}
    rig = Rig(Lab(tiny_llama(device), folder), config)
    assert rig.tiers._disk is not None
    store = rig.tiers._disk._store
    write_bytes, write_page = os.write, store.write
    written = 0

    def slow_write(file: int, data: memoryview) -> int:
        time.sleep(SLICE_SECONDS)
        return write_bytes(file, memoryview(data)[:SLICE_BYTES])

    def announced_write(*page: object) -> bool:
        nonlocal written
        if written == pages:
            print("writing", flush=True)
        written += 1
        return write_page(*page)  # type: ignore[arg-type]

    os.write = slow_write  # type: ignore[assignment]
    store.write = announced_write  # type: ignore[method-assign,assignment]
    for prompt in prompts():
        rig.submit(prompt)
    time.sleep(60)
