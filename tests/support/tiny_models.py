"""Tiny random decoders of many families, for tests that compare two ways to run them."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from bicl.frontends.http.loader import LoadedModel, describe
from bicl.frontends.transformers import register

VOCAB_SIZE = 260
COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

FAMILIES: dict[str, tuple[str, dict]] = {
    "llama": ("llama", {"head_dim": 64}),
    "llama-head80": ("llama", {"head_dim": 80}),
    "qwen2": ("qwen2", {"hidden_size": 64}),
    "qwen2-window": (
        "qwen2",
        {
            "hidden_size": 64,
            "use_sliding_window": True,
            "sliding_window": 70,
            "max_window_layers": 1,
        },
    ),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "mistral-window": ("mistral", {"head_dim": 64, "sliding_window": 37}),
    "gemma2": (
        "gemma2",
        {
            "head_dim": 32,
            "sliding_window": 48,
            "query_pre_attn_scalar": 40,
            "attn_logit_softcapping": 2.0,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 32,
            "sliding_window": 65,
            "query_pre_attn_scalar": 24,
            "sliding_window_pattern": 2,
        },
    ),
    "phi3-head96": ("phi3", {"hidden_size": 384, "sliding_window": None}),
    "phi": ("phi", {"hidden_size": 320, "partial_rotary_factor": 0.5}),
}


def tiny_model(family: str, attn_implementation: str, **overrides: object) -> PreTrainedModel:
    """A random float32 model; the same weights at every call."""
    model_type, options = FAMILIES[family]
    config = CONFIG_MAPPING[model_type](**{**COMMON, **options, **overrides})
    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation)
    # Larger than the default initialisation, so that attention is not close to uniform.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(std=0.15)
    return model.eval().float()


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Four special tokens, then one token a byte."""
    specials = ["<pad>", "<bos>", "<eos>", "<sep>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*specials, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )


def tiny_loaded(family: str, **overrides: object) -> LoadedModel:
    """A tiny model as the loader would return it."""
    register()
    model = tiny_model(family, "bicl", **overrides)
    return describe(model, byte_tokenizer(), model_id=family, sha="tiny")
