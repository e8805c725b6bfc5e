"""SmolLM2-135M where length passes the most windows that may be read."""

from __future__ import annotations

import pytest
import torch

from bench.hysparse.decoding import Episode, decode_logits, read_context
from bench.hysparse.model import Model
from bench.hysparse.texts import prose_paragraphs
from bicl.frontends.http.loader import LoadedModel
from bicl.sparse.config import HySparseConfig
from bicl.sparse.selection import SelectionRule, tiles_to_keep
from bicl.sparse.sgm import PAGE_GATES, SpatialGate
from bicl.sparse.variants import Choice, DecodeRows, kept_keys

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

NEEDLE, NUMBER = "The special magic number for distant desert is", " 643780"
QUESTION = "\n\n" + NEEDLE


@pytest.fixture(scope="module")
def model(smollm2: LoadedModel) -> Model:
    return Model(smollm2.model, smollm2.tokenizer)


def prompt(model: Model, tokens: int) -> torch.Tensor:
    """Prose of exactly ``tokens`` tokens, a needle after a third of it, and the question."""
    hay = model.encode("\n\n".join(prose_paragraphs()))
    needle, question = model.encode(f"\n\n{NEEDLE}{NUMBER}.\n\n"), model.encode(QUESTION)
    rest = tokens - len(needle) - len(question)
    return torch.cat((hay[: rest // 3], needle, hay[rest // 3 : rest], question))


@pytest.mark.parametrize("tokens", [2047, 2048, 2049, 5200])
def test_answers_stay_right_where_length_passes_max_k(model: Model, tokens: int) -> None:
    """32 windows of 64 tokens may be read, of 32, 33 and 82. (A55)"""
    config = HySparseConfig(sparsity_ratio=0.3, max_k=32)
    rule = SelectionRule.of(config, 64)
    layers = config.sparse_layers(model.depth)
    start = {kind: gate(layers, model.head_dim) for kind, gate in PAGE_GATES.items()}
    gate = SpatialGate(model.head_dim)
    ids = prompt(model, tokens)
    assert len(ids) == tokens
    answer = model.encode(NUMBER)
    kept_tiles: list[int] = []

    def keep(layer: int, rows: DecodeRows, own: slice) -> torch.Tensor:
        tiles = (rows.length + 63) // 64
        sparsity = torch.full((len(tiles),), config.sparsity_ratio)
        kept_tiles.extend(tiles_to_keep(tiles, sparsity, rule).tolist())
        weights = {kind: gate.weights_of(layer) for kind, gate in start.items()}
        return kept_keys("centroids", rows, Choice(rule, sparsity, weights, gate))

    context = read_context(model.model, ids[:-1])
    episode = Episode(len(ids) - 1, torch.cat((ids[-1:], answer)))
    logits = decode_logits(model.model, context, [episode], {"own": (1, keep)}, layers, 64)["own"]
    # The number's digits; before them dense decoding, too, may prefer a quote to the space.
    assert torch.equal(logits[0, 0, 1:-1].argmax(-1), answer[1:])
    assert max(kept_tiles) <= 32
    assert max(kept_tiles) < -(-tokens // 64), "nothing was left out"  # (A58)
