"""Which GPUs are here, and whether the kernels run on them. Knows no torch and no server."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MIN_CAPABILITY", "Gpu", "Verdict", "find_gpus", "is_jetson", "judge"]

MIN_CAPABILITY = (8, 0)
_TEGRA = Path("/etc/nv_tegra_release")
_QUERY = ("nvidia-smi", "--query-gpu=index,uuid,compute_cap,name", "--format=csv,noheader")


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA GPU. ``capability`` is None where the driver does not say."""

    name: str
    capability: tuple[int, int] | None


@dataclass(frozen=True)
class Verdict:
    """Whether BICL's kernels can run here; ``missing`` says what they lack, else is empty."""

    missing: str = ""

    @property
    def usable(self) -> bool:
        return not self.missing


def judge(gpus: Sequence[Gpu], *, jetson: bool = False) -> Verdict:
    """Decide by facts alone.

    Args:
        gpus: all that a server would use; the weakest one decides.
        jetson: the machine is a Jetson (Tegra).
    """
    if jetson:
        return Verdict(
            "this is a Jetson (Tegra), whose driver and shared memory the kernels are not built "
            "for; an NVIDIA GPU of compute capability 8.0 or newer on a PC or server is needed"
        )
    if not gpus:
        return Verdict(
            "no NVIDIA GPU is visible; one of compute capability 8.0 or newer is needed (in a "
            "container: docker run --gpus all, or a GPU resource in Kubernetes)"
        )
    for gpu in gpus:
        if gpu.capability is None:
            return Verdict(f"{gpu.name} does not tell its compute capability; 8.0 is needed")
        if gpu.capability < MIN_CAPABILITY:
            have = ".".join(map(str, gpu.capability))
            return Verdict(
                f"{gpu.name} has compute capability {have}, older than Ampere; 8.0 or newer is "
                "needed (A100, A10, L4, H100, RTX 30 or later)"
            )
    return Verdict()


def is_jetson() -> bool:
    return _TEGRA.exists()


def find_gpus(environ: Mapping[str, str]) -> list[Gpu]:
    """The GPUs that ``CUDA_VISIBLE_DEVICES`` leaves, asked from the driver's own tool."""
    if shutil.which(_QUERY[0], path=environ.get("PATH")) is None:
        return []
    try:
        answer = subprocess.run(
            _QUERY, capture_output=True, text=True, timeout=30, check=True, env=dict(environ)
        )
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[part.strip() for part in line.split(",", 3)] for line in answer.stdout.splitlines()]
    rows = [row for row in rows if len(row) == 4]
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        wanted = [part.strip() for part in visible.split(",") if part.strip()]
        rows = [row for row in rows if _is_visible(row[0], row[1], wanted)]
    return [Gpu(name, _capability(text)) for _, _, text, name in rows]


def _is_visible(index: str, uuid: str, wanted: Sequence[str]) -> bool:
    return any(each == index or uuid.startswith(each) for each in wanted)


def _capability(text: str) -> tuple[int, int] | None:
    major, _, minor = text.partition(".")
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else None
