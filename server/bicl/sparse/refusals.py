"""On which models HySparse starts: what is refused, why, and what to do instead.

The facts come from a model's ``config.json``, so that the launcher can refuse before anything is
loaded; a door that has the model itself gives better ones.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bicl.errors import ConfigError
from bicl.sparse.config import REFERENCE_DEPTH, HySparseConfig

__all__ = ["ModelFacts", "SparseModel", "check_model", "coarse_weights"]

FULL_ENDS = 8
"""Layers at either end of a model of 32 that a reasoning model needs whole."""

FEW_BITS = 5
"""Weights with fewer bits are refused."""

_METHODS = (
    "awq", "gptq", "gptq_marlin", "marlin", "exl2", "aqlm", "quip", "hqq", "vptq", "spqr", "higgs",
    "bitnet", "mxfp4", "fp_quant",
)  # fmt: skip
_FOUR_BIT_FORMAT = re.compile(r"(?:int|uint|nf|fp)_?4|w4a", re.IGNORECASE)
"""In a name such as NVFP4 (modelopt's ``quant_algo``) or int4_weight_only (torchao's
``quant_type``)."""
_FOUR_BIT_FLAGS = ("bitsandbytes-nf4", "bitsandbytes-fp4")
_REASONING_NAME = re.compile(
    r"(?:^|[-_/ ])(?:r1|qwq|o1|gpt-oss|magistral)(?=$|[-_/ .0-9])|thinking|reason", re.IGNORECASE
)
_REASONING_MARK = "<think>"


@dataclass(frozen=True)
class ModelFacts:
    """What the checks ask of a model.

    Attributes:
        depth: layers; ``None``: unknown.
        weights: name of a weight format below five bits, or empty.
        reasoning: how it shows that it is a reasoning model, or empty.
        windows: one entry a layer, the tokens of its sliding window or ``None``; empty: none.
        speculation: drafts are verified several tokens at a time.
    """

    depth: int | None
    weights: str = ""
    reasoning: str = ""
    windows: tuple[int | None, ...] = ()
    speculation: bool = False

    @classmethod
    def from_config(
        cls,
        raw: Mapping[str, Any],
        *,
        model_id: str = "",
        chat_template: str | None = None,
        quantize: str | None = None,
        speculation: bool = False,
    ) -> ModelFacts:
        """Facts of a ``config.json``.

        Args:
            raw: its content.
            model_id: names often say what the config does not.
            chat_template: of the tokenizer.
            quantize: a method that was asked for by flag.
            speculation: drafts were asked for by flag.
        """
        text = {**raw, **(raw.get("text_config") or {})}
        depth = next((text[n] for n in ("num_hidden_layers", "n_layer") if text.get(n)), None)
        return cls(
            depth,
            coarse_weights(raw.get("quantization_config"), quantize),
            _reasoning(model_id, chat_template),
            _windows(text, depth) if depth else (),
            speculation,
        )


@dataclass(frozen=True)
class SparseModel:
    """A model that may run.

    Attributes:
        layers: numbers of the sparse layers; ``None`` where the depth is not known yet.
        notes: one sentence each, for the log.
    """

    layers: tuple[int, ...] | None
    notes: tuple[str, ...]


def check_model(config: HySparseConfig, model: ModelFacts) -> SparseModel:
    """Refuse what the settings cannot do on a model.

    Raises:
        ConfigError: naming the flag, the reason and the remedy. With ``force`` the reasons that
            are a matter of quality become notes.
    """
    if model.speculation:
        raise ConfigError(
            "--enable-hysparse with speculation: drafts are verified several tokens at a time, and "
            "a choice of tiles belongs to one query; leave --speculate (or the Medusa model) out, "
            "or --enable-hysparse"
        )
    notes = []
    for reason in (_weights_refusal(model), _reasoning_refusal(config, model)):
        if reason and not config.force:
            raise ConfigError(f"--enable-hysparse: {reason}, or force it with --hysparse-force")
        if reason:
            notes.append(f"--hysparse-force: {reason}")
    if model.depth is None:
        return SparseModel(None, tuple(notes))
    chosen = config.sparse_layers(model.depth)
    windowed = {n for n, window in enumerate(model.windows) if window is not None}
    layers = tuple(n for n in chosen if n not in windowed)
    if not layers:
        raise ConfigError(_no_layer(config, model, chosen))
    if len(layers) < len(chosen):
        notes.append(
            f"{len(chosen) - len(layers)} of the {len(chosen)} layers of --hysparse-layers "
            f"{config.layers} have a sliding window and stay as they are"
        )
    return SparseModel(layers, tuple(notes))


def coarse_weights(quantization: Mapping[str, Any] | None, quantize: str | None = None) -> str:
    """Name of a weight format of fewer than five bits, empty for all others.

    Args:
        quantization: ``quantization_config`` of a ``config.json``.
        quantize: TGI's flag.
    """
    if quantize in _METHODS or quantize in _FOUR_BIT_FLAGS:
        return f"--quantize {quantize}"
    found = quantization or {}
    method = str(found.get("quant_method", "")).lower()
    bits = found.get("bits") or found.get("w_bit") or found.get("nbits") or _group_bits(found)
    if found.get("load_in_4bit") or (isinstance(bits, int) and bits < FEW_BITS):
        return f"{method or 'quantised'} weights of {4 if found.get('load_in_4bit') else bits} bits"
    if named := _FOUR_BIT_FORMAT.search(f"{found.get('quant_algo')} {found.get('quant_type')}"):
        return f"{method} weights of format {named[0]}"
    return f"{method} weights" if method in _METHODS and bits is None else ""


def _group_bits(found: Mapping[str, Any]) -> int | None:
    """compressed-tensors keeps the bits of each group of layers."""
    groups = (found.get("config_groups") or {}).values()
    bits = [(group.get("weights") or {}).get("num_bits") for group in groups]
    return min((each for each in bits if isinstance(each, int)), default=None)


def _reasoning(model_id: str, chat_template: str | None) -> str:
    if chat_template and _REASONING_MARK in chat_template:
        return f"its chat template has {_REASONING_MARK}"
    name = model_id.rstrip("/").rpartition("/")[2]
    return "its name says so" if _REASONING_NAME.search(name) else ""


def _windows(text: Mapping[str, Any], depth: int) -> tuple[int | None, ...]:
    window = text.get("sliding_window")
    if not window or text.get("use_sliding_window") is False:
        return ()
    types = text.get("layer_types")
    if isinstance(types, Sequence) and len(types) == depth:
        return tuple(window if kind == "sliding_attention" else None for kind in types)
    if text.get("use_sliding_window"):
        begin = text.get("max_window_layers", 0)
        return tuple(window if layer >= begin else None for layer in range(depth))
    every = text.get("sliding_window_pattern") or {"gemma2": 2, "gemma3_text": 6}.get(
        str(text.get("model_type"))
    )
    # Of a pattern of n layers the last one sees everything.
    return tuple(None if every and (layer + 1) % every == 0 else window for layer in range(depth))


def _weights_refusal(model: ModelFacts) -> str:
    if not model.weights:
        return ""
    return (
        f"{model.weights} lose about three times as much accuracy with HySparse as weights of 16 "
        "bits do; serve the unquantised model, or leave --enable-hysparse out"
    )


def _reasoning_refusal(config: HySparseConfig, model: ModelFacts) -> str:
    if not model.reasoning or model.depth is None:
        return ""
    ends = -(-model.depth * FULL_ENDS // REFERENCE_DEPTH)
    layers = config.sparse_layers(model.depth)
    if not layers or (layers[0] >= ends and layers[-1] < model.depth - ends):
        return ""
    remedy = (
        f"use --hysparse-layers {ends}-{model.depth - ends - 1}/{model.depth}"
        if model.depth > 2 * ends
        else "leave --enable-hysparse out"
    )
    return (
        f"this is a reasoning model ({model.reasoning}), whose first and last {ends} of "
        f"{model.depth} layers must stay full, but --hysparse-layers {config.layers} makes layers "
        f"{layers[0]} to {layers[-1]} sparse; {remedy}"
    )


def _no_layer(config: HySparseConfig, model: ModelFacts, chosen: tuple[int, ...]) -> str:
    if not chosen:
        return (
            f"--hysparse-layers {config.layers} names no layer of this model of {model.depth}; "
            f"write its own numbers with the depth, such as 0-{(model.depth or 1) - 1}/"
            f"{model.depth}"
        )
    return (
        f"--enable-hysparse: every layer of --hysparse-layers {config.layers} has a sliding window "
        f"({model.windows[chosen[0]]} tokens), so that nothing is left to skip; name layers "
        "without one, or leave --enable-hysparse out"
    )
