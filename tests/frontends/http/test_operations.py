"""Health, readiness, info, models, metrics, OpenAPI."""

import asyncio
import re
import threading

import pytest
from fake_engine import FakeEngine
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from bicl.frontends.http.app import create_app
from bicl.frontends.http.assembly import ModelFacts, assemble

# docs/source/reference/metrics.md of TGI 3.3.7, and what its router and backend count besides.
TGI_METRICS = {
    "tgi_batch_current_max_tokens": "gauge",
    "tgi_batch_current_size": "gauge",
    "tgi_batch_decode_duration": "histogram",
    "tgi_batch_filter_duration": "histogram",
    "tgi_batch_forward_duration": "histogram",
    "tgi_batch_inference_count": "counter",
    "tgi_batch_inference_duration": "histogram",
    "tgi_batch_inference_success": "counter",
    "tgi_batch_next_size": "histogram",
    "tgi_queue_size": "gauge",
    "tgi_request_count": "counter",
    "tgi_request_duration": "histogram",
    "tgi_request_generated_tokens": "histogram",
    "tgi_request_inference_duration": "histogram",
    "tgi_request_input_length": "histogram",
    "tgi_request_max_new_tokens": "histogram",
    "tgi_request_mean_time_per_token_duration": "histogram",
    "tgi_request_queue_duration": "histogram",
    "tgi_request_skipped_tokens": "histogram",
    "tgi_request_success": "counter",
    "tgi_request_validation_duration": "histogram",
    "tgi_request_failure": "counter",
    "tgi_batch_concat": "counter",
    "tgi_batch_concat_duration": "histogram",
    "tgi_batch_inference_failure": "counter",
    "tgi_batch_max_total_tokens": "gauge",
}
ONE = {"inputs": "hello", "parameters": {"max_new_tokens": 2}}


def types(text: str) -> dict[str, str]:
    return dict(re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE))


def samples(client: TestClient) -> dict[str, float]:
    found = {}
    for line in client.get("/metrics").text.splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            found[name] = float(value)
    return found


def test_every_tgi_metric_keeps_its_name_and_type(client: TestClient) -> None:
    """(A69)"""
    before = types(client.get("/metrics").text)
    client.post("/generate", json=ONE)
    after = types(client.get("/metrics").text)
    assert before == after
    assert {name: kind for name, kind in after.items() if name.startswith("tgi_")} == TGI_METRICS


def test_metrics_parse_and_name_the_process(client: TestClient) -> None:
    text = client.get("/metrics").text
    families = {family.name for family in text_string_to_metric_families(text)}
    assert {"process_resident_memory_bytes", "bicl_pages", "bicl_info"} <= families
    assert "_created" not in text


def test_duration_buckets_are_tgis(client: TestClient) -> None:
    client.post("/generate", json=ONE)
    bounds = [
        float(name.split('le="')[1].rstrip('"}'))
        for name in samples(client)
        if name.startswith("tgi_request_duration_bucket")
    ]
    assert len(bounds) == 36
    assert bounds[0] == pytest.approx(0.00015)
    assert bounds[1] / bounds[0] == pytest.approx(1.5)
    lengths = [n for n in samples(client) if n.startswith("tgi_request_input_length_bucket")]
    assert len(lengths) == 101


def test_requests_are_counted_by_outcome(client: TestClient, engine: FakeEngine) -> None:
    client.post("/generate", json=ONE)
    client.post("/generate_stream", json=ONE)
    client.post("/generate", json={"inputs": ""})
    client.post("/generate_stream", json={"inputs": ""})
    engine.fail_with = RuntimeError("broken")
    client.post("/generate", json=ONE)
    found = samples(client)
    assert found["tgi_request_count"] == 5
    assert found["tgi_request_success"] == 2
    assert found['tgi_request_failure{err="validation"}'] == 2
    assert found['tgi_request_failure{err="generation"}'] == 1
    assert found["tgi_request_generated_tokens_sum"] == 4
    assert found["tgi_request_input_length_count"] == 3
    assert found['bicl_requests_total{outcome="failed"}'] == 1
    assert found["bicl_time_to_first_token_seconds_count"] == 2


def test_hits_are_counters_that_never_fall(client: TestClient, engine: FakeEngine) -> None:
    """(A70)"""
    engine.cached_tokens = 4
    seen = []
    for _ in range(3):
        client.post("/generate", json=ONE)
        found = samples(client)
        queried = found["bicl_prefix_queried_tokens_total"]
        seen.append((queried, found["bicl_prefix_hit_tokens_total"]))
    assert seen == [(10, 4), (20, 8), (30, 12)]


def test_the_usage_gauge_is_pages_in_use_over_all_pages(make_client, tokenizer) -> None:
    """(A70)"""
    engine = FakeEngine(tokenizer.decode, tick=0.02)
    client = make_client(engine=engine)
    with running(client, 2):
        found = samples(client)
    assert found['bicl_pages{state="in_use"}'] == 2
    assert found["bicl_cache_usage_ratio"] == 2 / found["bicl_page_capacity"]


def test_whether_pages_are_reused_is_a_gauge(client: TestClient) -> None:
    """(A72)"""
    assert samples(client)["bicl_reuse_enabled"] == 1
    assert client.get("/info").json()["bicl"]["reuse_enabled"] is True


def test_reuse_switched_off_and_fall_backs_are_told(engine, config, tokenizer) -> None:
    """(A72)"""
    facts = ModelFacts("m", reuse_enabled=False, fallbacks=("kernels: none for this card",))
    with TestClient(create_app(assemble(config, engine, tokenizer, facts))) as client:
        found = samples(client)
        info = client.get("/info").json()["bicl"]
    assert found["bicl_reuse_enabled"] == 0
    assert found['bicl_fallback{reason="kernels: none for this card"}'] == 1
    assert info["reuse_enabled"] is False
    assert info["fallbacks"] == ["kernels: none for this card"]


def test_a_fall_back_at_work_is_told_and_counted(make_client, engine: FakeEngine) -> None:
    client = make_client(engine=engine)
    for count, told in ((0, []), (2, ["16-bit copies would not fit"])):
        engine.unwidened_prefills = count
        found = samples(client)
        assert found["bicl_unwidened_prefills_total"] == count
        assert sum(name.startswith("bicl_fallback{") for name in found) == len(told)
        fallbacks = client.get("/info").json()["bicl"]["fallbacks"]
        assert [text in said for text, said in zip(told, fallbacks, strict=True)] == [True] * len(
            told
        )


class running:
    """Requests in flight while the block runs."""

    def __init__(self, client: TestClient, count: int) -> None:
        self.client, self.count = client, count

    def __enter__(self) -> None:
        body = {"inputs": "hello", "parameters": {"max_new_tokens": 100}}
        self.threads = [
            threading.Thread(target=self.client.post, args=("/generate",), kwargs={"json": body})
            for _ in range(self.count)
        ]
        for thread in self.threads:
            thread.start()
        while samples(self.client)["tgi_batch_current_size"] < self.count:
            pass

    def __exit__(self, *_: object) -> None:
        for thread in self.threads:
            thread.join()


def test_a_full_server_answers_429_stays_alive_and_is_not_ready(make_client, tokenizer) -> None:
    """(A65)"""
    engine = FakeEngine(tokenizer.decode, tick=0.01)
    client = make_client(engine=engine, max_concurrent_requests=2)
    assert client.get("/ready").status_code == 200
    with running(client, 2):
        refused = client.post("/generate", json=ONE)
        assert refused.status_code == 429
        assert refused.json() == {"error": "Model is overloaded", "error_type": "overloaded"}
        streamed = client.post("/generate_stream", json=ONE)
        assert streamed.status_code == 200
        assert '"error_type":"overloaded"' in streamed.text
        assert client.get("/health").status_code == 200
        assert client.get("/ready").status_code == 503
    assert client.get("/ready").status_code == 200
    assert client.post("/generate", json=ONE).status_code == 200
    assert samples(client)['tgi_request_failure{err="overloaded"}'] == 2


def test_overload_is_told_before_validation(make_client, tokenizer) -> None:
    engine = FakeEngine(tokenizer.decode, tick=0.01)
    client = make_client(engine=engine, max_concurrent_requests=1)
    with running(client, 1):
        assert client.post("/generate", json={"inputs": ""}).status_code == 429


@pytest.mark.parametrize("route", ["/health", "/ping", "/"])
def test_health_is_an_empty_200_until_the_engine_dies(
    client: TestClient, engine: FakeEngine, route: str
) -> None:
    assert (client.get(route).status_code, client.get(route).content) == (200, b"")
    engine.healthy = False
    response = client.get(route)
    assert response.status_code == 503
    assert response.json() == {"error": "unhealthy", "error_type": "healthcheck"}


def test_info_has_tgis_fields_and_ours(client: TestClient) -> None:
    info = client.get("/info").json()
    ours = info.pop("bicl")
    assert list(info) == [
        "model_id",
        "model_sha",
        "model_pipeline_tag",
        "max_concurrent_requests",
        "max_best_of",
        "max_stop_sequences",
        "max_input_tokens",
        "max_total_tokens",
        "validation_workers",
        "max_client_batch_size",
        "router",
        "version",
        "sha",
        "docker_label",
    ]
    assert info["version"] == "3.3.7"
    assert (info["max_input_tokens"], info["max_total_tokens"]) == (100, 120)
    assert any(name.startswith("adapter_id") for name in ours["unsupported"])


def test_flags_without_effect_are_named_in_info(make_client) -> None:
    info = make_client(max_waiting_tokens=20).get("/info").json()
    assert info["bicl"]["without_effect"] == ["--max-waiting-tokens"]


@pytest.mark.parametrize("route", ["/health", "/ready", "/info", "/metrics", "/v1/models", "/"])
def test_probes_may_ask_with_head(client: TestClient, route: str) -> None:
    response = client.head(route)
    assert (response.status_code, response.content) == (200, b"")


def test_models_names_the_served_model(client: TestClient) -> None:
    assert client.get("/v1/models").json() == {
        "object": "list",
        "data": [{"id": "fake/model", "object": "model", "created": 0, "owned_by": "fake/model"}],
    }


def test_openapi_describes_every_route_with_its_body(client: TestClient) -> None:
    document = client.get("/api-doc/openapi.json").json()
    for route in (
        "/",
        "/generate",
        "/generate_stream",
        "/v1/chat/completions",
        "/v1/completions",
        "/tokenize",
        "/chat_tokenize",
    ):
        content = document["paths"][route]["post"]["requestBody"]["content"]
        assert list(content) == ["application/json"]
    for route in ("/health", "/ready", "/info", "/metrics", "/v1/models"):
        assert "get" in document["paths"][route]
    assert client.get("/docs").status_code == 200
    fields = document["components"]["schemas"]["GenerateParameters"]["properties"]
    assert {"best_of", "typical_p", "top_n_tokens", "grammar", "adapter_id"} <= set(fields)


def test_browsers_may_call_from_the_allowed_origins_only(make_client) -> None:
    anywhere = make_client().get("/info", headers={"origin": "http://a.example"})
    assert anywhere.headers["access-control-allow-origin"] == "*"
    client = make_client(cors_allow_origin="http://a.example, http://b.example")
    for origin, allowed in (("http://b.example", True), ("http://c.example", False)):
        response = client.get("/info", headers={"origin": origin})
        assert ("access-control-allow-origin" in response.headers) == allowed


def test_while_draining_new_requests_are_503_and_liveness_stays(make_client, tokenizer) -> None:
    """(A65, A67)"""
    engine = FakeEngine(tokenizer.decode)
    client = make_client(engine=engine)
    client.app.state.server.inference.draining = True
    chat = {"messages": [{"role": "user", "content": "a"}], "stream": True}
    for route, body in (
        ("/generate", ONE),
        ("/generate_stream", ONE),
        ("/", ONE),
        ("/v1/chat/completions", chat),
        ("/v1/completions", {"prompt": "a"}),
    ):
        response = client.post(route, json=body)
        assert response.status_code == 503
        assert response.json()["error_type"] == "shutting_down"
    assert client.get("/health").status_code == 200
    assert client.get("/ready").status_code == 503
    assert engine.requests == []


def test_many_requests_at_once_all_get_their_own_answer(make_client, tokenizer) -> None:
    engine = FakeEngine(tokenizer.decode, tick=0.001)
    client = make_client(engine=engine, max_concurrent_requests=64)
    answers: dict[str, str] = {}

    def ask(text: str) -> None:
        body = {"inputs": text, "parameters": {"max_new_tokens": len(text)}}
        answers[text] = client.post("/generate", json=body).json()["generated_text"]

    async def all_at_once() -> None:
        texts = [f"request number {index}" for index in range(32)]
        await asyncio.gather(*(asyncio.to_thread(ask, text) for text in texts))

    asyncio.run(all_at_once())
    assert len(answers) == 32
    assert all(text == answer for text, answer in answers.items())
    assert engine.snapshot().batch_size == 0


@pytest.mark.parametrize(
    ("route", "kinds", "event"),
    [
        ("/generate", {"application/json"}, None),
        ("/generate_stream", {"text/event-stream"}, "StreamResponse"),
        ("/", {"application/json", "text/event-stream"}, "StreamResponse"),
        (
            "/v1/chat/completions",
            {"application/json", "text/event-stream"},
            "ChatCompletionChunk",
        ),
        ("/v1/completions", {"application/json", "text/event-stream"}, "Chunk"),
    ],
)
def test_openapi_describes_answers_and_events(
    client: TestClient, route: str, kinds: set[str], event: str | None
) -> None:
    document = client.get("/api-doc/openapi.json").json()
    content = document["paths"][route]["post"]["responses"]["200"]["content"]
    assert set(content) == kinds
    if event is not None:
        reference = content["text/event-stream"]["schema"]["$ref"]
        assert reference == f"#/components/schemas/{event}"
        assert event in document["components"]["schemas"]


def test_every_reference_in_openapi_leads_somewhere(client: TestClient) -> None:
    text = client.get("/api-doc/openapi.json").text
    names = set(re.findall(r'"#/components/schemas/([^"]+)"', text))
    assert names <= set(client.get("/api-doc/openapi.json").json()["components"]["schemas"])
