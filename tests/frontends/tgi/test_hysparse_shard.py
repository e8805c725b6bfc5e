"""HySparse in a shard: the deployment's ratio, what it counts, and the way back."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from bicl.errors import ConfigError
from bicl.frontends.tgi import attention as attention_module
from bicl.frontends.tgi.attention import paged_attention
from bicl.frontends.tgi.config import OverlayConfig
from bicl.frontends.tgi.hysparse import ShardSparsity, watch
from bicl.frontends.tgi.kv_cache import KVCache, KVScales
from bicl.sparse.config import HySparseConfig
from bicl.sparse.gate_file import GATE_NAME, save_gate
from bicl.sparse.guard import GuardBounds
from bicl.sparse.sgm import CentroidGate

ONE = torch.ones(())
SCALES = KVScales(ONE, ONE)
HEADS, DIM, LAYERS, PAGES = 2, 64, 3, 12
CONFIG = HySparseConfig(layers="1-2/3", floor_tokens=128, sparsity_ratio=0.5)
BOUNDS = GuardBounds(shadow_interval=4, min_mass_kept=0.0)


class Shard:
    """A model of TGI's shape: layers' caches, and a decode step over them."""

    model_id = "org/model"
    num_layers = LAYERS
    dtype = torch.float32
    tokenizer = SimpleNamespace(chat_template=None)

    def __init__(self) -> None:
        self.cuda_graphs: dict[int, Any] = {}
        self.graphs_seen: list[dict[int, Any]] = []
        self.generator = torch.Generator().manual_seed(1)
        self.init_kv_cache()

    def init_kv_cache(self) -> None:
        self.kv_cache = [
            KVCache(
                num_blocks=2 * PAGES,
                num_heads=HEADS,
                head_size=DIM,
                dtype=torch.float32,
                device=torch.device("cpu"),
            )
            for _ in range(LAYERS)
        ]

    def cuda_graph_warmup(self, size: int) -> None:
        ratios = attention_module.shard_sparsity().ratios(size)
        self.cuda_graphs[size] = "dense" if ratios is None else "sparse"

    def fill(self, tables: list[list[int]], lengths: list[int]) -> None:
        for table, length in zip(tables, lengths, strict=True):
            token = torch.arange(length)
            slots = torch.tensor(table)[token // 64] * 64 + token % 64
            for cache in self.kv_cache:
                rows = torch.randn(length, HEADS, DIM, generator=self.generator) * 2
                cache.store(key=rows, value=rows, slots=slots, kv_scales=SCALES)

    def generate_token(self, batch: Any) -> list[torch.Tensor]:
        """The next token of each row, in every layer."""
        self.graphs_seen.append(self.cuda_graphs)
        rows = len(batch.cache_lengths)
        lengths = torch.tensor(batch.cache_lengths, dtype=torch.int32)
        new = torch.ones(rows, dtype=torch.int32)
        seqlen = SimpleNamespace(
            input_lengths=new,
            cache_lengths=lengths,
            cu_seqlen_q=torch.arange(rows + 1, dtype=torch.int32),
            max_q=1,
            max_k=int(lengths.max()) + 1,
        )
        table = torch.tensor(batch.block_tables, dtype=torch.int32)
        places = zip(batch.block_tables, batch.cache_lengths, strict=True)
        slots = torch.tensor([table[n // 64] * 64 + n % 64 for table, n in places])
        outputs = []
        for cache in self.kv_cache:
            key, value = torch.randn(2, rows, HEADS, DIM, generator=self.generator)
            query = torch.randn(rows, 2 * HEADS, DIM, generator=self.generator)
            cache.store(key=key, value=value, slots=slots, kv_scales=SCALES)
            outputs.append(
                paged_attention(
                    query,
                    cache,
                    table,
                    DIM**-0.5,
                    table,
                    seqlen,
                    seqlen.max_k,
                    kv_scales=SCALES,
                )
            )
        batch.cache_lengths = [n + 1 for n in batch.cache_lengths]
        return outputs


def batch(lengths: tuple[int, ...] = (640, 100)) -> Any:
    tables = [list(range(PAGES)), list(range(PAGES, 2 * PAGES))][: len(lengths)]
    return SimpleNamespace(
        prefilling=False,
        cache_lengths=list(lengths),
        input_lengths=[1] * len(lengths),
        block_tables=tables,
    )


def served(sparsity: ShardSparsity | None, monkeypatch: pytest.MonkeyPatch) -> Shard:
    monkeypatch.setattr(attention_module, "shard_sparsity", lambda: sparsity)
    shard = Shard()
    if sparsity is not None:
        sparsity.layers = CONFIG.sparse_layers(LAYERS)
        sparsity.attach(shard)
        sparsity.capture(shard, shard.cuda_graph_warmup, 2)
    shard.fill(batch().block_tables, batch().cache_lengths)
    return shard


@pytest.fixture
def sparsity() -> ShardSparsity:
    return ShardSparsity(CONFIG, BOUNDS, page_size=64)


@pytest.fixture
def shard(sparsity: ShardSparsity, monkeypatch: pytest.MonkeyPatch) -> Shard:
    return served(sparsity, monkeypatch)


def step(sparsity: ShardSparsity, shard: Shard, rows: Any) -> list[torch.Tensor]:
    return sparsity.step(shard, rows, Shard.generate_token)


def test_long_rows_leave_tiles_out_in_the_sparse_layers_only(sparsity, shard, monkeypatch) -> None:
    rows = batch()
    got = step(sparsity, shard, rows)
    plain = served(None, monkeypatch)
    expected = plain.generate_token(batch())
    assert torch.equal(got[0], expected[0])
    for layer in (1, 2):
        assert not torch.allclose(got[layer][0], expected[layer][0])
        assert torch.allclose(got[layer][1], expected[layer][1], atol=1e-5)  # short: dense
    # 641 tokens are 11 tiles, of which 5 are left out; 101 are 2.
    assert sparsity.counters.tiles_skipped == 5 * 2
    assert sparsity.counters.tiles_read == (6 + 2) * 2


def test_every_fourth_step_runs_outside_its_graph_and_is_measured(sparsity, shard) -> None:
    rows = batch()
    for _ in range(9):
        step(sparsity, shard, rows)
    assert [not graphs for graphs in shard.graphs_seen] == [n % 4 == 0 for n in range(9)]
    assert shard.cuda_graphs == {2: "sparse"}
    assert sparsity.counters.shadow_steps == 3
    assert sparsity.counters.stale_pages == 0
    assert sparsity.fallback == ""


def test_steps_without_anything_to_leave_out_are_never_measured(sparsity, shard) -> None:
    rows = batch((100,))
    for _ in range(9):
        step(sparsity, shard, rows)
    assert sparsity.counters.shadow_steps == 0
    assert shard.graphs_seen == [{2: "dense"}] * 9


def test_steps_that_would_save_too_little_are_dense(sparsity, shard, monkeypatch) -> None:
    sparsity._least_skipped = 6  # 641 tokens could leave 5 tiles out
    got = step(sparsity, shard, batch())
    expected = served(None, monkeypatch).generate_token(batch())
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)
    assert shard.graphs_seen == [{2: "dense"}]
    assert shard.cuda_graphs == {2: "sparse"}
    counted = sparsity.counters
    assert (counted.little_steps, counted.tiles_skipped, counted.tiles_read) == (1, 0, 13 * 2)


def test_a_bad_index_sends_the_whole_shard_back_to_the_full_cache(
    sparsity, shard, monkeypatch, caplog
) -> None:
    """(A60)"""
    rows = batch()
    step(sparsity, shard, rows)
    for index in sparsity._backend.sparse.indexes.values():
        index.vectors.zero_()
    for _ in range(4):
        step(sparsity, shard, rows)
    assert sparsity.fallback == "index"
    assert "full cache from now on (index" in caplog.text
    assert sparsity.counters.fallbacks == 1
    assert not sparsity.ratios(8).any()
    skipped = sparsity.counters.tiles_skipped
    state = shard.generator.get_state()
    got = step(sparsity, shard, rows)
    assert sparsity.counters.tiles_skipped == skipped
    for cache in shard.kv_cache:
        cache.backend = sparsity._backend.sparse.inner
    shard.generator.set_state(state)
    rows.cache_lengths = [n - 1 for n in rows.cache_lengths]
    expected = shard.generate_token(rows)
    for one, other in zip(got, expected, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_lost_attention_sends_it_back_too(monkeypatch) -> None:
    sparsity = ShardSparsity(CONFIG, GuardBounds(min_mass_kept=0.999), page_size=64)
    step(sparsity, served(sparsity, monkeypatch), batch())
    assert sparsity.fallback == "mass"


def test_ratios_keep_their_address_for_captured_graphs(sparsity, shard) -> None:
    before = sparsity.ratios(4).data_ptr()
    shard.init_kv_cache()
    sparsity.attach(shard)
    assert sparsity.ratios(7).data_ptr() == before
    with pytest.raises(RuntimeError, match="decode batch of 5000 rows"):
        sparsity.ratios(5000)


def test_the_index_is_part_of_the_memory_that_pages_cost(sparsity, shard) -> None:
    """Two of three layers: for each head eight rows of 32 bytes, and six bytes each."""
    record, page = HEADS * 8 * (DIM // 2 + 6), HEADS * 2 * 64 * DIM * 4
    assert sparsity.index_share == pytest.approx(1 / (1 + 2 / 3 * record / page))


def test_watching_wraps_decode_and_new_pages_and_leaves_prefill_alone(sparsity) -> None:
    calls = []

    class Model:
        def init_kv_cache(self) -> None:
            calls.append("pages")

        def generate_token(self, rows: Any) -> str:
            calls.append("token")
            return "done"

        def cuda_graph_warmup(self, size: int) -> None:
            calls.append(f"graph of {size}")

    sparsity.attach = lambda model: calls.append("index")
    sparsity.step = lambda model, rows, run: run(model, rows)
    watch(Model, sparsity)
    model = Model()
    model.init_kv_cache()
    assert model.generate_token(SimpleNamespace(prefilling=True)) == "done"
    assert model.generate_token(SimpleNamespace(prefilling=False)) == "done"
    model.cuda_graphs = {}
    model.init_kv_cache()
    model.cuda_graph_warmup(4)
    again = ["pages", "index", "graph of 4", "graph of 4"]
    assert calls == ["pages", "index", "token", "token", *again]


@pytest.mark.parametrize(
    ("changes", "drafts", "part"),
    [
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, 0, "awq weights"),
        ({}, 2, "speculation"),
        ({"sliding_window": 4096}, 0, "sliding window"),
    ],
    ids=["awq", "speculation", "window"],
)
def test_a_loaded_model_is_refused_by_name(
    sparsity, monkeypatch, changes: dict[str, Any], drafts: int, part: str
) -> None:
    """(A60)"""
    told_drafts(monkeypatch, drafts)
    model = SimpleNamespace(
        model_id="org/model",
        num_layers=LAYERS,
        tokenizer=SimpleNamespace(chat_template=None),
        config=SimpleNamespace(to_dict=lambda: {"num_hidden_layers": LAYERS} | changes),
    )
    with pytest.raises(ConfigError, match=part):
        sparsity.check(model)


def test_a_gate_beside_the_model_judges_its_pages(
    sparsity: ShardSparsity, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told_drafts(monkeypatch, 0)
    gate = CentroidGate(CONFIG.sparse_layers(LAYERS), DIM)
    with torch.no_grad():
        gate.weights.fill_(0.5)
    save_gate(tmp_path / GATE_NAME, gate)
    shard = Shard()
    shard.model_id = str(tmp_path)
    sparsity.check(shard)
    sparsity.attach(shard)
    indexes = shard.kv_cache[0].backend.sparse.indexes
    assert [float(index.weights.mean()) for index in indexes.values()] == [0.5, 0.5]


def told_drafts(monkeypatch: pytest.MonkeyPatch, drafts: int) -> None:
    """What TGI's own module says of speculation."""
    module = ModuleType("text_generation_server.utils.speculate")
    module.get_speculate = lambda: drafts
    for name in ("text_generation_server", "text_generation_server.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)


def test_the_environment_says_it_all() -> None:
    found = OverlayConfig.from_environment(
        {"BICL_ENABLE_HYSPARSE": "1", "BICL_HYSPARSE_SPARSITY_RATIO": "0.7"}
    )
    assert found.hysparse == HySparseConfig(sparsity_ratio=0.7)
    assert found.block_size == 32  # nobody looked at the model, nobody asked
    asked = {"BICL_ENABLE_HYSPARSE": "1", "BICL_BLOCK_SIZE": "64"}
    assert OverlayConfig.from_environment(asked).block_size == 64
    assert OverlayConfig.from_environment({}).block_size == 64
    with pytest.raises(ConfigError, match="needs --enable-hysparse"):
        OverlayConfig.from_environment({"BICL_HYSPARSE_MAX_K": "9"})
