"""``bicl hysparse tune``: what it measures, what it chooses, what it leaves behind."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from support.driving import assert_same_greedy, generate, request, running

from bicl.errors import ConfigError
from bicl.frontends import tune as module
from bicl.frontends.http.engine import EngineConfig
from bicl.frontends.tune import Grid, best_result, engine_for, run_tune, tune
from bicl.frontends.tune_report import Result
from bicl.frontends.tune_samples import Samples, read_samples
from bicl.sparse.config import HySparseConfig
from bicl.sparse.gate_file import GATE_NAME, save_gate
from bicl.sparse.settings import read_config_file
from bicl.sparse.sgm import make_gate

BASE = HySparseConfig(text_kind="off", layers="0-2/3", floor_tokens=128)
GRID = Grid(ratios=(0.3, 0.6), layers=("0-2/3",), modes=("select", "compact"), max_ks=(512,))
SIZES = EngineConfig(max_total_tokens=700, max_batch_size=2)
QUIET = Console(quiet=True)


def ids(length: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(4, 260, (length,), generator=generator).tolist())


SAMPLES = Samples((ids(600, 1), ids(600, 2)), predicted=16)


def result(ratio: float, perplexity: float, skipped: float, tasks: float | None = None) -> Result:
    return Result(replace(BASE, sparsity_ratio=ratio), perplexity, 0.5, tasks, skipped)


# --- forced tokens -----------------------------------------------------------------------------
def test_forced_tokens_are_emitted_with_the_models_logprobs(tiny) -> None:
    prompt = ids(100, 3)
    with running(tiny, max_total_tokens=200) as engine:
        (free,) = generate(engine, request(prompt, 8, top_n_tokens=1))
        (forced,) = generate(engine, request(prompt, 8, forced_ids=tuple(free.ids)))
        (other,) = generate(engine, request(prompt, 8, forced_ids=(7, 8, 9), top_n_tokens=1))
    told = [[event.token.logprob for event in each.tokens] for each in (forced, free)]
    assert told[0] == pytest.approx(told[1], abs=1e-5)
    assert other.ids[:3] == [7, 8, 9]
    assert other.tokens[0].top_tokens[0].id == free.ids[0]
    with torch.inference_mode():
        reference = tiny_logits(tiny, [*prompt, 7, 8])
    assert other.tokens[2].token.logprob == pytest.approx(float(reference[-1, 9]), abs=1e-4)
    assert_same_greedy(other.ids[3:4], [int(tiny_next(tiny, [*prompt, 7, 8, 9]))], reference)


def tiny_logits(loaded, tokens):
    from support.driving import plain_twin

    return plain_twin(loaded)(torch.tensor([tokens])).logits[0].log_softmax(dim=-1)


def tiny_next(loaded, tokens):
    with torch.inference_mode():
        return tiny_logits(loaded, tokens)[-1].argmax()


# --- choosing ----------------------------------------------------------------------------------
DENSE = result(0.0, 10.0, 0.0)


def test_the_most_left_out_within_the_drop_wins() -> None:
    results = [result(0.3, 10.01, 0.2), result(0.6, 10.02, 0.4), result(0.9, 10.5, 0.6)]
    assert best_result(results, DENSE, 0.003) is results[1]
    assert best_result(results, DENSE, 0.1) is results[2]


def test_tasks_count_as_much_as_text() -> None:
    dense = result(0.0, 10.0, 0.0, tasks=1.0)
    results = [result(0.3, 10.0, 0.2, tasks=1.0), result(0.6, 10.0, 0.4, tasks=0.99)]
    assert best_result(results, dense, 0.003) is results[0]


def test_nothing_within_the_drop_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"within a drop of 0\.30%.*ratio 0\.3.*loses 5\.00%"):
        best_result([result(0.3, 10.5, 0.2), result(0.6, 11.0, 0.4)], DENSE, 0.003)


def test_settings_that_left_nothing_out_do_not_count() -> None:
    """(A58)"""
    with pytest.raises(ConfigError, match="no setting left anything out"):
        best_result([result(0.3, 10.0, 0.0)], DENSE, 0.003)
    results = [result(0.9, 10.0, 0.0), result(0.3, 10.0, 0.1)]
    assert best_result(results, DENSE, 0.003) is results[1]


# --- the whole search --------------------------------------------------------------------------
def search(tiny, folder: Path, max_drop: float = 10.0, grid: Grid = GRID) -> Result:
    return tune(
        tiny, SAMPLES, grid, folder, base=BASE, max_drop=max_drop, engine=SIZES, console=QUIET
    )


def test_a_search_leaves_a_config_that_serve_reads_a_table_and_a_plot(tiny, tmp_path: Path) -> None:
    best = search(tiny, tmp_path)
    assert best.config.sparsity_ratio == 0.6
    assert read_config_file(tmp_path / "hysparse.json") == best.config
    told = json.loads((tmp_path / "hysparse.json").read_text())
    assert told["tiles_left_out_of_all_layers"] == pytest.approx(0.6, abs=0.07)
    table = (tmp_path / "tune.md").read_text()
    assert table.count("| select |") == table.count("| compact |") == 2
    assert "| dense |" in table
    assert (tmp_path / "tune.png").stat().st_size > 1000


def test_a_search_goes_on_where_it_was_cut_off(tiny, tmp_path: Path, monkeypatch) -> None:
    search(tiny, tmp_path)
    path = tmp_path / "tune.jsonl"
    lines = path.read_text().splitlines()
    assert len(lines) == 5
    path.write_text("\n".join(lines[:3]) + "\n" + lines[3][:40])  # interrupted while it wrote
    measured = []
    measure = module._measure

    def spy(loaded, engine, samples, config):
        measured.append((config.mode, config.sparsity_ratio))
        return measure(loaded, engine, samples, config)

    monkeypatch.setattr(module, "_measure", spy)
    search(tiny, tmp_path)
    assert measured == [("compact", 0.3), ("compact", 0.6)]
    search(tiny, tmp_path)
    assert len(measured) == 2, "what follows a line that was cut off is lost"


def test_another_gate_is_measured_anew(tiny, tmp_path: Path) -> None:
    """Also one of the same name, written by a later fit."""
    gate = make_gate("centroids", (0, 1, 2), 64)
    base = replace(BASE, gate_path=str(tmp_path / "gate.safetensors"))
    small = Grid(ratios=(0.6,), layers=("0-2/3",))
    options = {"base": base, "max_drop": 10.0, "engine": SIZES, "console": QUIET}
    results = []
    for factor in (1.0, -1.0, -1.0):
        with torch.no_grad():
            gate.weights.fill_(factor)
        save_gate(tmp_path / "gate.safetensors", gate)
        results.append(tune(tiny, SAMPLES, small, tmp_path, **options))
    assert results[0].perplexity != results[1].perplexity == results[2].perplexity
    assert len((tmp_path / "tune.jsonl").read_text().splitlines()) == 4


def test_pages_of_32_tokens_are_measured_anew_and_told(tiny, tmp_path: Path) -> None:
    options = {"base": BASE, "max_drop": 10.0, "console": QUIET}
    small = Grid(ratios=(0.6,), layers=("0-2/3",))
    results = [
        tune(tiny, SAMPLES, small, tmp_path, engine=replace(SIZES, page_size=size), **options)
        for size in (64, 32, 32)
    ]
    assert results[0].perplexity != results[1].perplexity == results[2].perplexity
    assert len((tmp_path / "tune.jsonl").read_text().splitlines()) == 4
    assert json.loads((tmp_path / "hysparse.json").read_text())["page_size"] == 32
    own = engine_for(SAMPLES, tiny, 32)
    assert (own.page_size, own.max_total_tokens, own.max_batch_size) == (32, 601, 2)
    by_samples = tune(tiny, SAMPLES, small, tmp_path, engine=own, **options)
    assert by_samples.perplexity == pytest.approx(results[1].perplexity, rel=1e-3)


def test_a_gate_beside_the_model_is_tried_as_serve_takes_it(tmp_path: Path, monkeypatch) -> None:
    gate = tmp_path / GATE_NAME
    gate.write_bytes(b"fitted")
    tried = []
    monkeypatch.setattr(module, "load_model", lambda path, device: path)
    monkeypatch.setattr(module, "read_samples", lambda *_, **__: SAMPLES)
    monkeypatch.setattr(module, "engine_for", lambda *_: SIZES)
    monkeypatch.setattr(module, "tune", lambda *_, base, **__: tried.append(base.gate_path))
    options = {"max_drop": 1.0, "pieces": 1, "context": 600, "predicted": 16, "page_size": 32}
    for base in (BASE, replace(BASE, gate_path="own")):
        run_tune(str(tmp_path), [], None, GRID, tmp_path, base=base, device="cpu", **options)
    assert tried == [str(gate), "own"]


def test_other_samples_are_measured_anew(tiny, tmp_path: Path) -> None:
    search(tiny, tmp_path)
    other = Samples((ids(600, 9),), predicted=8)
    options = {"base": BASE, "max_drop": 10.0, "engine": SIZES, "console": QUIET}
    small = Grid(ratios=(0.6,), layers=("0-2/3",))
    tune(tiny, other, small, tmp_path, **options)
    assert len((tmp_path / "tune.jsonl").read_text().splitlines()) == 7


def test_samples_are_cut_from_texts_and_read_from_json_lines(tiny, tmp_path: Path) -> None:
    text, tasks = tmp_path / "a.txt", tmp_path / "tasks.jsonl"
    text.write_text("abcdefghij" * 100)
    tasks.write_text('{"prompt": "2+2=", "answer": "4"}\n\n')
    found = read_samples(tiny, [text], tasks, pieces=3, context=90, predicted=10)
    assert [len(each) for each in found.texts] == [100] * 3
    assert found.tasks[0].answer == "4"


@pytest.mark.parametrize(
    ("content", "part"), [("short", "needs 100"), (None, "No such file")], ids=["short", "missing"]
)
def test_texts_that_do_not_serve_are_refused(
    tiny, tmp_path: Path, content: str | None, part: str
) -> None:
    path = tmp_path / "a.txt"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=part):
        read_samples(tiny, [path], None, pieces=1, context=90, predicted=10)


def test_tasks_without_answers_are_refused(tiny, tmp_path: Path) -> None:
    text, tasks = tmp_path / "a.txt", tmp_path / "tasks.jsonl"
    text.write_text("abcdefghij" * 20)
    tasks.write_text('{"question": "2+2="}\n')
    with pytest.raises(ConfigError, match="each line is"):
        read_samples(tiny, [text], tasks, pieces=1, context=90, predicted=10)
