"""Decoder layers in nine launches: as transformers writes them they take some twenty-five.

One product makes queries, keys and values, and one the gates and ups; keys are rotated on their way
to their pages, one kernel computes the gated activation; both residual sums happen in the products
before them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from bicl.frontends.transformers.geometry import cache_argument
from bicl.frontends.transformers.norms import fuse_norms
from bicl.frontends.transformers.rows import LayerRows, PagedCache

__all__ = ["fuse", "fuse_layers"]

PARTS = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj"}
HEAD_NORMS = ("q_norm", "k_norm")
GATED = ("gate_proj", "up_proj", "down_proj")
NUM_TRIED = 7
"""Tokens that both forms of a layer are tried on."""
ROUNDINGS, LEAST_TOLERANCE = 8, 1e-4
"""How far they may lie apart: that many roundings of the largest number of a row."""


def fuse(model: PreTrainedModel) -> tuple[str, ...]:
    """Let a model run in as few launches as is known to be right.

    Returns:
        What stays as transformers writes it, one sentence each.
    """
    fuse_norms(model)
    fused, layers = fuse_layers(model), model.config.get_text_config().num_hidden_layers
    if fused == layers:
        return ()
    return (
        f"{layers - fused} of {layers} decoder layers in as many launches as transformers makes: "
        "they are not of the parts that can be joined, or compute something else with them",
    )


def fuse_layers(model: PreTrainedModel) -> int:
    """Let the model's decoder layers run in fewer launches.

    Only layers of the usual parts (an RMS norm, attention with rotary embedding in halves, another
    norm, a feed-forward part), and only if both forms agree on one another's input: what a layer
    hands to its attention, and what it returns. Weights that are joined stay visible under their
    own names, as parts of one tensor.

    Args:
        model: loaded with ``attn_implementation="bicl"``, on its device, in its dtype.

    Returns:
        How many layers were fused.
    """
    layers = [module for module in model.modules() if _has_usual_parts(module)]
    if not layers:
        return 0
    calls = _record(model, layers)
    return sum(_fuse(layer, calls[layer]) for layer in layers if layer in calls)


@dataclass
class _Handed:
    """What a layer gave to its attention."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    options: dict[str, Any]


class _Probe(PagedCache):
    """Notes what it is handed; answers with the queries."""

    def __init__(self) -> None:
        super().__init__()
        self.handed: dict[int, _Handed] = {}

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def attend(
        self, rows: LayerRows, query: torch.Tensor, mask: torch.Tensor | None, **options: Any
    ) -> torch.Tensor:
        own = (query.clone(), rows.key.clone(), rows.value.clone())
        self.handed[rows.layer_idx] = _Handed(*own, options)
        return query.transpose(1, 2).contiguous()


@dataclass
class _Call:
    """A layer's arguments and what came of them."""

    hidden: torch.Tensor
    keywords: dict[str, Any] = field(default_factory=dict)
    output: Any = None
    handed: _Handed | None = None


@torch.inference_mode()
def _record(model: PreTrainedModel, layers: Sequence[nn.Module]) -> dict[nn.Module, _Call]:
    """Run a few tokens through the model as it is."""
    calls: dict[nn.Module, _Call] = {}

    def before(layer: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if len(arguments) == 1:
            calls[layer] = _Call(arguments[0].clone(), keywords)

    def after(layer: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        if layer in calls:
            calls[layer].output = output

    probe = _Probe()
    hooks = [layer.register_forward_pre_hook(before, with_kwargs=True) for layer in layers]
    hooks += [layer.register_forward_hook(after) for layer in layers]
    try:
        place = torch.arange(NUM_TRIED, device=model.device)[None]
        vocab_size = model.config.get_text_config().vocab_size
        model(
            input_ids=(place * 7919 + 11) % vocab_size,
            position_ids=place * 37 + 3,
            use_cache=True,
            **{cache_argument(model): probe},
        )
    finally:
        for hook in hooks:
            hook.remove()
    for layer, call in calls.items():
        call.handed = probe.handed.get(_number(layer))
    return calls


@torch.inference_mode()
def _fuse(layer: Any, call: _Call) -> bool:
    if call.handed is None or not isinstance(call.output, torch.Tensor):
        return False
    probe = _Probe()
    keywords = {
        name: probe if isinstance(value, PagedCache) else value
        for name, value in call.keywords.items()
    }
    try:
        fused = _FusedLayer(layer, call.handed)
        output = fused(call.hidden.clone(), **keywords)
    except torch.OutOfMemoryError:
        raise  # says nothing about the layer
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
        return False  # something in it is not as usual
    handed = probe.handed[_number(layer)]
    pairs = [(getattr(handed, n), getattr(call.handed, n)) for n in ("query", "key", "value")]
    if not all(_agree(own, expected) for own, expected in pairs):
        return False
    if not _agree(output - call.hidden, call.output - call.hidden, call.output):
        return False
    layer.forward = fused
    return True


def _number(layer: Any) -> int:
    number: int = layer.self_attn.layer_idx
    return number


def _agree(own: torch.Tensor, expected: torch.Tensor, rounded: torch.Tensor | None = None) -> bool:
    """Whether rows differ by roundings: of their largest number, or of ``rounded`` itself."""
    if own.shape != expected.shape:
        return False
    roundings = ROUNDINGS * torch.finfo(expected.dtype).eps
    allowed = max(roundings, LEAST_TOLERANCE) * expected.abs().amax(-1, keepdim=True).float()
    if rounded is not None:
        allowed = allowed + roundings * rounded.abs().float()
    return bool(((own.float() - expected.float()).abs() <= allowed).all())


class _FusedLayer:
    """A decoder layer's ``forward``.

    Args:
        layer: as it was loaded; keeps its parts, some of its weights are joined.
        handed: what it gives to its attention.

    Raises:
        ValueError: projections that cannot be joined.
    """

    def __init__(self, layer: Any, handed: _Handed) -> None:
        attention = layer.self_attn
        self._original = layer.forward
        self._layer_idx = _number(layer)
        self._options = handed.options
        self._heads = [rows.shape[1] for rows in (handed.query, handed.key, handed.value)]
        self._head_dim = handed.query.shape[-1]
        self._norms = layer.input_layernorm, layer.post_attention_layernorm
        self._head_norms = [getattr(attention, name, None) for name in HEAD_NORMS]
        self._qkv = _join([attention.q_proj, attention.k_proj, attention.v_proj])
        self._o_proj = attention.o_proj
        self._mlp = layer.mlp
        self._gate_up = None
        if _is_gated(layer.mlp):
            self._gate_up = _join([layer.mlp.gate_proj, layer.mlp.up_proj])
        device = attention.q_proj.weight.device.type
        self._rotate = import_module(f"bicl.ops.{device}.rotary").rotate
        self._swiglu = import_module(f"bicl.ops.{device}.swiglu").swiglu
        products = import_module(f"bicl.ops.{device}.linear")
        self._linear, self._add_linear = products.linear, products.add_linear

    def __call__(self, hidden_states: torch.Tensor, **keywords: Any) -> torch.Tensor:
        """One packed row ``[1, T, hidden_size]``, which the result overwrites. Whatever else it is
        called with, as for training, goes the old way."""
        cache = next((own for own in keywords.values() if isinstance(own, PagedCache)), None)
        if cache is None or hidden_states.shape[0] != 1 or not torch.is_inference_mode_enabled():
            result: torch.Tensor = self._original(hidden_states, **keywords)
            return result
        hidden = hidden_states[0]
        qkv = self._linear(self._norms[0](hidden), *self._qkv)
        query, key, value = torch.split(qkv.view(len(qkv), -1, self._head_dim), self._heads, dim=1)
        query, key = (
            rows if norm is None else norm(rows)
            for rows, norm in zip((query, key), self._head_norms, strict=True)
        )
        cos, sin = keywords["position_embeddings"]
        if not cache.rotates:
            self._rotate(query, key, cos[0], sin[0])
        key, value = (rows.transpose(0, 1)[None] for rows in (key, value))
        rows, _ = cache.update(key, value, self._layer_idx)
        if cache.rotates:
            rows.rotary = cos[0], sin[0]
        out = cache.attend(
            rows, query.transpose(0, 1)[None], keywords.get("attention_mask"), **self._options
        )
        pairs = len(hidden) * self._heads[1]  # as of a decode step of so many rows
        o_proj, attended = self._o_proj, out[0].flatten(1)
        self._add_linear(hidden, attended, o_proj.weight, o_proj.bias, attention_pairs=pairs)
        normed = self._norms[1](hidden)
        if self._gate_up is None:
            hidden.add_(self._mlp(normed[None])[0])
        else:
            gated = self._swiglu(self._linear(normed, *self._gate_up))
            down = self._mlp.down_proj
            self._add_linear(hidden, gated, down.weight, down.bias)
        return hidden_states


@torch.inference_mode(False)  # whose tensors could not be loaded into later
@torch.no_grad()
def _join(linears: Sequence[nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight and bias of all, one after the other; their own become views of them."""
    biases = [linear.bias for linear in linears]
    if any(bias is None for bias in biases) and any(bias is not None for bias in biases):
        raise ValueError("some projections have a bias, others have none")
    sizes = [linear.out_features for linear in linears]
    weight = _joined([linear.weight for linear in linears])
    bias = None if biases[0] is None else _joined(biases)
    for number, linear in enumerate(linears):
        linear.weight = nn.Parameter(torch.split(weight, sizes)[number], requires_grad=False)
        if bias is not None:
            linear.bias = nn.Parameter(torch.split(bias, sizes)[number], requires_grad=False)
    if weight.device.type == "cuda":
        torch.cuda.empty_cache()  # blocks of the parts fit no joined weight: they would stay
    return weight, bias


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach() for tensor in tensors])


def _has_usual_parts(module: nn.Module) -> bool:
    children = dict(module.named_children())
    if set(children) != PARTS:
        return False
    parts = dict(children["self_attn"].named_children())
    plain = all(type(parts.get(name)) is nn.Linear for name in PROJECTIONS)
    return plain and set(parts) - PROJECTIONS in (set(), set(HEAD_NORMS))


def _is_gated(mlp: nn.Module) -> bool:
    if not all(type(getattr(mlp, name, None)) is nn.Linear for name in GATED):
        return False
    return type(getattr(mlp, "act_fn", None)).__name__.lower().startswith("silu")
