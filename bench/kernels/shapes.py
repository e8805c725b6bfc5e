"""What is measured: heads, shapes, and the bytes and operations they stand for. No tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = [
    "DECODE_SHAPES",
    "HEADS",
    "HEAD_DIM",
    "LATENT_HEADS",
    "MAIN_HEADS",
    "MLA_SHAPES",
    "PREFILL_SHAPES",
    "STORE_TOKENS",
    "Heads",
    "PrefillShape",
    "causal_pairs",
    "kv_bytes",
    "latent_bytes",
    "prefill_flops",
    "store_bytes",
]

HEAD_DIM = 128
STORE_TOKENS = (64, 8192)


@dataclass(frozen=True)
class Heads:
    """Query and KV heads of one rank."""

    query: int
    kv: int

    def __str__(self) -> str:
        return f"{self.query}/{self.kv}"

    @property
    def group(self) -> int:
        return self.query // self.kv


class LatentHeads(Heads):
    """Query heads over one latent of 576 elements a token (MLA)."""

    def __str__(self) -> str:
        return f"{super().__str__()} d576"


LATENT_HEADS = LatentHeads(16, 1)
MAIN_HEADS = Heads(32, 8)
HEADS = (MAIN_HEADS, Heads(32, 32), Heads(64, 8))


def _uniform(batch: int, context: int) -> tuple[str, tuple[int, ...]]:
    return f"{batch}x{context}", (context,) * batch


DECODE_SHAPES: dict[str, tuple[int, ...]] = dict(
    [
        _uniform(1, 4096),
        _uniform(1, 32768),
        _uniform(8, 4096),
        _uniform(32, 4096),
        _uniform(64, 2048),
        _uniform(128, 1024),
        _uniform(32, 16384),
        ("skew", (32768,) + (2048,) * 31),
        _uniform(1, 512),
        _uniform(4, 1024),
        _uniform(16, 1024),
        _uniform(64, 512),
        _uniform(256, 512),
        ("mix64", tuple(64 * (index + 1) for index in range(64))),
    ]
)
"""Context lengths of each decode batch; ``BxC`` is batch x context."""

MLA_SHAPES = tuple(DECODE_SHAPES)[:8]


@dataclass(frozen=True)
class PrefillShape:
    """New tokens and total keys of each sequence; causal, aligned to the bottom right."""

    new_tokens: tuple[int, ...]
    total_tokens: tuple[int, ...]


def _whole(batch: int, length: int) -> tuple[str, PrefillShape]:
    return f"{batch}x{length}", PrefillShape((length,) * batch, (length,) * batch)


def _extend(name: str, batch: int, new: int, cached: int) -> tuple[str, PrefillShape]:
    return name, PrefillShape((new,) * batch, (new + cached,) * batch)


PREFILL_SHAPES: dict[str, PrefillShape] = dict(
    [
        _whole(1, 4096),
        _whole(4, 2048),
        _whole(1, 16384),
        _extend("512+8192b1", 1, 512, 8192),
        _extend("512+8192b8", 8, 512, 8192),
        _extend("64+8192", 1, 64, 8192),
        _extend("32+2048b16", 16, 32, 2048),
    ]
)
"""``N+CbB``: B sequences, N new tokens each, C cached before them."""


def kv_bytes(
    lengths: Sequence[int],
    kv_heads: int,
    head_dim: int = HEAD_DIM,
    element_bytes: int = 2,
) -> int:
    """Bytes of K and V that a decode step must read."""
    return sum(lengths) * kv_heads * head_dim * element_bytes * 2


def latent_bytes(lengths: Sequence[int]) -> int:
    """Bytes that a decode step over 16-bit latents must read."""
    return sum(lengths) * 576 * 2


def causal_pairs(new: int, total: int) -> int:
    """Query-key pairs of ``new`` causal queries at the end of ``total`` keys."""
    return new * (total - new) + new * (new + 1) // 2


def prefill_flops(shape: PrefillShape, query_heads: int, head_dim: int = HEAD_DIM) -> int:
    """Multiplications and additions of QK^T and PV, counting only pairs the mask keeps."""
    pairs = sum(map(causal_pairs, shape.new_tokens, shape.total_tokens))
    return 4 * head_dim * query_heads * pairs


def store_bytes(
    tokens: int, kv_heads: int, head_dim: int = HEAD_DIM, element_bytes: int = 2
) -> int:
    """Bytes read plus written when K and V of ``tokens`` tokens are stored once."""
    return tokens * kv_heads * head_dim * element_bytes * 2 * 2
