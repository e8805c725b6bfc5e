"""HySparse's checks on a model of the embedded server: before it is loaded, and after."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from transformers import PretrainedConfig

from bicl.frontends.http.loader import LoadedModel, locate
from bicl.sparse.config import HySparseConfig
from bicl.sparse.refusals import ModelFacts, SparseModel, check_model

__all__ = ["check_before_loading", "check_loaded"]

_COARSE_GGUF = re.compile(r"_(?:Q[1-4]|IQ[1-4]|TQ[1-4]|MXFP4|NVFP4)(?=_|$)")


def check_before_loading(
    config: HySparseConfig, model_id: str, revision: str | None
) -> tuple[str, ...]:
    """Refuse by what the model's files say about themselves; returns notes for the log.

    Raises:
        ConfigError: naming the flag, the reason and the remedy.
    """
    source, options = locate(model_id, revision)
    if "gguf_file" in options:
        weights = _coarse_gguf(Path(source) / options["gguf_file"])
        return check_model(config, ModelFacts(None, weights)).notes
    try:
        raw, _ = PretrainedConfig.get_config_dict(source, revision=revision)
    except OSError:
        return ()  # loading will say what is wrong
    return check_model(config, ModelFacts.from_config(raw, model_id=model_id)).notes


def check_loaded(config: HySparseConfig, loaded: LoadedModel) -> SparseModel:
    """The same by what the loaded model shows: its layers, its windows, its chat template.

    Raises:
        ConfigError: naming the flag, the reason and the remedy.
    """
    template = loaded.tokenizer.chat_template
    facts = ModelFacts.from_config(
        loaded.model.config.to_dict(),
        model_id=loaded.model_id,
        chat_template=template if isinstance(template, str) else None,
    )
    layers = loaded.geometry.layers
    windows = tuple(None if each.window_left < 0 else each.window_left + 1 for each in layers)
    return check_model(config, replace(facts, depth=len(layers), windows=windows))


def _coarse_gguf(path: Path) -> str:
    """Name of a GGUF file's weight format if it has fewer than five bits, or empty."""
    from gguf import GGUFReader, LlamaFileType

    entry = GGUFReader(path).fields.get("general.file_type")
    if entry is None:
        return ""
    name = LlamaFileType(int(entry.parts[entry.data[0]][0])).name.removeprefix("MOSTLY")
    return f"GGUF{name.replace('_', ' ', 1)} weights" if _COARSE_GGUF.match(name) else ""
