"""The quality bench's arithmetic and its questions."""

from __future__ import annotations

from typing import Any

import pytest

from bench.hysparse.report import merge, summarise, verdicts
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


def test_runs_of_several_processes_are_one() -> None:
    texts = [
        row(measure="perplexity", texts=1, perplexity=2.0, differences=[0.01]),
        row(measure="perplexity", texts=3, perplexity=4.0, differences=[0.0, 0.0, 0.0]),
    ]
    (merged,) = merge(texts)
    assert merged["texts"] == 4
    assert merged["perplexity"] == pytest.approx(2.0 ** (0.25 + 2 * 0.75))
    assert len(merged["differences"]) == 4
    both = [row(right=3, dense_right=4, questions=10), row(), row(task="other")]
    merged, other = merge(both)
    assert (merged["right"], merged["dense_right"], merged["questions"]) == (12, 14, 22)
    assert merged["told_apart"]
    assert other["questions"] == 12


def test_a_target_is_met_by_what_a_server_can_run_or_said_to_be_missed() -> None:
    def line(name: str, change: float, share: float) -> dict[str, Any]:
        return {
            "name": name,
            "ratio": 0.65,
            "tokens": None,
            "perplexity_change": change,
            "task_accuracy_of_dense": share,
        }

    ours = [line("centroids", 0.004, 0.999), line("centroids fitted", 0.006, 0.98)]
    others = [line("oracle", 0.0, 1.0), line("centroids-8", 0.0, 1.0)]
    good, bad = verdicts([*ours, *others, line("kvpress A", 0.005, 0.5)])
    assert (good.perplexity, good.answers, good.ahead) == (True, True, True)
    assert (bad.perplexity, bad.answers, bad.ahead) == (False, False, False)
