"""Takes the place of ``text_generation_server.layers.attention.kv_cache``."""

from bicl.frontends.tgi.kv_cache import KVCache, KVScales, get_kv_scales

__all__ = ["KVCache", "KVScales", "get_kv_scales"]
