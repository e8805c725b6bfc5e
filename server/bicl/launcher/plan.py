"""From a command line, a model and a machine to what is started. No side effects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from bicl.cache.settings import KVCacheConfig
from bicl.errors import ConfigError
from bicl.hardware import Verdict
from bicl.launcher.flags import CommandLine, is_set
from bicl.launcher.hysparse import enables_hysparse, plan_hysparse
from bicl.launcher.model_config import ModelConfig
from bicl.launcher.tiers import plan_tiers

__all__ = ["Launch", "plan_launch"]

DEFAULT_CUDA_GRAPHS = (1, 2, 4, 8, 16, 32)  # TGI's
STOCK = "stock text-generation-inference runs instead"
MAX_HEAD_DIM = 256  # of the compiled kernels
DTYPES = ("float16", "bfloat16")
INSTEAD = "use --flash-attn-version 2 for stock text-generation-inference"


@dataclass
class Launch:
    """What the real launcher is started with.

    Attributes:
        arguments: its command line.
        environment: variables to set.
        notes: one sentence each, for the log.
    """

    arguments: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def plan_launch(line: CommandLine, model: ModelConfig | None, hardware: Verdict) -> Launch:
    """Decide what runs.

    Args:
        line: the divided command line.
        model: None if its config could not be read; the shard then checks on its own.
        hardware: whether the kernels run here.

    Raises:
        ConfigError: something was asked for that cannot be had; nothing was loaded.
    """
    reason = _why_stock(line, model, hardware)
    if reason:
        return _stock(line, reason)
    launch = Launch(line.theirs, {"ATTENTION": "flashdecoding"})
    _check_attention(line.environ)
    _check_dtype(line)
    if model is not None:
        _check_vision(line, model)
        _check_heads(line, model)
    _check_adapters(line)
    block_size = _block_size(line, model)
    launch.environment["BICL_BLOCK_SIZE"] = str(block_size)
    deterministic = line.our("--deterministic") == "true"
    launch.environment["BICL_DETERMINISTIC"] = "1" if deterministic else "0"
    for plan in (plan_hysparse, plan_tiers):
        environment, notes = plan(line, model)
        launch.environment |= environment
        launch.notes += notes
    if graphs := _cuda_graphs(line):
        launch.environment["CUDA_GRAPHS"] = graphs
    asked = line.our("--block-size", "auto") != "auto"
    small = ", for HySparse to choose among (--block-size)" if enables_hysparse(line) else ""
    launch.notes.append(
        f"pages of {block_size} tokens{'' if asked else small}, attention over BICL tiles"
    )
    if model is not None and model.head_dim is not None and model.head_dim % block_size:
        padded = -(-model.head_dim // block_size) * block_size
        launch.notes.append(
            f"head_dim {model.head_dim} is stored in {padded}: the cache holds "
            f"{model.head_dim / padded:.0%} of the tokens that it would without padding"
        )
    return launch


def _why_stock(line: CommandLine, model: ModelConfig | None, hardware: Verdict) -> str:
    if is_set("BICL_DISABLE", line.environ.get("BICL_DISABLE", "")):
        return "BICL_DISABLE is set"
    if line.our("--flash-attn-version") == "2":
        return "--flash-attn-version 2"
    if not hardware.usable:
        return hardware.missing
    if model is not None and model.without_pages:
        return f"{model.model_type} models have no pages to replace: {model.without_pages}"
    return ""


def _stock(line: CommandLine, reason: str) -> Launch:
    asked = [name for name in line.ours if name != "--flash-attn-version"]
    if enables_hysparse(line) and "--enable-hysparse" not in asked:
        asked.append("BICL_ENABLE_HYSPARSE")
    if asked:
        raise ConfigError(f"{', '.join(asked)} cannot be honoured: {reason}; leave it out")
    return Launch(line.theirs, {"BICL_DISABLE": "1"}, [f"{reason}; {STOCK}"])


def _check_attention(environ: Mapping[str, str]) -> None:
    attention = environ.get("ATTENTION", "flashdecoding")
    if attention != "flashdecoding":
        raise ConfigError(
            f"ATTENTION={attention} in the environment; BICL takes the place of flashdecoding: "
            f"unset it, or {INSTEAD}"
        )


def _check_dtype(line: CommandLine) -> None:
    dtype = line.their("--dtype")
    if dtype and dtype not in DTYPES:
        raise ConfigError(
            f"--dtype {dtype} is not supported by attention over pages; use one of {list(DTYPES)}"
        )


def _check_vision(line: CommandLine, model: ModelConfig) -> None:
    if not model.is_vision:
        return
    if line.their("--speculate") not in (None, "0"):
        raise ConfigError(
            f"--speculate with the vision model type {model.model_type}: text-generation-inference "
            "then computes wrong slots across pages; leave --speculate out"
        )
    if line.environ.get("PREFIX_CACHING", "").lower() in ("1", "true"):
        raise ConfigError(
            f"PREFIX_CACHING with the vision model type {model.model_type}: two images have the "
            "same token ids; unset it"
        )


def _check_adapters(line: CommandLine) -> None:
    cached = line.environ.get("PREFIX_CACHING", "").lower() in ("1", "true")
    if line.their("--lora-adapters") and cached:
        raise ConfigError(
            "PREFIX_CACHING with --lora-adapters: text-generation-inference's router shares pages "
            "between adapters, also while another request reads them; unset PREFIX_CACHING "
            "(--host-cache-size keeps adapters apart)"
        )


def _check_heads(line: CommandLine, model: ModelConfig) -> None:
    if model.head_dim is not None and model.head_dim > MAX_HEAD_DIM:
        raise ConfigError(
            f"the model's head_dim {model.head_dim} is larger than {MAX_HEAD_DIM}, the largest "
            f"that the kernels take; {INSTEAD}"
        )
    shards = line.their("--num-shard")
    if not shards or not shards.isdecimal() or model.num_kv_heads in (None, 1):
        return
    if model.num_kv_heads % int(shards):
        raise ConfigError(
            f"--num-shard {shards} does not divide the model's {model.num_kv_heads} KV heads; "
            f"use a divisor of {model.num_kv_heads}"
        )


def _block_size(line: CommandLine, model: ModelConfig | None) -> int:
    config = KVCacheConfig(block_size=line.our("--block-size", "auto"))
    total = line.their("--max-total-tokens") or ""
    longest = int(total) if total.isdecimal() else 1 << 30
    head_dim = model.head_dim if model is not None else None
    return config.page_size(head_dim or 64, longest, chooses_pages=enables_hysparse(line))


def _cuda_graphs(line: CommandLine) -> str:
    """Graphs for the batch sizes that can occur, the largest included; empty: TGI's own."""
    largest = line.their("--max-batch-size") or ""
    if line.their("--cuda-graphs") is not None or not largest.isdecimal():
        return ""
    drafts = line.their("--speculate") or ""
    rows = int(largest) * (1 + (int(drafts) if drafts.isdecimal() else 0))
    sizes = {size for size in DEFAULT_CUDA_GRAPHS if size < rows} | {rows}
    return ",".join(map(str, sorted(sizes)))
