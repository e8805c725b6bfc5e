"""When a request goes back to the full cache."""

from __future__ import annotations

import pytest

from bicl.errors import ConfigError
from bicl.sparse.guard import FALLBACK_REASONS, Guard, GuardBounds, Signals
from bicl.sparse.row import SparseRow

GOOD = Signals(expected=0.65, actual=0.65, mass_kept=0.95, entropy=4.0)


def signals(**changes: float) -> Signals:
    return Signals(**{**vars(GOOD), **changes})


def judge(*measured: Signals) -> str:
    guard = Guard(GuardBounds())
    return [guard.judge(each) for each in measured][-1]


def test_good_signals_go_on() -> None:
    assert judge(GOOD, GOOD, signals(mass_kept=0.81)) == ""


def test_the_specifications_drift_goes_back() -> None:
    """0.65 falls to 0.5 while entropy rises by 15 %. (A60)"""
    assert judge(GOOD, signals(actual=0.499, entropy=4.0 * 1.151)) == "drift"


@pytest.mark.parametrize("changes", [{"actual": 0.1}, {"entropy": 40.0}])
def test_half_of_the_drift_does_not(changes: dict[str, float]) -> None:
    assert judge(GOOD, signals(**changes)) == ""


@pytest.mark.parametrize("mass", [0.79, 0.0, float("nan")])
def test_lost_attention_goes_back(mass: float) -> None:
    assert judge(GOOD, signals(mass_kept=mass)) == "mass"


def test_a_wrong_index_goes_back_whatever_else_is_measured() -> None:
    assert judge(signals(stale_pages=1)) == "index"


def test_reasons_are_those_that_metrics_know() -> None:
    assert set(FALLBACK_REASONS) == {"index", "mass", "drift"}


@pytest.mark.parametrize(
    "bounds",
    [
        {"shadow_interval": 0},
        {"min_mass_kept": 1.1},
        {"min_sparsity_share": -0.1},
        {"max_entropy_rise": -1.0},
    ],
    ids=str,
)
def test_bounds_out_of_range_are_named(bounds: dict[str, float]) -> None:
    (name,) = bounds
    with pytest.raises(ConfigError, match=name):
        GuardBounds(**bounds)


def test_a_row_is_measured_at_its_first_sparse_step_and_then_every_interval() -> None:
    row = SparseRow(0.65, Guard(GuardBounds()))
    measured = []
    for step in range(20):
        due = row.is_due(8)
        row.count(100 + step, 3, 10)
        if due:
            row.learn(GOOD)
            measured.append(step)
    assert measured == [0, 8, 16]
    assert (row.tiles_read, row.tiles_total, row.mass_kept) == (60, 200, pytest.approx(0.95))


def test_a_row_that_fell_back_is_dense_and_says_why() -> None:
    row = SparseRow(0.65, Guard(GuardBounds()))
    assert row.path == "sparse"
    row.count(100, 3, 10)
    assert not row.is_exact(101)
    assert row.is_exact(100)
    assert row.learn(signals(mass_kept=0.1))
    row.recomputed()
    assert (row.ratio, row.asked, row.path, row.fallback) == (0.0, 0.65, "fallback", "mass")
    assert row.is_exact(10_000)
