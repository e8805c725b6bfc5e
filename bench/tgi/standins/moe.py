"""Mixtures of experts for small models: every expert computes every token, and graphs record it."""

import torch


def fused_topk(hidden_states, gating_output, topk, renormalize):
    return _chosen(gating_output.float().softmax(-1), None, topk, renormalize)


def grouped_topk(
    hidden_states, gating_output, topk, renormalize, num_expert_group, topk_group,
    scoring_func="softmax", e_score_correction_bias=None,
):  # fmt: skip
    by_sigmoid = scoring_func == "sigmoid"
    logits = gating_output.float()
    shares = logits.sigmoid() if by_sigmoid else logits.softmax(-1)
    choice = shares if e_score_correction_bias is None else shares + e_score_correction_bias
    groups = choice.view(choice.shape[0], num_expert_group, -1)
    best = groups.topk(2 if by_sigmoid else 1, dim=-1).values.sum(-1)
    kept = torch.zeros_like(best).scatter(1, best.topk(topk_group, dim=-1).indices, 1.0)
    choice = (groups * kept[..., None]).flatten(1)
    return _chosen(shares, choice, topk, renormalize)


def _chosen(shares, choice, topk, renormalize):
    experts = (shares if choice is None else choice).topk(topk, dim=-1).indices
    weights = shares.gather(1, experts)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, experts


def fused_experts(hidden_states, w1, w2, topk_weights, topk_ids, **options):
    shares = torch.zeros(hidden_states.shape[0], w1.shape[0], device=hidden_states.device)
    shares = shares.scatter(1, topk_ids, topk_weights.float()).to(hidden_states.dtype)
    gate, up = torch.einsum("th,eih->tei", hidden_states, w1).chunk(2, dim=-1)
    inner = torch.nn.functional.silu(gate) * up * shares[..., None]
    return torch.einsum("tei,ehi->th", inner, w2)
