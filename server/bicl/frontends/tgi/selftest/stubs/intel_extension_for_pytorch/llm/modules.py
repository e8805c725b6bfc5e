"""Mixture of experts, one expert at a time."""

import torch
from torch.nn.functional import silu


class GatedMLPMOE:
    """``W13``: gate and up projections ``[experts, 2 * inner, hidden]``; ``W2``: down."""

    def __init__(self, *, W13, W2, use_prepack):
        self.gate_up, self.down = W13, W2

    def __call__(
        self,
        *,
        hidden_states,
        router_logits,
        top_k,
        renormalize,
        use_grouped_topk,
        num_expert_group=None,
        topk_group=None,
        scoring_func="softmax",
        e_score_correction_bias=None,
    ):
        by_sigmoid = scoring_func == "sigmoid"
        logits = router_logits.float()
        shares = choice = logits.sigmoid() if by_sigmoid else logits.softmax(-1)
        if e_score_correction_bias is not None:
            choice = shares + e_score_correction_bias
        if use_grouped_topk:
            choice = _best_groups(choice, num_expert_group, topk_group, 2 if by_sigmoid else 1)
        experts = choice.topk(top_k, dim=-1).indices
        weights = shares.gather(1, experts)
        if renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(hidden_states)
        for expert in experts.unique().tolist():
            rows, places = (experts == expert).nonzero(as_tuple=True)
            gate, up = (hidden_states[rows] @ self.gate_up[expert].T).chunk(2, dim=-1)
            result = (silu(gate) * up) @ self.down[expert].T
            out.index_add_(0, rows, result * weights[rows, places, None].to(result.dtype))
        return out


def _best_groups(shares, count, kept, looked_at):
    """Zero for the experts of all groups but those with the best one or two together."""
    grouped = shares.view(shares.shape[0], count, -1)
    best = grouped.topk(looked_at, dim=-1).values.sum(-1).topk(kept, dim=-1).indices
    mask = torch.zeros(grouped.shape[:2], dtype=torch.bool).scatter_(1, best, True)
    return grouped.masked_fill(~mask[..., None], 0.0).flatten(1)
