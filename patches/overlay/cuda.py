"""Takes the place of ``text_generation_server.layers.attention.cuda``."""

from bicl.frontends.tgi.attention import SUPPORTS_WINDOWING, attention, paged_attention

__all__ = ["SUPPORTS_WINDOWING", "attention", "paged_attention"]
