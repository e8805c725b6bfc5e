"""Two thousand mixed requests on a pool so small that it evicts and preempts all the time.

Everything is drawn from one seed and stepped by hand, so a failure can be repeated. The pool is
poisoned with NaN: a read of a slot that nobody wrote would spoil an output. (A19, A20, A25-A32)
"""

from __future__ import annotations

import os
import random
from collections import Counter
from dataclasses import dataclass, field

import psutil
import pytest
import torch
from support.driving import request, run_steps, stepped
from support.tiny_models import tiny_loaded

from bicl.errors import CapacityError, OverloadedError
from bicl.frontends.http.engine import Engine, RequestStream
from bicl.frontends.http.request import GenerationRequest, RequestDone, RequestFailed, TokenEvent

NUM_REQUESTS = int(os.environ.get("BICL_SOAK_REQUESTS", "2000"))
NUM_KINDS = 120
NUM_PAGES = 14
MAX_TOTAL_TOKENS = 448
RSS_GROWTH_BYTES = 48 << 20


@dataclass
class Client:
    """One request under way. ``patience``: tokens after which it hangs up."""

    kind: int
    stream: RequestStream
    patience: int | None
    tokens: list[int] = field(default_factory=list)
    last: RequestDone | RequestFailed | None = None

    def poll(self) -> None:
        """Take what has arrived, without waiting."""
        while not self.stream._ended and self.stream._events:
            event = next(self.stream)
            if isinstance(event, TokenEvent):
                self.tokens.append(event.token.id)
            else:
                self.last = event
            if self.patience is not None and len(self.tokens) >= self.patience:
                self.stream.close()
                self.patience = None


def make_kinds(rng: random.Random) -> list[GenerationRequest]:
    """Prompts with shared beginnings, and all sorts of parameters."""
    stems = [[rng.randrange(4, 260) for _ in range(rng.choice([64, 100, 150]))] for _ in range(6)]
    kinds = []
    for number in range(NUM_KINDS):
        stem = rng.choice(stems) if rng.random() < 0.6 else []
        prompt = stem + [rng.randrange(4, 260) for _ in range(rng.randrange(1, 130))]
        options: dict = {}
        if rng.random() < 0.5:
            options |= {"do_sample": True, "seed": number, "temperature": rng.choice([0.7, 1.5])}
        if rng.random() < 0.2:
            options |= {"top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2}
        if rng.random() < 0.2:
            options |= {"stop": tuple("abcdefghijklmnop")}
        if rng.random() < 0.1:
            options |= {"decoder_input_details": True}
        if rng.random() < 0.2:
            options |= {"ignore_eos": False}
        if rng.random() < 0.2:
            options |= {"salt": rng.choice("ab")}
        kinds.append(request(prompt, rng.choice([1, 2, 5, 12, 30, 70]), **options))
    return kinds


def again(kind: GenerationRequest) -> GenerationRequest:
    return request(
        kind.prompt_ids,
        salt=kind.salt,
        **{name: getattr(kind.params, name) for name in kind.params.__dataclass_fields__},
    )


def poison(engine: Engine) -> None:
    for layer in engine._runner.pool.layers:
        layer.pages.fill_(float("nan"))


def solo_outputs(loaded, kinds: list[GenerationRequest]) -> list[list[int]]:
    engine = stepped(loaded, prefix_caching=False, max_total_tokens=MAX_TOTAL_TOKENS)
    outputs = []
    for kind in kinds:
        client = Client(0, engine.submit(again(kind)), None)
        run_steps(engine)
        client.poll()
        assert isinstance(client.last, RequestDone)
        outputs.append(client.tokens)
    return outputs


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_thousand_mixed_requests() -> None:
    torch.set_num_threads(1)
    rng = random.Random(1)
    loaded = tiny_loaded("llama")
    kinds = make_kinds(rng)
    expected = solo_outputs(loaded, kinds)
    engine = stepped(
        loaded,
        num_pages=NUM_PAGES,
        max_batch_size=6,
        max_batch_prefill_tokens=150,
        max_waiting=12,
        max_total_tokens=MAX_TOTAL_TOKENS,
    )
    poison(engine)
    clients: list[Client] = []
    seen: Counter[str] = Counter()
    rss: list[int] = []
    sent = 0

    def settle() -> None:
        for client in list(clients):
            client.poll()
            if client.last is None and not client.stream._ended:
                continue
            clients.remove(client)
            wanted = expected[client.kind]
            if isinstance(client.last, RequestDone):
                seen[str(client.last.finish_reason)] += 1
                assert client.tokens == wanted, kinds[client.kind]
            else:
                assert client.last is None, client.last
                seen["hung up"] += 1
                assert client.tokens == wanted[: len(client.tokens)]

    while sent < NUM_REQUESTS or clients:
        room = sent < NUM_REQUESTS and (len(clients) < 12 or rng.random() < 0.01)
        for _ in range(rng.choice([0, 1, 3, 6]) if room else 0):
            sent += 1
            if rng.random() < 0.02:
                with pytest.raises(CapacityError):
                    engine.submit(request(range(4, 204), MAX_TOTAL_TOKENS))
                seen["refused: too long"] += 1
                continue
            kind = rng.randrange(NUM_KINDS)
            try:
                stream = engine.submit(again(kinds[kind]))
            except OverloadedError:
                seen["refused: queue full"] += 1
                continue
            patience = rng.randrange(0, 12) if rng.random() < 0.25 else None
            client = Client(kind, stream, patience)
            clients.append(client)
            if patience == 0:
                stream.close()  # before the engine even looked at it
        engine.step()
        settle()
        if sent % 100 == 0:
            engine.check_integrity()
            rss.append(psutil.Process().memory_info().rss)
    run_steps(engine)
    engine.check_integrity()
    stats = engine.snapshot()
    assert (stats.pages_in_use, stats.queue_size, stats.batch_size) == (0, 0, 0)
    assert stats.pages_free + stats.pages_cached == stats.pages_total == NUM_PAGES
    assert sum(seen.values()) == sent >= NUM_REQUESTS
    assert min(seen.values()) > 0
    assert stats.preemptions > 0
    assert stats.evicted_pages > 0
    assert stats.aborted > 0
    grown = max(rss[len(rss) // 4 :]) - rss[len(rss) // 4]
    assert grown < RSS_GROWTH_BYTES
    print(
        f"\nsoak: {sent} requests, {dict(seen)}; {stats.steps} steps, "
        f"{stats.generated_tokens} tokens, {stats.preemptions} preemptions, "
        f"{stats.evicted_pages} pages evicted, hit rate "
        f"{stats.hit_tokens / stats.queried_tokens:.2f}, RSS grew {grown >> 20} MiB"
    )
