"""Contestants: each turns a :class:`PagedBatch` into callables that compute its attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from bench.kernels.arena import PagedBatch
from bicl.attention.pool import LayerCache

__all__ = ["Contestant", "Prepared", "Registry", "Unsupported", "load"]

AttentionCall = Callable[[], torch.Tensor]
StoreCall = Callable[[LayerCache, torch.Tensor, torch.Tensor, torch.Tensor], None]


def _unchanged(out: torch.Tensor) -> torch.Tensor:
    return out


def _nothing() -> None:
    pass


class Unsupported(Exception):
    """The contestant has no way to do this shape; the message says why."""


@dataclass(frozen=True)
class Prepared:
    """A batch as one contestant runs it.

    Attributes:
        calls: one callable a set of pages.
        key_value: K and V ``[length, kv heads, head_dim]`` that sequence ``i`` of the first
            callable reads, for the check against the float32 reference.
        keep: objects that must outlive the calls.
        packed: a call's output as ``[sum(new_tokens), query heads, head_dim]``; untimed.
        settle: called once the calls have been captured, before they are timed or checked.
    """

    calls: Sequence[AttentionCall]
    key_value: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
    keep: object = None
    packed: Callable[[torch.Tensor], torch.Tensor] = _unchanged
    settle: Callable[[], None] = _nothing


@dataclass(frozen=True)
class Contestant:
    """An implementation of one operator.

    Attributes:
        name: as in the result file.
        prepare: raises :class:`Unsupported` for a shape it cannot do.
        paged: reads K and V through a page table, as a server's cache demands.
        ours: False for peers.
        element_bytes: bytes of a stored element.
    """

    name: str
    prepare: Callable[[PagedBatch], Prepared]
    paged: bool = True
    ours: bool = False
    element_bytes: int = 2


@dataclass
class Registry:
    """All contestants that this machine can run, and why others are absent.

    Attributes:
        layer: store of the newest token, then decode.
        mla: decode over latents; prepared from a ``LatentBatch``.
        sm80_decode, sm80_prefill: the path for older cards, forced; measured apart.
        launch, plan: a name, and what makes the callable whose host time counts.
        store: ours; its rivals are torch operators.
    """

    decode: list[Contestant] = field(default_factory=list)
    layer: list[Contestant] = field(default_factory=list)
    prefill: list[Contestant] = field(default_factory=list)
    mla: list[Contestant] = field(default_factory=list)
    sm80_decode: list[Contestant] = field(default_factory=list)
    sm80_prefill: list[Contestant] = field(default_factory=list)
    launch: dict[str, Callable[[PagedBatch], Callable[[], object]]] = field(default_factory=dict)
    plan: dict[str, Callable[[PagedBatch], Callable[[], object]]] = field(default_factory=dict)
    store: StoreCall | None = None
    missing: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)


def load() -> Registry:
    """Import every contestant. A peer that is not installed is listed as missing."""
    from bench.kernels.impls import (
        bicl,
        bicl_latent,
        bicl_token_major,
        flash_attention3,
        flash_mla,
        flashinfer,
        sdpa,
    )

    registry = Registry()
    ours = (bicl, bicl_token_major, bicl_latent)
    for module in (*ours, flashinfer, flash_attention3, flash_mla, sdpa):
        try:
            module.register(registry)
        except ImportError as error:
            registry.missing[module.NAME] = str(error)
    return registry
