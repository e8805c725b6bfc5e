"""HySparse in the engine on a GPU: CUDA kernels, decode through CUDA graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.driving import generate, request, running
from support.tiny_models import byte_tokenizer, tiny_model

from bicl.frontends.http.loader import LoadedModel, describe
from bicl.frontends.http.request import SparseOptions
from bicl.frontends.transformers import register
from bicl.sparse.config import HySparseConfig
from bicl.sparse.guard import GuardBounds

pytestmark = pytest.mark.gpu

CONFIG = HySparseConfig(
    text_kind="off", layers="0-2/3", floor_tokens=128, sparsity_ratio=0.6, min_skipped_mb=0
)
COMPACT = HySparseConfig(
    text_kind="off", layers="1-2/3", floor_tokens=128, sparsity_ratio=0.6, mode="compact"
)
BOUNDS = GuardBounds(shadow_interval=8, min_mass_kept=0.0)
SIZES = {"max_total_tokens": 1000, "max_batch_size": 4, "max_batch_prefill_tokens": 4000}
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    register()
    model = tiny_model("llama", "bicl", head_dim=128).to("cuda", torch.bfloat16)
    return describe(model, byte_tokenizer(), model_id="llama", sha="tiny")


def prompt(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(4, 260, (length,), generator=generator).tolist()


def answers(loaded: LoadedModel, ratio: float | None = None, **options):
    with running(loaded, **{**SIZES, "guard": BOUNDS, **options}) as engine:
        wish = SparseOptions(sparsity_ratio=ratio)
        prompts = [prompt(length) for length in (100, 450, 600, 900)]
        results = generate(engine, *[request(p, NEW_TOKENS, sparse=wish) for p in prompts])
        return results, engine.snapshot()


def facts(results) -> list[list[tuple[int, float]]]:
    return [[(t.token.id, t.token.logprob) for t in result.tokens] for result in results]


@pytest.mark.parametrize("config", [CONFIG, COMPACT], ids=["select", "compact"])
def test_graphs_give_the_bits_of_eager_decode(loaded, config) -> None:
    """(A60)"""
    graphs, stats = answers(loaded, hysparse=config)
    assert stats.graph_misses == 0
    assert stats.sparse.tiles_skipped > 0
    eager, _ = answers(loaded, hysparse=config, cuda_graphs=False)
    assert facts(graphs) == facts(eager)
    assert [r.done.usage.sparse.tiles_read for r in graphs] == [
        r.done.usage.sparse.tiles_read for r in eager
    ]


@pytest.mark.parametrize("config", [CONFIG, COMPACT], ids=["select", "compact"])
def test_requests_that_wish_for_none_have_the_bits_of_a_dense_server(loaded, config) -> None:
    """(A57)"""
    dense, _ = answers(loaded)
    none, stats = answers(loaded, 0.0, hysparse=config)
    assert facts(none) == facts(dense)
    assert stats.sparse.tiles_skipped == 0


def test_a_sound_index_is_never_called_wrong(loaded) -> None:
    """Rows computed again have the same bits, whichever kernel wrote them first."""
    for dtype in (None, torch.float8_e4m3fn):
        results, stats = answers(loaded, hysparse=CONFIG, kv_dtype=dtype)
        assert stats.sparse.shadow_steps > 0
        assert stats.sparse.stale_pages == 0
        assert all(r.done.usage.sparse.fallback == "" for r in results)


def test_rows_beside_prefill_chunks_leave_tiles_out_too(loaded) -> None:
    """Two attention calls a layer, one of them over a choice of pages."""
    results, stats = answers(loaded, hysparse=CONFIG, max_batch_prefill_tokens=300)
    whole, all_stats = answers(loaded, hysparse=CONFIG)
    assert stats.sparse.rows == all_stats.sparse.rows
    assert stats.sparse.tiles_skipped == all_stats.sparse.tiles_skipped
    assert stats.sparse.stale_pages == 0
    assert [len(r.ids) for r in results] == [len(r.ids) for r in whole]


def test_a_bad_index_is_noticed_between_graphs(loaded) -> None:
    with running(loaded, **SIZES, guard=BOUNDS, hysparse=CONFIG) as engine:
        generate(engine, request(prompt(600), 2))
        for index in engine._runner.shadow.sparse.indexes.values():
            index.vectors.zero_()
        torch.cuda.synchronize()
        (result,) = generate(engine, request(prompt(600), NEW_TOKENS))
        assert engine.snapshot().sparse.fallbacks == {"index": 1}
        (after,) = generate(engine, request(prompt(600), NEW_TOKENS))
    assert result.done.usage.sparse.fallback == "index"
    assert after.done.usage.sparse.fallback == ""


def test_requests_this_small_are_dense_unless_told_otherwise(loaded) -> None:
    """The bits and the graphs of a dense server."""
    dense, _ = answers(loaded)
    small, stats = answers(loaded, hysparse=replace(CONFIG, min_skipped_mb=32))
    assert facts(small) == facts(dense)
    assert (stats.graph_misses, stats.sparse.tiles_skipped) == (0, 0)
    assert set(stats.sparse.rows) == {"short", "little"}


def test_compact_pages_of_fp8_serve(loaded) -> None:
    results, stats = answers(loaded, hysparse=COMPACT, kv_dtype=torch.float8_e4m3fn)
    assert stats.sparse.compactions == 3
    assert all(len(r.ids) == NEW_TOKENS for r in results)


def test_what_compact_layers_gave_up_comes_back_from_host_memory(loaded) -> None:
    options = {**SIZES, "guard": BOUNDS, "hysparse": COMPACT, "host_cache_bytes": 256 << 20}
    prompts = [prompt(length) for length in (450, 600, 900)]
    with running(loaded, **options) as engine:
        first = generate(engine, *[request(each, NEW_TOKENS) for each in prompts])
        assert engine._tiers.settle(30)
        manager = engine._scheduler.manager
        with engine._lock:
            for group in (manager, manager.group):
                group._prefixes.evict(group.usable_pages)
        for layer in engine._runner.pool.layers:
            layer.pages.fill_(torch.nan)
        second = generate(engine, *[request(each, NEW_TOKENS) for each in prompts])
        stats = engine.snapshot()
    assert [r.ids for r in second] == [r.ids for r in first]
    assert [r.done.usage.cached_host_tokens for r in second] == [384, 512, 832]
    assert stats.sparse.compactions == 6
    assert stats.tiers.dropped_saves == 0


def test_rows_that_always_read_more_newest_windows_serve(loaded) -> None:
    config = replace(CONFIG, text_kind="legal", kind_rules="legal=1:4")
    results, stats = answers(loaded, hysparse=config)
    plain, before = answers(
        loaded, hysparse=replace(CONFIG, text_kind="legal", kind_rules="legal=1")
    )
    assert all(len(r.ids) == NEW_TOKENS for r in results)
    assert stats.sparse.tiles_skipped == before.sparse.tiles_skipped > 0
    assert facts(results) != facts(plain)
    assert not stats.sparse.fallbacks
