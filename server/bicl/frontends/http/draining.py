"""uvicorn that drains on SIGTERM, and that ends when its engine has."""

from __future__ import annotations

import logging
import threading
from types import FrameType

import uvicorn

from bicl.frontends.http.inference import Inference

__all__ = ["DrainingServer"]

log = logging.getLogger(__name__)

# For the last bytes of answers that are complete, after the engine has drained.
FLUSH_SECONDS = 5
# uvicorn ticks ten times a second.
TICKS_BETWEEN_CHECKS = 5


class DrainingServer(uvicorn.Server):
    """On the first SIGTERM or SIGINT: readiness off, new requests 503, running ones get
    ``grace_seconds`` and then an error; then stop. On the second: stop at once.

    uvicorn would close its sockets first, so that clients and probes saw refused connections, and
    would end by raising the signal again.

    An engine whose thread ended (its device or its bookkeeping cannot be trusted) will not recover:
    the server stops, too, so that whoever supervises it starts another. ``engine_failed`` tells.
    """

    def __init__(self, config: uvicorn.Config, inference: Inference, grace_seconds: float) -> None:
        config.timeout_graceful_shutdown = FLUSH_SECONDS
        super().__init__(config)
        self._inference = inference
        self._grace_seconds = grace_seconds
        self.engine_failed = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._inference.draining:
            self.should_exit = self.force_exit = True
            return
        self._inference.draining = True
        threading.Thread(target=self._drain, name="drain", daemon=True).start()

    async def on_tick(self, counter: int) -> bool:
        due = counter % TICKS_BETWEEN_CHECKS == 0 and not self._inference.draining
        if due and not self._inference.engine.snapshot().healthy:
            log.error("the engine ended: stopping the server")
            self._inference.draining = self.engine_failed = self.should_exit = True
        return await super().on_tick(counter)

    def _drain(self) -> None:
        log.info("signal received: no new requests, %g s for the others", self._grace_seconds)
        try:
            if not self._inference.engine.drain(self._grace_seconds):
                log.warning("requests still run after %g s: ending them", self._grace_seconds)
                self._inference.engine.stop()
        finally:
            self.should_exit = True
