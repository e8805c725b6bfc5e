"""Plain-torch stand-in for the operators that TGI's models call on a CPU."""

from . import distributed, llm

__all__ = ["distributed", "llm"]
