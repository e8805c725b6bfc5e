"""What must be in the image before a model is loaded: the kernels and the overlay."""

from __future__ import annotations

import sysconfig
from collections.abc import Mapping
from pathlib import Path

import bicl
from bicl.errors import ConfigError
from bicl.launcher.plan import INSTEAD

__all__ = ["KERNELS", "check_kernels", "check_overlay", "site_packages"]

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
