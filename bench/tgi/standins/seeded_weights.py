"""A checkpoint that is no file: a shard reads it through ``safe_open``, a reference from here."""

import json
import os
import zlib
from pathlib import Path

import torch

__all__ = ["SeededWeights"]

FIRST_WORD = 4  # of the benchmarks' vocabulary, behind the special tokens
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class _Slice:
    def __init__(self, tensor):
        self.tensor = tensor

    def get_shape(self):
        return list(self.tensor.shape)

    def get_dtype(self):
        return "BF16"

    def __getitem__(self, index):
        return self.tensor[index]


class SeededWeights:
    """A Llama checkpoint that is made when it is read: N(0, 0.02), norms 1. ``BENCH_WORDS``: how
    many words it can say, the first ones; all others' rows of the head are 0."""

    def __init__(self, filename, framework="pytorch"):
        config = json.loads((Path(filename).parent / "config.json").read_text())
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        head = hidden // config["num_attention_heads"]
        kv = config["num_key_value_heads"] * head
        self.shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
        self.shapes |= {"lm_head.weight": (config["vocab_size"], hidden)}
        self.shapes |= {"model.norm.weight": (hidden,)}
        for i in range(config["num_hidden_layers"]):
            layer = {
                "self_attn.q_proj": (hidden, hidden),
                "self_attn.k_proj": (kv, hidden),
                "self_attn.v_proj": (kv, hidden),
                "self_attn.o_proj": (hidden, hidden),
                "mlp.gate_proj": (inner, hidden),
                "mlp.up_proj": (inner, hidden),
                "mlp.down_proj": (hidden, inner),
                "input_layernorm": (hidden,),
                "post_attention_layernorm": (hidden,),
            }
            self.shapes |= {f"model.layers.{i}.{n}.weight": s for n, s in layer.items()}

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def keys(self):
        return list(self.shapes)

    def get_tensor(self, name):
        shape = self.shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16, device=DEVICE)
        generator = torch.Generator(DEVICE).manual_seed(zlib.crc32(name.encode()))
        tensor = torch.randn(shape, dtype=torch.bfloat16, device=DEVICE, generator=generator)
        tensor.mul_(0.02)
        words = int(os.environ.get("BENCH_WORDS", "0"))
        if words and name == "lm_head.weight":
            tensor[:FIRST_WORD] = 0
            tensor[FIRST_WORD + words :] = 0
        return tensor

    def get_slice(self, name):
        return _Slice(self.get_tensor(name))
