"""How much host memory is free, for this process: what a container may take counts, too."""

from __future__ import annotations

from pathlib import Path

import psutil

__all__ = ["free_host_memory"]

_CGROUPS = (
    # limit, usage, statistics, what can be taken back without harm
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)


def free_host_memory(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that could be allocated now: the least of what the machine and the control group (v2 or
    v1) leave."""
    available = int(psutil.virtual_memory().available)
    for limit, usage, statistics, reclaimable in _CGROUPS:
        try:
            left = int((root / limit).read_text()) - int((root / usage).read_text())
            lines = (root / statistics).read_text().splitlines()
        except (OSError, ValueError):  # another version, or "max": no limit
            continue
        counts = dict(line.split() for line in lines if line)
        available = min(available, max(0, left + int(counts.get(reclaimable, "0"))))
    return available
