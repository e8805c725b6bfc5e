"""RMS norms of a model in one kernel each."""

from __future__ import annotations

import pytest
import torch
from support.tiny_models import tiny_model

from bicl.frontends.transformers.norms import fuse_norms

TOKENS = torch.arange(4, 40)[None]


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return model(TOKENS).logits


@pytest.mark.parametrize(("family", "a_layer"), [("llama", 2), ("qwen3", 4)])
def test_plain_norms_are_fused_and_give_what_they_gave(family: str, a_layer: int) -> None:
    model = tiny_model(family, "sdpa")
    expected = logits(model)
    assert fuse_norms(model) == a_layer * model.config.num_hidden_layers + 1
    torch.testing.assert_close(logits(model), expected, atol=1e-5, rtol=1e-5)
    assert fuse_norms(model.bfloat16()) == a_layer * model.config.num_hidden_layers + 1


def test_norms_that_compute_something_else_stay_as_they_are() -> None:
    """Gemma's weight counts from one."""
    model = tiny_model("gemma2", "eager")
    expected = logits(model)
    assert fuse_norms(model) == 0
    assert torch.equal(logits(model), expected)
