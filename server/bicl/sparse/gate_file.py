"""The file that ``bicl hysparse fit`` writes beside a model, and serving looks for."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from bicl.errors import ConfigError
from bicl.sparse.config import HySparseConfig
from bicl.sparse.sgm import Gate, PageGate, make_gate

__all__ = ["GATE_NAME", "find_gate", "load_gate", "open_gate", "save_gate", "with_gate"]

log = logging.getLogger(__name__)

GATE_NAME = "hysparse-gate.safetensors"


def save_gate(path: str | Path, gate: Gate, facts: dict[str, str] | None = None) -> None:
    """Write a gate as safetensors; what it is for stands in the file's metadata."""
    from safetensors.torch import save_file

    metadata = {"format": "bicl-hysparse-gate-1", "kind": gate.kind, "head_dim": str(gate.head_dim)}
    if isinstance(gate, PageGate):
        metadata["layers"] = ",".join(map(str, gate.layers))
    tensors = {name: value.detach().contiguous() for name, value in gate.state_dict().items()}
    save_file(tensors, str(path), metadata | (facts or {}))


def load_gate(path: str | Path) -> Gate:
    """Read what :func:`save_gate` wrote.

    Raises:
        ConfigError: no such file, or not such a file.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if metadata.get("format") != "bicl-hysparse-gate-1":
            raise ConfigError(f"its format is {metadata.get('format')!r}, not bicl-hysparse-gate-1")
        head_dim = int(metadata["head_dim"])
        layers = tuple(int(n) for n in metadata.get("layers", "").split(",") if n)
        gate = make_gate(metadata["kind"], layers, head_dim)
        gate.load_state_dict(tensors)
    except (OSError, SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"gate file {path} cannot be used: {error}; give what `bicl hysparse fit` wrote"
        ) from None
    return gate


def find_gate(model: str | Path) -> str | None:
    """The gate beside a local model (its folder, or a file in it), if there is one."""
    path = Path(model)
    found = (path if path.is_dir() else path.parent) / GATE_NAME
    return str(found) if path.exists() and found.is_file() else None


def with_gate(config: HySparseConfig, model: str | Path) -> HySparseConfig:
    """The settings as a server runs them: without a gate of their own, with that beside a model."""
    if config.gate_path is not None:
        return config
    return replace(config, gate_path=find_gate(model))


def open_gate(path: str | None) -> Gate | None:
    """The gate to serve with, and a line in the log that says which; ``None``: nothing is fitted.

    Raises:
        ConfigError: see :func:`load_gate`.
    """
    if path is None:
        log.warning(
            "HySparse: no fitted gate; pages are judged by an analytic start. "
            "`bicl hysparse fit` calibrates one on your texts"
        )
        return None
    gate = load_gate(path)
    log.info("HySparse: gate of kind %s from %s", gate.kind, path)
    return gate
