"""Puts the parts of a server together."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

import bicl
from bicl.config import ServerConfig
from bicl.errors import ConfigError
from bicl.frontends.http.chat_template import ChatTemplate
from bicl.frontends.http.inference import EngineLike, Inference
from bicl.frontends.http.schemas.ops import BiclInfo, Info
from bicl.frontends.http.server_state import WIRE_VERSION, ServerState
from bicl.frontends.http.tokenization import TextTokenizer
from bicl.frontends.http.unsupported import IMAGES, UNSUPPORTED
from bicl.frontends.http.validation import Validator
from bicl.metrics import CacheFacts, ServerMetrics

__all__ = ["ModelFacts", "assemble"]


@dataclass(frozen=True)
class ModelFacts:
    """What ``/info`` and the metrics tell about the model, the cache and the machine.

    Attributes:
        model_id, model_sha, dtype, device: of the model.
        cache: JSON values about the cache (block size, tile, type, pages, bytes, ...).
        max_batch_total_tokens: tokens that the pool holds.
        reuse_enabled: pages are shared between requests.
        fallbacks: what runs otherwise than asked for, one sentence each.
    """

    model_id: str
    model_sha: str | None = None
    dtype: str = "float32"
    device: str = "cpu"
    cache: dict[str, Any] | None = None
    max_batch_total_tokens: int = 0
    reuse_enabled: bool = True
    fallbacks: tuple[str, ...] = ()


def assemble(
    config: ServerConfig,
    engine: EngineLike,
    tokenizer: PreTrainedTokenizerBase,
    facts: ModelFacts | None = None,
    metrics: ServerMetrics | None = None,
) -> ServerState:
    """A server's state.

    Args:
        config: resolved.
        engine: started.
        metrics: the engine's observer, if it has one already.

    Raises:
        ConfigError: no fast tokenizer, or a template file that cannot be read.
    """
    assert config.max_input_tokens is not None
    assert config.max_total_tokens is not None
    facts = facts or ModelFacts(config.model_id)
    metrics = metrics or ServerMetrics(config.max_input_tokens, config.max_total_tokens)
    metrics.attach(engine.snapshot, _cache_facts(facts))
    text_tokenizer = TextTokenizer(tokenizer, config.validation_workers)
    validator = Validator(config, text_tokenizer)
    return ServerState(
        config=config,
        inference=Inference(engine, validator, metrics, config.max_concurrent_requests),
        tokenizer=text_tokenizer,
        chat_template=ChatTemplate(tokenizer, _template_of(config)),
        metrics=metrics,
        compute_type=f"{facts.device}+bicl",
        info=_info(config, facts),
    )


def _template_of(config: ServerConfig) -> str | None:
    if config.tokenizer_config_path is None:
        return None
    path = Path(config.tokenizer_config_path)
    try:
        template = json.loads(path.read_text()).get("chat_template")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--tokenizer-config-path {path} cannot be read: {error}") from None
    if not isinstance(template, str):
        raise ConfigError(f"--tokenizer-config-path {path} has no chat_template")
    return template


def _cache_facts(facts: ModelFacts) -> CacheFacts:
    cache = facts.cache or {}
    known = [name for name in ("backend", "block_size", "kv_dtype") if name in cache]
    labels = {
        "version": bicl.__version__,
        "model_id": facts.model_id,
        "device": facts.device,
        "dtype": facts.dtype,
    } | {name: str(cache[name]) for name in known}
    return CacheFacts(facts.max_batch_total_tokens, facts.reuse_enabled, labels, facts.fallbacks)


def _info(config: ServerConfig, facts: ModelFacts) -> Info:
    assert config.max_input_tokens is not None
    assert config.max_total_tokens is not None
    return Info(
        model_id=facts.model_id,
        model_sha=facts.model_sha,
        model_pipeline_tag="text-generation",
        max_concurrent_requests=config.max_concurrent_requests,
        max_best_of=config.max_best_of,
        max_stop_sequences=config.max_stop_sequences,
        max_input_tokens=config.max_input_tokens,
        max_total_tokens=config.max_total_tokens,
        validation_workers=config.validation_workers,
        max_client_batch_size=config.max_client_batch_size,
        router="bicl",
        version=WIRE_VERSION,
        sha=None,
        docker_label=None,
        bicl=BiclInfo(
            version=bicl.__version__,
            model_dtype=facts.dtype,
            model_device_type=facts.device,
            reuse_enabled=facts.reuse_enabled,
            cache=facts.cache or {},
            unsupported=_unsupported(),
            fallbacks=list(facts.fallbacks),
            without_effect=list(config.settings_without_effect),
        ),
    )


def _unsupported() -> dict[str, str]:
    listed = {f"{item.field} ({', '.join(item.routes)})": item.reason for item in UNSUPPORTED}
    return listed | {
        "suffix (/v1/completions)": "preprocess the prompt",
        "image_url (/v1/chat/completions)": IMAGES,
    }
