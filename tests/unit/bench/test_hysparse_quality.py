"""The quality bench's arithmetic and its questions."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.hysparse import tasks, texts
from bench.hysparse.arena import Setup
from bench.hysparse.join import add, join, rename
from bench.hysparse.measures import RARELY, plan
from bench.hysparse.report import cells, leads, read_items, summarise, verdicts, write_report
from bench.hysparse.tables import by_length, by_ratio, of_presses
from bench.hysparse.tasks import TASKS, make_samples
from bench.hysparse.texts import KINDS, digest, prose_paragraphs, read_kind
from bicl.sparse.policy import KIND_RULES


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


def test_tasks_are_written_as_tune_reads_them(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(tasks, "load_model", lambda *_: SimpleNamespace(count=words))
    path = tmp_path / "tasks.jsonl"
    tasks.main([str(path), "--tasks", "needle", "variables", "--tokens", "900", "--count", "2"])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 4
    for line in lines:
        assert set(line) == {"prompt", "answer"}
        assert words(line["prompt"]) <= 900
        assert line["answer"] in line["prompt"]


@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_on_this_machine(kind: str) -> None:
    text = read_kind(kind)
    assert len(text) > 50_000 or kind == "manuals"  # of packages that need not be installed
    assert len(digest(text)) == 12


def test_texts_travel_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts.main([str(tmp_path)])
    here = {kind: read_kind(kind) for kind in KINDS}, prose_paragraphs()
    try:
        texts.read_from(tmp_path)
        monkeypatch.setattr(texts, "KINDS", {})  # this machine's are not asked
        assert ({kind: read_kind(kind) for kind in here[0]}, prose_paragraphs()) == here
        with pytest.raises(FileNotFoundError, match=r"bench\.hysparse\.texts"):
            texts.read_from(tmp_path / "absent")
    finally:
        texts.read_from(None)


def record(**changes: Any) -> dict[str, Any]:
    """One context of a task: what dense and one variant got right."""
    values: dict[str, Any] = {
        "measure": "task",
        "task": "needle",
        "aware": False,
        "tokens": 4096,
        "below_floor": False,
        "questions": 12,
        "results": [["dense", 0.0, 1.0, 10], ["bounds", 0.65, 0.36, 9]],
    }
    return values | changes


def piece(*losses: float, **changes: Any) -> dict[str, Any]:
    dense, own = losses
    results = [["dense", 0.0, 1.0, dense], ["bounds", 0.65, 0.36, own]]
    values = record(measure="perplexity", kind="prose", results=results) | changes
    return {key: value for key, value in values.items() if key not in ("task", "aware")}


def summary_of(*records: dict[str, Any]) -> dict[Any, dict[str, Any]]:
    """The sums of ``bounds``, by length."""
    rows = summarise(cells([{"item": "any", "records": list(records)}]))
    return {row["tokens"]: row for row in rows if row["name"] == "bounds"}


def test_sums_hold_only_what_left_something_out_above_the_floor_and_tells_apart() -> None:
    """(A58)"""
    right = [["dense", 0.0, 1.0, 10], ["bounds", 0.65, 0.36, 10]]
    counted = [record(), record(aware=True, results=right)]
    nothing = [["dense", 0.0, 1.0, 10], ["bounds", 0.65, 1.0, 0]]
    wrong = [["dense", 0.0, 1.0, 4], ["bounds", 0.65, 0.36, 0]]
    ignored = [
        record(tokens=2048, results=nothing),
        record(tokens=1024, below_floor=True),
        record(task="words", results=wrong),
    ]
    sums = summary_of(*counted, *ignored)
    assert sums[None]["task_accuracy_of_dense"] == 19 / 20
    assert sums[None]["questions"] == 24
    assert sums[1024]["right"] == 9
    assert not sums[2048]["exercised"]
    assert "right" not in sums[2048]


def test_perplexity_is_summed_over_paired_differences() -> None:
    both = [piece(2.0, 2.01), piece(3.0, 3.03), piece(1.0, 1.02, tokens=2048)]
    sums = summary_of(*both)
    assert sums.keys() == {None, 2048, 4096}
    assert sums[2048]["pieces"] == 1
    assert sums[2048]["perplexity_change_se"] is None
    assert sums[None]["perplexity_change"] == pytest.approx(0.0202, abs=1e-4)
    assert sums[None]["perplexity_change_se"] == pytest.approx(0.01 / 3**0.5)
    assert sums[None]["perplexity_change_most"] == pytest.approx(0.0305, abs=1e-4)


def test_the_error_of_answers_is_that_of_a_ratio_over_contexts() -> None:
    def sample(own: int) -> dict[str, Any]:
        return record(results=[["dense", 0.0, 1.0, 10], ["bounds", 0.65, 0.36, own]])

    row = summary_of(sample(8), sample(10))[4096]
    assert row["task_accuracy_of_dense"] == 0.9
    assert row["task_accuracy_se"] == pytest.approx(0.1)  # of 0.8 and 1.0


def test_several_runs_are_one_and_each_context_counts_once(tmp_path: Path) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    meta = {"meta": {"study": "1", "texts": {}}}
    lines = [{"item": f"needle {n}", "seconds": 1.0, "records": [record()]} for n in range(3)]
    first.write_text("\n".join(map(json.dumps, [meta, *lines[:2]])) + '\n{"item": "cut o')
    second.write_text("\n".join(map(json.dumps, [meta, *lines[1:]])))
    items = read_items([first, second, tmp_path / "absent.jsonl"])
    assert [item["item"] for item in items] == ["needle 0", "needle 1", "needle 2"]
    write_report([first, second], tmp_path / "out.json")
    report = json.loads((tmp_path / "out.json").read_text())
    row = next(row for row in report["rows"] if row["name"] == "bounds")
    assert (row["measure"], row["right"], row["questions"]) == ("summary", 27, 36)
    second.write_text(json.dumps({"meta": {"study": "2"}}))
    with pytest.raises(ValueError, match="different study"):
        write_report([first, second], None)


def test_a_shorter_run_is_a_smaller_sample_of_the_same() -> None:
    rounds = {
        number: [item.title for item in plan([number], (1024, 2048), (1024, 2048), None)]
        for number in range(4)
    }
    whole = [item.title for item in plan(range(4), (1024, 2048), (1024, 2048), None)]
    assert whole == [title for own in rounds.values() for title in own]
    assert len(set(whole)) == len(whole)
    for number, own in rounds.items():
        assert sum(title.startswith("perplexity") for title in own) == len(KINDS)
        tasks = len(TASKS) - (number > 0) * len(RARELY)
        for length in (1024, 2048):
            assert sum(f" {length} a" in title for title in own) == 2 * tasks


def test_a_name_says_how_a_variant_is_run() -> None:
    assert Setup.of("centroids") == Setup("centroids")
    assert Setup.of("centroids floor") == Setup("centroids", floor=True)
    served = Setup.of("centroids served fitted")
    assert served == Setup("centroids", floor=True, kinds=True, fitted=True)
    assert served.ratio(0.5, "code") == 0.5 * KIND_RULES["code"].share < served.ratio(0.5, "other")
    assert Setup.of("centroids floor").ratio(0.5, "code") == 0.5
    small = Setup.of("centroids served pages-32")
    assert small == Setup("centroids", floor=True, kinds=True, page=32)
    assert Setup.of("centroids").page == 64
    with pytest.raises(ValueError, match="none of"):
        Setup.of("centroids severed")


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


def test_a_lead_is_that_over_the_nearest_press_on_the_same_pieces() -> None:
    def losses(ours: float, near: float, far: float) -> dict[str, Any]:
        results = [
            ["dense", 0.0, 1.0, 2.0],
            ["centroids served", 0.65, 0.36, ours],
            ["kvpress Near", 0.65, 0.36, near],
            ["kvpress Far", 0.65, 0.36, far],
        ]
        return piece(2.0, ours, results=results)

    found = cells([{"item": "any", "records": [losses(2.0, 2.02, 2.5), losses(2.1, 2.14, 2.5)]}])
    for row in leads(found):
        assert (row["name"], row["press"], row["pieces"]) == ("centroids served", "kvpress Near", 2)
        assert row["lead"] == pytest.approx(0.0304, abs=1e-4)
        assert row["lead_se"] == pytest.approx(0.01)
    assert [row["tokens"] for row in leads(found)] == [4096, None]


def context(tokens: int, *results: list[Any]) -> dict[str, Any]:
    record = {"measure": "perplexity", "kind": "code", "piece": 1, "tokens": tokens}
    return {"item": f"perplexity {tokens}", "records": [record | {"results": list(results)}]}


def test_a_later_runs_rows_take_the_place_of_our_own_variants() -> None:
    dense, press = ["dense", 0.0, 1.0, 2.5], ["kvpress Any", 0.65, 0.36, 2.9]
    earlier = [
        context(1024, dense, ["centroids served", 0.65, 1.0, 2.5], ["centroids", 0.65, 0.4, 2.8]),
        context(4096, dense, ["centroids served", 0.65, 0.4, 2.7], press),
    ]
    later = [
        context(4096, dense, ["centroids served", 0.65, 0.4, 2.6], ["oracle", 0.65, 0.4, 2.5]),
        context(8000, dense, ["centroids served", 0.65, 0.4, 2.6]),
    ]
    short, long = (item["records"][0]["results"] for item in join(earlier, later))
    assert short == [dense, ["centroids served", 0.65, 1.0, 2.5]], "what is dense has no index"
    assert long == [dense, ["centroids served", 0.65, 0.4, 2.6], press]
    later[0]["records"][0]["results"][0] = ["dense", 0.0, 1.0, 2.5001]
    with pytest.raises(ValueError, match=r"dense differs.*4096"):
        join(earlier, later)


def test_further_configurations_are_added_where_they_have_all_contexts() -> None:
    dense, press = ["dense", 0.0, 1.0, 2.5], ["kvpress SnapKV", 0.65, 0.4, 2.9]
    small = ["centroids served pages-32", 0.65, 0.4, 2.55]
    items = [context(2048, dense, press), context(4096, dense, press)]
    short, long = (
        item["records"][0]["results"] for item in add(items, [context(4096, dense, small)])
    )
    assert short == [dense, press], "no context of this length has it"
    assert long == [dense, press, small]
    others = [context(4096, dense, ["kvpress SnapKV", 0.65, 0.4, 2.91])]
    with pytest.raises(ValueError, match=r"kvpress SnapKV differs.*2\.9, 2\.91"):
        add(items, others)


def test_variants_are_renamed_and_how_they_are_run_is_not() -> None:
    rows = [["centroids served", 0.65, 0.4, 2.7], ["centroids-flat", 0.65, 0.4, 2.7]]
    (item,) = rename([context(4096, *rows)], {"centroids": "centroids-unturned"})
    names = [row[0] for row in item["records"][0]["results"]]
    assert names == ["centroids-unturned served", "centroids-flat"]


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("hysparse-quality", by_length),
        ("hysparse-quality", of_presses),
        ("hysparse-quality-spread", by_length),
        ("hysparse-quality-early", by_length),
        ("hysparse-quality-presses", by_ratio),
        ("hysparse-quality-indexes", by_length),
    ],
)
def test_the_hysparse_page_has_the_files_tables(name: str, table: Any) -> None:
    root = Path(__file__).resolve().parents[3]
    page = (root / "docs" / "hysparse.md").read_text()
    rows = json.loads((root / "bench" / "results" / f"{name}.json").read_text())["rows"]
    missing = [row for row in table(rows).splitlines()[2:] if row not in page]
    assert missing == [], "paste what `python -m bench.hysparse.tables` prints"
