"""What we change in TGI's own modules, right after each has run."""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from bicl.errors import ConfigError
from bicl.frontends.tgi.config import ATTENTION, overlay_config
from bicl.frontends.tgi.upstream import DISABLE, Release

__all__ = ["patches"]

logger = logging.getLogger("bicl")


def patches(release: Release) -> Mapping[str, Callable[[ModuleType], None]]:
    """By module name."""
    models = "text_generation_server.models"
    return {
        f"{models}.globals": _set_globals,
        f"{models}.flash_causal_lm": _mend_flash_causal_lm,
        models: functools.partial(_check_models, release=release),
    }


def _set_globals(module: Any) -> None:
    """Before any module takes the constants over by value."""
    if module.ATTENTION != ATTENTION:
        raise ConfigError(
            f"ATTENTION is {module.ATTENTION!r}; BICL needs ATTENTION={ATTENTION} (our "
            f"text-generation-launcher sets it); {DISABLE}"
        )
    module.BLOCK_SIZE = overlay_config().block_size
    if os.environ.get("LORA_ADAPTERS"):
        # Graphs are captured without adapters. TGI says that it switches them off, but changes a
        # variable that nobody reads.
        module.CUDA_GRAPHS = None


def _mend_flash_causal_lm(module: Any) -> None:
    from bicl.frontends.tgi import hysparse, prefixes
    from bicl.frontends.tgi.graph_step import stage_in_one_launch
    from bicl.frontends.tgi.kv_cache import KVCache, nominal_share
    from bicl.frontends.tgi.next_tokens import send_early

    sparsity = hysparse.shard_sparsity()
    if module.KVCache is not KVCache or overlay_config().block_size != module.BLOCK_SIZE:
        raise ConfigError(
            "text-generation-inference took its own KV cache: something imported it before us"
        )
    free_memory = module.get_free_memory

    @functools.wraps(free_memory)
    def get_free_memory(device: Any, memory_fraction: float) -> int:
        # TGI divides this by a page's nominal size; a page with padded heads or an index is larger.
        index_share = 1.0 if sparsity is None else sparsity.index_share
        return int(free_memory(device, memory_fraction) * nominal_share() * index_share)

    module.get_free_memory = get_free_memory
    if overlay_config().verify_prefixes:
        prefixes.verify_claims(module.FlashCausalLM, module.FlashCausalLMBatch)
    stage_in_one_launch(module.FlashCausalLM)
    send_early(module.HeterogeneousNextTokenChooser)
    if sparsity is not None:
        hysparse.watch(module.FlashCausalLM, sparsity)


def _check_models(module: Any, *, release: Release) -> None:
    from bicl.frontends.tgi import prefixes
    from bicl.frontends.tgi.texts import decode_directly

    if not module.FLASH_ATTENTION:
        raise ConfigError(
            "text-generation-inference could not import its flash models (its own warning above "
            f"says why) and would serve without a paged cache; {DISABLE}"
        )
    if not release.windows:
        # TGI then refuses long inputs of sliding-window models by itself.
        module.SUPPORTS_WINDOWING = False
    get_model = module.get_model

    @functools.wraps(get_model)
    def checked_get_model(*args: Any, **kwargs: Any) -> Any:
        model = get_model(*args, **kwargs)
        given = inspect.signature(get_model).bind(*args, **kwargs).arguments
        model.bicl_revision = given.get("revision")
        _keep_bounds(model, release)
        try:
            _check_model(model, release)
            prefixes.serve_metrics()
        except ConfigError as error:
            from bicl.frontends.tgi.hook import end_process

            end_process(str(error))
        if not decode_directly(model.tokenizer):
            kind = type(model.tokenizer).__name__
            logger.info("bicl: %s decodes in a way of its own, which stays as it is", kind)
        logger.info(
            "bicl: cache in place, text-generation-inference %s, pages of %d tokens",
            release.name,
            overlay_config().block_size,
        )
        return model

    module.get_model = checked_get_model


def _keep_bounds(model: Any, release: Release) -> None:
    """3.2.1 stores whole sequences, but cuts the longest one's length down to the window, as if the
    cache were still a ring: its rotary table is then too short for the positions behind."""
    if release.windows and hasattr(model, "max_past"):
        model.max_past = lambda: None


def _check_model(model: Any, release: Release) -> None:
    """Refuse at load, by name, what would be served without us or wrongly."""
    from text_generation_server.models.flash_causal_lm import FlashCausalLM
    from text_generation_server.models.globals import PREFIX_CACHING
    from text_generation_server.models.vlm_causal_lm import VlmCausalLM
    from text_generation_server.utils.speculate import get_speculate

    from bicl.frontends.tgi.hysparse import shard_sparsity
    from bicl.frontends.tgi.probe import try_pages

    kind = type(model).__name__
    if not isinstance(model, FlashCausalLM):
        raise ConfigError(
            f"{model.model_id} is served by {kind}, which has no paged KV cache for BICL to "
            f"replace; {DISABLE}"
        )
    if isinstance(model, VlmCausalLM) and get_speculate():
        raise ConfigError(
            f"--speculate {get_speculate()} with the vision model {model.model_id}: "
            "text-generation-inference then computes wrong slots across pages; start without "
            "--speculate"
        )
    if os.environ.get("LORA_ADAPTERS") and PREFIX_CACHING:
        raise ConfigError(
            "PREFIX_CACHING with LoRA adapters: text-generation-inference's router shares pages "
            "between adapters, also while another request reads them; unset it (the host cache "
            "keeps adapters apart)"
        )
    if model.info.block_size != overlay_config().block_size:
        raise ConfigError(
            f"the shard would tell the router pages of {model.info.block_size} tokens, but they "
            f"have {overlay_config().block_size}; {DISABLE}"
        )
    try_pages(model)
    if (sparsity := shard_sparsity()) is not None:
        sparsity.check(model)
    window = getattr(model, "sliding_window", None)
    if window is not None and window > 0 and not release.windows:
        raise ConfigError(
            f"{model.model_id} has a sliding window of {window} tokens, which BICL supports from "
            f"text-generation-inference 3.2.1 on; this is {release.name}. Use a newer image; "
            f"{DISABLE}"
        )
