"""One model and a set of configurations, run on the same contexts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from bench.hysparse.compaction import COMPACT, compaction
from bench.hysparse.decoding import (
    Context,
    Episode,
    KeepRows,
    Scored,
    decode_scored,
    read_context,
)
from bench.hysparse.model import Model
from bench.hysparse.presses import PressMasks
from bicl.sparse.config import VARIANTS as INDEX_KINDS
from bicl.sparse.config import HySparseConfig
from bicl.sparse.policy import KIND_RULES
from bicl.sparse.selection import SelectionRule, tiles_by_layer
from bicl.sparse.sgm import PAGE_GATES, Gate, PageGate, make_gate
from bicl.sparse.variants import Choice, DecodeRows, kept_keys

__all__ = ["FLOOR", "PAGE", "Arena", "Key", "Setup"]

PAGE = 64
SMALL_PAGES = "pages-32"
FLOOR = HySparseConfig.floor_tokens
Key = tuple[str, float]
"""Name and ratio of a configuration; dense is ``("dense", 0.0)``."""


@dataclass(frozen=True)
class Setup:
    """A variant, and how it is run; by name for instance ``centroids served fitted``.

    Attributes:
        variant: of :mod:`bicl.sparse.variants`, or ``compact``: what ``--hysparse-mode compact``
            drops of a context, once.
        floor: with a server's default floor (``floor``, ``served``), else without any.
        kinds: a ratio is what a text of that kind gets of it, as a server with
            ``--hysparse-text-kind auto`` has it (``served``), else the same for all.
        fitted: with the weights and the layers' shares of ``--gate``.
        page: tokens of a page; windows are of 64 tokens in either case.
    """

    variant: str
    floor: bool = False
    kinds: bool = False
    fitted: bool = False
    page: int = PAGE

    @classmethod
    def of(cls, name: str) -> Setup:
        variant, *words = name.split(" ")
        if unknown := set(words) - {"floor", "served", "fitted", SMALL_PAGES}:
            raise ValueError(
                f"{name!r}: {', '.join(unknown)} is none of floor, served, fitted, {SMALL_PAGES}"
            )
        served = "served" in words
        page = PAGE // 2 if SMALL_PAGES in words else PAGE
        return cls(variant, served or "floor" in words, served, "fitted" in words, page)

    def ratio(self, ratio: float, text_kind: str) -> float:
        """What of ``ratio`` a text of a kind gets."""
        return ratio * KIND_RULES[text_kind].share if self.kinds else ratio


class Arena:
    """One model, one set of configurations, everything that is measured with them.

    Args:
        variants: names of :class:`Setup`, each at all ``ratios``.
        presses: of kvpress, at ``press_ratios``.
        fitted: gates, at most one of each kind.
    """

    def __init__(
        self,
        model: Model,
        config: HySparseConfig,
        ratios: Sequence[float],
        variants: Sequence[str],
        presses: dict[str, Any],
        press_ratios: Sequence[float],
        fitted: Sequence[Gate],
    ) -> None:
        self.model = model
        self.config = config
        self.ratios = tuple(ratios)
        self.setups = {name: Setup.of(name) for name in variants}
        self.presses = presses
        self.press_ratios = tuple(press_ratios)
        self.failures: list[str] = []
        self.layers = config.sparse_layers(model.depth)
        self._rules = {
            (floor, page): SelectionRule.of(
                replace(config, floor_tokens=FLOOR if floor else 0), page
            )
            for floor in (False, True)
            for page in {PAGE, *(setup.page for setup in self.setups.values())}
        }
        kinds = {kind: make_gate(kind, self.layers, model.head_dim) for kind in INDEX_KINDS}
        start = {kind: gate.to(model.device) for kind, gate in kinds.items()}
        own = start | {gate.kind: gate.to(model.device) for gate in fitted}
        self._gates = {False: start, True: own}

    def configurations(self) -> list[Key]:
        """All configurations."""
        ours = [(name, ratio) for name in self.setups for ratio in self.ratios]
        theirs = [(f"kvpress {name}", r) for name in self.presses for r in self.press_ratios]
        return [("dense", 0.0), *ours, *theirs]

    def kept(self, key: Key, length: int, text_kind: str) -> float:
        """Tokens that a sparse layer reads, on average over the layers, in a decode step at the
        end of ``length`` tokens."""
        name, ratio = key
        if name == "dense":
            return float(length)
        setup = self.setups.get(name, Setup(name))
        tiles = torch.tensor([-(-length // setup.page)], dtype=torch.int32)
        sparsity = torch.tensor([setup.ratio(ratio, text_kind)])
        shares = torch.tensor([*self._shares(setup).values()])
        rule = self._rules[setup.floor, setup.page]
        read = tiles_by_layer(tiles, sparsity, rule, shares).float().mean()
        return length - (float(tiles) - float(read)) * setup.page

    def read(self, ids: torch.Tensor, prefixes: Sequence[int]) -> tuple[Context, PressMasks | None]:
        masks = None
        if self.presses:
            rule = self._rules[False, PAGE]
            kept = {
                ratio: {prefix: _tokens_read(rule, ratio, prefix + 1) - 1 for prefix in prefixes}
                for ratio in self.press_ratios
            }
            masks = PressMasks(self.presses, self.layers, prefixes, kept, self.failures)
        return read_context(self.model.model, ids, masks), masks

    def decode(
        self,
        context: Context,
        masks: PressMasks | None,
        episodes: Sequence[Episode],
        targets: torch.Tensor,
        text_kind: str,
    ) -> tuple[list[Key], torch.Tensor, torch.Tensor]:
        """Every configuration in one pass.

        Args:
            targets: int64 ``[episodes, R]``, the tokens that follow.

        Returns:
            The configurations; losses and whether the target was the likeliest token, each
            ``[configurations, episodes, R]`` on the CPU.
        """
        rows = len(episodes) * len(episodes[0].ids)
        choices: dict[str, tuple[int, KeepRows | None]] = {"dense": (1, None)}
        for name, setup in self.setups.items():
            choices[name] = (len(self.ratios), self._keep(setup, context, rows, text_kind))
        for name in self.presses:
            if masks:
                own = (len(self.press_ratios), masks.keep(name, rows))
                choices[f"kvpress {name}"] = own
        scored: dict[str, Scored] = decode_scored(
            self.model.model, context, episodes, targets, choices, self.layers, PAGE
        )
        losses = torch.cat([own.loss for own in scored.values()]).cpu()
        return (
            self.configurations(),
            losses,
            torch.cat([own.right for own in scored.values()]).cpu(),
        )

    def _shares(self, setup: Setup) -> dict[int, float]:
        """Of a ratio, which each layer leaves out: all as much, without a fit."""
        gate = self._gates[setup.fitted].get(setup.variant)
        if not isinstance(gate, PageGate):
            return dict.fromkeys(self.layers, 1.0)
        return {layer: gate.share_of(layer) for layer in self.layers}

    def _keep(self, setup: Setup, context: Context, rows: int, text_kind: str) -> KeepRows:
        ratios = [setup.ratio(ratio, text_kind) for ratio in self.ratios]
        if setup.variant == COMPACT:
            return compaction(context, ratios, self._rules[setup.floor, setup.page], rows)
        sparsity = torch.tensor(ratios, device=self.model.device).repeat_interleave(rows)
        shares = self._shares(setup)
        gates = self._gates[setup.fitted]

        def keep(layer: int, shown: DecodeRows, own: slice) -> torch.Tensor:
            choice = Choice(
                self._rules[setup.floor, setup.page],
                sparsity[own] * shares[layer],
                {kind: gates[kind].weights_of(layer) for kind in PAGE_GATES},
                gates["gate"],
                self.config.combine,
                dtype=torch.bfloat16,
                seed=layer * 1_000_003 + own.start,
            )
            return kept_keys(setup.variant, shown, choice)

        return keep


def _tokens_read(rule: SelectionRule, ratio: float, length: int) -> int:
    """By the first decode step after ``length - 1`` tokens."""
    tiles = torch.tensor([-(-length // PAGE)], dtype=torch.int32)
    read = rule.tiles_to_keep(tiles, torch.tensor([ratio]))
    return length - int(tiles - read) * PAGE
