"""A result file: what was measured, and on what."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.kernels.machine import command_line, commit, sources

__all__ = ["machine", "save"]


def machine(**more: Any) -> dict[str, Any]:
    """The ``meta`` of a result file; the card's name if there is one."""
    facts: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "sources": sources(),
        "command": command_line(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu": _cpu(),
        "load_average": round(os.getloadavg()[0], 2),
    }
    if torch.cuda.is_available():
        facts["card"] = torch.cuda.get_device_name()
    return facts | more


def save(path: Path, meta: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a result file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".tmp")
    aside.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")
    aside.replace(path)
    print("written to", path)


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()} ({len(names)} cores)"
