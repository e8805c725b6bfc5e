"""Clients that others wrote, against the real server with SmolLM2-135M-Instruct."""

import asyncio
import json
from collections.abc import Iterator

import httpx
import openai
import pytest
import text_generation
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError, ValidationError
from text_generation.errors import ValidationError as TextGenerationValidationError

pytestmark = [
    pytest.mark.slow,
    # The text-generation client was written for pydantic 1's names.
    pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20"),
]

PROMPT = "The capital of France is"
MESSAGES = [{"role": "user", "content": "Name the capital of France."}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a town",
        "parameters": {
            "type": "object",
            "properties": {"town": {"type": "string", "enum": ["Paris", "Oslo"]}},
            "required": ["town"],
        },
    },
}


@pytest.fixture
def hub(bundled_server: str, monkeypatch: pytest.MonkeyPatch) -> InferenceClient:
    # Tests keep the hub offline; this client asks a server of our own.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    return InferenceClient(model=bundled_server, timeout=120)


@pytest.fixture
def chat(bundled_server: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{bundled_server}/v1", api_key="none") as client:
        yield client


@pytest.fixture
def tgi(bundled_server: str) -> text_generation.Client:
    return text_generation.Client(bundled_server, timeout=120)


@pytest.fixture(scope="module", autouse=True)
def _pages_come_back(bundled_server: str) -> Iterator[None]:
    yield
    metrics = httpx.get(f"{bundled_server}/metrics").text
    values = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if line[0] != "#")
    assert float(values['bicl_pages{state="in_use"}']) == 0
    free, cached = (float(values[f'bicl_pages{{state="{s}"}}']) for s in ("free", "cached"))
    assert free + cached == float(values["bicl_page_capacity"])
    assert float(values["tgi_batch_current_size"]) == 0
    assert httpx.get(f"{bundled_server}/health").status_code == 200


# --- huggingface_hub ---------------------------------------------------------------------------
def test_hub_text_generation(hub: InferenceClient) -> None:
    assert "Paris" in hub.text_generation(PROMPT, max_new_tokens=8, return_full_text=False)
    full = hub.text_generation(PROMPT, max_new_tokens=4, return_full_text=True)
    assert full.startswith(PROMPT)


def test_hub_text_generation_with_details(hub: InferenceClient) -> None:
    answer = hub.text_generation(
        PROMPT,
        max_new_tokens=6,
        details=True,
        decoder_input_details=True,
        top_n_tokens=2,
        return_full_text=False,
    )
    assert answer.details.generated_tokens == 6
    assert answer.details.finish_reason == "length"
    assert "".join(token.text for token in answer.details.tokens) == answer.generated_text
    assert "".join(token.text for token in answer.details.prefill) == PROMPT
    assert answer.details.prefill[0].logprob is None
    assert all(token.logprob <= 0 for token in answer.details.prefill[1:])
    assert all(len(tops) == 2 for tops in answer.details.top_tokens)
    assert answer.details.tokens[0].logprob == answer.details.top_tokens[0][0]["logprob"]


def test_hub_text_generation_streamed(hub: InferenceClient) -> None:
    whole = hub.text_generation(PROMPT, max_new_tokens=8, return_full_text=False)
    pieces = list(hub.text_generation(PROMPT, max_new_tokens=8, stream=True))
    assert len(pieces) == 8
    assert "".join(pieces) == whole


def test_hub_text_generation_streamed_with_details(hub: InferenceClient) -> None:
    events = list(
        hub.text_generation(
            PROMPT, max_new_tokens=5, stream=True, details=True, return_full_text=False
        )
    )
    assert [event.index for event in events] == [1, 2, 3, 4, 5]
    last = events[-1]
    assert last.generated_text == "".join(event.token.text for event in events)
    assert last.details.generated_tokens == 5
    assert last.details.input_length == 5


def test_hub_stop_sequences_end_the_text(hub: InferenceClient) -> None:
    answer = hub.text_generation(
        PROMPT, max_new_tokens=30, stop=["."], details=True, return_full_text=False
    )
    assert answer.details.finish_reason == "stop_sequence"
    assert answer.generated_text.endswith(".")


def test_hub_seeds_repeat(hub: InferenceClient) -> None:
    def sample(seed: int) -> str:
        return hub.text_generation(
            PROMPT, max_new_tokens=6, do_sample=True, temperature=1.5, seed=seed
        )

    assert sample(3) == sample(3)
    assert len({sample(seed) for seed in range(4)}) > 1


def test_hub_errors_carry_tgis_message(hub: InferenceClient) -> None:
    with pytest.raises((ValidationError, HfHubHTTPError), match="`top_p` must be"):
        hub.text_generation(PROMPT, top_p=1.5)


def test_hub_chat(hub: InferenceClient) -> None:
    answer = hub.chat_completion(MESSAGES, max_tokens=20, temperature=0)
    assert "Paris" in answer.choices[0].message.content
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_hub_chat_streamed(hub: InferenceClient) -> None:
    whole = hub.chat_completion(MESSAGES, max_tokens=12, temperature=0)
    chunks = list(hub.chat_completion(MESSAGES, max_tokens=12, temperature=0, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


# --- openai ------------------------------------------------------------------------------------
def test_openai_chat_with_logprobs_and_cached_tokens(chat: openai.OpenAI) -> None:
    def ask():
        return chat.chat.completions.create(
            model="tgi",
            messages=MESSAGES,
            max_tokens=6,
            temperature=0,
            logprobs=True,
            top_logprobs=3,
        )

    ask()
    answer = ask()
    content = answer.choices[0].logprobs.content
    assert "".join(each.token for each in content) == answer.choices[0].message.content
    assert all(len(each.top_logprobs) == 3 for each in content)
    cached = answer.usage.prompt_tokens_details.cached_tokens
    assert 0 < cached < answer.usage.prompt_tokens


def test_openai_second_turn_reuses_the_first_ones_answer(chat: openai.OpenAI) -> None:
    """(A75)"""
    messages = [{"role": "user", "content": "List three rivers of Europe in one sentence."}]

    def ask():
        return chat.chat.completions.create(
            model="tgi", messages=messages, max_tokens=40, temperature=0
        )

    first = ask()
    messages.append({"role": "assistant", "content": first.choices[0].message.content})
    messages.append({"role": "user", "content": "Which is the longest?"})
    second = ask().usage
    answered = first.usage.total_tokens
    assert second.prompt_tokens_details.cached_tokens >= answered - 2


def test_openai_chat_streamed_with_usage(chat: openai.OpenAI) -> None:
    stream = chat.chat.completions.create(
        model="tgi",
        messages=MESSAGES,
        max_tokens=6,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 6
    assert len(chunks) == 7


def test_openai_completions(chat: openai.OpenAI) -> None:
    answer = chat.completions.create(
        model="tgi", prompt=[PROMPT, "1, 2, 3,"], max_tokens=4, temperature=0
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert "Paris" in answer.choices[0].text
    assert "4" in answer.choices[1].text
    assert answer.usage.completion_tokens == 8


def test_openai_completions_streamed(chat: openai.OpenAI) -> None:
    stream = chat.completions.create(
        model="tgi", prompt=PROMPT, max_tokens=5, temperature=0, stream=True
    )
    chunks = list(stream)
    assert "Paris" in "".join(chunk.choices[0].text for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == 5


def test_openai_json_schema(chat: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"town": {"type": "string", "maxLength": 12}},
        "required": ["town"],
    }
    answer = chat.chat.completions.create(
        model="tgi",
        messages=MESSAGES,
        max_tokens=60,
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "t", "schema": schema}},
    )
    assert answer.choices[0].message.content.lstrip().startswith("{")
    assert answer.choices[0].finish_reason == "stop"


def test_openai_tools(chat: openai.OpenAI) -> None:
    answer = chat.chat.completions.create(
        model="tgi",
        messages=[{"role": "user", "content": "What is the weather in Oslo?"}],
        tools=[TOOL],
        tool_choice="required",
        max_tokens=80,
        temperature=0,
    )
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    assert call.function.arguments in ('{"town":"Oslo"}', '{"town":"Paris"}')


def test_openai_tools_streamed(chat: openai.OpenAI) -> None:
    stream = chat.chat.completions.create(
        model="tgi",
        messages=[{"role": "user", "content": "What is the weather in Oslo?"}],
        tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        max_tokens=80,
        temperature=0,
        stream=True,
    )
    calls = [call for chunk in stream for call in chunk.choices[0].delta.tool_calls or []]
    assert calls[0].function.name == "get_weather"
    arguments = "".join(call.function.arguments for call in calls)
    assert json.loads(arguments) in ({"town": "Oslo"}, {"town": "Paris"})


def test_openai_errors_have_the_status(chat: openai.OpenAI) -> None:
    with pytest.raises(openai.UnprocessableEntityError) as long:
        chat.completions.create(model="tgi", prompt="a " * 20_000, max_tokens=5)
    assert "must be <= " in long.value.response.json()["error"]
    with pytest.raises(openai.UnprocessableEntityError) as several:
        chat.chat.completions.create(model="tgi", messages=MESSAGES, n=3)
    assert "`n` is not supported" in several.value.response.json()["error"]


def test_openai_models(chat: openai.OpenAI) -> None:
    (model,) = chat.models.list().data
    assert model.id == "HuggingFaceTB/SmolLM2-135M-Instruct"


# --- text-generation ---------------------------------------------------------------------------
def test_text_generation_client(tgi: text_generation.Client) -> None:
    answer = tgi.generate(PROMPT, max_new_tokens=6, decoder_input_details=True, top_n_tokens=2)
    assert "Paris" in answer.generated_text
    assert answer.details.generated_tokens == 6
    assert "".join(token.text for token in answer.details.prefill) == PROMPT
    assert len(answer.details.top_tokens) == 6


def test_text_generation_client_best_of(tgi: text_generation.Client) -> None:
    answer = tgi.generate(PROMPT, max_new_tokens=6, best_of=2, do_sample=True)
    (other,) = answer.details.best_of_sequences

    def mean(tokens: list) -> float:
        return sum(token.logprob for token in tokens) / len(tokens)

    assert mean(answer.details.tokens) >= mean(other.tokens)


def test_text_generation_client_streamed(tgi: text_generation.Client) -> None:
    events = list(tgi.generate_stream(PROMPT, max_new_tokens=6))
    assert events[-1].generated_text == "".join(event.token.text for event in events)
    assert events[-1].details.generated_tokens == 6
    assert events[-1].details.finish_reason == "length"


def test_text_generation_client_chat(tgi: text_generation.Client) -> None:
    """Not streamed: this client's chunk demands `tool_calls`, which TGI 3.3.7 sends with tools
    only."""
    answer = tgi.chat(MESSAGES, max_tokens=12, temperature=0)
    assert "Paris" in answer.choices[0].message.content


def test_text_generation_client_grammar(tgi: text_generation.Client) -> None:
    grammar = {"type": "regex", "value": "(Paris|Oslo), [0-9]{3}"}
    answer = tgi.generate("Say a town and a number: ", max_new_tokens=20, grammar=grammar)
    town, number = answer.generated_text.split(", ")
    assert town in ("Paris", "Oslo")
    assert number.isdigit()
    assert len(number) == 3


def test_text_generation_client_errors(tgi: text_generation.Client) -> None:
    with pytest.raises(TextGenerationValidationError, match="`truncate` must be strictly"):
        tgi.generate(PROMPT, truncate=1_000_000)


def test_text_generation_async_client(bundled_server: str) -> None:
    async def ask() -> tuple[str, str]:
        client = text_generation.AsyncClient(bundled_server, timeout=120)
        answer = await client.generate(PROMPT, max_new_tokens=6)
        pieces = [
            event.token.text async for event in client.generate_stream(PROMPT, max_new_tokens=6)
        ]
        return answer.generated_text, "".join(pieces)

    whole, streamed = asyncio.run(ask())
    assert whole == streamed
