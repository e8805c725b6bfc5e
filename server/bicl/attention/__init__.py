"""Attention over pages: device memory, step metadata, backends."""
