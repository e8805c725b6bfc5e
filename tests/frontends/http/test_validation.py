"""TGI's rules: which request is refused, in which words, and that nothing was submitted."""

import pytest
from fake_engine import FakeEngine
from starlette.testclient import TestClient

from bicl.errors import CapacityError, InvalidInputError, OverloadedError

LONG = "x" * 101  # one token a byte; the limit is 100


def refusal(client: TestClient, inputs: str = "hello", **parameters: object) -> tuple[int, dict]:
    response = client.post("/generate", json={"inputs": inputs, "parameters": parameters})
    return response.status_code, response.json()


RULES = [
    ({"best_of": 2}, "you must use sampling when `best_of` is > 1"),
    ({"best_of": 3, "do_sample": True}, "`best_of` must be > 0 and <= 2. Given: 3"),
    (
        {"best_of": 2, "do_sample": True, "seed": 1},
        "`seed` must not be set when `best_of` > 1",
    ),
    ({"temperature": 0}, "`temperature` must be strictly positive"),
    ({"temperature": -1.5}, "`temperature` must be strictly positive"),
    ({"temperature": 1e-60}, "`temperature` must be strictly positive"),  # 0 in float32
    ({"repetition_penalty": 0}, "`repetition_penalty` must be strictly positive"),
    ({"frequency_penalty": 2.5}, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
    ({"frequency_penalty": -2.5}, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
    ({"top_p": 0}, "`top_p` must be > 0.0 and < 1.0"),
    ({"top_p": 1}, "`top_p` must be > 0.0 and < 1.0"),
    ({"top_p": 0.99999999999}, "`top_p` must be > 0.0 and < 1.0"),  # 1 in float32
    ({"typical_p": 1.0}, "`typical_p` must be > 0.0 and < 1.0"),
    ({"top_k": 0}, "`top_k` must be strictly positive"),
    ({"top_k": -1}, "`top_k` must be strictly positive"),
    ({"max_new_tokens": 0}, "`max_new_tokens` must be strictly positive"),
    ({"stop": list("abcde")}, "`stop` supports up to 4 stop sequences. Given: 5"),
    ({"top_n_tokens": 6}, "`top_n_tokens` must be >= 0 and <= 5. Given: 6"),
    ({"truncate": 0}, "`truncate` must be strictly positive and less than 100. Given: 0"),
    (
        {"truncate": 101},
        "`truncate` must be strictly positive and less than 100. Given: 101",
    ),
    ({"adapter_id": "mine"}, "`adapter_id` is not supported: no adapters are loaded"),
    (
        {"max_new_tokens": 116},
        "`inputs` tokens + `max_new_tokens` must be <= 120. "
        "Given: 5 `inputs` tokens and 116 `max_new_tokens`",
    ),
    ({"grammar": {"type": "json", "value": 7}}, "grammar is not supported"),
    (
        {"grammar": {"type": "json", "value": {"type": "object"}}},
        "grammar is not valid: Grammar must have a 'properties' field",
    ),
    (
        {"grammar": {"type": "json_schema", "value": {"schema": {"type": "object"}}}},
        "grammar is not valid: Grammar must have a 'properties' field",
    ),
]


@pytest.mark.parametrize(("parameters", "message"), RULES)
def test_a_broken_rule_is_answered_422_in_tgis_words(
    client: TestClient, engine: FakeEngine, parameters: dict, message: str
) -> None:
    """(A62)"""
    status, body = refusal(client, **parameters)
    assert status == 422
    assert body == {"error": f"Input validation error: {message}", "error_type": "validation"}
    assert engine.requests == []


@pytest.mark.parametrize("value", ["{", {"properties": {"a": {"type": "nonsense"}}}])
def test_a_grammar_that_is_no_schema_is_refused(client: TestClient, value: object) -> None:
    status, body = refusal(client, grammar={"type": "json", "value": value})
    assert status == 422
    assert body["error"].startswith("Input validation error: grammar is not valid: ")


def test_empty_input_is_refused(client: TestClient, engine: FakeEngine) -> None:
    """(A62)"""
    status, body = refusal(client, inputs="")
    assert (status, body["error"]) == (422, "Input validation error: `inputs` cannot be empty")
    assert engine.requests == []


def test_rules_are_checked_in_tgis_order(client: TestClient) -> None:
    _, body = refusal(client, inputs="", temperature=0, top_p=7, max_new_tokens=0)
    assert body["error"].endswith("`temperature` must be strictly positive")
    _, body = refusal(client, inputs="", max_new_tokens=0)
    assert body["error"].endswith("`max_new_tokens` must be strictly positive")


def test_input_beyond_its_limit_is_refused_with_both_numbers(client: TestClient) -> None:
    """(A61)"""
    status, body = refusal(client, inputs=LONG, max_new_tokens=1)
    assert status == 422
    assert "`inputs` must have less than 100 tokens. Given: 101" in body["error"]


def test_truncate_keeps_the_last_tokens(client: TestClient, engine: FakeEngine) -> None:
    """(A61)"""
    text = "a" * 400 + "b" * 100
    response = client.post(
        "/generate", json={"inputs": text, "parameters": {"truncate": 100, "max_new_tokens": 1}}
    )
    assert response.status_code == 200
    assert response.headers["x-prompt-tokens"] == "100"
    (request,) = engine.requests
    assert len(set(request.prompt_ids)) == 1
    assert len(request.prompt_ids) == 100


def test_total_exactly_at_the_limit_is_taken(client: TestClient) -> None:
    """(A62)"""
    status, _ = refusal(client, max_new_tokens=115)
    assert status == 200
    status, _ = refusal(client, max_new_tokens=116)
    assert status == 422


def test_without_max_new_tokens_all_that_fits_is_generated(
    client: TestClient, engine: FakeEngine
) -> None:
    assert client.post("/generate", json={"inputs": "hello"}).status_code == 200
    assert engine.requests[0].params.max_new_tokens == 115


def test_more_new_tokens_than_ever_fit_are_cut_where_tgi_plans_them_later(
    make_client, engine: FakeEngine
) -> None:
    """TGI checks no more than 1,024 new tokens against the limit and stops when it is reached."""
    client = make_client(max_input_tokens=1500, max_total_tokens=2000)
    status, _ = refusal(client, inputs="x" * 500, max_new_tokens=1900)
    assert status == 200
    assert engine.requests[0].params.max_new_tokens == 1500


def test_a_request_without_parameters_samples_and_one_with_parameters_does_not(
    client: TestClient, engine: FakeEngine
) -> None:
    client.post("/generate", json={"inputs": "a"})
    client.post("/generate", json={"inputs": "a", "parameters": {}})
    client.post("/generate", json={"inputs": "a", "parameters": {"temperature": 0.5}})
    assert [request.params.do_sample for request in engine.requests] == [True, False, True]


def test_the_seed_is_told_only_where_sampling_used_it(client: TestClient) -> None:
    _, greedy = refusal(client, details=True, seed=7, max_new_tokens=1)
    _, sampled = refusal(client, details=True, seed=7, do_sample=True, max_new_tokens=1)
    assert greedy["details"]["seed"] is None
    assert sampled["details"]["seed"] == 7


def test_all_parameters_reach_the_engine(client: TestClient, engine: FakeEngine) -> None:
    status, _ = refusal(
        client,
        temperature=0.5,
        repetition_penalty=1.5,
        frequency_penalty=0.25,
        top_k=7,
        top_p=0.75,
        typical_p=0.875,
        max_new_tokens=9,
        stop=["a", "b", "a"],
        watermark=True,
        seed=2**64 - 1,
        top_n_tokens=3,
        decoder_input_details=True,
        grammar={"type": "regex", "value": "[a-z]+"},
    )
    assert status == 200
    params = engine.requests[0].params
    assert (params.temperature, params.repetition_penalty, params.frequency_penalty) == (
        0.5,
        1.5,
        0.25,
    )
    assert (params.top_k, params.top_p, params.typical_p) == (7, 0.75, 0.875)
    assert (params.max_new_tokens, params.stop, params.seed) == (9, ("a", "b"), 2**64 - 1)
    assert params.watermark
    assert params.decoder_input_details
    assert params.top_n_tokens == 3
    assert params.grammar is not None
    assert params.grammar.value == "[a-z]+"


def test_prefill_details_can_be_switched_off_for_the_server(
    make_client, engine: FakeEngine
) -> None:
    """(A64)"""
    request = {"inputs": "hi", "parameters": {"decoder_input_details": True, "max_new_tokens": 1}}
    with_them = make_client().post("/generate", json=request).json()["details"]
    without = make_client(enable_prefill_logprobs=False).post("/generate", json=request)
    assert [token["logprob"] for token in with_them["prefill"]] == [None, -0.5]
    assert without.json()["details"]["prefill"] == []
    assert set(with_them) == set(without.json()["details"])


def test_grammar_can_be_switched_off_for_the_server(make_client) -> None:
    client = make_client(disable_grammar_support=True)
    status, body = refusal(client, grammar={"type": "regex", "value": "a"})
    assert (status, body["error"]) == (422, "Input validation error: grammar is not supported")


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (CapacityError("too long for the pool"), 422, "validation"),
        (InvalidInputError("grammar does not compile"), 422, "validation"),
        (OverloadedError("queue full"), 429, "overloaded"),
    ],
)
def test_what_the_engine_refuses_gets_tgis_status(
    client: TestClient, engine: FakeEngine, error: Exception, status: int, kind: str
) -> None:
    engine.refuse_with = error
    got, body = refusal(client)
    assert (got, body["error_type"]) == (status, kind)


def test_a_failure_during_generation_is_424(client: TestClient, engine: FakeEngine) -> None:
    engine.fail_with = RuntimeError("out of memory")
    status, body = refusal(client)
    assert status == 424
    assert body == {
        "error": "Request failed during generation: out of memory",
        "error_type": "generation",
    }


def test_refused_and_failed_requests_give_their_permits_back(make_client, engine) -> None:
    client = make_client(max_concurrent_requests=1)
    for parameters in ({"temperature": 0}, {"max_new_tokens": 1}):
        for _ in range(3):
            refusal(client, **parameters)
    engine.fail_with = RuntimeError("broken")
    for _ in range(3):
        assert refusal(client)[0] == 424
    engine.fail_with = None
    assert refusal(client, max_new_tokens=1)[0] == 200


def test_best_of_returns_the_others_and_draws_different_seeds(
    client: TestClient, engine: FakeEngine
) -> None:
    _, body = refusal(client, best_of=2, do_sample=True, details=True, max_new_tokens=2)
    (other,) = body["details"]["best_of_sequences"]
    assert set(other) == {
        "generated_text",
        "finish_reason",
        "generated_tokens",
        "seed",
        "prefill",
        "tokens",
        "cached_tokens",
    }
    first, second = (request.params.seed for request in engine.requests)
    assert first != second


def test_a_cache_salt_comes_from_the_header_and_never_from_the_body(
    client: TestClient, engine: FakeEngine
) -> None:
    """(A16)"""
    body = {"inputs": "a", "salt": "x", "cache_salt": "x", "parameters": {"salt": "x"}}
    client.post("/generate", json=body)
    client.post("/generate", json=body, headers={"x-bicl-cache-salt": "tenant"})
    assert [request.salt for request in engine.requests] == ["", "tenant"]
    long = client.post("/generate", json=body, headers={"x-bicl-cache-salt": "y" * 257})
    assert long.status_code == 422
