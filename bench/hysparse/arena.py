"""One model and a set of configurations, run on the same contexts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from bench.hysparse.decoding import Context, Episode, KeepRows, decode_logits, read_context
from bench.hysparse.model import Model
from bench.hysparse.presses import PressMasks
from bicl.sparse.config import VARIANTS as INDEX_KINDS
from bicl.sparse.config import HySparseConfig
from bicl.sparse.selection import SelectionRule, tiles_by_layer
from bicl.sparse.sgm import PAGE_GATES, Gate, PageGate, make_gate
from bicl.sparse.variants import Choice, DecodeRows, kept_keys

__all__ = ["FITTED", "FLOOR", "PAGE", "SERVED", "Arena"]

PAGE = 64
FLOOR = HySparseConfig.floor_tokens
FITTED, SERVED = " fitted", " served"
"""Behind the name of a variant: with the weights of ``--gate``; with a server's default floor."""


class Arena:
    """One model, one set of configurations, everything that is measured with them."""

    def __init__(
        self,
        model: Model,
        config: HySparseConfig,
        ratios: Sequence[float],
        variants: Sequence[str],
        presses: dict[str, Any],
        fitted: Sequence[Gate],
    ) -> None:
        self.model = model
        self.config = config
        self.ratios = ratios
        self.variants = variants
        self.presses = presses
        self.failures: list[str] = []
        self.rule = SelectionRule.of(config, PAGE)
        self.served = SelectionRule.of(replace(config, floor_tokens=FLOOR), PAGE)
        self.layers = config.sparse_layers(model.depth)
        kinds = {kind: make_gate(kind, self.layers, model.head_dim) for kind in INDEX_KINDS}
        self._start = {kind: gate.to(model.device) for kind, gate in kinds.items()}
        self._fitted = self._start | {gate.kind: gate.to(model.device) for gate in fitted}

    def kept(self, length: int, name: str = "") -> dict[float, int]:
        """Tokens that each ratio keeps of the first decode step after ``length - 1`` tokens."""
        rule = self.served if SERVED in name else self.rule
        tiles = torch.tensor([-(-length // PAGE)], dtype=torch.int32)
        shares = torch.tensor([*self._shares(name).values()])
        kept = {0.0: length}
        for ratio in self.ratios:
            read = tiles_by_layer(tiles, torch.tensor([ratio]), rule, shares).float().mean()
            kept[ratio] = length - int((float(tiles) - float(read)) * PAGE)
        return kept

    def _shares(self, name: str) -> dict[int, float]:
        """Of a ratio, which each layer leaves out: all as much, without a fit."""
        kind = next(k for k in INDEX_KINDS if name.startswith(k)) if FITTED in name else None
        gate = self._fitted.get(kind)
        if not isinstance(gate, PageGate):
            return dict.fromkeys(self.layers, 1.0)
        return {layer: gate.share_of(layer) for layer in self.layers}

    def read(self, ids: torch.Tensor, prefixes: Sequence[int]) -> tuple[Context, PressMasks | None]:
        kept = {
            ratio: {prefix: self.kept(prefix + 1)[ratio] - 1 for prefix in prefixes}
            for ratio in self.ratios
        }
        masks = None
        if self.presses:
            masks = PressMasks(self.presses, self.layers, prefixes, kept, self.failures)
        return read_context(self.model.model, ids, masks), masks

    def decode(
        self, context: Context, masks: PressMasks | None, episodes: Sequence[Episode]
    ) -> dict[tuple[str, float], torch.Tensor]:
        """Logits ``[episodes, R, vocabulary]`` by name and ratio; dense is ``("dense", 0.0)``."""
        rows = len(episodes) * len(episodes[0].ids)
        choices: dict[str, tuple[int, KeepRows]] = {"dense": (1, _keep_all)}
        for name in self.variants:
            choices[name] = (len(self.ratios), self._variant(name, rows))
        result = {}
        logits = self._run(context, episodes, choices)
        result["dense", 0.0] = logits.pop("dense")[0]
        for name, own in logits.items():
            result |= {(name, ratio): own[i] for i, ratio in enumerate(self.ratios)}
        choices = {
            f"kvpress {name}": (len(self.ratios), masks.keep(name, rows))
            for name in self.presses
            if masks
        }
        for name, own in (self._run(context, episodes, choices) if choices else {}).items():
            result |= {(name, ratio): own[i] for i, ratio in enumerate(self.ratios)}
        return result

    def _run(
        self,
        context: Context,
        episodes: Sequence[Episode],
        choices: dict[str, tuple[int, KeepRows]],
    ) -> dict[str, torch.Tensor]:
        return decode_logits(self.model.model, context, episodes, choices, self.layers, PAGE)

    def _variant(self, name: str, rows: int) -> KeepRows:
        sparsity = torch.tensor(self.ratios, device=self.model.device).repeat_interleave(rows)
        shares = self._shares(name)
        gates = self._fitted if name.endswith(FITTED) else self._start
        rule = self.served if SERVED in name else self.rule

        def keep(layer: int, shown: DecodeRows, own: slice) -> torch.Tensor:
            choice = Choice(
                rule,
                sparsity[own] * shares[layer],
                {kind: gates[kind].weights_of(layer) for kind in PAGE_GATES},
                gates["gate"],
                self.config.combine,
                dtype=torch.bfloat16,
                seed=layer * 1_000_003 + own.start,
            )
            return kept_keys(_variant_of(name), shown, choice)

        return keep


def _variant_of(name: str) -> str:
    return name.removesuffix(FITTED).removesuffix(SERVED)


def _keep_all(layer: int, rows: DecodeRows, own: slice) -> torch.Tensor:
    seen = torch.arange(len(rows.key), device=rows.key.device) < rows.shared[:, None]
    return seen[:, None].expand(-1, rows.num_kv_heads, -1)
