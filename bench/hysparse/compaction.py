"""What ``--hysparse-mode compact`` keeps of a context, by the code that serves.

Unlike the variants it drops tokens once, when the context has been read, as a press does: what a
later question would have looked at may be gone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bench.hysparse.decoding import Context, KeepRows
from bicl.sparse.compact import OBSERVED, choose_tokens, token_scores, tokens_to_keep
from bicl.sparse.selection import SelectionRule
from bicl.sparse.variants import DecodeRows

__all__ = ["COMPACT", "compaction"]

COMPACT = "compact"


def compaction(
    context: Context, ratios: Sequence[float], rule: SelectionRule, rows: int
) -> KeepRows:
    """The tokens of ``context`` that each KV head keeps.

    Args:
        ratios: that are left out, one a configuration, each of ``rows`` decode rows.
    """
    total = len(context.ids)
    kept_at: dict[int, torch.Tensor] = {}

    def choose(layer: int, scale: float) -> torch.Tensor:
        """bool ``[ratios, H, T]``."""
        key = context.keys[layer]
        newest = context.queries[layer][-OBSERVED:]
        scores, _ = token_scores(newest, key, scale=scale)
        kept = torch.zeros(len(ratios), *scores.shape, dtype=torch.bool, device=key.device)
        for place, ratio in enumerate(ratios):
            number = tokens_to_keep(total, ratio, rule)
            kept[place].scatter_(1, choose_tokens(scores, number, rule).long(), True)
        return kept

    def keep(layer: int, shown: DecodeRows, own: slice) -> torch.Tensor:
        if layer not in kept_at:
            kept_at[layer] = choose(layer, shown.scale)
        which = torch.arange(own.start, own.stop, device=shown.key.device) // rows
        return kept_at[layer][which]

    return keep
