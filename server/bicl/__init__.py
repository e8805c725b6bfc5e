"""BICL: a KV cache of tensor-core-ready tiles. Nothing happens at import."""

__version__ = "0.1.0"

__all__ = ["__version__"]
