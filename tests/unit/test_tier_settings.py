"""Flags of the host and disk tiers."""

from __future__ import annotations

import pytest
import torch

from bicl.cache.settings import KVCacheConfig
from bicl.config import ServerConfig
from bicl.errors import ConfigError
from bicl.frontends.http.engine.config import EngineConfig
from bicl.frontends.http.engine.sizing import disk_cache_bytes, host_cache_bytes

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_default_is_a_share_on_a_gpu_and_nothing_on_the_cpu(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("", (), {"available": 400}))
    assert host_cache_bytes(KVCacheConfig(), CUDA) == 100
    assert host_cache_bytes(KVCacheConfig(), CPU) == 0
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("", (), {"available": 1 << 40}))
    assert host_cache_bytes(KVCacheConfig(), CUDA) == 64 << 30
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("", (), {"available": 400}))
    disk = KVCacheConfig(disk_cache_dir=str(tmp_path), disk_cache_size="1MB")
    assert host_cache_bytes(disk, CPU) == 100
    assert host_cache_bytes(KVCacheConfig(host_cache_size="50%"), CPU) == 200
    assert host_cache_bytes(KVCacheConfig(host_cache_size="0"), CUDA) == 0
    assert host_cache_bytes(KVCacheConfig(disable_prefix_caching=True), CUDA) == 0
    with pytest.raises(ConfigError, match="--host-cache-size 401 needs 401 bytes, but 400"):
        host_cache_bytes(KVCacheConfig(host_cache_size="401"), CPU)


def test_what_is_on_disk_already_counts_as_free(tmp_path) -> None:
    config = KVCacheConfig(disk_cache_dir=str(tmp_path / "new"), disk_cache_size="1MB")
    assert disk_cache_bytes(config) == 1_000_000
    assert disk_cache_bytes(KVCacheConfig()) == 0


def test_a_folder_that_cannot_be_made_is_refused(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    config = KVCacheConfig(disk_cache_dir=str(tmp_path / "file" / "x"), disk_cache_size="1MB")
    with pytest.raises(ConfigError, match="--disk-cache-dir"):
        disk_cache_bytes(config)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"host_cache_size": "much"}, "--host-cache-size 'much' is not a size"),
        ({"disk_cache_dir": "/x"}, "give both"),
        ({"disk_cache_size": "1GB"}, "give both"),
        ({"disk_cache_dir": "/x", "disk_cache_size": "auto"}, "--disk-cache-size 'auto'"),
        (
            {"disk_cache_dir": "/x", "disk_cache_size": "1GB", "host_cache_size": "0"},
            "leaves no memory",
        ),
        ({"host_cache_size": "1GB", "disable_prefix_caching": True}, "one or the other"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KVCacheConfig(**settings)


def test_settings_come_from_flags_and_environment() -> None:
    environment = {"BICL_HOST_CACHE_SIZE": "2GiB", "BICL_DISK_CACHE_SIZE": "9GB"}
    config = ServerConfig.from_sources({"model_id": "m", "disk_cache_dir": "/x"}, environment)
    assert config.cache.host_cache_size == "2GiB"
    assert (config.cache.disk_cache_dir, config.cache.disk_cache_size) == ("/x", "9GB")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"host_cache_bytes": -1}, "must not be below 0"),
        ({"host_cache_bytes": 1, "prefix_caching": False}, "reused prefixes only"),
        ({"eviction_policy": "random"}, "use one of"),
    ],
)
def test_engine_refuses_tiers_that_cannot_work(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**settings)
