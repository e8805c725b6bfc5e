"""What ``bicl doctor`` says where text-generation-inference is installed, as in its image."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

from bicl import doctor, hardware
from bicl.doctor import Finding, Verdict
from bicl.errors import ConfigError
from bicl.frontends.tgi.install import PACKAGE, START, find_patches, verify
from bicl.hardware import find_gpus
from bicl.launcher import installed
from bicl.launcher.flags import is_set
from bicl.launcher.plan import STOCK

__all__ = ["DOOR", "checks", "find_package"]

DOOR = "text-generation-inference on BICL pages"
NEEDED = ("numpy", "psutil", "tvm_ffi", "xxhash")


def find_package() -> Path | None:
    """Where TGI's Python server lies. Asked past our own hook, which would verify it at once and
    end this process if anything is wrong: that is for the report."""
    for finder in sys.meta_path:
        ours = type(finder).__module__ == START
        find = None if ours else getattr(finder, "find_spec", None)
        spec = find(PACKAGE, None) if find else None
        if spec is not None and spec.submodule_search_locations:
            return Path(next(iter(spec.submodule_search_locations)))
    return None


def checks(package: Path) -> Iterator[Callable[[], Finding]]:
    """Those of this door, beside those of the machine."""

    def check_overlay() -> Finding:
        return judge_overlay(package)

    yield check_packages
    yield check_overlay
    yield check_gpu
    yield check_kernels


def check_packages() -> Finding:
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        remedy = "reinstall bicl in the environment of text-generation-inference"
        return Finding("packages", Verdict.FAIL, f"missing: {', '.join(missing)}", remedy)
    return Finding("packages", Verdict.OK, ", ".join(NEEDED))


def judge_overlay(package: Path) -> Finding:
    """Whether the shards would start with our cache."""
    try:
        if is_set("BICL_DISABLE", os.environ.get("BICL_DISABLE", "")):
            return Finding("overlay", Verdict.WARN, f"BICL_DISABLE is set; {STOCK}", "unset it")
        release = verify(installed.site_packages(os.environ), find_patches(), package)
    except ConfigError as error:
        return Finding("overlay", Verdict.FAIL, str(error))
    limits = f"; without {', '.join(release.limits)}" if release.limits else ""
    return Finding("overlay", Verdict.OK, f"in place for TGI {release.name}{limits}")


def check_kernels() -> Finding:
    """The launcher's own check, then what the embedded server's doctor says of the library."""
    if _hardware().usable:
        try:
            installed.check_kernels()
        except ConfigError as error:
            return Finding("kernels", Verdict.FAIL, str(error))
    return doctor.check_kernels()


def check_gpu() -> Finding:
    """The launcher's own gate."""
    if missing := _hardware().missing:
        return Finding("gpu", Verdict.FAIL, f"{missing}; {STOCK}")
    return Finding("gpu", Verdict.OK, ", ".join(gpu.name for gpu in find_gpus(os.environ)))


def _hardware() -> hardware.Verdict:
    return hardware.judge(find_gpus(os.environ), jetson=hardware.is_jetson())
