"""The transformers door: any decoder of the transformers library on BICL pages.

Nothing happens at import. :func:`register` adds an attention function and a mask function under
the name ``"bicl"`` to transformers' own registries, :func:`unregister` takes them out again::

    from bicl.frontends.transformers import BiclCache, register

    register()
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="bicl")
    model.generate(**inputs, past_key_values=BiclCache(model))

Serving engines that own their pages use :class:`PackedCache` instead: one row of packed tokens a
call, described by an :class:`~bicl.attention.metadata.AttentionMetadata`.
"""

from bicl.frontends.transformers.cache import BiclCache, PackedCache
from bicl.frontends.transformers.geometry import LayerGeometry, ModelGeometry, inspect_model
from bicl.frontends.transformers.registration import ATTENTION_NAME, register, unregister

__all__ = [
    "ATTENTION_NAME",
    "BiclCache",
    "LayerGeometry",
    "ModelGeometry",
    "PackedCache",
    "inspect_model",
    "register",
    "unregister",
]
