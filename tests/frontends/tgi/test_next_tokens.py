"""When chosen tokens are sent to the host at once, and that the host gets what was chosen."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bicl.frontends.tgi import next_tokens
from bicl.frontends.tgi.next_tokens import send_early


class OnDevice:
    """A tensor as far as the wrapper looks at it."""

    is_cuda = True

    def __init__(self, values: list[Any]) -> None:
        self.values, self.shape = values, torch.Size([len(values)])

    def tolist(self) -> list[Any]:
        raise AssertionError("waits for everything issued so far")


def make_chooser(chosen: Any) -> Any:
    class Chooser:
        def __call__(self, input_ids: Any, scores: Any, speculate: int, *rest: Any) -> Any:
            return chosen

    return Chooser


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happened, in order."""
    happened: list[str] = []

    def start_copy(tensor: OnDevice) -> torch.Tensor:
        happened.append("copy")
        return torch.tensor(tensor.values)

    def event() -> Any:
        return SimpleNamespace(
            record=lambda: happened.append("record"), synchronize=lambda: happened.append("wait")
        )

    monkeypatch.setattr(next_tokens, "_start_copy", start_copy)
    monkeypatch.setattr(torch.cuda, "Event", event)
    return happened


def chosen_of(device: Any) -> tuple[Any, ...]:
    return device([7, 9]), device([-0.5, -2.0]), None, device([1, 1]), None


def test_the_host_asks_copies_behind_the_choice(order: list[str]) -> None:
    chooser = make_chooser(chosen_of(OnDevice))
    send_early(chooser)
    ids, logprobs, _, accepted, _ = chooser()(None, None, 0, None, None)
    assert order == ["copy", "copy", "record"]
    assert (logprobs.tolist(), ids.tolist(), accepted.tolist()) == ([-0.5, -2.0], [7, 9], [1, 1])
    assert order[3:] == ["wait", "wait"]


@pytest.mark.parametrize("step", [(2, None), (0, torch.zeros(2, 1)), (2, torch.zeros(2, 1))])
def test_steps_with_drafts_go_the_usual_way(order: list[str], step: tuple[Any, ...]) -> None:
    chooser = make_chooser(chosen_of(OnDevice))
    send_early(chooser)
    for tensor in chooser()(None, None, *step)[:2]:
        with pytest.raises(AssertionError, match="waits"):
            tensor.tolist()
    assert order == []


def test_on_the_cpu_nothing_is_copied(order: list[str]) -> None:
    chooser = make_chooser(chosen_of(torch.tensor))
    send_early(chooser)
    ids, *_ = chooser()(None, None, 0)
    assert order == []
    assert ids.tolist() == [7, 9]
