"""A chat's messages, and what its event stream holds."""

import json

from fake_engine import FakeEngine
from transformers import PreTrainedTokenizerFast

HELLO = [{"role": "user", "content": "hello"}]


def data_of(text: str) -> list:
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    assert blocks.pop() == "data: [DONE]"
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


def script(engine: FakeEngine, tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    engine._script = tokenizer.encode(text)
