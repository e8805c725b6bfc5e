"""What a result was measured on."""

from __future__ import annotations

import datetime
import os
import shlex
import subprocess
import sys
from typing import Any

import torch

__all__ = ["card_state", "command_line", "commit", "describe", "driver"]


def _output(*command: str) -> str | None:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()


def commit() -> str | None:
    """The checked-out commit, marked if files differ from it; outside a repository what
    ``BENCH_COMMIT`` says."""
    head = _output("git", "rev-parse", "--short=12", "HEAD")
    if head is None:
        return os.environ.get("BENCH_COMMIT")
    return head + ("+changes" if _output("git", "status", "--porcelain", "-uno") else "")


def command_line() -> str:
    """What was typed to start this process, ``python -m`` and the module's name included."""
    spec = sys.modules["__main__"].__spec__
    what = ["-m", spec.name.removesuffix(".__main__")] if spec else [sys.argv[0]]
    return shlex.join(["python", *what, *sys.argv[1:]])


def _smi(fields: str) -> list[str] | None:
    text = _output("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", "-i", "0")
    return None if text is None else [part.strip() for part in text.split(",")]


def driver() -> str | None:
    found = _smi("driver_version")
    return found[0] if found else None


def card_state() -> dict[str, str]:
    """Clocks, power and temperature now; empty where nvidia-smi cannot tell."""
    fields = "clocks.sm,clocks.mem,power.draw,temperature.gpu"
    return dict(zip(fields.split(","), _smi(fields) or [], strict=False))


def describe(peer_versions: dict[str, str], revision: str | None = None) -> dict[str, Any]:
    """The ``meta`` of a result file; ``revision`` where the sources carry no history."""
    properties = torch.cuda.get_device_properties(0)
    now = datetime.datetime.now(datetime.UTC)
    return {
        "card": properties.name,
        "sms": properties.multi_processor_count,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "driver": driver(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "peers": peer_versions,
        "commit": revision or commit(),
        "date": now.isoformat(timespec="seconds"),
        "command": command_line(),
        "card_before": card_state(),
        "method": (
            "median us of one call in a replayed CUDA graph, contestants interleaved, KV cold "
            "(1 GiB between re-reads); plans made outside; fp8 rates count fp8 bytes"
        ),
    }
