"""A cached page counts only if this shard wrote these tokens into it."""

from __future__ import annotations

import socket
import urllib.request
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bicl.frontends.tgi import prefixes
from bicl.frontends.tgi.config import OverlayConfig
from bicl.frontends.tgi.page_tags import PageTags, Prompt

PAGE = 4
IDS = list(range(100, 111))  # two pages and three tokens


def prompt(ids: list[int], adapter: str = "") -> Prompt:
    return Prompt(ids, PAGE, adapter)


@pytest.fixture
def tags() -> PageTags:
    return PageTags(PAGE)


@pytest.fixture
def computed(tags: PageTags) -> PageTags:
    tags.record(prompt(IDS), [7, 3, 9], 0, len(IDS))
    return tags


def test_pages_that_were_written_are_accepted(computed: PageTags) -> None:
    assert computed.admit(prompt([*IDS[:8], 5]), [7, 3, 1], 8) == 8


def test_pages_that_nobody_wrote_are_not(tags: PageTags) -> None:
    assert tags.admit(prompt(IDS), [7, 3, 9], 8) == 0
    assert (tags.counters.claimed_tokens, tags.counters.rejected_claims) == (8, 1)


def test_claim_is_cut_at_the_first_page_of_other_tokens(computed: PageTags) -> None:
    other = [*IDS[:4], 1, 2, 3, 4, 5]
    assert computed.admit(prompt(other), [7, 3, 1], 8) == 4


def test_same_tokens_after_another_history_do_not_count(computed: PageTags) -> None:
    assert computed.admit(prompt([0, 0, 0, 0, *IDS[4:8], 1]), [2, 3, 1], 8) == 0


def test_same_tokens_of_another_adapter_do_not_count(computed: PageTags) -> None:
    assert computed.admit(prompt(IDS, "poet"), [7, 3, 9], 8) == 0


def test_claim_may_end_inside_a_complete_page(computed: PageTags) -> None:
    """A prompt that is cached as a whole comes with all but its last token claimed."""
    assert computed.admit(prompt(IDS[:8]), [7, 3], 7) == 7
    assert computed.admit(prompt(IDS[:8]), [7, 3], 8) == 8, "the shared page keeps its tag"


def test_claim_inside_an_incomplete_page_is_cut_to_whole_pages(computed: PageTags) -> None:
    assert computed.admit(prompt(IDS[:7]), [7, 3], 6) == 4


def test_new_owner_wipes_what_a_page_held(computed: PageTags) -> None:
    computed.admit(prompt([1, 2, 3]), [3], 0)
    assert computed.admit(prompt(IDS), [7, 3, 9], 8) == 4


def test_chunks_tag_a_page_when_they_complete_it(tags: PageTags) -> None:
    tags.record(prompt(IDS), [7, 3, 9], 0, 6)
    assert tags.admit(prompt(IDS), [7, 3, 9], 8) == 4
    tags.record(prompt(IDS), [7, 3, 9], 4, 6)
    tags.record(prompt(IDS), [7, 3, 9], 6, 11)
    assert tags.admit(prompt(IDS), [7, 3, 9], 8) == 8


def test_page_0_is_rubbish_and_never_tagged(tags: PageTags) -> None:
    tags.record(prompt(IDS), [0], 0, 4)
    assert tags.admit(prompt(IDS), [0], 4) == 0


def test_new_memory_forgets_everything(computed: PageTags) -> None:
    computed.clear()
    assert computed.admit(prompt(IDS), [7, 3, 9], 8) == 0


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_an_accepted_page_always_holds_the_prompts_tokens(data: st.DataObject) -> None:
    """Against a model that stores the tokens themselves: prompts, cuts, reuse, cancellations."""
    tags, truth = PageTags(PAGE), dict[int, tuple[int, ...]]()
    for _ in range(data.draw(st.integers(1, 25))):
        ids = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=14))
        count = -(-len(ids) // PAGE)
        pages = data.draw(st.lists(st.integers(1, 5), min_size=count, max_size=count, unique=True))
        claimed = data.draw(st.integers(0, len(ids) - 1))
        accepted = tags.admit(prompt(ids), pages, claimed)
        assert 0 <= accepted <= claimed
        for index in range(-(-accepted // PAGE)):
            assert truth.get(pages[index]) == tuple(ids[: (index + 1) * PAGE])
        for page in pages[-(-accepted // PAGE) :]:
            truth.pop(page, None)
        end = data.draw(st.integers(accepted + 1, len(ids)))  # cancelled after some chunk
        tags.record(prompt(ids), pages, accepted, end)
        for index in range(accepted // PAGE, end // PAGE):
            truth[pages[index]] = tuple(ids[: (index + 1) * PAGE])


class FakeRequest(SimpleNamespace):
    def HasField(self, name: str) -> bool:
        return hasattr(self, name)


class FakeBatch:
    @classmethod
    def from_tokenized(cls, pb: Any, tokenizer: Any, inputs: Any, dtype: Any, device: Any) -> Any:
        return [(r.cache_len, getattr(r, "chunk_len", None)) for r in pb.requests]


class FakeModel:
    failing = False

    def init_kv_cache(self) -> None: ...

    def generate_token(self, batch: Any) -> str:
        if self.failing:
            raise RuntimeError("out of memory")
        batch.cache_lengths = [99]  # TGI moves the lengths on
        return "tokens"


@pytest.fixture
def wrapped(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    model, batch = type("Model", (FakeModel,), {}), type("Batch", (FakeBatch,), {})
    monkeypatch.setattr(prefixes, "_tags", None)
    prefixes.verify_claims(model, batch)
    return model(), batch


def request(ids: list[int], cached: int, **more: Any) -> FakeRequest:
    blocks = list(range(1, 2 + len(ids) // 64))
    return FakeRequest(id=1, blocks=blocks, cache_len=cached, adapter_id="", **more)


def admit(batch: Any, one: FakeRequest, ids: list[int]) -> Any:
    return batch.from_tokenized(SimpleNamespace(requests=[one]), None, [ids], None, None)[0]


def prefill(model: Any, one: FakeRequest, ids: list[int]) -> None:
    step = SimpleNamespace(
        prefilling=True,
        requests=[one],
        prefilling_mask=[True],
        cache_lengths=[0],
        input_lengths=[len(ids)],
        prompt_lengths=[len(ids)],
        all_input_ids=[ids],
    )
    assert model.generate_token(step) == "tokens"


def test_claim_of_uncomputed_pages_is_lowered_in_the_request(wrapped: Any) -> None:
    ids = list(range(150))
    assert admit(wrapped[1], request(ids, 128), ids) == (0, None)
    assert prefixes.counters().rejected_claims == 1


def test_claim_is_kept_after_the_prefill_was_computed(wrapped: Any) -> None:
    model, batch = wrapped
    ids = list(range(150))
    prefill(model, request(ids, 0), ids)
    assert admit(batch, request(ids, 128), ids) == (128, None)
    assert prefixes.counters().accepted_tokens == 128


def test_failed_prefill_leaves_no_tags(wrapped: Any) -> None:
    """TGI's router frees such a request's pages as if they had been computed."""
    model, batch = wrapped
    ids, model.failing = list(range(150)), True
    with pytest.raises(RuntimeError, match="out of memory"):
        prefill(model, request(ids, 0), ids)
    assert admit(batch, request(ids, 128), ids) == (0, None)


@pytest.mark.parametrize(
    ("chunking", "speculate", "chunk"), [(True, 0, 22), (True, 2, 150), (False, 0, 150)]
)
def test_lowered_claim_goes_on_in_chunks_only_where_tgi_can(
    wrapped: Any, monkeypatch: pytest.MonkeyPatch, chunking: bool, speculate: int, chunk: int
) -> None:
    for name, value in (("prefill_chunking", chunking), ("speculate", speculate)):
        getter = "get_support_chunking" if name == "prefill_chunking" else "get_speculate"
        module = SimpleNamespace(**{getter: lambda value=value: value})
        monkeypatch.setitem(
            __import__("sys").modules, f"text_generation_server.utils.{name}", module
        )
    ids = list(range(150))
    assert admit(wrapped[1], request(ids, 128, chunk_len=22), ids) == (0, chunk)


def test_rejected_claims_are_served_to_prometheus(
    wrapped: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings_ = OverlayConfig(metrics_port=port - 1)
    monkeypatch.setattr(prefixes, "overlay_config", lambda: settings_)
    monkeypatch.setenv("RANK", "1")
    prefixes.serve_metrics()
    ids = list(range(150))
    admit(wrapped[1], request(ids, 128), ids)
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
    assert 'bicl_prefix_rejected_claims_total{rank="1"} 1.0' in text
    assert 'bicl_prefix_claimed_tokens_total{rank="1"} 128.0' in text
