"""Small arrays reach the host unchanged and in time, whatever the copy engines do meanwhile."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bicl.attention.results import ResultCopies
from bicl.ops.cuda.small_copies import small_copies

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)


def page_locked(size: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8).pin_memory()


def test_pieces_of_any_size_are_copied_both_ways() -> None:
    sizes = [0, 1, 15, 16, 17, 4096, 4100, 300_001]
    there = [page_locked(size) for size in sizes]
    here = [torch.zeros(size + 32, dtype=torch.uint8, device=DEVICE) for size in sizes]
    back = [page_locked(size) for size in sizes]
    inner = [tensor[16 : 16 + size] for tensor, size in zip(here, sizes, strict=True)]
    small_copies(list(zip(there, inner, strict=True)), DEVICE)
    small_copies(list(zip(inner, back, strict=True)), DEVICE)
    torch.cuda.synchronize()
    for source, device, target, size in zip(there, here, back, sizes, strict=True):
        assert torch.equal(source, target)
        assert not device[:16].any()
        assert not device[16 + size :].any()


def test_pieces_that_are_not_aligned_are_copied() -> None:
    source = page_locked(1000)
    target = torch.zeros(1000, dtype=torch.uint8, device=DEVICE)
    small_copies([(source[3:900], target[1:898])], DEVICE)
    assert torch.equal(target.cpu()[1:898], source[3:900])


def test_too_many_pieces_are_refused() -> None:
    pairs = [(page_locked(1), torch.zeros(1, dtype=torch.uint8, device=DEVICE))] * 17
    with pytest.raises(ValueError, match="17 pieces at once; at most 16"):
        small_copies(pairs, DEVICE)


def test_results_come_as_they_were_when_the_stream_came_to_them() -> None:
    copies = ResultCopies(DEVICE)
    tokens = torch.arange(70, device=DEVICE)
    values = torch.linspace(0, 1, 70, device=DEVICE)
    torch.cuda._sleep(20_000_000)
    first = copies.begin(tokens, values)
    tokens.add_(1)
    second = copies.begin(tokens[::2])
    assert second.lists() == [list(range(1, 71, 2))]
    ids, floats = first.lists()
    assert ids == list(range(70))
    np.testing.assert_array_equal(floats, values.tolist())


def test_results_in_flight_do_not_mix() -> None:
    copies = ResultCopies(DEVICE)
    for size in (3, 5000, 40):  # larger ones than any before, and smaller ones again
        torch.cuda._sleep(20_000_000)
        pending = [copies.begin(torch.full((size,), step, device=DEVICE)) for step in range(20)]
        for step, copy in enumerate(pending):
            assert copy.lists() == [[step] * size]
