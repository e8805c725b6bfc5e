"""``bicl hysparse fit`` on a tiny model: from texts to a gate that serving picks up."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from support.tiny_models import byte_tokenizer, tiny_model
from typer.testing import CliRunner

from bicl.cli import app
from bicl.sparse.gate_file import GATE_NAME, find_gate, load_gate
from bicl.sparse.sgm import CentroidGate

WORDS = ("page", "tile", "query", "head", "key", "value", "cache", "prefix", "token", "layer")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama", "eager", max_position_embeddings=4096, num_hidden_layers=4).save_pretrained(
        folder
    )
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    rng = random.Random(0)
    for name in ("a.txt", "b.py"):
        (tmp_path / name).write_text(" ".join(rng.choices(WORDS, k=600)))
    (tmp_path / "picture.png").write_bytes(b"\x00")
    return tmp_path


def run(*arguments: object) -> object:
    return CliRunner().invoke(app, ["hysparse", "fit", *map(str, arguments)])


def options(model: Path, texts: Path) -> tuple[object, ...]:
    common = ("--chunks", 2, "--tokens", 3000, "--queries", 20, "--steps", 3)
    return ("--model-id", model, "--text", texts, *common)


def test_fit_writes_a_gate_beside_the_model_and_reports_every_layer(
    model: Path, texts: Path
) -> None:
    result = run(*options(model, texts))
    assert result.exit_code == 0, result.output
    gate = load_gate(model / GATE_NAME)
    assert isinstance(gate, CentroidGate)
    assert gate.layers == (1, 2, 3)
    assert find_gate(model) == str(model / GATE_NAME)
    for word in ("before", "after", "best possible", "mean", "192 parameters from 32 queries"):
        assert word in result.output


def test_the_literal_gate_can_be_fitted_too(model: Path, texts: Path, tmp_path: Path) -> None:
    target = tmp_path / "gate.safetensors"
    result = run(*options(model, texts), "--variant", "gate", "--output", target)
    assert result.exit_code == 0, result.output
    assert load_gate(target).kind == "gate"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("--text", "/nowhere/at/all"), "no such file or folder"),
        (("--tokens", "1000"), "too short"),
        (("--layers", "12-3"), "no range of layers"),
        (("--model-id", "owner/name"), "comes from the hub"),
    ],
)
def test_what_cannot_be_fitted_is_refused_by_name(
    model: Path, texts: Path, change: tuple[str, str], message: str
) -> None:
    result = run(*options(model, texts), *change)
    assert result.exit_code != 0
    assert message in str(result.exception)


@pytest.mark.parametrize("command", ["fit", "tune"])
def test_pages_of_another_size_are_refused_before_the_model_is_looked_for(command: str) -> None:
    arguments = ["hysparse", command, "--model-id", "/nowhere", "--text", "/nowhere"]
    result = CliRunner().invoke(app, [*arguments, "--page-size", "48"])
    assert result.exit_code == 2
    assert "pages have 32 or 64 tokens, not 48" in result.output


def test_short_texts_are_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("too little to leave anything out")
    result = run(*options(model, tmp_path))
    assert "no text has" in str(result.exception)
