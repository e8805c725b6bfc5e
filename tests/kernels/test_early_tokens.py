"""Tokens that leave the GPU early are those that were chosen."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bicl.frontends.tgi.next_tokens import send_early

pytestmark = pytest.mark.gpu

VOCABULARY = 5000


class Greedy:
    """TGI's chooser, as far as greedy requests see of it."""

    def __call__(self, input_ids: Any, scores: torch.Tensor, speculate: int, drafts: Any) -> Any:
        logprobs, ids = torch.log_softmax(scores, -1).max(-1)
        return ids, logprobs, None, torch.ones_like(ids), None


send_early(Greedy)


@pytest.mark.parametrize("rows", [1, 8, 128])
def test_the_host_sees_what_was_chosen(rows: int) -> None:
    """Also of steps whose copies take the memory of those before, while the GPU is behind."""
    generator = torch.Generator("cuda").manual_seed(rows)
    for _ in range(5):
        scores = torch.randn(
            rows, VOCABULARY, device="cuda", dtype=torch.bfloat16, generator=generator
        )
        torch.cuda._sleep(2_000_000)
        ids, logprobs, _, accepted, _ = Greedy()(None, scores, 0)
        torch.cuda._sleep(2_000_000)
        found = logprobs.tolist(), ids.tolist(), accepted.tolist()
        assert found == (logprobs.cpu().tolist(), ids.cpu().tolist(), [1] * rows)
