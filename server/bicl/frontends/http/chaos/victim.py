"""A server that is killed while it writes.

It serves prompts that its killer knows, says so when its first page is on disk, and writes so
slowly that a signal nearly always meets a write.
"""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

from bicl.frontends.http.chaos.model import FIRST_ID, VOCAB_SIZE, tiny_llama
from bicl.frontends.http.chaos.rig import Lab, Rig

__all__ = ["main", "prompts"]

SEED = 20
NUM_PROMPTS = 100


def prompts() -> list[tuple[int, ...]]:
    """In the order in which they are served."""
    rng = random.Random(SEED)
    return [
        tuple(rng.randrange(FIRST_ID, VOCAB_SIZE) for _ in range(150)) for _ in range(NUM_PROMPTS)
    ]


def main() -> None:
    """``FOLDER DEVICE`` on the command line. Never returns by itself before a minute is over."""
    write = os.write

    def slow_write(file: int, data: memoryview) -> int:
        time.sleep(0.001)
        return write(file, memoryview(data)[:8192])

    folder = Path(sys.argv[1])
    config = {"disk_cache_dir": folder, "disk_cache_bytes": 64 << 20}
    rig = Rig(Lab(tiny_llama(sys.argv[2]), folder), config)
    os.write = slow_write  # type: ignore[assignment]
    for prompt in prompts():
        rig.submit(prompt)
    rig.wait_until(lambda: rig.tier_stats().disk_written_pages, "a page is on disk")
    print("writing", flush=True)
    time.sleep(60)
