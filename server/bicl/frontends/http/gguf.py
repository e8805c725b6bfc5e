"""GGUF files: what makes reading them slow is done once."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

__all__ = ["read_once"]


@contextmanager
def read_once() -> Iterator[None]:
    """Within it, transformers parses a GGUF file once and not three times (for the tokenizer, the
    configuration and the weights), and maps tensor names once and not once a module. That was
    two thirds of the start with a small model. One load at a time.
    """
    if find_spec("gguf") is None:
        yield
        return
    import gguf

    names = ("GGUFReader", "get_tensor_name_map")
    originals = {name: getattr(gguf, name) for name in names}
    for name, original in originals.items():
        setattr(gguf, name, functools.cache(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(gguf, name, original)
