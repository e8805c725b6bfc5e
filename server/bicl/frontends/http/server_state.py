"""What all routes share: one object, made once."""

from __future__ import annotations

from dataclasses import dataclass

from bicl.config import ServerConfig
from bicl.frontends.http.chat_template import ChatTemplate
from bicl.frontends.http.errors import WireError
from bicl.frontends.http.inference import Inference
from bicl.frontends.http.schemas.ops import Info
from bicl.frontends.http.tokenization import TextTokenizer
from bicl.metrics import ServerMetrics

__all__ = ["WIRE_VERSION", "ServerState"]

# The version of text-generation-inference whose wire format this is.
WIRE_VERSION = "3.3.7"


@dataclass(frozen=True)
class ServerState:
    """Routes find it at ``app.state.server``.

    Attributes:
        config: resolved.
        info: what ``/info`` answers.
        compute_type: of the header ``x-compute-type``.
    """

    config: ServerConfig
    inference: Inference
    tokenizer: TextTokenizer
    chat_template: ChatTemplate
    metrics: ServerMetrics
    compute_type: str
    info: Info

    @property
    def fingerprint(self) -> str:
        return f"{WIRE_VERSION}-native"

    def request_failed(self, error: WireError) -> None:
        """Count an error that a client is told."""
        if error.metric is not None:
            self.metrics.request_failed(error.metric)

    def client_left(self) -> None:
        """Count a client that went away before its answer was complete."""
        self.metrics.request_failed("dropped")

    @property
    def ready(self) -> bool:
        """Whether a new request would be taken."""
        return not self.inference.draining and not self.inference.saturated and self.alive

    @property
    def alive(self) -> bool:
        return self.inference.engine.snapshot().healthy
