"""A server on a fake engine in a process of its own, for tests of signals."""

import sys
from dataclasses import replace

import uvicorn
from byte_tokenizer import build_tokenizer
from fake_engine import FakeEngine

from bicl.config import ServerConfig
from bicl.frontends.http.app import create_app
from bicl.frontends.http.assembly import assemble
from bicl.frontends.http.draining import DrainingServer


def main(port: int, grace: float, tick: float) -> None:
    tokenizer = build_tokenizer()
    config = ServerConfig(model_id="fake/model", max_total_tokens=100_000).resolve(100_000)
    engine = FakeEngine(tokenizer.decode, tick=tick)
    state = assemble(replace(config, max_concurrent_requests=8), engine, tokenizer)
    options = uvicorn.Config(create_app(state), port=port, log_config=None, access_log=False)
    DrainingServer(options, state.inference, grace).run()
    engine.stop()
    if engine.snapshot().batch_size:
        sys.exit(3)
