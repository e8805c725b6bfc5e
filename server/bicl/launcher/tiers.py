"""The host and disk tiers' flags in front of text-generation-inference."""

from __future__ import annotations

from bicl.cache.settings import KVCacheConfig
from bicl.errors import ConfigError
from bicl.launcher.flags import CommandLine
from bicl.launcher.model_config import ModelConfig

__all__ = ["plan_tiers"]


def plan_tiers(line: CommandLine, model: ModelConfig | None) -> tuple[dict[str, str], list[str]]:
    """What the shards find in their environment, and notes for the log.

    Raises:
        ConfigError: naming the flag, the reason and the remedy; nothing was loaded.
    """
    host = line.our("--host-cache-size", "0") or "0"
    folder = line.our("--disk-cache-dir") or None
    disk = line.our("--disk-cache-size") or None
    if host == "auto":
        raise ConfigError("--host-cache-size auto: give text-generation-inference a size or 0")
    KVCacheConfig(host_cache_size=host, disk_cache_dir=folder, disk_cache_size=disk)
    if host == "0":
        return {}, []
    if model is not None and model.is_vision:
        raise ConfigError(
            f"--host-cache-size with the vision model type {model.model_type}: two images have the "
            "same token ids; leave it out"
        )
    if line.environ.get("BICL_VERIFY_PREFIXES", "1").lower() not in ("1", "true"):
        raise ConfigError(
            "--host-cache-size with BICL_VERIFY_PREFIXES=0: pages come back by the tags that are "
            "then not kept; unset the variable"
        )
    environment = {"BICL_HOST_CACHE_SIZE": host}
    if folder and disk:
        environment |= {"BICL_DISK_CACHE_DIR": folder, "BICL_DISK_CACHE_SIZE": disk}
    note = f"prefixes that leave the GPU are kept in {host} of host memory"
    return environment, [note + (f", then in {disk} on {folder}" if folder else "")]
