"""A Llama of a given shape with random weights, ready for the engine. No files, no network."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from bicl.frontends.http.loader import LoadedModel, describe
from bicl.frontends.transformers import ATTENTION_NAME, register

__all__ = ["SHAPES", "random_llama"]

SHAPES = {
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
    },
    "small": {
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 4096,
    },
}
"""``8b``: Llama 3's. ``small``: for a CPU, and for trying a benchmark out."""

FIRST_ID = 4
"""Ids below are special tokens."""


def random_llama(shape: str, device: str, dtype: torch.dtype, seed: int = 0) -> LoadedModel:
    """Weights N(0, 0.02), the same for the same seed and device."""
    config = LlamaConfig(
        **SHAPES[shape],
        max_position_embeddings=131_072,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    register()
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=ATTENTION_NAME
        )
    with torch.inference_mode():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(std=0.02)
    tokenizer = _one_word_a_token(config.vocab_size)
    return describe(model.eval(), tokenizer, model_id=f"random-llama-{shape}", sha=f"seed {seed}")


def _one_word_a_token(vocab_size: int) -> PreTrainedTokenizerFast:
    special = ["<pad>", "<bos>", "<eos>", "<unk>"]
    words = {word: i for i, word in enumerate(special)}
    words |= {f"w{i}": i for i in range(FIRST_ID, vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )
