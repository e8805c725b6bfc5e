"""Anything may be posted: the answer is one of TGI's statuses, and nothing stays held."""

import json

from fake_engine import FakeEngine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from bicl.frontends.http.schemas.chat import ChatRequest
from bicl.frontends.http.schemas.completions import CompletionRequest
from bicl.frontends.http.schemas.generate import GenerateParameters

KEPT = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
STATUSES = {200, 400, 422, 424, 429}
NUMBERS = st.one_of(
    st.integers(-(2**70), 2**70),
    st.integers(-3, 130),
    st.floats(allow_nan=False, allow_infinity=False),
    st.floats(0, 1),
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=8))
JSON = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
GRAMMARS = st.fixed_dictionaries(
    {"type": st.sampled_from(["json", "regex", "json_schema", "json_object", "x"]), "value": JSON}
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system"])},
        optional={"content": st.one_of(st.text(max_size=20), JSON), "tool_calls": JSON},
    ),
    max_size=3,
)

KEYWORDS = st.fixed_dictionaries(
    {}, optional=dict.fromkeys(("type", "properties", "required", "$defs"), JSON)
)
TOOLS = st.lists(
    st.fixed_dictionaries(
        {
            "type": st.just("function"),
            "function": st.fixed_dictionaries(
                {"name": st.text(max_size=5), "parameters": st.one_of(KEYWORDS, JSON)},
                optional={"description": st.text(max_size=5)},
            ),
        }
    ),
    max_size=2,
)


def some_of(names: list[str], **known: st.SearchStrategy) -> st.SearchStrategy:
    """Objects in which each field may be absent, sensible or anything."""
    fields = {name: st.one_of(known[name], JSON) if name in known else JSON for name in names}
    return st.fixed_dictionaries({}, optional=fields)


PARAMETERS = some_of(
    list(GenerateParameters.model_fields),
    grammar=GRAMMARS,
    max_new_tokens=st.integers(1, 30),
    temperature=st.floats(0.1, 2),
    top_k=st.integers(1, 50),
    do_sample=st.booleans(),
    details=st.booleans(),
    stop=st.lists(st.text(max_size=3), max_size=5),
    best_of=st.integers(0, 3),
    truncate=st.integers(1, 20),
    top_n_tokens=st.integers(0, 6),
)
CHATS = some_of(
    list(ChatRequest.model_fields),
    messages=MESSAGES,
    response_format=GRAMMARS,
    max_tokens=st.integers(1, 30),
    stream=st.booleans(),
    tools=TOOLS,
    tool_choice=st.sampled_from(["auto", "none", "required", "x", None]),
)
TOOL_CHATS = st.fixed_dictionaries(
    {
        "messages": st.just([{"role": "user", "content": "hi"}]),
        "tools": TOOLS,
        "stream": st.booleans(),
    },
    optional={"tool_choice": st.sampled_from(["auto", "required", "none"])},
)
COMPLETIONS = some_of(
    list(CompletionRequest.model_fields),
    prompt=st.one_of(st.text(max_size=20), st.lists(st.text(max_size=5), max_size=5)),
    max_tokens=st.integers(1, 30),
    stream=st.booleans(),
)


def check(client: TestClient, engine: FakeEngine, route: str, body: object) -> None:
    response = client.post(
        route, content=json.dumps(body), headers={"content-type": "application/json"}
    )
    assert response.status_code in STATUSES, response.text
    if response.headers["content-type"] == "application/json":
        answer = response.json()
        assert response.status_code == 200 or set(answer) == {"error", "error_type"}
    assert engine.snapshot().batch_size == 0
    assert client.app.state.server.inference._permits == 8
    engine.requests.clear()


@settings(max_examples=150, suppress_health_check=KEPT, deadline=None, derandomize=True)
@given(
    route=st.sampled_from(["/", "/generate", "/generate_stream", "/tokenize"]),
    body=st.fixed_dictionaries(
        {},
        optional={
            "inputs": st.one_of(st.text(max_size=40), JSON),
            "parameters": st.one_of(PARAMETERS, JSON),
            "stream": st.booleans(),
        },
    ),
)
def test_generate_survives_any_body(
    client: TestClient, engine: FakeEngine, route: str, body: object
) -> None:
    check(client, engine, route, body)


@settings(max_examples=100, suppress_health_check=KEPT, deadline=None, derandomize=True)
@given(
    route=st.sampled_from(["/v1/chat/completions", "/chat_tokenize"]),
    body=st.one_of(CHATS, TOOL_CHATS),
)
def test_chat_survives_any_body(
    client: TestClient, engine: FakeEngine, route: str, body: object
) -> None:
    check(client, engine, route, body)


@settings(max_examples=100, suppress_health_check=KEPT, deadline=None, derandomize=True)
@given(body=COMPLETIONS)
def test_completions_survive_any_body(client: TestClient, engine: FakeEngine, body: object) -> None:
    check(client, engine, "/v1/completions", body)


@settings(max_examples=60, suppress_health_check=KEPT, deadline=None, derandomize=True)
@given(body=st.binary(max_size=60))
def test_bytes_that_are_no_request_never_reach_the_engine(
    client: TestClient, engine: FakeEngine, body: bytes
) -> None:
    headers = {"content-type": "application/json"}
    response = client.post("/generate", content=body, headers=headers)
    assert response.status_code in (400, 422)
    assert engine.requests == []
