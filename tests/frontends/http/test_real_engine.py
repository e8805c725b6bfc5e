"""The wire on the real engine: same tokens as transformers, pages accounted for, reuse reported."""

import contextlib
import json
import random
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from live import Live, serve_in_thread, wait_until
from starlette.testclient import TestClient
from support.driving import assert_same_greedy, greedy_reference, plain_twin, running
from test_disconnects import REQUESTS, send
from test_validation import RULES

from bicl.config import ServerConfig
from bicl.frontends.http.app import create_app
from bicl.frontends.http.assembly import assemble
from bicl.frontends.http.engine import Engine, EngineConfig
from bicl.metrics import ServerMetrics

TOTAL = 512
CHAT = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def engine(tiny) -> Iterator[Engine]:
    """On leaving, every page must be back (`running` proves it)."""
    with running(tiny, max_total_tokens=TOTAL, max_batch_size=8, num_pages=40) as engine:
        yield engine


@pytest.fixture(scope="module")
def app(engine, tiny):
    config = ServerConfig(model_id="tiny", max_total_tokens=TOTAL).resolve(TOTAL)
    tiny.tokenizer.chat_template = CHAT
    return create_app(assemble(config, engine, tiny.tokenizer))


@pytest.fixture(scope="module")
def client(app) -> Iterator[TestClient]:
    with TestClient(app) as client:
        yield client


def ids(response: httpx.Response) -> list[int]:
    return [token["id"] for token in response.json()["details"]["tokens"]]


def generate(client: TestClient, text: str, **parameters: object) -> httpx.Response:
    parameters = {"details": True, "max_new_tokens": 8, **parameters}
    return client.post("/generate", json={"inputs": text, "parameters": parameters})


@pytest.mark.parametrize("length", [1, 63, 64, 65, 130, 400])
def test_greedy_tokens_equal_transformers_cold_and_warm(client, engine, tiny, length) -> None:
    text = "the quick brown fox jumps over the lazy dog, " * 10
    prompt = tiny.tokenizer(text).input_ids[-length:]
    reference = greedy_reference(plain_twin(tiny), prompt, 8)
    engine.flush_cache()
    cold = generate(client, text, truncate=length)
    warm = generate(client, text, truncate=length)
    for response in (cold, warm):
        got = ids(response)
        assert_same_greedy(got, reference[0][: len(got)], reference[1][: len(got)])
    assert ids(cold) == ids(warm)
    assert cold.headers["x-cached-tokens"] == "0"
    assert warm.json()["details"]["cached_tokens"] == int(warm.headers["x-cached-tokens"])
    assert length < 64 or int(warm.headers["x-cached-tokens"]) >= length // 64 * 64 - 1


def test_a_stream_gives_the_same_tokens_as_one_answer(client) -> None:
    body = {"inputs": "hello there", "parameters": {"max_new_tokens": 9, "details": True}}
    whole = client.post("/generate", json=body).json()
    text = client.post("/generate_stream", json=body).text
    events = [json.loads(block[6:]) for block in text.split("\n\n") if block]
    tokens = [event["token"] for event in events]
    assert [token["id"] for token in tokens] == [t["id"] for t in whole["details"]["tokens"]]
    assert events[-1]["generated_text"] == whole["generated_text"]
    assert all(event["generated_text"] is None for event in events[:-1])


def test_prefill_details_name_every_prompt_token(client) -> None:
    details = generate(client, "hello", decoder_input_details=True).json()["details"]
    assert "".join(token["text"] for token in details["prefill"]) == "hello"
    assert [token["logprob"] is None for token in details["prefill"]] == [True] + [False] * 4


def test_tenants_do_not_share_pages(client, engine) -> None:
    """(A16)"""
    engine.flush_cache()
    body = {"inputs": "secret " * 30, "parameters": {"max_new_tokens": 1}}

    def cached(salt: str) -> int:
        response = client.post("/generate", json=body, headers={"x-bicl-cache-salt": salt})
        return int(response.headers["x-cached-tokens"])

    assert [cached("a"), cached("b"), cached("")] == [0, 0, 0]
    assert cached("a") > 100


# Rules that do not depend on the length limits, which differ here.
BAD = [
    parameters for parameters, message in RULES if " 100" not in message and "120" not in message
]


@pytest.mark.parametrize("parameters", BAD)
def test_bad_input_leaves_pages_untouched(client, engine, parameters) -> None:
    """(A62)"""
    before = engine.snapshot()
    response = client.post("/generate", json={"inputs": "hello", "parameters": parameters})
    after = engine.snapshot()
    assert response.status_code == 422
    assert (after.pages_in_use, after.pages_free) == (before.pages_in_use, before.pages_free)
    assert after.prefilled_tokens == before.prefilled_tokens
    engine.check_integrity()


@pytest.mark.parametrize("grammar", ["(", "[", "a{5,2}", "(?P<x>"])
def test_a_regex_that_does_not_compile_is_422(client, engine, grammar) -> None:
    response = generate(client, "a", grammar={"type": "regex", "value": grammar})
    assert response.status_code == 422
    assert response.json()["error_type"] == "validation"
    assert engine.snapshot().batch_size == 0


def test_a_prompt_that_can_never_fit_is_refused_while_others_run(client) -> None:
    """(A34)"""
    threads = [
        threading.Thread(target=generate, args=(client, f"request {n}"), kwargs={"seed": n})
        for n in range(3)
    ]
    for thread in threads:
        thread.start()
    assert generate(client, "x" * 600).status_code == 422
    for thread in threads:
        thread.join()
    assert generate(client, "small").status_code == 200


def test_the_engines_steps_reach_tgis_metrics(tiny) -> None:
    """(A69)"""
    metrics = ServerMetrics(TOTAL - 1, TOTAL)
    config = ServerConfig(model_id="tiny", max_total_tokens=TOTAL).resolve(TOTAL)
    sizes = EngineConfig(max_total_tokens=TOTAL, max_batch_size=4, num_pages=16)
    engine = Engine(tiny, sizes, observer=metrics).start()
    try:
        state = assemble(config, engine, tiny.tokenizer, metrics=metrics)
        with TestClient(create_app(state)) as client:
            assert generate(client, "hello", max_new_tokens=3, seed=1).status_code == 200
            found = {}
            for line in client.get("/metrics").text.splitlines():
                if line[0] != "#":
                    name, value = line.rsplit(" ", 1)
                    found[name] = float(value)
    finally:
        engine.stop()
    assert found['tgi_batch_inference_count{method="prefill"}'] == 1
    assert found['tgi_batch_inference_success{method="prefill"}'] == 1
    assert found['tgi_batch_forward_duration_count{method="prefill"}'] == 1
    assert found["tgi_batch_next_size_count"] == 1
    assert found["bicl_prefilled_tokens_total"] == 5
    assert found["bicl_prefix_queried_tokens_total"] >= 4
    assert found["tgi_request_success"] == 1
    assert found["tgi_request_queue_duration_count"] == 1


@pytest.fixture
def live(app) -> Iterator[Live]:
    with serve_in_thread(app) as live:
        yield live


@pytest.mark.parametrize(("route", "body"), REQUESTS)
def test_a_client_that_leaves_frees_its_pages(live, engine, route, body) -> None:
    """(A30, A31)"""
    body = json.loads(json.dumps(body).replace("1000", "400"))
    connection = send(live, route, body)
    connection.close()
    wait_until(lambda: engine.snapshot().batch_size == 0, timeout=20)
    wait_until(lambda: engine.snapshot().queue_size == 0, timeout=20)
    assert engine.snapshot().pages_in_use == 0
    engine.check_integrity()


EXTREMES = [
    {"temperature": 1e-30, "do_sample": True},
    {"temperature": 1e300, "do_sample": True},
    {"repetition_penalty": 1e-37},
    {"repetition_penalty": 1e300},
    {"frequency_penalty": -2.0, "repetition_penalty": 3.0},
    {"top_p": 1e-30},
    {"typical_p": 1e-30},
    {"typical_p": 0.999, "top_p": 0.999, "top_k": 2**31 - 1, "temperature": 0.01},
    {"top_k": 1, "seed": 2**64 - 1},
    {"seed": 0, "do_sample": True},
    {"stop": [""]},
    {"stop": ["\x00", "é" * 100, " "]},
    {"top_n_tokens": 5, "do_sample": True},
    {"watermark": True, "do_sample": True},
    {"best_of": 2, "temperature": 2.0},
    {"grammar": {"type": "regex", "value": ""}},
    {"grammar": {"type": "regex", "value": "[a-c]{0,3}"}, "temperature": 5.0},
    {"grammar": {"type": "json", "value": {"properties": {}}}},
]


@pytest.mark.parametrize("parameters", EXTREMES)
def test_extreme_but_legal_parameters_are_answered(client, engine, parameters) -> None:
    response = generate(client, "hello", **parameters)
    assert response.status_code == 200, response.text
    details = response.json()["details"]
    assert details["generated_tokens"] == len(details["tokens"]) >= 1
    assert all(token["logprob"] is None or token["logprob"] <= 0 for token in details["tokens"])
    assert client.get("/health").status_code == 200
    engine.check_integrity()


def test_mixed_traffic_leaves_every_page_and_permit_back(live, app, engine) -> None:
    """300 requests of all kinds from 16 threads; a quarter of the clients leaves. (A30, A31)"""
    state = app.state.server
    permits = state.inference._permits
    draws = random.Random(7)
    kinds = [
        ("/generate", lambda: {"inputs": text(), "parameters": sampling()}),
        ("/generate_stream", lambda: {"inputs": text(), "parameters": sampling()}),
        ("/v1/completions", lambda: {"prompt": [text(), text()], "max_tokens": 12}),
        ("/v1/completions", lambda: {"prompt": text(), "max_tokens": 12, "stream": True}),
        ("/v1/chat/completions", lambda: {"messages": chat(), "max_tokens": 9, "stream": True}),
        ("/generate", lambda: {"inputs": text(), "parameters": {"top_p": 5}}),
        ("/generate", lambda: {"inputs": "x" * 600}),
        ("/tokenize", lambda: {"inputs": text()}),
    ]

    def text() -> str:
        return draws.choice("abc") * 70 + str(draws.randrange(40)) * draws.randrange(1, 90)

    def chat() -> list[dict]:
        return [{"role": "user", "content": text()}]

    def sampling() -> dict:
        extra = [{}, {"do_sample": True, "best_of": 2}, {"stop": ["a"]}, {"top_n_tokens": 3}]
        return {"max_new_tokens": draws.randrange(1, 40), **draws.choice(extra)}

    work = [(route, make(), draws.random() < 0.25) for route, make in draws.choices(kinds, k=300)]

    def run(job: tuple[str, dict, bool]) -> int:
        route, body, leaves = job
        if leaves:
            with contextlib.closing(send(live, route, body)) as connection:
                connection.settimeout(draws.choice([0.001, 0.02]))
                with contextlib.suppress(TimeoutError):
                    connection.recv(200)
            return 0
        return httpx.post(live.url + route, json=body, timeout=120).status_code

    with ThreadPoolExecutor(16) as pool:
        statuses = Counter(pool.map(run, work))
    assert set(statuses) <= {0, 200, 422}
    assert statuses[200] > 100
    wait_until(lambda: engine.snapshot().batch_size + engine.snapshot().queue_size == 0)
    wait_until(lambda: state.inference._permits == permits)
    assert engine.snapshot().pages_in_use == 0
    engine.check_integrity()
