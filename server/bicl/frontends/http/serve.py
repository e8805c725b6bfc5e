"""``bicl serve``: load, warm up, listen, drain."""

from __future__ import annotations

import gc
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import uvicorn

from bicl.cache.settings import parse_memory
from bicl.config import ServerConfig, environment
from bicl.errors import BackendError, BiclError
from bicl.frontends.http.app import create_app
from bicl.frontends.http.assembly import ModelFacts, assemble
from bicl.frontends.http.draining import DrainingServer
from bicl.frontends.http.engine import Engine, EngineConfig
from bicl.frontends.http.engine.sizing import (
    disk_cache_bytes,
    free_bytes,
    host_cache_bytes,
    page_layouts,
    sparse_layers,
)
from bicl.frontends.http.hysparse import check_before_loading, check_loaded
from bicl.frontends.http.listener import bind, start_listening
from bicl.frontends.http.loader import BUNDLED, LoadedModel, load_model, resolve_model
from bicl.hardware import find_gpus, is_jetson, judge
from bicl.metrics import ServerMetrics
from bicl.ops.cuda import library
from bicl.sparse.gate_file import with_gate

__all__ = ["serve"]

log = logging.getLogger("bicl")

BUNDLED_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
KV_DTYPES = {
    "auto": None,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8_e4m3fn": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


def serve(config: ServerConfig) -> None:
    """Serve until SIGTERM or SIGINT, then drain and return.

    Raises:
        ConfigError: the model or a setting cannot work.
        BiclError: the engine ended while it served.
    """
    _configure_logging(config.json_output)
    with closing(bind(config.hostname, config.port)) as listener:
        _serve_on(listener, config)


def _serve_on(listener: socket.socket, config: ServerConfig) -> None:
    device, fallbacks = _choose_device(config.device)
    hysparse = config.hysparse.resolve()
    notes: tuple[str, ...] = ()
    if hysparse is not None:
        model_id = resolve_model(config.model_id)
        notes = check_before_loading(hysparse, model_id, config.revision)
    with _timed(f"loading {config.model_id}"):
        loaded = _load(config, device)
    if hysparse is not None:
        found = check_loaded(hysparse, loaded)
        for note in dict.fromkeys(notes + found.notes):
            log.warning("%s", note)
        log.info(
            "HySparse (%s) leaves %.0f %% out in %d of %d layers; what is computed so is not "
            "shared between requests, prompts are",
            hysparse.mode,
            100 * hysparse.sparsity_ratio,
            len(found.layers or ()),
            len(loaded.geometry.layers),
        )
    config = config.resolve(loaded.max_position)
    for flag in config.settings_without_effect:
        log.warning("%s has no effect: prefill goes in chunks, as in TGI", flag)
    if config.cache.disable_prefix_caching:
        log.warning("pages are not reused between requests: --disable-prefix-caching")
    engine_config = _engine_config(config, loaded)
    assert config.max_input_tokens is not None
    assert config.max_total_tokens is not None
    metrics = ServerMetrics(config.max_input_tokens, config.max_total_tokens)
    engine = Engine(loaded, engine_config, observer=metrics)
    try:
        with _timed("warming up"):
            engine.start()
        # A full collection would walk the model and all libraries, in the middle of a step.
        gc.collect()
        gc.freeze()
        facts = _facts(config, loaded, engine, engine_config)
        facts = replace(facts, fallbacks=fallbacks + loaded.notes + _kernel_fallbacks())
        state = assemble(config, engine, loaded.tokenizer, facts, metrics)
        start_listening(listener)
        log.info(
            "serving %s on http://%s:%d (API: /docs)", facts.model_id, *listener.getsockname()[:2]
        )
        options = uvicorn.Config(
            create_app(state), log_config=None, access_log=False, server_header=False
        )
        server = DrainingServer(options, state.inference, config.graceful_termination_timeout)
        server.run(sockets=[listener])
        if server.engine_failed:
            raise BiclError("the engine ended; the log above says why")
    finally:
        engine.stop()


def _choose_device(wanted: str) -> tuple[str, tuple[str, ...]]:
    """The device, and what `auto` had to give up."""
    if wanted != "auto":
        return wanted, ()
    if not torch.cuda.is_available():
        return "cpu", ()
    missing = judge(find_gpus(environment()), jetson=is_jetson()).missing
    if not missing:
        try:
            library.module()
        except BackendError as error:
            missing = str(error)
    if not missing:
        return "cuda", ()
    log.warning("running on the CPU: %s", missing)
    return "cpu", (f"CPU in place of the GPU: {missing}",)


def _kernel_fallbacks() -> tuple[str, ...]:
    """Known once the warm-up has asked for kernels."""
    if library.kernels_from() == "build":
        return ()
    return ("kernels compiled on this machine: the build has no code for its card",)


def _load(config: ServerConfig, device: str) -> LoadedModel:
    """On the CPU by a thread that ends with it, so that OpenMP's threads for it end, too: beside
    the engine's they would be more than there are cores, see ``Engine._get_ready``. No executor:
    Python waits for the threads of one, so that Ctrl-C would not end the load."""
    load = partial(
        load_model,
        resolve_model(config.model_id),
        revision=config.revision,
        dtype=None if config.dtype == "auto" else config.dtype,
        device=device,
        trust_remote_code=config.trust_remote_code,
    )
    if device != "cpu":
        return load()
    loaded: Future[LoadedModel] = Future()

    def deliver() -> None:
        try:
            loaded.set_result(load())
        except BaseException as error:
            loaded.set_exception(error)

    thread = threading.Thread(target=deliver, name="bicl-load", daemon=True)
    thread.start()
    model = loaded.result()
    thread.join()
    return model


def _engine_config(config: ServerConfig, loaded: LoadedModel) -> EngineConfig:
    assert config.max_total_tokens is not None
    assert config.max_batch_prefill_tokens is not None
    head_dim = max(layer.head_dim for layer in loaded.geometry.layers)
    hysparse = config.hysparse.resolve()
    chooses = hysparse is not None and hysparse.mode == "select"
    page_size = config.cache.page_size(head_dim, config.max_total_tokens, chooses_pages=chooses)
    if chooses and config.cache.block_size == "auto":
        log.info("pages of %d tokens, for HySparse to choose among (--block-size)", page_size)
    memory, total = config.cache.cache_memory, config.max_batch_total_tokens
    folder = config.cache.disk_cache_dir
    return EngineConfig(
        max_total_tokens=config.max_total_tokens,
        max_batch_prefill_tokens=config.max_batch_prefill_tokens,
        max_batch_size=config.max_batch_size,
        max_waiting=config.max_concurrent_requests,
        page_size=page_size,
        num_pages=None if total is None else -(-total // page_size),
        cache_memory_bytes=(
            None if memory == "auto" else parse_memory(memory, free_bytes(loaded.device))
        ),
        kv_dtype=KV_DTYPES[config.cache.kv_cache_dtype],
        prefix_caching=not config.cache.disable_prefix_caching,
        host_cache_bytes=host_cache_bytes(config.cache, loaded.device),
        disk_cache_dir=None if folder is None else Path(folder),
        disk_cache_bytes=disk_cache_bytes(config.cache),
        cuda_graphs=config.cuda_graphs != "0",
        num_threads=config.num_threads,
        hysparse=hysparse and with_gate(hysparse, resolve_model(config.model_id)),
        guard=config.hysparse.guard(),
    )


@dataclass(frozen=True)
class _CacheShape:
    """Sums over the layers' page layouts."""

    page_bytes: int
    used_bytes: float

    @classmethod
    def of(cls, loaded: LoadedModel, config: EngineConfig) -> _CacheShape:
        layouts = page_layouts(loaded, config)
        return cls(
            sum(layout.page_bytes for layout in layouts),
            sum(layout.page_bytes * (1 - layout.padding_waste) for layout in layouts),
        )


def _facts(
    config: ServerConfig, loaded: LoadedModel, engine: Engine, engine_config: EngineConfig
) -> ModelFacts:
    shape = _CacheShape.of(loaded, engine_config)
    layout = page_layouts(loaded, engine_config)[0]
    pages = engine.snapshot().pages_total
    cache = {
        "backend": loaded.device.type,
        "block_size": engine_config.page_size,
        "tile": layout.tile,
        "kv_dtype": str(layout.dtype).removeprefix("torch."),
        "swizzle": layout.swizzle,
        "layers": len(loaded.geometry.layers),
        "pages": pages,
        "bytes": engine.cache_bytes,
        "host_bytes": engine_config.host_cache_bytes,
        "disk_bytes": engine_config.disk_cache_bytes,
        "padding_waste": round(1 - shape.used_bytes / shape.page_bytes, 4),
    }
    if engine_config.hysparse is not None:
        sparse = engine_config.hysparse
        cache["hysparse"] = {
            "mode": sparse.mode,
            "sparsity_ratio": sparse.sparsity_ratio,
            "layers": list(sparse_layers(loaded, engine_config)),
            "max_k": sparse.max_k,
            "floor_tokens": sparse.floor_tokens,
            "min_skipped_mb": sparse.min_skipped_mb if loaded.device.type == "cuda" else 0,
            "variant": sparse.variant,
            "text_kind": sparse.text_kind,
            "kind_rules": sparse.kind_rules,
            "fitted": sparse.gate_path is not None,
        }
    return ModelFacts(
        model_id=BUNDLED_NAME if config.model_id == BUNDLED else config.model_id,
        model_sha=loaded.revision,
        dtype=str(loaded.dtype),
        device=loaded.device.type,
        cache=cache,
        max_batch_total_tokens=pages * engine_config.page_size,
        reuse_enabled=engine_config.prefix_caching,
    )


@contextmanager
def _timed(what: str) -> Iterator[None]:
    started = time.perf_counter()
    log.info("%s ...", what)
    yield
    log.info("%s took %.1f s", what, time.perf_counter() - started)


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "timestamp": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname,
            "target": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def _configure_logging(as_json: bool) -> None:
    handler = logging.StreamHandler()
    plain = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(_JsonFormatter() if as_json else plain)
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for noisy in ("httpx", "httpcore", "uvicorn"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
