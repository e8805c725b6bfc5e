"""How long stores hold a step up, on the CPU; on a GPU: tests/frontends/engine/test_on_cuda.py."""

from __future__ import annotations

import pytest
import torch

from bicl.attention import store_clock
from bicl.attention.store_clock import StoreClock

CPU = torch.device("cpu")


def test_one_layer_is_timed_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([10.0, 10.5, 20.0, 20.25])
    monkeypatch.setattr(store_clock.time, "perf_counter", lambda: next(now))
    clock = StoreClock(CPU, num_layers=8)
    assert clock.layer == 4
    for _ in range(2):
        clock.begin()
        clock.end()
    assert clock.take() == pytest.approx(8 * 0.75)
    assert clock.take() == 0.0


def test_replays_count_as_they_were_measured() -> None:
    clock = StoreClock(CPU, num_layers=8)
    clock.replayed(0.25)
    clock.replayed(0.5)
    assert clock.take() == 0.75
