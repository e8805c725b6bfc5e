"""What passes between the HTTP routes and the engine: plain frozen data, no wire format.

Routes validate and tokenise; the engine trusts what stands here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

__all__ = [
    "FinishReason",
    "GenerationParams",
    "GenerationRequest",
    "Grammar",
    "GrammarKind",
    "PrefillToken",
    "RequestDone",
    "RequestEvent",
    "RequestFailed",
    "SparseOptions",
    "SparseUsage",
    "Token",
    "TokenEvent",
    "Usage",
]


class FinishReason(StrEnum):
    """TGI's finish reasons."""

    LENGTH = "length"
    EOS_TOKEN = "eos_token"
    STOP_SEQUENCE = "stop_sequence"


class GrammarKind(StrEnum):
    JSON = "json"
    REGEX = "regex"


@dataclass(frozen=True)
class Grammar:
    """Constrains the output. ``value``: a JSON schema as text, or a regular expression."""

    kind: GrammarKind
    value: str


@dataclass(frozen=True)
class SparseOptions:
    """What one request asks of HySparse; ``None`` leaves it to the server."""

    sparsity_ratio: float | None = None
    enable_sg: bool | None = None


@dataclass(frozen=True)
class GenerationParams:
    """Sampling and stopping, after validation. Neutral values switch a rule off.

    ``seed`` is always set (drawn by the route when the client gave none), so that a preempted
    request repeats its draws. ``include_stop`` leaves a matched stop sequence in the text, as TGI
    does; without it the sequence is never given out, not even in part. ``best_of`` is the
    route's affair: it submits several requests. ``forced_ids`` are emitted in place of what would
    be chosen, with their log-probabilities: to measure, not to serve.
    """

    max_new_tokens: int
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    include_stop: bool = True
    ignore_eos: bool = False
    watermark: bool = False
    grammar: Grammar | None = None
    top_n_tokens: int = 0
    decoder_input_details: bool = False
    sparse: SparseOptions = SparseOptions()
    forced_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt to continue.

    Attributes:
        id: unique among live requests.
        prompt_ids: token ids, already truncated; at least one.
        params: see :class:`GenerationParams`.
        salt: tenant salt; prefixes are shared only within one salt.
        adapter_id: adapter whose keys and values these are; part of the prefix key.
    """

    id: str
    prompt_ids: tuple[int, ...]
    params: GenerationParams
    salt: str = ""
    adapter_id: str = ""


@dataclass(frozen=True)
class Token:
    """A generated token. ``text`` is what it adds to the output (may be empty while a
    multi-byte character or a possible stop string is incomplete)."""

    id: int
    text: str
    logprob: float
    special: bool


@dataclass(frozen=True)
class PrefillToken:
    """A prompt token with its log-probability; ``None`` for the first."""

    id: int
    text: str
    logprob: float | None


@dataclass(frozen=True)
class TokenEvent:
    """One generated token. ``top_tokens`` has ``top_n_tokens`` entries, best first.

    ``last``: :class:`RequestDone` follows. TGI's wire puts the final text into the last token's
    event, so the route must know without waiting for another step.
    """

    token: Token
    top_tokens: tuple[Token, ...] = ()
    last: bool = False


@dataclass(frozen=True)
class SparseUsage:
    """What HySparse did in one request.

    Attributes:
        sparsity_ratio: asked for, after the request's own wish and the kind of its text.
        tiles_read, tiles_total: tiles that decode steps read, and would have read dense: of one KV
            head, summed over sparse layers and steps.
        mass_kept: share of the attention mass that lay in the tiles that were read, mean of the
            shadow steps; ``None`` before the first.
        entropy: of the last shadow step's attention in the sparse layers, in nats; ``None`` before
            the first.
        entropy_by_group: the same of a layer before, among and after the sparse ones (``first``,
            ``sparse``, ``last``; ``compact`` measures ``sparse`` alone).
        shadow_steps: decode steps in which a dense shadow ran beside a sampled layer.
        fallback: why it went back to the full cache; empty: it did not.
        text_kind: of its prompt, as classified; empty: nobody asked.
    """

    sparsity_ratio: float
    tiles_read: int = 0
    tiles_total: int = 0
    mass_kept: float | None = None
    entropy: float | None = None
    entropy_by_group: Mapping[str, float] = field(default_factory=dict)
    shadow_steps: int = 0
    fallback: str = ""
    text_kind: str = ""

    @property
    def actual_ratio(self) -> float:
        """Share of the tiles that was left out."""
        return 1.0 - self.tiles_read / self.tiles_total if self.tiles_total else 0.0


@dataclass(frozen=True)
class Usage:
    """Where one request's time and tokens went. Times in seconds. ``sparse``: with HySparse.

    ``cached_host_tokens`` and ``cached_disk_tokens`` of the ``cached_tokens`` came from there.
    """

    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int
    queue_time: float
    inference_time: float
    num_preemptions: int = 0
    cached_host_tokens: int = 0
    cached_disk_tokens: int = 0
    sparse: SparseUsage | None = None


@dataclass(frozen=True)
class RequestDone:
    """Last event of a request that ended well."""

    finish_reason: FinishReason
    generated_text: str
    usage: Usage
    prefill: tuple[PrefillToken, ...] = field(default=())


@dataclass(frozen=True)
class RequestFailed:
    """Last event of a request that ended badly. ``error`` tells the route which status fits."""

    error: Exception


RequestEvent = TokenEvent | RequestDone | RequestFailed
