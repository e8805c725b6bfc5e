"""HySparse as it is asked for at start: flags, environment and a file that ``tune`` wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from bicl.errors import ConfigError
from bicl.settings import check_choices, flag_name, setting, settings_of
from bicl.sparse.config import MODES, TEXT_KINDS, VARIANTS, HySparseConfig
from bicl.sparse.guard import GuardBounds

__all__ = ["HySparseSettings", "read_config_file", "write_config_file"]

PREFIX = "hysparse_"
# A field of HySparseConfig that has another name as a flag.
_FIELDS = {"gate": "gate_path"}
_GUARD = frozenset(PREFIX + item.name for item in fields(GuardBounds))


@dataclass(frozen=True)
class HySparseSettings:
    """The flags. ``None`` leaves a value to ``--hysparse-config``, and that to the default.

    Raises:
        ConfigError: naming the value, what is allowed and what to do.
    """

    enable_hysparse: bool = setting(
        False,
        "Let decode steps read only the pages that a query needs (docs/hysparse.md).",
        env="BICL_ENABLE_HYSPARSE",
    )
    hysparse_config: str | None = setting(
        None, "File that `bicl hysparse tune` wrote; flags win over it.", env="BICL_HYSPARSE_CONFIG"
    )
    hysparse_sparsity_ratio: float | None = setting(
        None,
        "Share of a sequence's tiles that a sparse layer leaves out. Default: 0.65.",
        env="BICL_HYSPARSE_SPARSITY_RATIO",
    )
    hysparse_layers: str | None = setting(
        None,
        "Sparse layers of a model of 32, scaled to this model's depth; 10-28/40 names the depth. "
        "Default: 10-28.",
        env="BICL_HYSPARSE_LAYERS",
    )
    hysparse_max_k: int | None = setting(
        None,
        "Most windows of 64 tokens that a sequence reads in a sparse layer. Default: 512.",
        env="BICL_HYSPARSE_MAX_K",
    )
    hysparse_mode: str | None = setting(
        None,
        "select: all pages stay, each step reads some. compact: the rest is released when prefill "
        "ends. Default: select.",
        env="BICL_HYSPARSE_MODE",
        choices=MODES,
    )
    hysparse_floor_tokens: int | None = setting(
        None,
        "Length up to which a sequence is dense, bit for bit. Default: 1536.",
        env="BICL_HYSPARSE_FLOOR_TOKENS",
    )
    hysparse_min_skipped_mb: int | None = setting(
        None,
        "Least MB of pages that a step on a GPU must leave out of a sparse layer; with less it "
        "runs dense, since choosing would cost more. Default: 32.",
        env="BICL_HYSPARSE_MIN_SKIPPED_MB",
    )
    hysparse_variant: str | None = setting(
        None,
        "What a tile's index holds: centroids of its keys, their bounds, or their gated mean. "
        "Default: centroids.",
        env="BICL_HYSPARSE_VARIANT",
        choices=VARIANTS,
    )
    hysparse_gate: str | None = setting(
        None,
        "Weights that `bicl hysparse fit` wrote for this variant.",
        env="BICL_HYSPARSE_GATE",
    )
    hysparse_text_kind: str | None = setting(
        None,
        "What the texts are; auto classifies each prompt, off treats all alike. Default: auto.",
        env="BICL_HYSPARSE_TEXT_KIND",
        choices=TEXT_KINDS,
    )
    hysparse_kind_rules: str | None = setting(
        None,
        "What kinds of text (chat, news, code, legal, other) get: share of the ratio, and newest "
        "windows of 64 tokens that are always read. Default: code=0.85,legal=0.85; an example with "
        "windows: code=0.85:4.",
        env="BICL_HYSPARSE_KIND_RULES",
    )
    hysparse_enable_sg: bool | None = setting(
        None,
        "Always keep tokens at the boundaries of syntax nodes.",
        env="BICL_HYSPARSE_ENABLE_SG",
    )
    hysparse_shadow_interval: int | None = setting(
        None,
        "Decode steps between two measurements of a request. Default: 32.",
        env="BICL_HYSPARSE_SHADOW_INTERVAL",
    )
    hysparse_min_mass_kept: float | None = setting(
        None,
        "Least share of the attention in the tiles read; below it a request goes back to the full "
        "cache. Default: 0.8.",
        env="BICL_HYSPARSE_MIN_MASS_KEPT",
    )
    hysparse_min_sparsity_share: float | None = setting(
        None,
        "Least share of the expected sparsity that must be measured. Default: 0.77.",
        env="BICL_HYSPARSE_MIN_SPARSITY_SHARE",
    )
    hysparse_max_entropy_rise: float | None = setting(
        None,
        "Most that attention's entropy may rise meanwhile. Default: 0.15.",
        env="BICL_HYSPARSE_MAX_ENTROPY_RISE",
    )
    hysparse_force: bool = setting(
        False,
        "Start although the model is one on which HySparse is refused; the reason is logged.",
        env="BICL_HYSPARSE_FORCE",
    )

    def __post_init__(self) -> None:
        check_choices(self)
        self.resolve()
        self.guard()

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> HySparseSettings:
        """Settings from their variables; an empty one is none at all."""
        values: dict[str, Any] = {
            each.name: each.parse(environ[each.env])
            for each in settings_of("hysparse", cls)
            if environ.get(each.env)
        }
        return cls(**values)

    @property
    def given(self) -> dict[str, Any]:
        """What was asked for beside ``--enable-hysparse``, by field name."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        del values["enable_hysparse"]
        return {k: value for k, value in values.items() if value is not None and value is not False}

    def resolve(self) -> HySparseConfig | None:
        """The one object that the rest works with; ``None``: HySparse is off.

        Raises:
            ConfigError: a value is out of range, the file cannot be read, or a flag was given
                without ``--enable-hysparse``.
        """
        given = self.given
        if not self.enable_hysparse:
            if given:
                raise ConfigError(
                    f"{', '.join(map(flag_name, given))} needs --enable-hysparse; add it, or leave "
                    "the others out"
                )
            return None
        path = given.pop("hysparse_config", None)
        base = HySparseConfig() if path is None else read_config_file(path)
        changes = {_field(name): value for name, value in given.items() if name not in _GUARD}
        try:
            return replace(base, **changes)
        except ConfigError as error:
            raise ConfigError(f"{self._blame(changes, base)}: {error}") from None

    def guard(self) -> GuardBounds:
        """When a request goes back to the full cache.

        Raises:
            ConfigError: a bound is out of range.
        """
        given = {_field(name): value for name, value in self.given.items() if name in _GUARD}
        try:
            return GuardBounds(**given)
        except ConfigError as error:
            flags = ", ".join(flag_name(PREFIX + name) for name in given)
            raise ConfigError(f"{flags}: {error}") from None

    def _blame(self, changes: Mapping[str, Any], base: HySparseConfig) -> str:
        """The flag whose value alone is wrong already; all of them where it is the mixture."""
        flags = {_field(item.name): flag_name(item.name) for item in fields(self)}
        for name, value in changes.items():
            try:
                replace(base, **{name: value})
            except ConfigError:
                return f"{flags[name]} {value}"
        return ", ".join(flags[name] for name in changes)


def _field(setting_name: str) -> str:
    """The field of ``HySparseConfig`` or ``GuardBounds`` that a setting fills."""
    name = setting_name.removeprefix(PREFIX)
    return _FIELDS.get(name, name)


def read_config_file(path: str | Path) -> HySparseConfig:
    """Settings from the JSON file that :func:`write_config_file` wrote.

    Raises:
        ConfigError: it cannot be read, or holds something else.
    """
    try:
        values = json.loads(Path(path).read_text())["hysparse"]
        known = {item.name for item in fields(HySparseConfig)}
        if unknown := sorted(set(values) - known):
            raise ConfigError(f"unknown keys {', '.join(unknown)}")
        return HySparseConfig(**values)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--hysparse-config {path} cannot be used: {error}; give the file that "
            "`bicl hysparse tune` wrote"
        ) from None


def write_config_file(path: str | Path, config: HySparseConfig, **facts: Any) -> None:
    """Write what ``--hysparse-config`` reads; ``facts`` (JSON values) say where it comes from."""
    Path(path).write_text(json.dumps({"hysparse": asdict(config), **facts}, indent=2) + "\n")
