"""Token ids to text without the Python that transformers puts around its fast tokenizers.

TGI detokenises twice a row and step, one row after another, while the GPU has nothing to do. Most
of such a call is not the tokenizer's own work: it finds out what kind of list it was given, and
remembers an option that no decoder-only model has.
"""

from __future__ import annotations

import functools
import re
from typing import Any

__all__ = ["decode_directly"]

_CLEANED = re.compile(" (?:[.?!,']|n't)")
"""Where transformers' clean-up of spaces may change a text; none of its replacements begins
otherwise."""


def decode_directly(tokenizer: Any) -> bool:
    """Give a fast tokenizer a shorter way from lists of ids to the same text.

    Whatever is not such a list, any other option, and texts that the clean-up of spaces may change
    go transformers' way.

    Returns:
        Whether it was done: a tokenizer that is not transformers' own, or decodes in a way of its
        own, stays as it is.
    """
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    kind, base = type(tokenizer), PreTrainedTokenizerBase
    if (
        not issubclass(kind, PreTrainedTokenizerFast)
        or kind._decode is not PreTrainedTokenizerFast._decode
        or kind.decode is not base.decode
        or kind.clean_up_tokenization is not base.clean_up_tokenization
        or "decode" in vars(tokenizer)
    ):
        return False
    decode = tokenizer.decode

    @functools.wraps(decode)
    def decode_ids(
        token_ids: Any, skip_special_tokens: bool = False, *arguments: Any, **options: Any
    ) -> Any:
        plain = type(token_ids) is list and token_ids and type(token_ids[0]) is int
        if plain and not arguments and not options:
            text = tokenizer._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
            if not tokenizer.clean_up_tokenization_spaces or not _CLEANED.search(text):
                return text
        return decode(token_ids, skip_special_tokens, *arguments, **options)

    tokenizer.decode = decode_ids
    return True
