"""Continuous batching engine of the embedded server."""

from bicl.frontends.http.engine.config import (
    EngineConfig,
    EngineObserver,
    EngineStats,
    Outcome,
    StepKind,
    StepRecord,
)
from bicl.frontends.http.engine.engine import Engine
from bicl.frontends.http.engine.stream import RequestStream

__all__ = [
    "Engine",
    "EngineConfig",
    "EngineObserver",
    "EngineStats",
    "Outcome",
    "RequestStream",
    "StepKind",
    "StepRecord",
]
