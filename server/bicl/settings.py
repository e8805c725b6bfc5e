"""What a setting is: a dataclass field that is also a flag and an environment variable.

The settings themselves stand in :mod:`bicl.config`, and in ``settings`` of the cache and of
HySparse; here is what they are made of, and the flags
of TGI's launcher that make no sense in this server.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from types import UnionType
from typing import Any, get_args, get_type_hints

from bicl.errors import ConfigError

__all__ = [
    "REFUSED_SETTINGS",
    "Setting",
    "check_choices",
    "flag_name",
    "refuse",
    "setting",
    "settings_of",
]

REFUSED_SETTINGS: Mapping[str, str] = {
    "sharded": "this server runs one process; for tensor parallelism use the TGI image",
    "num_shard": "this server runs one process; for tensor parallelism use the TGI image",
    "quantize": "weights are served as they are stored; give a GGUF file or an unquantised model",
    "speculate": "speculation is not part of this server; use the TGI image",
    "lora_adapters": "adapters are not part of this server; merge the adapter into the weights",
    "rope_scaling": "set rope scaling in the model's config.json",
    "rope_factor": "set rope scaling in the model's config.json",
    "cuda_memory_fraction": "give the cache a size: --cache-memory 40% or --cache-memory 8GiB",
    "disable_custom_kernels": "use --device cpu to run without CUDA kernels",
    "prometheus_port": "metrics are at /metrics of --port",
    "shard_uds_path": "there is no separate shard process",
    "master_addr": "there is no separate shard process",
    "master_port": "there is no separate shard process",
    "weights_cache_override": "use --huggingface-hub-cache",
    "otlp_endpoint": "tracing is not part of this server; scrape /metrics",
    "otlp_service_name": "tracing is not part of this server; scrape /metrics",
    "ngrok": "put a tunnel of your own in front of --port",
    "ngrok_authtoken": "put a tunnel of your own in front of --port",
    "ngrok_edge": "put a tunnel of your own in front of --port",
    "usage_stats": "this server sends no usage statistics; leave the setting out",
}
# Values under which a refused setting asks for nothing.
NEUTRAL_VALUES: Mapping[str, tuple[str, ...]] = {
    "sharded": ("false",),
    "num_shard": ("1",),
    "cuda_memory_fraction": ("1", "1.0"),
    "usage_stats": ("off",),
}
# TGI names its launcher's variables after the flags, but some of these names are too common to be
# read as a request to this server.
_NO_ENVIRONMENT = frozenset({"master_addr", "master_port", "otlp_endpoint", "otlp_service_name"})


def setting(
    default: Any,
    help: str,
    *,
    env: str | None = None,
    choices: tuple[str, ...] = (),
    aliases: tuple[str, ...] = (),
) -> Any:
    metadata = {"help": help, "env": env, "choices": choices, "aliases": aliases}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Setting:
    """One flag.

    Attributes:
        name: field name; ``owner``: ``server`` or ``cache``, the object it belongs to.
        type: ``str``, ``int``, ``float`` or ``bool``.
        default, help, choices, aliases: for the command line.
        env: its environment variable.
    """

    name: str
    owner: str
    type: type
    default: Any
    help: str
    env: str
    choices: tuple[str, ...]
    aliases: tuple[str, ...]

    @property
    def flag(self) -> str:
        return flag_name(self.name)

    def parse(self, text: str) -> object:
        """The value that an environment variable's text stands for.

        Raises:
            ConfigError: naming the variable, its text and what is expected.
        """
        try:
            if self.type is bool:
                return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
            return self.type(text)
        except (KeyError, ValueError):
            expected = (
                "true or false" if self.type is bool else f"a value of type {self.type.__name__}"
            )
            raise ConfigError(
                f"{self.env}={text!r} in the environment; expected {expected}"
            ) from None


def settings_of(owner: str, cls: type) -> Iterator[Setting]:
    """The settings among a dataclass's fields, in their order."""
    hints = get_type_hints(cls)
    for item in fields(cls):
        if item.metadata:
            yield _as_setting(owner, item, hints[item.name])


def _as_setting(owner: str, item: Field[Any], hint: Any) -> Setting:
    kind = get_args(hint)[0] if isinstance(hint, UnionType) else hint
    meta = item.metadata
    return Setting(
        name=item.name,
        owner=owner,
        type=kind,
        default=item.default,
        help=meta["help"],
        env=meta["env"] or item.name.upper(),
        choices=meta["choices"],
        aliases=meta["aliases"],
    )


def check_choices(config: Any) -> None:
    """Hold the settings of a dataclass instance to their choices; ``None`` is left alone.

    Raises:
        ConfigError: naming the flag, its value and the choices.
    """
    for item in fields(config):
        choices, value = item.metadata.get("choices"), getattr(config, item.name)
        if choices and value is not None and value not in choices:
            raise ConfigError(
                f"{flag_name(item.name)} {value} is not supported; use one of {', '.join(choices)}"
            )


def flag_name(name: str) -> str:
    return "--" + name.replace("_", "-")


def refuse(flags: Mapping[str, object], environ: Mapping[str, str]) -> None:
    for name, remedy in REFUSED_SETTINGS.items():
        value = flags.get(name)
        source = flag_name(name)
        if value is None and name not in _NO_ENVIRONMENT:
            value, source = environ.get(name.upper()), name.upper()
        if value in (None, ""):
            continue
        if str(value).lower() not in NEUTRAL_VALUES.get(name, ()):
            raise ConfigError(f"{source}={value} cannot be honoured: {remedy}")
