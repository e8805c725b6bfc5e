"""A server on a fake engine in a process of its own, for tests of signals."""

import sys
import threading
from dataclasses import replace

import uvicorn
from byte_tokenizer import build_tokenizer
from fake_engine import FakeEngine

from bicl.config import ServerConfig
from bicl.frontends.http.app import create_app
from bicl.frontends.http.assembly import assemble
from bicl.frontends.http.draining import DrainingServer

ENGINE_FAILED = 4


def main(port: int, grace: float, tick: float, dies_after: float | None = None) -> None:
    """``dies_after``: seconds until the engine reports that its thread ended."""
    tokenizer = build_tokenizer()
    config = ServerConfig(model_id="fake/model", max_total_tokens=100_000).resolve(100_000)
    engine = FakeEngine(tokenizer.decode, tick=tick)
    state = assemble(replace(config, max_concurrent_requests=8), engine, tokenizer)
    options = uvicorn.Config(create_app(state), port=port, log_config=None, access_log=False)
    server = DrainingServer(options, state.inference, grace)
    if dies_after is not None:
        threading.Timer(dies_after, setattr, (engine, "healthy", False)).start()
    server.run()
    engine.stop()
    if server.engine_failed:
        sys.exit(ENGINE_FAILED)
    if engine.snapshot().batch_size:
        sys.exit(3)
