"""A tiny Llama with random weights: the same ones for the same seed, in every process."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from bicl.frontends.http.loader import LoadedModel, describe
from bicl.frontends.transformers import ATTENTION_NAME, register

__all__ = ["FIRST_ID", "VOCAB_SIZE", "tiny_llama"]

VOCAB_SIZE = 256
FIRST_ID = 4
"""Ids below are special tokens."""


def tiny_llama(device: str = "cpu", seed: int = 0) -> LoadedModel:
    """Float32 on a CPU, where equal tokens can be asked for; else bfloat16."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    register()
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        config, attn_implementation=ATTENTION_NAME
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:  # wide, so that attention is far from uniform
                parameter.normal_(std=0.15, generator=generator)
    dtype = torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16
    model = model.eval().to(device, dtype)
    return describe(model, _one_word_a_token(), model_id="tiny-llama", sha=f"tiny {seed}")


def _one_word_a_token() -> PreTrainedTokenizerFast:
    words = {word: i for i, word in enumerate(["<pad>", "<bos>", "<eos>", "<unk>"])}
    words |= {f"w{i}": i for i in range(FIRST_ID, VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )
