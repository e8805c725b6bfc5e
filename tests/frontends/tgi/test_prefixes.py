"""What becomes of a request's cached prefix where its batch enters the shard."""

from __future__ import annotations

import socket
import sys
import urllib.request
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from bicl.cache.tiers import HostMover, PageTiers
from bicl.errors import ConfigError
from bicl.frontends.tgi import prefixes
from bicl.frontends.tgi.config import OverlayConfig
from bicl.frontends.tgi.tiers import ShardTiers

PAGE = 64


class FakeRequest(SimpleNamespace):
    def HasField(self, name: str) -> bool:
        return hasattr(self, name)


class Criteria:
    """TGI keeps one for each request, through every filter and merge."""


class FakeBatch:
    """The part of TGI's batch that the wrapper looks at."""

    @classmethod
    def from_tokenized(cls, pb: Any, tokenizer: Any, inputs: Any, dtype: Any, device: Any) -> Any:
        batch = cls()
        batch.prefilling, batch.speculative_ids = True, None
        batch.requests = list(pb.requests)
        batch.all_input_ids = [list(ids) for ids in inputs]
        batch.cache_lengths = [r.cache_len for r in pb.requests]
        chunks = [getattr(r, "chunk_len", 1 << 30) for r in pb.requests]
        batch.input_lengths = [
            min(chunk, len(ids) - r.cache_len)
            for r, ids, chunk in zip(pb.requests, inputs, chunks, strict=True)
        ]
        batch.stopping_criterias = [Criteria() for _ in pb.requests]
        return batch


class FakeModel:
    """Writes its tokens into pages: a token's id at its slot."""

    failing = False
    model_id = "org/model"
    rank, world_size = 0, 1

    def init_kv_cache(self) -> None:
        layer = SimpleNamespace(pages=torch.full((40, PAGE), -1.0), device=torch.device("cpu"))
        self.kv_cache = [SimpleNamespace(layer=layer, before_store=None)]

    def warmup(self) -> str:
        self.init_kv_cache()
        return "capacity"

    def generate_token(self, batch: Any) -> str:
        if self.failing:
            raise RuntimeError("out of memory")
        for cache in self.kv_cache:
            if cache.before_store is not None:
                cache.before_store()
        for i, request in enumerate(batch.requests):
            start = batch.cache_lengths[i]
            end = start + batch.input_lengths[i]
            self.write(request.blocks, batch.all_input_ids[i], start, end)
            batch.cache_lengths[i] = end
            batch.input_lengths[i] = 1
            if end >= len(batch.all_input_ids[i]):
                batch.prefilling = False
                batch.all_input_ids[i].append(1000 + end)
        return "tokens"

    def write(self, blocks: list[int], ids: list[int], start: int, end: int) -> None:
        for at in range(start, end):
            self.kv_cache[0].layer.pages[blocks[at // PAGE], at % PAGE] = ids[at]

    def read(self, blocks: list[int], count: int) -> list[int]:
        pages = self.kv_cache[0].layer.pages
        return [int(pages[blocks[at // PAGE], at % PAGE]) for at in range(count)]


class Shard:
    """A wrapped model and batch class; remembers what was computed ahead."""

    def __init__(self) -> None:
        self.batch_class = type("Batch", (FakeBatch,), {})
        self.model: Any = type("Model", (FakeModel,), {})()
        self.ahead: list[tuple[int, int]] = []
        prefixes.verify_claims(type(self.model), self.batch_class)

    def warm_up(self) -> None:
        assert self.model.warmup() == "capacity"

    def admit(self, request: FakeRequest, ids: list[int]) -> Any:
        pb = SimpleNamespace(requests=[request])
        return self.batch_class.from_tokenized(pb, None, [ids], None, None)

    def run(self, request: FakeRequest, ids: list[int], steps: int = 1) -> Any:
        batch = self.admit(request, ids)
        for _ in range(steps):
            assert self.model.generate_token(batch) == "tokens"
        return batch


@pytest.fixture
def tier() -> list[ShardTiers]:
    """Put one in before ``warm_up`` to give the shard a host tier."""
    return []


@pytest.fixture
def shard(monkeypatch: pytest.MonkeyPatch, tier: list[ShardTiers]) -> Iterator[Shard]:
    vision = ModuleType("text_generation_server.models.vlm_causal_lm")
    vision.__dict__["VlmCausalLM"] = type("VlmCausalLM", (), {})
    monkeypatch.setitem(sys.modules, vision.__name__, vision)
    monkeypatch.setattr(prefixes, "_keeper", None)
    monkeypatch.setattr(prefixes, "make_tiers", lambda model: tier[0] if tier else None)
    made = Shard()

    def compute(self: Any, model: Any, request: Any, ids: list[int], start: int, end: int) -> None:
        made.ahead.append((start, end))
        model.write(request.blocks, ids, start, end)

    monkeypatch.setattr("bicl.frontends.tgi.catch_up.CatchUp.compute", compute)
    made.warm_up()
    yield made
    for each in tier:
        each.close()


@pytest.fixture
def hosted(shard: Shard, tier: list[ShardTiers]) -> Shard:
    """With a host tier over the pages."""
    caches = shard.model.kv_cache
    mover = HostMover([(cache.layer.pages,) for cache in caches])
    pages = PageTiers(mover, PAGE, fingerprint=b"", host_bytes=1 << 16)
    tier.append(ShardTiers(pages, caches))
    prefixes._keeper.tiers = tier[0]  # type: ignore[union-attr]
    return shard


def request(blocks: list[int], cached: int, **more: Any) -> FakeRequest:
    fixed = {"id": 1, "adapter_id": "", "prefill_logprobs": False}
    return FakeRequest(**(fixed | {"blocks": blocks, "cache_len": cached} | more))


def ids(length: int, first: int = 0) -> list[int]:
    return list(range(first, first + length))


def test_what_was_never_computed_is_computed_before_the_request_begins(shard: Shard) -> None:
    one = request([1, 2, 3], 128, chunk_len=22)
    shard.admit(one, ids(150))
    assert shard.ahead == [(0, 128)]
    assert (one.cache_len, one.chunk_len) == (128, 22), "as the router planned it"
    assert prefixes.counters().rejected_claims == 1
    assert prefixes.counters().mended_tokens == 128


def test_claim_is_kept_after_the_prefill_was_computed(shard: Shard) -> None:
    shard.run(request([1, 2, 3], 0), ids(150))
    shard.admit(request([1, 2, 7], 128), ids(150))
    assert shard.ahead == []
    assert prefixes.counters().accepted_tokens == 128


def test_mended_pages_count_as_computed(shard: Shard) -> None:
    shard.run(request([1, 2, 3], 128), ids(150))
    shard.admit(request([1, 2, 7], 128), ids(150))
    assert shard.ahead == [(0, 128)]


def test_failed_prefill_leaves_no_tags(shard: Shard) -> None:
    """TGI's router frees such a request's pages as if they had been computed."""
    shard.model.failing = True
    with pytest.raises(RuntimeError, match="out of memory"):
        shard.run(request([1, 2, 3], 0), ids(150))
    shard.admit(request([1, 2, 3], 128), ids(150))
    assert shard.ahead == [(0, 128)]


def test_chunks_count_as_far_as_they_were_computed(shard: Shard) -> None:
    shard.run(request([1, 2, 3], 0, chunk_len=70), ids(150))
    shard.admit(request([1, 2, 3], 128), ids(150))
    assert shard.ahead == [(64, 128)]


def test_pages_that_left_the_pool_come_back_from_the_host(
    hosted: Shard, tier: list[ShardTiers]
) -> None:
    """The router claims nothing; the prefill is shortened by what the tier holds."""
    hosted.run(request([1, 2, 3], 0), ids(150))
    assert tier[0].settle(5)
    hosted.run(request([1, 2, 3], 0), ids(150, 5000))  # other tokens take the pages
    again = request([9, 8, 7], 0, chunk_len=150)
    hosted.run(again, ids(150))
    assert (again.cache_len, again.chunk_len) == (128, 22)
    assert hosted.model.read([9, 8, 7], 150) == ids(150)
    assert prefixes.counters().added_tokens == 128


def test_prompt_that_is_held_whole_computes_its_last_token(
    hosted: Shard, tier: list[ShardTiers]
) -> None:
    """(A6)"""
    hosted.run(request([1, 2], 0), ids(128))
    assert tier[0].settle(5)
    again = request([9, 8], 0, chunk_len=100)
    hosted.run(again, ids(128))
    assert (again.cache_len, again.chunk_len) == (127, 1)
    assert hosted.model.read([9, 8], 128) == ids(128)


def test_false_claim_is_made_good_from_the_host_before_it_is_computed(
    hosted: Shard, tier: list[ShardTiers]
) -> None:
    hosted.run(request([1, 2, 3], 0), ids(150))
    assert tier[0].settle(5)
    hosted.run(request([9, 8, 7], 128), ids(150))
    assert hosted.ahead == []
    assert hosted.model.read([9, 8, 7], 150) == ids(150)


def test_replies_are_kept_too(hosted: Shard, tier: list[ShardTiers]) -> None:
    """(A75)"""
    batch = hosted.run(request([1, 2, 3], 0), ids(100), steps=40)
    assert tier[0].settle(5)
    said = batch.all_input_ids[0]
    assert len(said) == 140
    following = request([9, 8, 7, 6], 0)
    hosted.run(following, [*said, *ids(40, 7000)])
    assert following.cache_len == 128
    assert hosted.model.read([9, 8, 7, 6], 180) == [*said, *ids(40, 7000)]


@pytest.mark.parametrize("tokens", [1, 3])
def test_pages_are_kept_by_the_step_that_fills_them(
    hosted: Shard, tier: list[ShardTiers], tokens: int
) -> None:
    """Of two requests that fill theirs at different steps, with drafts and without."""
    requests = [request([1, 2, 3], 0), request([4, 5, 6], 0)]
    pb = SimpleNamespace(requests=requests)
    prompts = [ids(100), ids(60, 5000)]
    batch = hosted.batch_class.from_tokenized(pb, None, prompts, None, None)
    for step in range(60 // tokens):
        hosted.model.generate_token(batch)
        assert tier[0].settle(5)
        expected = sum(length // PAGE for length in batch.cache_lengths)
        assert tier[0].stats().saved_pages == expected, step
        if tokens > 1:
            batch.speculative_ids, batch.input_lengths = object(), [tokens] * 2
            for said in batch.all_input_ids:
                said += [2000 + step] * (tokens - 1)


def test_other_adapters_pages_do_not_come(hosted: Shard, tier: list[ShardTiers]) -> None:
    """(A11)"""
    hosted.run(request([1, 2, 3], 0, adapter_id="poet"), ids(150))
    assert tier[0].settle(5)
    other = request([9, 8, 7], 0, adapter_id="clerk")
    hosted.run(other, ids(150))
    assert other.cache_len == 0
    same = request([6, 5, 4], 0, adapter_id="poet")
    hosted.run(same, ids(150))
    assert same.cache_len == 128


def test_details_of_the_prompt_need_every_token_computed(
    hosted: Shard, tier: list[ShardTiers]
) -> None:
    """(A7)"""
    hosted.run(request([1, 2, 3], 0), ids(150))
    assert tier[0].settle(5)
    asked = request([9, 8, 7], 0, prefill_logprobs=True)
    hosted.run(asked, ids(150))
    assert asked.cache_len == 0


def test_ranks_agree_on_the_least(
    hosted: Shard, tier: list[ShardTiers], monkeypatch: pytest.MonkeyPatch
) -> None:
    hosted.run(request([1, 2, 3], 0), ids(150))
    assert tier[0].settle(5)
    monkeypatch.setattr(ShardTiers, "_agree", lambda self, count: min(count, 1))
    again = request([9, 8, 7], 0)
    hosted.run(again, ids(150))
    assert again.cache_len == 64
    assert hosted.model.read([9, 8, 7], 150) == ids(150)


def test_broken_copies_are_computed(
    hosted: Shard, tier: list[ShardTiers], monkeypatch: pytest.MonkeyPatch
) -> None:
    hosted.run(request([1, 2, 3], 0), ids(150))
    assert tier[0].settle(5)

    def broken(*arguments: Any) -> Any:
        raise OSError("no copy")

    monkeypatch.setattr(HostMover, "load", broken)
    again = request([9, 8, 7], 0)
    hosted.run(again, ids(150))
    assert again.cache_len == 0
    assert hosted.model.read([9, 8, 7], 150) == ids(150)
    assert tier[0].stats().failures["copy"] == 1


def test_warm_up_requests_have_no_pages_and_pass(shard: Shard) -> None:
    one = request([], 0)
    shard.admit(one, ids(150))
    assert one.cache_len == 0


def test_rejected_claims_are_served_to_prometheus(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = OverlayConfig(metrics_port=port - 1)
    monkeypatch.setattr(prefixes, "overlay_config", lambda: settings)
    monkeypatch.setenv("RANK", "1")
    prefixes.serve_metrics()
    shard.admit(request([1, 2, 3], 128), ids(150))
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
    assert 'bicl_prefix_rejected_claims_total{rank="1"} 1.0' in text
    assert 'bicl_prefix_claimed_tokens_total{rank="1"} 128.0' in text
    assert 'bicl_unwidened_prefills_total{rank="1"} 0.0' in text


def test_a_metrics_port_that_is_taken_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        settings = OverlayConfig(metrics_port=port - 1)
        monkeypatch.setattr(prefixes, "overlay_config", lambda: settings)
        monkeypatch.setenv("RANK", "1")
        with pytest.raises(ConfigError, match=f"port {port} for shard 1 cannot be opened"):
            prefixes.serve_metrics()
