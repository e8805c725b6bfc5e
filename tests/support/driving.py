"""Driving the engine in tests."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from bicl.frontends.http.engine import Engine, EngineConfig, RequestStream
from bicl.frontends.http.loader import LoadedModel
from bicl.frontends.http.request import (
    GenerationParams,
    GenerationRequest,
    RequestDone,
    RequestFailed,
    TokenEvent,
)

SIZES = {"max_total_tokens": 1000, "max_batch_size": 4, "max_batch_prefill_tokens": 300}
"""Of an engine whose longer prompts are read in several chunks."""

_numbers = itertools.count()


@dataclass
class Result:
    """All events of one request."""

    tokens: list[TokenEvent]
    last: RequestDone | RequestFailed

    @property
    def ids(self) -> list[int]:
        return [event.token.id for event in self.tokens]

    @property
    def text(self) -> str:
        return "".join(event.token.text for event in self.tokens)

    @property
    def done(self) -> RequestDone:
        assert isinstance(self.last, RequestDone), self.last
        return self.last


def random_prompt(length: int, seed: int = 0) -> list[int]:
    """Bytes of the tests' tokenizer; always the same ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, 199, (length,), generator=generator).tolist()


def request(prompt: Sequence[int], max_new_tokens: int = 8, **options) -> GenerationRequest:
    """A request that ignores end-of-sequence tokens unless told otherwise."""
    outer = {key: options.pop(key) for key in ("salt", "adapter_id") if key in options}
    params = GenerationParams(max_new_tokens, **{"ignore_eos": True, **options})
    return GenerationRequest(f"r{next(_numbers)}", tuple(prompt), params, **outer)


def collect(stream: RequestStream) -> Result:
    *tokens, last = stream
    return Result(tokens, last)


@contextmanager
def running(loaded: LoadedModel, **config) -> Iterator[Engine]:
    """A started engine that is stopped, and whose pages are counted, at the end."""
    engine = Engine(loaded, EngineConfig(**{"max_total_tokens": 512, **config})).start()
    try:
        yield engine
        assert engine.drain(60)
        engine.check_integrity()
        assert engine.snapshot().pages_in_use == 0
    finally:
        engine.stop()


def stepped(loaded: LoadedModel, **config) -> Engine:
    """An engine without a thread: the test calls ``step``."""
    return Engine(loaded, EngineConfig(**{"max_total_tokens": 512, **config}))


def run_steps(engine: Engine) -> int:
    """Step until nothing is left; returns how many steps that took."""
    steps = 0
    while engine.step():
        steps += 1
    return steps


def generate(engine: Engine, *requests: GenerationRequest) -> list[Result]:
    """Submit all at once to a running engine and wait."""
    streams = [engine.submit(one) for one in requests]
    return [collect(stream) for stream in streams]


def answers(engine: Engine, *prompts: list[int], tokens: int = 24, **options) -> list[Result]:
    """Submit prompts that differ in nothing else."""
    return generate(engine, *[request(each, tokens, **options) for each in prompts])


def token_facts(result: Result) -> list[tuple[int, float]]:
    """Tokens and their log-probabilities, to the bit."""
    return [(event.token.id, event.token.logprob) for event in result.tokens]


def plain_twin(loaded: LoadedModel) -> PreTrainedModel:
    """The same weights under transformers' own attention and cache."""
    weights = {id(parameter): parameter for parameter in loaded.model.parameters()}
    twin = copy.deepcopy(loaded.model, memo=weights)
    twin.set_attn_implementation("eager")
    return twin


def greedy_reference(
    model: PreTrainedModel, prompt: Sequence[int], new_tokens: int
) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens of transformers' generate, and the logits they were chosen from."""
    ids = torch.tensor([list(prompt)])
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
    return out.sequences[0, len(prompt) :].tolist(), torch.cat(out.logits)


def assert_same_greedy(got: list[int], expected: list[int], logits: torch.Tensor) -> None:
    """Equal tokens; where they part, the reference's two candidates must be nearly tied."""
    assert len(got) == len(expected)
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        if a != b:
            gap = float(logits[i, b] - logits[i, a])
            assert gap < 1e-3, f"token {i}: {a} instead of {b}, logits {gap:.4f} apart"
            return
