"""Text to token ids, off the event loop where that takes long."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tokenizers import Encoding, Tokenizer
from transformers import PreTrainedTokenizerBase

from bicl.errors import ConfigError
from bicl.frontends.http.schemas.generate import SimpleToken

__all__ = ["TextTokenizer"]

# A tokenizer does some 1-2 MB/s: below this a hop to a thread costs more than it saves.
INLINE_CHARACTERS = 2_000


class TextTokenizer:
    """A fast tokenizer that may be used from many tasks at once.

    Raises:
        ConfigError: the model has no fast tokenizer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, workers: int) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise ConfigError(
                "the model has no fast tokenizer (tokenizer.json); convert it with transformers' "
                "AutoTokenizer(...).save_pretrained"
            )
        # A copy: whoever else uses the tokenizer may set padding or truncation on theirs.
        self._tokenizer = Tokenizer.from_str(backend.to_str())
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="tokenize")

    async def encode(self, text: str, add_special_tokens: bool) -> Encoding:
        if len(text) <= INLINE_CHARACTERS:
            return self._encode(text, add_special_tokens)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, self._encode, text, add_special_tokens)

    def _encode(self, text: str, add_special_tokens: bool) -> Encoding:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def simple_tokens(encoding: Encoding, text: str) -> list[SimpleToken]:
    """``/tokenize``'s answer. Offsets count bytes of UTF-8, as TGI's do."""
    byte_at = _byte_offsets(text)
    raw = text.encode()
    tokens: list[SimpleToken] = []
    offsets: list[Any] = encoding.offsets
    for token, (start, stop) in zip(encoding.ids, offsets, strict=True):
        first, last = byte_at[start], byte_at[stop]
        piece = raw[first:last].decode(errors="replace")
        tokens.append(SimpleToken(id=token, text=piece, start=first, stop=last))
    return tokens


def _byte_offsets(text: str) -> list[int]:
    offsets = [0]
    for character in text:
        offsets.append(offsets[-1] + len(character.encode()))
    return offsets
