"""Ways to start the shard, and the cases that apply to each. Needs nothing of TGI."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from bicl.frontends.tgi.selftest.bench import Bench
from bicl.frontends.tgi.selftest.cases import (
    ADAPTERS,
    CASES,
    CHUNKING,
    DISK,
    HOST,
    PREFIXES,
    SPARSE,
)

__all__ = ["SCENARIOS", "Scenario"]


@dataclass(frozen=True)
class Scenario:
    """How the shard is started.

    Attributes:
        model: name in ``models.MODELS``.
        flags, environment, world_size: of the shard.
        without: cases that cannot apply, because TGI itself lacks the feature there.
        adapters: LoRA adapters of the model to load.
        host_cache: there is a host tier below the pages, ``disk_cache``: and a disk below that.
        sparse: HySparse leaves tiles out.
        free_bytes: memory that the shard is told to have.
        kv_bytes, exact, new_tokens: as in :class:`Bench`.
    """

    model: str
    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    world_size: int = 1
    without: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    host_cache: bool = False
    disk_cache: bool = False
    sparse: bool = False
    free_bytes: int = 64 << 20
    kv_bytes: int = 4
    exact: bool = True
    new_tokens: int = 12

    @property
    def cases(self) -> dict[str, Callable[[Bench], None]]:
        left_out = {*self.without}
        left_out |= set() if self.adapters else set(ADAPTERS)
        left_out |= set() if self.host_cache else set(HOST)
        left_out |= set() if self.disk_cache else set(DISK)
        left_out |= set() if self.sparse else set(SPARSE)
        return {name: case for name, case in CASES.items() if name not in left_out}

    @property
    def prefixes(self) -> bool:
        """TGI offers cached prefixes there."""
        return self.environment.get("PREFIX_CACHING") != "0"


def _fp8(dtype: str) -> Scenario:
    return Scenario("llama", ("--kv-cache-dtype", dtype), kv_bytes=1, exact=False)


HOST_CACHE = {"BICL_HOST_CACHE_SIZE": "32MiB"}

SCENARIOS = {
    "llama": Scenario("llama"),
    "llama-head80": Scenario("llama-head80"),
    "llama-head100": Scenario("llama-head100"),
    "llama-head120-mqa": Scenario("llama-head120-mqa"),
    "llama-block32": Scenario("llama", environment={"BICL_BLOCK_SIZE": "32"}),
    "llama-deterministic": Scenario("llama", environment={"BICL_DETERMINISTIC": "1"}),
    "llama-fp8-e4m3": _fp8("fp8_e4m3fn"),
    "llama-fp8-e5m2": _fp8("fp8_e5m2"),
    "llama-speculate2": Scenario("llama", ("--speculate", "2"), without=CHUNKING),
    "llama-tp2": Scenario("llama", world_size=2),
    "qwen2": Scenario("qwen2"),
    "qwen3": Scenario("qwen3", without=CHUNKING),
    "mistral-window": Scenario("mistral-window"),
    "gemma2-window": Scenario("gemma2-window"),
    "phi3-head96": Scenario("phi3-head96"),
    "gpt-neox-head80": Scenario("gpt-neox-head80"),
    "llama-lora": Scenario(
        "llama-lora",
        environment={"PREFIX_CACHING": "0"} | HOST_CACHE,
        without=PREFIXES,
        adapters=("poet", "clerk"),
        host_cache=True,
    ),
    "llama-host-cache": Scenario("llama", environment=HOST_CACHE, host_cache=True),
    "llama-disk-cache": Scenario(
        "llama",
        environment=HOST_CACHE | {"BICL_DISK_CACHE_SIZE": "64MiB"},
        host_cache=True,
        disk_cache=True,
    ),
    "llama-host-cache-speculate2": Scenario(
        "llama", ("--speculate", "2"), HOST_CACHE, without=CHUNKING, host_cache=True
    ),
    "llama-host-cache-tp2": Scenario(
        "llama", environment=HOST_CACHE, world_size=2, host_cache=True
    ),
    "llama-hysparse-host-cache": Scenario(
        "llama",
        environment=HOST_CACHE
        | {
            "BICL_ENABLE_HYSPARSE": "1",
            "BICL_HYSPARSE_FORCE": "1",
            "BICL_HYSPARSE_FLOOR_TOKENS": "2048",  # all is read; the index must not disturb it
        },
        without=("capacity_fills_the_memory_and_no_more",),  # an index lies beside the pages
        host_cache=True,
    ),
    "llama-hysparse": Scenario(
        "llama",
        environment={
            "BICL_ENABLE_HYSPARSE": "1",
            "BICL_HYSPARSE_FORCE": "1",
            "BICL_HYSPARSE_FLOOR_TOKENS": "192",
            "BICL_HYSPARSE_MIN_SKIPPED_MB": "0",
            "BICL_HYSPARSE_SPARSITY_RATIO": "0.5",
            "BICL_HYSPARSE_MIN_MASS_KEPT": "0",  # of a random model's attention little is kept
            "BICL_HYSPARSE_MAX_ENTROPY_RISE": "100",
        },
        without=(
            "capacity_fills_the_memory_and_no_more",
            # A row beside a prefill is dense, so its tokens depend on who comes meanwhile.
            "random_traffic",
            "every_page_is_accounted_for",
        ),
        sparse=True,
        exact=False,
    ),
    "qwen3-host-cache": Scenario(
        "qwen3", environment=HOST_CACHE, without=CHUNKING, host_cache=True
    ),
    "mixtral": Scenario("mixtral"),
    "deepseek-v3-head192": Scenario("deepseek-v3-head192", free_bytes=256 << 20),
    "llava-next": Scenario("llava-next", environment={"PREFIX_CACHING": "0"}, without=PREFIXES),
    "smollm2": Scenario("smollm2", free_bytes=384 << 20),
    "smollm2-speculate2": Scenario(
        "smollm2", ("--speculate", "2"), without=CHUNKING, free_bytes=384 << 20
    ),
}
