"""What must be there before a model is loaded: kernels, overlay, shared memory."""

from __future__ import annotations

import sysconfig
from collections.abc import Mapping
from pathlib import Path

import bicl
from bicl import doctor
from bicl.errors import ConfigError
from bicl.launcher.flags import CommandLine
from bicl.launcher.plan import INSTEAD

__all__ = ["KERNELS", "check_kernels", "check_overlay", "note_on_shared_memory", "site_packages"]

KERNELS = Path(bicl.__file__).parent / "lib" / "libbicl_kernels.so"


def site_packages(environ: Mapping[str, str]) -> Path:
    """Where the overlay lies: ``BICL_SITE_PACKAGES``, or this Python's own."""
    return Path(environ.get("BICL_SITE_PACKAGES") or sysconfig.get_path("purelib"))


def check_kernels() -> None:
    """The shard would notice, too, but only once the model is loaded.

    Raises:
        ConfigError: there is no library.
    """
    if not KERNELS.is_file():
        raise ConfigError(
            f"{KERNELS} is missing: there are no compiled kernels; build the image with "
            f"--build-arg KERNELS=cuda (a source tree: make kernels), or {INSTEAD}"
        )


def check_overlay(environ: Mapping[str, str]) -> None:
    """Without its hook TGI would start as usual, and nobody would notice.

    Raises:
        ConfigError: naming the file that is missing or altered.
    """
    from bicl.frontends.tgi.install import find_patches, verify_files

    verify_files(site_packages(environ), find_patches())


def note_on_shared_memory(line: CommandLine, num_gpus: int) -> str:
    """A sentence for the log if several shards would start on a container's usual 64 MiB, where
    NCCL breaks or waits for ever; else empty. Without ``--num-shard`` every GPU gets a shard."""
    shards = line.their("--num-shard") or str(num_gpus)
    finding = doctor.check_shm()
    if shards == "1" or finding.verdict is doctor.Verdict.OK:
        return ""
    return f"{shards} shards, but {finding.text}; {finding.remedy}"
