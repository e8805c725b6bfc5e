"""A step of decode rows and prefill rows, taken apart: only the first can leave pages out."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bicl.attention.metadata import AttentionMetadata

__all__ = ["MixedStep", "divide"]


@dataclass(frozen=True)
class MixedStep:
    """Both parts of a step. ``num_decodes``: query rows, and sequences, of the first."""

    num_decodes: int
    decodes: AttentionMetadata
    rest: AttentionMetadata


def divide(meta: AttentionMetadata) -> MixedStep:
    """The step's first ``num_decodes`` sequences, of one query each, and the others."""
    n = meta.num_decodes
    decodes = replace(
        meta,
        page_table=meta.page_table[:n],
        cache_seqlens=meta.cache_seqlens[:n],
        cu_seqlens_q=meta.cu_seqlens_q[: n + 1],
        slot_mapping=meta.slot_mapping[:n],
        max_q=1,
        sparsity=None if meta.sparsity is None else meta.sparsity[:n],
        keep=None if meta.keep is None else meta.keep[:n],
        num_decodes=0,
    )
    rest = replace(
        meta,
        page_table=meta.page_table[n:],
        cache_seqlens=meta.cache_seqlens[n:],
        cu_seqlens_q=meta.cu_seqlens_q[n:] - n,
        slot_mapping=meta.slot_mapping[n:],
        sparsity=None,
        keep=None,
        num_decodes=0,
    )
    return MixedStep(n, decodes, rest)
