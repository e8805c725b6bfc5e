"""How keys and values are kept, as it is asked for at start."""

from __future__ import annotations

import re
from dataclasses import dataclass

from bicl.errors import ConfigError
from bicl.settings import check_choices, setting

__all__ = [
    "BLOCK_SIZES",
    "CHOICE_PAGE_SIZE",
    "KV_CACHE_DTYPES",
    "PAGE_SIZE",
    "KVCacheConfig",
    "parse_memory",
]

BLOCK_SIZES = ("32", "64", "auto")
PAGE_SIZE, CHOICE_PAGE_SIZE = 64, 32
"""Tokens, of ``auto``; and where decode steps choose the pages that they read."""
KV_CACHE_DTYPES = ("auto", "fp32", "fp16", "bf16", "fp8_e4m3fn", "fp8_e5m2")

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_memory(text: str, free_bytes: int, name: str = "--cache-memory") -> int:
    """Bytes that ``text`` stands for: ``8GiB``, ``512MB``, ``1048576``, or ``40%`` of what is free.

    Args:
        name: of the setting, for messages.

    Raises:
        ConfigError: not a size, not positive, or more than is free.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(%|[kmgt]?i?b?)\s*", text, re.IGNORECASE)
    if match is None:
        raise ConfigError(
            f"{name} {text!r} is not a size; write 8GiB, 512MB, a number of bytes, or 40%"
        )
    number, unit = float(match[1]), match[2].lower()
    if unit == "%":
        wanted = int(number / 100 * free_bytes)
    else:
        scale = {**_UNITS, **_BINARY}.get(unit.removesuffix("b"))
        if scale is None:
            raise ConfigError(f"{name} {text!r}: unknown unit {match[2]!r}; write GiB or MB")
        wanted = int(number * scale)
    if wanted < 1:
        raise ConfigError(f"{name} {text!r} is no memory at all; give at least one page")
    if wanted > free_bytes:
        raise ConfigError(
            f"{name} {text} needs {wanted} bytes, but {free_bytes} are free; "
            f"the largest value that fits is {free_bytes}"
        )
    return wanted


@dataclass(frozen=True)
class KVCacheConfig:
    """How keys and values are kept.

    Raises:
        ConfigError: naming the value, what is allowed and what to do.
    """

    block_size: str = setting(
        "auto",
        "Tokens a page. auto: 64; 32 where 64 would pad the head dimension and 32 would not, for "
        "requests of at most 256 tokens, or where HySparse chooses pages.",
        env="BICL_BLOCK_SIZE",
        choices=BLOCK_SIZES,
    )
    kv_cache_dtype: str = setting(
        "auto",
        "Type in which keys and values are stored. auto: the model's.",
        choices=KV_CACHE_DTYPES,
    )
    cache_memory: str = setting(
        "auto",
        "Memory of the cache: 8GiB, 512MB, bytes, or a share of the free memory such as 40%. "
        "auto: what the largest batch needs, at most 40% of the free memory.",
        env="BICL_CACHE_MEMORY",
    )
    disable_prefix_caching: bool = setting(
        False, "Never reuse pages between requests.", env="BICL_DISABLE_PREFIX_CACHING"
    )
    host_cache_size: str = setting(
        "auto",
        "Host memory for prefixes that leave the cache: 64GiB, 50% of the free memory, 0 for none. "
        "auto: a quarter of the free memory, at most 64 GiB, on a GPU; none on the CPU.",
        env="BICL_HOST_CACHE_SIZE",
    )
    disk_cache_dir: str | None = setting(
        None,
        "Folder for prefixes on a local disk, below the host memory; found again after a restart.",
        env="BICL_DISK_CACHE_DIR",
    )
    disk_cache_size: str | None = setting(
        None,
        "Size of the prefixes in --disk-cache-dir: 500GiB, or 50% of the free space.",
        env="BICL_DISK_CACHE_SIZE",
    )

    def __post_init__(self) -> None:
        check_choices(self)
        if self.cache_memory != "auto":
            parse_memory(self.cache_memory, free_bytes=1 << 62)
        self._check_tiers()

    def _check_tiers(self) -> None:
        host, folder, disk = self.host_cache_size, self.disk_cache_dir, self.disk_cache_size
        if host not in ("auto", "0"):
            parse_memory(host, 1 << 62, "--host-cache-size")
        if disk is not None:
            parse_memory(disk, 1 << 62, "--disk-cache-size")
        if (folder is None) != (disk is None):
            raise ConfigError("--disk-cache-dir and --disk-cache-size belong together; give both")
        if folder is not None and host == "0":
            raise ConfigError(
                "--host-cache-size 0 leaves no memory through which --disk-cache-dir is read and "
                "written; give it a size"
            )
        if self.disable_prefix_caching and (folder is not None or host not in ("auto", "0")):
            raise ConfigError(
                "--disable-prefix-caching leaves nothing to keep with --host-cache-size or "
                "--disk-cache-dir; give one or the other"
            )

    def page_size(
        self, head_dim: int, max_total_tokens: int, *, chooses_pages: bool = False
    ) -> int:
        """Tokens a page, with ``auto`` resolved for a model and its longest request.

        Args:
            chooses_pages: decode steps choose the pages that they read, and choose better among
                small ones.
        """
        if self.block_size != "auto":
            return int(self.block_size)
        # Beyond 160, kernels for 32-wide tiles are built for heads that fill 64-wide ones, too.
        narrow = -(-head_dim // 32) * 32
        has_kernel = narrow <= 160 or narrow % 64 == 0
        avoids_padding = head_dim in (32, 96, 160)
        if chooses_pages and has_kernel:
            return CHOICE_PAGE_SIZE
        return 32 if avoids_padding or max_total_tokens <= 256 else PAGE_SIZE
