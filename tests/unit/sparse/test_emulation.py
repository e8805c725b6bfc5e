"""The quality bench decodes many configurations at once; that must be what a server computes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.hysparse.decoding import Episode, decode_logits, read_context
from bicl.attention.cpu import CpuBackend
from bicl.attention.metadata import AttentionMetadata
from bicl.attention.pool import KVPool
from bicl.frontends.transformers import PackedCache, inspect_model, register
from bicl.frontends.transformers.packed import PackedModel
from bicl.sparse.backend import SparseBackend
from bicl.sparse.config import HySparseConfig
from bicl.sparse.index import make_indexes
from bicl.sparse.selection import SelectionRule
from bicl.sparse.sgm import PAGE_GATES, SpatialGate
from bicl.sparse.variants import Choice, DecodeRows, kept_keys

PAGE, LAYERS, STEPS = 64, (1, 2), 64


@pytest.fixture(scope="module")
def model() -> Iterator[LlamaForCausalLM]:
    torch.manual_seed(0)
    with register():
        config = LlamaConfig(
            vocab_size=97,
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=4,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=4096,
            attn_implementation="bicl",
        )
        model = LlamaForCausalLM(config).eval()
        for layer in model.model.layers:  # attention that is not flat, or any choice would do
            layer.self_attn.q_proj.weight.data.mul_(30)
            layer.self_attn.k_proj.weight.data.mul_(30)
        yield model


def served(
    model: LlamaForCausalLM, ids: torch.Tensor, prefix: int, config: HySparseConfig
) -> torch.Tensor:
    """Prefill, then one decode step a token through SparseBackend, as the engine does."""
    layouts = inspect_model(model).layouts(torch.float32, page_size=PAGE, tile=PAGE, swizzle=False)
    pages = -(-len(ids) // PAGE)
    pool = KVPool(layouts, pages + 2, "cpu", fill=float("nan"))
    indexes = make_indexes({n: pool.layers[n] for n in LAYERS}, config.variant, torch.float32)
    call = PackedModel(model, PackedCache(pool, SparseBackend(CpuBackend(), config, indexes)))
    table = torch.arange(pages).flip(0).to(torch.int32)[None] + 2

    def step(begin: int, end: int, sparsity: float) -> torch.Tensor:
        place = torch.arange(begin, end)
        meta = AttentionMetadata(
            page_table=table,
            cache_seqlens=torch.tensor([end], dtype=torch.int32),
            cu_seqlens_q=torch.tensor([0, end - begin], dtype=torch.int32),
            slot_mapping=table[0, place // PAGE].long() * PAGE + place % PAGE,
            max_q=end - begin,
            max_k=end,
            sparsity=torch.tensor([sparsity]),
        )
        return call(ids[begin:end], place, meta, torch.tensor([end - begin - 1]))[0]

    step(0, prefix, config.sparsity_ratio)
    return torch.stack([step(n, n + 1, config.sparsity_ratio) for n in range(prefix, len(ids))])


@pytest.mark.parametrize("variant", ["centroids", "bounds", "gate"])
@pytest.mark.parametrize("prefix", [640, 1000])
def test_the_benchs_decoding_is_what_the_backend_computes_step_by_step(
    model: LlamaForCausalLM, variant: str, prefix: int
) -> None:
    ids = torch.randint(0, 97, (prefix + STEPS,), generator=torch.Generator().manual_seed(prefix))
    ratios = (0.5, 0.8)
    rule = SelectionRule.of(HySparseConfig(floor_tokens=0), PAGE)
    weights = {kind: gate(LAYERS, 64).weights_of(1) for kind, gate in PAGE_GATES.items()}
    sparsity = torch.tensor(ratios).repeat_interleave(STEPS)

    def keep(layer: int, rows: DecodeRows, own: slice) -> torch.Tensor:
        choice = Choice(rule, sparsity[own], weights, SpatialGate(64))
        return kept_keys(variant, rows, choice)

    context = read_context(model, ids[:prefix])
    episode = Episode(prefix, ids[prefix:])
    logits = decode_logits(model, context, [episode], {"own": (len(ratios), keep)}, LAYERS, PAGE)[
        "own"
    ]
    for place, ratio in enumerate(ratios):
        config = HySparseConfig(sparsity_ratio=ratio, floor_tokens=0, variant=variant)
        truth = served(model, ids, prefix, config)
        torch.testing.assert_close(logits[place, 0], truth, atol=1e-3, rtol=1e-3)
    dense = served(model, ids, prefix, HySparseConfig(sparsity_ratio=0.0))
    assert (logits[1, 0] - dense).abs().max() > 0.01, "the choice made no difference"
