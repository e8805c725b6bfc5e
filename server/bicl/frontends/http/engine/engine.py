"""The embedded server's engine: one thread that owns the model, its pages and the schedule."""

from __future__ import annotations

from bicl.frontends.http.engine.config import EngineConfig, EngineObserver, EngineStats
from bicl.frontends.http.engine.stream import RequestStream
from bicl.frontends.http.loader import LoadedModel
from bicl.frontends.http.request import GenerationRequest

__all__ = ["Engine"]


class Engine:
    """Continuous batching over BICL pages.

    All methods may be called from any thread.

    Args:
        loaded: model, tokenizer and facts, from :func:`bicl.frontends.http.loader.load_model`.
        config: limits and sizes.
        observer: told about steps, admissions and outcomes.

    Raises:
        ConfigError: the model or the sizes cannot work; the message says what would.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        *,
        observer: EngineObserver | None = None,
    ) -> None:
        raise NotImplementedError

    def start(self) -> Engine:
        """Warm up (the largest prefill once) and start the loop. Returns self."""
        raise NotImplementedError

    def submit(self, request: GenerationRequest) -> RequestStream:
        """Queue a request.

        Raises:
            CapacityError: it needs more tokens or pages than there will ever be.
            OverloadedError: ``max_waiting`` requests wait already, or the engine drains.
            InvalidInputError: its grammar does not compile, or a token id is out of range.
        """
        raise NotImplementedError

    def abort(self, request_id: str) -> None:
        """Drop a request, queued or running; its pages are free within two steps. Unknown or
        finished ids are ignored. Its stream gets no further event."""
        raise NotImplementedError

    def drain(self, timeout: float) -> bool:
        """Refuse new requests and wait until all others ended; True if that took less than
        ``timeout`` seconds."""
        raise NotImplementedError

    def stop(self) -> None:
        """Fail what is left and end the thread. Idempotent."""
        raise NotImplementedError

    def flush_cache(self) -> int:
        """Drop every cached page that nobody uses; returns how many."""
        raise NotImplementedError

    def snapshot(self) -> EngineStats:
        """Counters and gauges, consistent with each other."""
        raise NotImplementedError
