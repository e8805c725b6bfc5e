"""A cached page counts only if this shard wrote these tokens into it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bicl.cache.keys import PageChain
from bicl.frontends.tgi.claims import Claims

PAGE = 4
IDS = list(range(100, 111))  # two pages and three tokens


def prompt(ids: list[int], adapter: str = "") -> PageChain:
    return Claims(PAGE).chain(ids, adapter)


def admit(claims: Claims, chain: PageChain, pages: list[int], claimed: int) -> int:
    """What the shard does with a request that enters."""
    accepted = claims.verify(chain, pages, claimed)
    claims.take(pages[-(-accepted // PAGE) :])
    return accepted


@pytest.fixture
def tags() -> Claims:
    return Claims(PAGE)


@pytest.fixture
def computed(tags: Claims) -> Claims:
    tags.record(prompt(IDS), [7, 3, 9], 0, 2)
    return tags


def test_pages_that_were_written_are_accepted(computed: Claims) -> None:
    assert admit(computed, prompt([*IDS[:8], 5]), [7, 3, 1], 8) == 8


def test_pages_that_nobody_wrote_are_not(tags: Claims) -> None:
    assert admit(tags, prompt(IDS), [7, 3, 9], 8) == 0
    assert (tags.counters.claimed_tokens, tags.counters.rejected_claims) == (8, 1)


def test_claim_is_cut_at_the_first_page_of_other_tokens(computed: Claims) -> None:
    other = [*IDS[:4], 1, 2, 3, 4, 5]
    assert admit(computed, prompt(other), [7, 3, 1], 8) == 4


def test_same_tokens_after_another_history_do_not_count(computed: Claims) -> None:
    assert admit(computed, prompt([0, 0, 0, 0, *IDS[4:8], 1]), [2, 3, 1], 8) == 0


def test_same_tokens_of_another_adapter_do_not_count(computed: Claims) -> None:
    assert admit(computed, prompt(IDS, "poet"), [7, 3, 9], 8) == 0


def test_claim_may_end_inside_a_complete_page(computed: Claims) -> None:
    """A prompt that is cached as a whole comes with all but its last token claimed."""
    assert admit(computed, prompt(IDS[:8]), [7, 3], 7) == 7
    assert admit(computed, prompt(IDS[:8]), [7, 3], 8) == 8, "the shared page keeps its tag"


def test_claim_inside_an_incomplete_page_is_cut_to_whole_pages(computed: Claims) -> None:
    assert admit(computed, prompt(IDS[:7]), [7, 3], 6) == 4


def test_new_owner_wipes_what_a_page_held(computed: Claims) -> None:
    admit(computed, prompt([1, 2, 3]), [3], 0)
    assert admit(computed, prompt(IDS), [7, 3, 9], 8) == 4


def test_chunks_tag_a_page_when_they_complete_it(tags: Claims) -> None:
    tags.record(prompt(IDS), [7, 3, 9], 0, 6 // PAGE)
    assert admit(tags, prompt(IDS), [7, 3, 9], 8) == 4
    tags.record(prompt(IDS), [7, 3, 9], 1, 11 // PAGE)
    assert admit(tags, prompt(IDS), [7, 3, 9], 8) == 8


def test_page_0_is_rubbish_and_never_tagged(tags: Claims) -> None:
    tags.record(prompt(IDS), [0], 0, 1)
    assert admit(tags, prompt(IDS), [0], 4) == 0


def test_new_memory_forgets_everything(computed: Claims) -> None:
    computed.clear()
    assert admit(computed, prompt(IDS), [7, 3, 9], 8) == 0


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_an_accepted_page_always_holds_the_prompts_tokens(data: st.DataObject) -> None:
    """Against a model that stores the tokens themselves: prompts, cuts, reuse, cancellations."""
    tags, truth = Claims(PAGE), dict[int, tuple[int, ...]]()
    for _ in range(data.draw(st.integers(1, 25))):
        ids = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=14))
        count = -(-len(ids) // PAGE)
        pages = data.draw(st.lists(st.integers(1, 5), min_size=count, max_size=count, unique=True))
        claimed = data.draw(st.integers(0, len(ids) - 1))
        accepted = admit(tags, prompt(ids), pages, claimed)
        assert 0 <= accepted <= claimed
        for index in range(-(-accepted // PAGE)):
            assert truth.get(pages[index]) == tuple(ids[: (index + 1) * PAGE])
        for page in pages[-(-accepted // PAGE) :]:
            truth.pop(page, None)
        end = data.draw(st.integers(accepted + 1, len(ids)))  # cancelled after some chunk
        tags.record(prompt(ids), pages, accepted // PAGE, end // PAGE)
        for index in range(accepted // PAGE, end // PAGE):
            truth[pages[index]] = tuple(ids[: (index + 1) * PAGE])
