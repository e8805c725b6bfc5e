"""Every case of ``bicl chaos`` holds. (A11, A12, A16-A19, A28-A33, A40, A71; ``docs/chaos.md``)"""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from bicl.cli import app
from bicl.errors import InvalidInputError
from bicl.frontends.http.chaos import CASES, run_case
from bicl.frontends.http.chaos import runner as chaos_runner
from bicl.frontends.http.chaos.rig import ChaosError, Truth, require

SLOW = {"kill-during-write-back", "everything-at-once"}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in CASES]
)
def test_case_holds(name: str) -> None:
    result = run_case(name)
    assert not result.problem, result.problem
    assert result.seen


@pytest.mark.parametrize("seed", [1, 2])
def test_random_faults_of_other_seeds(seed: int) -> None:
    result = run_case("everything-at-once", seed=seed)
    assert not result.problem, result.problem


def test_a_contradiction_fails_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(chaos_runner.CASES, "disk-full", lambda lab: require(False, "it was wrong"))
    result = CliRunner().invoke(app, ["chaos", "disk-full"])
    assert result.exit_code == 1
    assert "FAIL disk-full" in result.output
    assert "it was wrong" in result.output
    assert "0 of 1 cases held" in result.output


def test_an_unexpected_error_fails_the_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(chaos_runner.CASES, "disk-full", lambda lab: {}["nothing"])
    assert "KeyError" in run_case("disk-full").problem


def test_cases_are_listed_and_unknown_ones_refused() -> None:
    result = CliRunner().invoke(app, ["chaos", "--list"])
    assert result.output.split() == list(CASES)
    refused = CliRunner().invoke(app, ["chaos", "no-such-case"])
    assert isinstance(refused.exception, InvalidInputError)
    assert "no-such-case" in str(refused.exception)


def test_a_failed_requirement_is_a_contradiction() -> None:
    require(True, "nothing")
    with pytest.raises(ChaosError, match="something"):
        require(0, "something")


def test_exact_answers_must_have_the_same_tokens() -> None:
    truth = Truth([5, 6, 7], [{5: -0.1}, {6: -0.2}, {7: -0.3}])
    assert truth.agrees([5, 6], [{5: -9.0}, {6: -9.0}])
    assert not truth.agrees([5, 7], [{5: -0.1}, {7: -0.2}])
    assert not truth.agrees([5, 6, 7, 8], [{8: 0.0}] * 4)


def test_where_sums_are_rounded_only_equally_likely_tokens_change_places() -> None:
    first = {5: -0.1, 8: -3.0}
    tie = {6: -0.7, 9: -0.75}
    truth = Truth([5, 6, 7], [first, tie, {7: -0.3, 4: -2.0}], tolerance=0.1)
    assert truth.agrees([5, 6], [{5: -0.12, 8: -2.95}, {6: -0.75, 9: -0.7}])
    assert truth.agrees([5, 9, 1], [first, {9: -0.69, 6: -0.71}, {1: -4.0}])  # then another past
    assert truth.agrees([5], [{5: -0.1, 3: -3.05}])  # 3 and 8 are as likely as each other
    assert not truth.agrees([8], [{8: -0.1, 5: -3.0}])
    assert not truth.agrees([5], [{5: -0.1, 3: -2.0}])
    assert not truth.agrees([5, 6], [first, {6: -0.4, 9: -1.2}])
    assert not truth.agrees([5, 3], [first, {6: -0.7, 3: -0.69}])
