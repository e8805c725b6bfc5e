"""The page allocator, against a dictionary of counts."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from bicl.cache.allocator import PageAllocator
from bicl.errors import ConfigError, IntegrityError


class AllocatorMachine(RuleBasedStateMachine):
    @initialize(num_pages=st.integers(1, 12), reserved=st.integers(0, 3))
    def create(self, num_pages: int, reserved: int) -> None:
        self.usable = set(range(reserved, num_pages + reserved))
        self.pages = PageAllocator(num_pages + reserved, reserved)
        self.counts: dict[int, int] = {}

    @rule(count=st.integers(0, 13))
    def allocate(self, count: int) -> None:
        free = self.usable - self.counts.keys()
        pages = self.pages.allocate(count)
        if count > len(free):
            assert pages is None
            return
        assert pages is not None
        assert len(set(pages)) == len(pages) == count
        assert set(pages) <= free
        self.counts |= dict.fromkeys(pages, 1)

    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        held = sorted(self.counts)
        for page in data.draw(st.lists(st.sampled_from(held)) if held else st.just([])):
            self.pages.retain([page])
            self.counts[page] += 1

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        held = sorted(self.counts)
        pages = data.draw(st.lists(st.sampled_from(held), unique=True) if held else st.just([]))
        last = [page for page in pages if self.counts[page] == 1]
        assert self.pages.release(pages) == len(last)
        for page in pages:
            self.counts[page] -= 1
            if page in last:
                del self.counts[page]

    @rule(data=st.data())
    def refuse_what_is_not_allocated(self, data: st.DataObject) -> None:
        strangers = set(range(-3, max(self.usable) + 3)) - self.counts.keys()
        page = data.draw(st.sampled_from(sorted(strangers)))
        with pytest.raises(IntegrityError, match=str(page)):
            self.pages.release([page])
        with pytest.raises(IntegrityError, match=str(page)):
            self.pages.retain([page])

    @invariant()
    def counts_agree(self) -> None:
        self.pages.check_integrity()
        assert self.pages.num_free == len(self.usable) - len(self.counts)
        for page in range(-1, max(self.usable) + 2):
            assert self.pages.references(page) == self.counts.get(page, 0)


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(max_examples=60, stateful_step_count=40)


def test_reserved_pages_are_never_handed_out() -> None:
    pages = PageAllocator(4, reserved_pages=1)
    assert pages.allocate(3) == [1, 2, 3]
    assert pages.allocate(1) is None


def test_failed_allocation_changes_nothing() -> None:  # A29
    pages = PageAllocator(4)
    held = pages.allocate(2)
    assert pages.allocate(3) is None
    assert pages.num_free == 2
    assert held is not None
    pages.release(held[:1])
    assert pages.allocate(3) is not None


def test_double_free_is_refused() -> None:  # A19
    pages = PageAllocator(2)
    held = pages.allocate(1)
    assert held is not None
    pages.release(held)
    with pytest.raises(IntegrityError, match="not allocated"):
        pages.release(held)


def test_same_page_twice_in_one_release_is_refused() -> None:
    pages = PageAllocator(2)
    held = pages.allocate(1)
    assert held is not None
    with pytest.raises(IntegrityError, match="not allocated"):
        pages.release(held * 2)


@pytest.mark.parametrize(("num_pages", "reserved"), [(0, 0), (1, 1), (4, 5), (4, -1), (-1, 0)])
def test_pool_without_usable_pages_is_refused(num_pages: int, reserved: int) -> None:
    with pytest.raises(ConfigError, match="at least"):
        PageAllocator(num_pages, reserved)


@pytest.mark.parametrize(
    ("spoil", "contradiction"),
    [
        (lambda pages: pages._free.append(pages._free[0]), "twice"),
        (lambda pages: pages._free.append(0), "both free and held"),
        (lambda pages: pages._free.pop(), "lost"),
        (lambda pages: pages._counts.pop(0), "lost"),
        (lambda pages: pages._counts.__setitem__(9, 1), "unknown"),
        (lambda pages: pages._counts.__setitem__(0, 0), "below 1"),
    ],
)
def test_spoilt_bookkeeping_is_found(spoil: object, contradiction: str) -> None:  # A23
    pages = PageAllocator(4)
    pages.allocate(1)
    pages.check_integrity()
    spoil(pages)  # type: ignore[operator]
    with pytest.raises(IntegrityError, match=contradiction):
        pages.check_integrity()
