"""Wire types of ``/vertex``."""

from __future__ import annotations

from bicl.frontends.http.schemas.base import Wire
from bicl.frontends.http.schemas.chat import ChatRequest
from bicl.frontends.http.schemas.generate import GenerateParameters

__all__ = ["VertexGenerate", "VertexRequest", "VertexResponse"]


class VertexGenerate(Wire):
    inputs: str
    parameters: GenerateParameters | None = None


class VertexRequest(Wire):
    instances: list[VertexGenerate | ChatRequest]


class VertexResponse(Wire):
    predictions: list[str]
