"""What a model's config.json says about its cache, as TGI reads it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["ModelConfig", "read_chat_template", "read_model_config"]

# Families that TGI serves without a paged cache: nothing of theirs goes through our modules.
WITHOUT_PAGES = {
    "bloom": "it uses ALiBi",
    "mpt": "it uses ALiBi",
    "opt": "its implementation has no paged cache",
    "galactica": "its implementation has no paged cache",
    "t5": "it is an encoder-decoder",
    "mamba": "it has a state, not a KV cache",
    "ssm": "it has a state, not a KV cache",
    "idefics": "its implementation has no paged cache",
}


@dataclass(frozen=True)
class ModelConfig:
    """Facts of a config.json; None where it does not say.

    Attributes:
        raw: the config itself, for checks that only some flags need.
        chat_template: of the tokenizer, if it was read.
    """

    model_type: str | None
    head_dim: int | None
    num_kv_heads: int | None
    is_vision: bool
    without_pages: str
    raw: Mapping[str, Any] = field(default_factory=dict)
    chat_template: str | None = None

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> ModelConfig:
        text = raw.get("text_config") or {}
        model_type = raw.get("model_type")

        def first(*names: str) -> Any:
            found = (source.get(name) for name in names for source in (raw, text))
            return next((value for value in found if value is not None), None)

        heads = first("num_attention_heads", "n_head", "n_heads")
        hidden = first("hidden_size", "n_embd", "d_model")
        head_dim = first("head_dim")
        if head_dim is None and heads and hidden:
            head_dim = hidden // heads
        if model_type in ("deepseek_v2", "deepseek_v3"):
            head_dim = 192
        kv_heads = 1 if raw.get("multi_query") else first("num_key_value_heads", "num_kv_heads")
        return cls(
            model_type=model_type,
            head_dim=head_dim,
            num_kv_heads=heads if kv_heads is None else kv_heads,
            is_vision=raw.get("vision_config") is not None,
            without_pages=_without_pages(model_type, raw),
            raw=raw,
        )


def _without_pages(model_type: str | None, raw: dict[str, Any]) -> str:
    if raw.get("is_encoder_decoder"):
        return "it is an encoder-decoder"
    if raw.get("alibi"):
        return "it uses ALiBi"
    return WITHOUT_PAGES.get(model_type or "", "")


def read_model_config(model_id: str, revision: str | None, cache: str | None) -> ModelConfig:
    """Read config.json of a local folder or of a hub model.

    Raises:
        OSError: it cannot be had. ValueError: it is no JSON object.
    """
    path = _file(model_id, "config.json", revision, cache)
    raw = json.loads(path.read_text())
    if not isinstance(raw, dict):
        raise ValueError(f"{path} is no JSON object")
    return ModelConfig.from_dict(raw)


def read_chat_template(model_id: str, revision: str | None, cache: str | None) -> str | None:
    """The tokenizer's chat template as text; None where the model has none that can be read."""
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        try:
            text = _file(model_id, name, revision, cache).read_text()
            # A list of named templates is searched as it stands.
            return text if name.endswith("jinja") else str(json.loads(text)["chat_template"])
        except (OSError, ValueError, KeyError, ImportError):
            continue
    return None


def _file(model_id: str, name: str, revision: str | None, cache: str | None) -> Path:
    if Path(model_id).is_dir():
        return Path(model_id) / name
    if model_id.startswith(("/", ".")):
        raise FileNotFoundError(f"there is no folder {model_id}")
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(model_id, name, revision=revision, cache_dir=cache))
