"""The part of TGI's router that a shard can see: pages, slots, prefixes, chunks, batches."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, Protocol

from text_generation_server.pb import generate_pb2 as pb

from bicl.frontends.tgi.selftest.shard import Answer, Shards

__all__ = ["Router", "Sequence"]


@dataclass
class Sequence:
    """One request and what came back.

    Attributes:
        top: how many of the likeliest tokens to ask for at each step; they come in ``tops``.
        adapter: of the request; empty for the base model.
        num_shared: of ``pages``, those at the front that belong to others, too.
        answers: steps that brought tokens.
    """

    id: int
    prompt: list[int]
    max_new_tokens: int
    pages: list[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[dict[int, float]] = field(default_factory=list)
    finished: bool = False
    top: int = 0
    adapter: str = ""
    num_shared: int = 0
    answers: int = 0


class Texts(Protocol):
    """Where prompts come from; :class:`Model` is one."""

    def prompt(self, length: int, seed: str) -> list[int]: ...

    def text(self, ids: list[int]) -> str: ...


class Router:
    """Hands out shuffled page ids and keeps one batch of the shard going."""

    def __init__(self, shards: Shards, model: Texts, num_tokens: int, page_size: int) -> None:
        self.shards, self.model, self.page_size = shards, model, page_size
        self._free = list(range(1, num_tokens // page_size))
        random.Random(5).shuffle(self._free)
        info = shards.info()
        self.speculate, self.chunks = info.speculate, info.support_chunking
        self.running: dict[int, Sequence] = {}
        self.step_microseconds: list[float] = []
        self.accepted_drafts = 0
        self._batches: list[Any] = []
        self._next_id = 1

    def sequence(
        self, prompt: list[int], max_new_tokens: int, shared: list[int] | None = None
    ) -> Sequence:
        """A request that is not sent yet. ``shared``: pages it starts with."""
        tokens = len(prompt) + max_new_tokens - 1 + self.speculate
        pages = list(shared or [])
        while len(pages) * self.page_size < tokens:
            pages.append(self._free.pop())
        self._next_id += 1
        return Sequence(self._next_id, prompt, max_new_tokens, pages)

    def release(self, sequence: Sequence, keep: int = 0) -> None:
        """Give back all pages but the first ``keep``; they are handed out again at once."""
        free = set(self._free)
        self._free += [p for p in reversed(sequence.pages[keep:]) if p not in free]

    def prefill(self, *sequences: Sequence, cached: int = 0, chunk: int | None = None) -> None:
        """Send new requests; they join the running batch, if there is one, now or in decode.

        Args:
            cached: tokens claimed to be in the first pages.
            chunk: tokens to compute now; by default all.
        """
        requests = [self._request(s, cached, chunk) for s in sequences]
        for sequence in sequences:
            self.running[sequence.id] = sequence
        before = None
        if self.chunks and self._batches:
            before = self._batches.pop()
        self._take(self.shards.prefill(self._batch_id(), requests, before))

    def decode(self, steps: int = 1) -> None:
        for _ in range(steps):
            batches, self._batches = self._batches, []
            self._take(self.shards.decode(batches))

    def finish(self) -> None:
        """Decode until every request has ended."""
        while self.running:
            self.decode()

    def cancel(self, sequence: Sequence) -> None:
        """The client is gone: drop the row."""
        del self.running[sequence.id]
        self._shrink()

    @property
    def free_pages(self) -> list[int]:
        """Pages that no request has now."""
        return list(self._free)

    def take_pages(self, keep: int) -> list[int]:
        """Leave ``keep`` free pages, so that they are used again and again; returns the others."""
        taken, self._free = self._free[keep:], self._free[:keep]
        return taken

    def give_pages(self, pages: list[int]) -> None:
        self._free += pages

    def abandon(self) -> None:
        """After a failed case: drop everything, so that the next one starts afresh."""
        self.running.clear()
        self._shrink()

    def health(self) -> None:
        """The router's health request: one token on page 0, slot 0."""
        sequence = Sequence(0, self.model.prompt(1, "health"), 1, [0])
        request = self._request(sequence, 0, None)
        self.shards.prefill(self._batch_id(), [request])

    def _take(self, answer: Answer) -> None:
        self.step_microseconds.append(answer.microseconds)
        if answer.batch is not None:
            self._batches.append(answer.batch)
        for request_id, tokens in answer.tokens.items():
            sequence = self.running[request_id]
            sequence.tokens += tokens
            sequence.answers += bool(tokens)
            self.accepted_drafts += max(len(tokens) - 1, 0)
            sequence.logprobs += answer.logprobs[request_id]
            sequence.tops += answer.tops[request_id]
            if request_id in answer.finished:
                sequence.finished = True
                del self.running[request_id]
        if answer.finished:
            self._shrink()

    def _shrink(self) -> None:
        """Drop the rows that have ended or were cancelled."""
        if not self.running:
            self.shards.clear()
            self._batches = []
        batches, self._batches = self._batches, []
        for batch in batches:
            keep = [i for i in batch.request_ids if i in self.running]
            if len(keep) == len(batch.request_ids):
                self._batches.append(batch)
            elif keep:
                self._batches.append(self.shards.filter(batch, keep))

    def _batch_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def _request(self, sequence: Sequence, cached: int, chunk: int | None) -> Any:
        length = len(sequence.prompt)
        slots = [p * self.page_size + i for p in sequence.pages for i in range(self.page_size)]
        needed = length + sequence.max_new_tokens - 1 + self.speculate
        request = request_of(sequence.id, self.model.text(sequence.prompt), length)
        request.stopping_parameters.max_new_tokens = sequence.max_new_tokens
        request.blocks.extend(sequence.pages)
        request.slots.extend(slots[:needed])
        request.top_n_tokens = sequence.top
        if sequence.adapter:
            request.adapter_id = sequence.adapter
        request.cache_len = cached
        request.chunk_len = length - cached if chunk is None else chunk
        return request


def request_of(request_id: int, text: str, length: int) -> Any:
    """A greedy request without pages, as at warm-up."""
    parameters = pb.NextTokenChooserParameters(
        temperature=1.0, top_p=1.0, typical_p=1.0, repetition_penalty=1.0
    )
    stopping = pb.StoppingCriteriaParameters(max_new_tokens=20, ignore_eos_token=True)
    chunks = pb.Input(chunks=[pb.InputChunk(text=text)])
    return pb.Request(
        id=request_id,
        inputs=text,
        input_chunks=chunks,
        truncate=length,
        parameters=parameters,
        stopping_parameters=stopping,
        add_special_tokens=False,
    )
