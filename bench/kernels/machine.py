"""What a result was measured on."""

from __future__ import annotations

import datetime
import hashlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

__all__ = [
    "SOURCES",
    "card_state",
    "command_line",
    "commit",
    "describe",
    "driver",
    "sources",
    "sources_at",
]

SOURCES = ("csrc", "server/bicl")
_ROOT = Path(__file__).resolve().parents[2]
_BUILT_FOLDERS = ("__pycache__", "lib")
_BUILT_FILES = (".o", ".so", ".cubin", ".pyc")


def _output(*command: str) -> str | None:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()


def commit() -> str | None:
    """What ``BENCH_COMMIT`` says (a copy's history may be missing or old), else the checked-out
    commit, marked if sources differ from it."""
    told = os.environ.get("BENCH_COMMIT")
    if told:
        return told[:12]
    head = _output("git", "rev-parse", "--short=12", "HEAD")
    changed = _output("git", "status", "--porcelain", "-uno", "--", "csrc", "server", "bench")
    return head and head + ("+changes" if changed else "")


def sources(root: Path = _ROOT) -> dict[str, str]:
    """Git's ids of the folders that were measured, made from the files themselves: whether a
    ``commit`` that somebody named is the one that ran, ``git rev-parse COMMIT:csrc`` tells."""
    return {name: _tree(root / name).hex()[:12] for name in SOURCES}


def sources_at(revision: str) -> dict[str, str] | None:
    """The same ids as a commit has them; None where its history is not at hand."""
    ids = {
        name: _output("git", "-C", str(_ROOT), "rev-parse", f"{revision}:{name}") or ""
        for name in SOURCES
    }
    return {name: own[:12] for name, own in ids.items()} if all(ids.values()) else None


def _tree(folder: Path) -> bytes:
    entries = []
    for path in folder.iterdir():
        name = path.name.encode()
        if path.is_dir():
            if path.name not in _BUILT_FOLDERS and not path.name.startswith("."):
                entries.append((name + b"/", b"40000 %b\0%b" % (name, _tree(path))))
        elif path.suffix not in _BUILT_FILES:
            mode = b"100755" if os.access(path, os.X_OK) else b"100644"
            blob = _object(b"blob", path.read_bytes())
            entries.append((name, b"%b %b\0%b" % (mode, name, blob)))
    return _object(b"tree", b"".join(line for _, line in sorted(entries)))


def _object(kind: bytes, content: bytes) -> bytes:
    header = b"%b %d\0" % (kind, len(content))
    return hashlib.sha1(header + content, usedforsecurity=False).digest()


def command_line() -> str:
    """What was typed to start this process, ``python -m`` and the module's name included; of files
    outside the repository the names only."""
    spec = sys.modules["__main__"].__spec__
    what = ["-m", spec.name.removesuffix(".__main__")] if spec else [sys.argv[0]]
    arguments = [re.sub(r"(?<![\w./])/(?:[^/=]*/)*", "", word) for word in sys.argv[1:]]
    return shlex.join(["python", *what, *arguments])


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
        "sources": sources(),
        "date": now.isoformat(timespec="seconds"),
        "command": command_line(),
        "card_before": card_state(),
        "method": (
            "median us of one call in a replayed CUDA graph, contestants interleaved, KV cold "
            "(1 GiB between re-reads); plans made outside; fp8 rates count fp8 bytes"
        ),
    }
