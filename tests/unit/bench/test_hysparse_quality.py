"""The quality bench's arithmetic and its questions."""

from __future__ import annotations

from typing import Any

import pytest

from bench.hysparse.report import summarise
from bench.hysparse.tasks import TASKS, make_samples
from bench.hysparse.texts import KINDS, digest, read_kind


def words(text: str) -> int:
    return len(text.split())


@pytest.mark.parametrize("task", TASKS)
def test_questions_fit_the_length_and_their_answers_stand_in_the_context(task: str) -> None:
    for sample in make_samples(task, 900, 3, seed=1, size=words):
        assert words(sample.context) <= 900
        assert sample.questions
        for question, answer in zip(sample.questions, sample.answers, strict=True):
            assert answer.startswith(" ")
            assert answer.strip() in " ".join(sample.context.split())
            assert not question.endswith(" ")


def test_samples_are_the_same_at_every_call_and_differ_by_seed() -> None:
    first, again, other = (
        make_samples("needle", 400, 1, seed=seed, size=words) for seed in (1, 1, 2)
    )
    assert first == again != other


@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_on_this_machine(kind: str) -> None:
    text = read_kind(kind)
    assert len(text) > 50_000
    assert len(digest(text)) == 12


def row(**changes: Any) -> dict[str, Any]:
    values = {
        "measure": "task",
        "name": "bounds",
        "ratio": 0.65,
        "tokens": 4096,
        "kept": 0.36,
        "exercised": True,
        "below_floor": False,
        "told_apart": True,
        "right": 9,
        "dense_right": 10,
        "questions": 12,
    }
    return values | changes


def test_sums_hold_only_what_left_something_out_above_the_floor_and_tells_apart() -> None:
    """(A58)"""
    counted = [row(), row(right=10)]
    ignored = [
        row(right=0, exercised=False),
        row(right=0, below_floor=True),
        row(right=0, told_apart=False),
    ]
    summary = next(row for row in summarise(counted + ignored) if row["tokens"] is None)
    assert summary["task_accuracy_of_dense"] == 19 / 20
    assert summary["questions"] == 24


def test_perplexity_is_summed_over_paired_differences() -> None:
    both = [
        row(measure="perplexity", differences=[0.01, 0.03], kept=0.36),
        row(measure="perplexity", differences=[0.02], kept=0.36, tokens=2048),
    ]
    by_length = {row["tokens"]: row for row in summarise(both)}
    assert by_length.keys() == {None, 2048, 4096}
    assert by_length[2048]["pieces"] == 1
    summary = by_length[None]
    assert summary["perplexity_change"] == pytest.approx(0.0202, abs=1e-4)
    assert summary["perplexity_change_se"] == pytest.approx(0.01 / 3**0.5)
