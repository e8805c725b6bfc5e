"""HySparse's flags in front of text-generation-inference: checked here, honoured by the shards."""

from __future__ import annotations

from bicl.errors import ConfigError
from bicl.launcher.flags import CommandLine
from bicl.launcher.model_config import ModelConfig
from bicl.settings import settings_of
from bicl.sparse.config import HySparseConfig
from bicl.sparse.refusals import ModelFacts, check_model
from bicl.sparse.settings import HySparseSettings

__all__ = ["enables_hysparse", "plan_hysparse"]

_SETTINGS = tuple(settings_of("hysparse", HySparseSettings))


def enables_hysparse(line: CommandLine) -> bool:
    """Whether ``--enable-hysparse`` or its variable is given."""
    return line.our("--enable-hysparse") == "true"


def plan_hysparse(line: CommandLine, model: ModelConfig | None) -> tuple[dict[str, str], list[str]]:
    """What the shards find in their environment, and notes for the log.

    Raises:
        ConfigError: naming the flag, the reason and the remedy; nothing was loaded.
    """
    given = {each.env: line.our(each.flag) for each in _SETTINGS if line.our(each.flag)}
    config = HySparseSettings.from_environment(given).resolve()
    if config is None:
        return {}, []
    _check_door(config)
    notes = [
        f"HySparse leaves {config.sparsity_ratio:.0%} of the tiles out in layers {config.layers} "
        "(of 32, scaled) of decode steps; requests cannot choose their own ratio here, the router "
        "does not pass it on (docs/hysparse.md)"
    ]
    if model is None:
        notes.append("HySparse: the model could not be checked here; the shard does")
        return given, notes
    facts = ModelFacts.from_config(
        model.raw,
        model_id=line.their("--model-id") or "",
        chat_template=model.chat_template,
        quantize=line.their("--quantize"),
        speculation=line.their("--speculate") not in (None, "", "0"),
    )
    return given, notes + list(check_model(config, facts).notes)


def _check_door(config: HySparseConfig) -> None:
    """Refuse what text-generation-inference leaves no room for."""
    if config.mode == "compact":
        raise ConfigError(
            "--hysparse-mode compact cannot be honoured here: the pages belong to "
            "text-generation-inference's router, which would not learn that they are free; use "
            "--hysparse-mode select, or `bicl serve`"
        )
    if config.kind_rules:
        raise ConfigError(
            f"--hysparse-kind-rules {config.kind_rules} cannot be honoured here: a shard sees "
            "token ids, never the text whose kind it would need; set --hysparse-sparsity-ratio "
            "for all, or use `bicl serve`"
        )
    if config.enable_sg:
        raise ConfigError(
            "--hysparse-enable-sg cannot be honoured here: a shard sees token ids, never the text "
            "whose syntax it would need; leave it out, or use `bicl serve`"
        )
