"""A step's tokens leave the GPU as soon as they are chosen, and the host waits for them once.

TGI asks for log-probabilities, ids and numbers of accepted drafts one after another, each time
behind all that it has issued by then, also what only the next step needs.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

__all__ = ["send_early"]


def send_early(chooser_class: Any) -> None:
    """Wrap TGI's ``HeterogeneousNextTokenChooser``: of a step without drafts on a GPU, ``tolist``
    of the ids, of their log-probabilities and of the ones that stand for accepted drafts answers
    from copies that were issued right behind the choice. TGI changes none of the three."""
    choose = chooser_class.__call__

    @functools.wraps(choose)
    def choose_and_send(
        self: Any,
        input_ids: torch.Tensor,
        scores: torch.Tensor,
        speculate: int,
        speculated_ids: torch.Tensor | None = None,
        *arguments: Any,
        **options: Any,
    ) -> Any:
        chosen = choose(self, input_ids, scores, speculate, speculated_ids, *arguments, **options)
        ids, logprobs, _, accepted, _ = chosen
        if not speculate and speculated_ids is None and ids.is_cuda:
            copies = [_start_copy(tensor) for tensor in (logprobs, ids)]
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
            for tensor, copy in zip((logprobs, ids), copies, strict=True):
                tensor.tolist = functools.partial(_arrived, copy, done)
            accepted.tolist = functools.partial(_ones, accepted.shape[0])
        return chosen

    chooser_class.__call__ = choose_and_send


def _start_copy(tensor: torch.Tensor) -> torch.Tensor:
    """In page-locked memory of its own, so that nothing waits for it here."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)


def _arrived(copy: torch.Tensor, done: torch.cuda.Event) -> Any:
    done.synchronize()
    return copy.tolist()


def _ones(count: int) -> list[int]:
    return [1] * count
