"""The presses of kvpress, on the same contexts, the same layers, and as many kept keys as ours.

A press sees the context as kvpress shows it (hidden states, keys, values, attention of the prefix)
through its own ``compress``; which keys it kept is then a mask like any other choice's. Left out:
presses that train, download statistics, change keys (merging, re-rotation), prune channels, or
need extra passes over the context (KVzip, FastKVzip, KVzap, Finch, DMS, DuoAttention,
ExpectedAttentionStats, QFilter, KVgrad, CUR, ThinK, SimLayerKV, PyramidKV with its layer budgets).
"""

from __future__ import annotations

import logging
import sys
import types
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch

from bench.hysparse.decoding import Context, KeepRows
from bicl.sparse.variants import DecodeRows

__all__ = ["PressMasks", "load_presses"]

log = logging.getLogger(__name__)

# Imported by kvpress at its top, used only by presses and loaders that we do not run.
_UNUSED = ("datasets", "fire", "peft", "cachetools")


Memo = dict[str, torch.Tensor]
Maker = Callable[[float, Memo], Any]
"""Compression ratio and what was scored already in this layer, to a press."""


def _memoised(press: Any, memo: Memo) -> Any:
    """Score once for all ratios, where the score does not depend on the ratio."""
    name = type(press).__name__
    if name != "StreamingLLMPress":
        score = press.score

        def remembered(*args: Any, **kwargs: Any) -> torch.Tensor:
            if name not in memo:
                memo[name] = score(*args, **kwargs)
            return memo[name].clone()  # head-wise budgets write into it

        press.score = remembered
    return press


def load_presses() -> dict[str, Maker]:
    """Name to maker. Import before ``register()``: kvpress wraps the
    attention functions that it finds.

    Raises:
        ImportError: kvpress is not installed.
    """
    absent = [name for name in _UNUSED if find_spec(name) is None]
    for name in absent:
        stand_in: Any = types.ModuleType(name)
        stand_in.load_dataset = None
        stand_in.LRUCache = dict
        stand_in.cached = lambda *_, **__: lambda function: function
        sys.modules[name] = stand_in
    try:
        import kvpress as kv
    finally:
        for name in absent:
            del sys.modules[name]

    def ratio(maker: Callable[..., Any]) -> Maker:
        return lambda share, memo: _memoised(maker(compression_ratio=share), memo)

    def around(outer: Callable[..., Any], inner: Callable[..., Any]) -> Maker:
        return lambda share, memo: outer(press=_memoised(inner(compression_ratio=share), memo))

    return {
        "SnapKV": ratio(kv.SnapKVPress),
        "ObservedAttention": ratio(kv.ObservedAttentionPress),
        "StreamingLLM": ratio(kv.StreamingLLMPress),
        "TOVA": ratio(kv.TOVAPress),
        "Knorm": ratio(kv.KnormPress),
        "KeyDiff": ratio(kv.KeyDiffPress),
        "ExpectedAttention": ratio(kv.ExpectedAttentionPress),
        "LagKV": ratio(kv.LagKVPress),
        "CriticalKV-SnapKV": around(kv.CriticalKVPress, kv.SnapKVPress),
        "ChunkKV-SnapKV": around(kv.ChunkKVPress, kv.SnapKVPress),
        "AdaKV-SnapKV": around(kv.AdaKVPress, kv.SnapKVPress),
        "AdaKV-ExpectedAttention": around(kv.AdaKVPress, kv.ExpectedAttentionPress),
    }


class PressMasks:
    """Collects, while a context is read, what each press keeps of some of its prefixes.

    Args:
        presses: from :func:`load_presses`.
        layers: where they compress.
        prefixes: lengths.
        kept: ratio to the keys that each prefix keeps, as many as ours.
        failures: gets a line for a press that raises; it takes no further part.
    """

    def __init__(
        self,
        presses: dict[str, Maker],
        layers: Sequence[int],
        prefixes: Sequence[int],
        kept: dict[float, dict[int, int]],
        failures: list[str],
    ) -> None:
        self._failures = failures
        self.presses = presses
        self._layers = set(layers)
        self._prefixes = sorted(prefixes)
        self._kept = kept
        self._masks: dict[tuple[str, float, int, int], torch.Tensor] = {}

    def attach(self, model: Any, context: Context) -> list[Any]:
        """Hook the model's attention layers; remove the handles after reading ``context``."""
        handles = []
        for layer in model.model.layers:
            attention = layer.self_attn
            attention.rotary_emb = model.model.rotary_emb
            if attention.layer_idx in self._layers:
                hook = self._hook(context)
                handles.append(attention.register_forward_hook(hook, with_kwargs=True))
        return handles

    def keep(self, name: str, rows_a_ratio: int) -> KeepRows:
        """One press at every ratio, ``rows_a_ratio`` rows each, one prefix for all."""

        def choose(layer: int, rows: DecodeRows, own: slice) -> torch.Tensor:
            prefix = len(rows.key)
            masks = torch.stack([self._masks[name, r, layer, prefix] for r in self._kept])
            ratio = torch.arange(own.start, own.stop, device=masks.device) // rows_a_ratio
            return masks[ratio]

        return choose

    def _hook(self, context: Context) -> Callable[..., None]:
        def hook(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            layer = module.layer_idx
            hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            keys, values = (
                own[layer].transpose(0, 1)[None] for own in (context.keys, context.values)
            )
            attention = _attention(module, hidden, keys, kwargs["position_embeddings"])
            for prefix in self._prefixes:
                shown = _Prefix(module, hidden, keys, values, attention, kwargs, prefix)
                memo: Memo = {}
                for name, make in list(self.presses.items()):
                    try:
                        for ratio, kept in self._kept.items():
                            mask = shown.kept_by(make, kept[prefix], memo)
                            self._masks[name, ratio, layer, prefix] = mask
                    except (AssertionError, RuntimeError, ValueError, KeyError) as error:
                        log.exception("kvpress %s gives up", name)
                        del self.presses[name]  # for all that follows: no press counts in part
                        self._failures.append(f"kvpress {name}: {error}"[:200])

        return hook


class _Prefix:
    """What a press is shown of the first ``prefix`` tokens in one layer."""

    def __init__(
        self,
        module: Any,
        hidden: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        attention: torch.Tensor,
        kwargs: dict[str, Any],
        prefix: int,
    ) -> None:
        self._module = module
        self._hidden = hidden[:, :prefix]
        self._keys, self._values = keys[:, :, :prefix], values[:, :, :prefix]
        self._attention = attention[..., :prefix, :prefix]
        cosine, sine = kwargs["position_embeddings"]
        self._kwargs = kwargs | {"position_embeddings": (cosine[:, :prefix], sine[:, :prefix])}

    def kept_by(self, make: Maker, kept: int, memo: Memo) -> torch.Tensor:
        """bool ``[H, prefix]``: the keys that are left where ``kept`` a head may stay."""
        module, keys = self._module, self._keys
        everything = torch.ones(keys.shape[1:3], dtype=torch.bool, device=keys.device)
        if kept >= keys.shape[2]:
            return everything
        # kvpress keeps int(n * (1 - ratio)): half a token more survives its rounding.
        press = make(1.0 - (kept + 0.5) / keys.shape[2], memo)
        observes = type(press).__name__ == "ObservedAttentionPress"
        attention = self._attention if observes else None  # as without eager attention
        shown = (module, self._hidden, keys, self._values, attention, self._kwargs)
        if _only_scores(press):  # what its compress would do, without moving keys
            best = press.score(*shown)[0].topk(kept, dim=-1).indices
            return torch.zeros_like(everything).scatter_(1, best, True)
        module.masked_key_indices = None
        left, _ = press.compress(*shown)
        if module.masked_key_indices is not None:  # budgets by head: marked, not removed
            _, head, place = module.masked_key_indices
            everything[head, place] = False
            module.masked_key_indices = None
            return everything
        pairs = zip(keys[0], left[0], strict=True)
        return torch.stack([torch.isin(_fingerprint(a), _fingerprint(b)) for a, b in pairs])


def _only_scores(press: Any) -> bool:
    """Whether ``compress`` is kvpress's own: keep the keys of the best scores."""
    import kvpress

    return type(press).compress is kvpress.ScorerPress.compress


def _fingerprint(keys: torch.Tensor) -> torch.Tensor:
    """int64 ``[n]`` of float32 keys ``[n, D]``: which of them survived, whatever the order."""
    bits = keys.contiguous().view(torch.int32).long()
    return bits[:, 0] * 0x1F1F1F1F + bits[:, -1] * 0x01000193 + bits[:, keys.shape[1] // 2]


def _attention(
    module: Any, hidden: torch.Tensor, keys: torch.Tensor, embeddings: Any
) -> torch.Tensor:
    """The whole attention matrix ``[1, Hq, T, T]``, for presses that observe it."""
    from transformers.models.llama.modeling_llama import rotate_half

    cosine, sine = (x[:, None] for x in embeddings)
    query = module.q_proj(hidden).unflatten(-1, (-1, module.head_dim)).transpose(1, 2)
    query = query * cosine + rotate_half(query) * sine
    group, length = query.shape[1] // keys.shape[1], keys.shape[2]
    future = torch.ones(length, length, dtype=torch.bool, device=keys.device).triu(1)
    shares = query.new_empty(1, query.shape[1], length, length)
    for head in range(query.shape[1]):  # one at a time: of 8,000 tokens each takes 256 MB
        scores = query[0, head] @ keys[0, head // group].t() * module.scaling
        torch.softmax(scores.masked_fill_(future, -torch.inf), dim=-1, out=shares[0, head])
    return shares
