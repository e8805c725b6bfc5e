"""Wire types of ``/``, ``/generate``, ``/generate_stream`` and ``/tokenize``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from bicl.frontends.http.schemas.base import F32, I32, U32, U64, Wire, is_empty

__all__ = [
    "BestOfSequence",
    "CompatGenerateRequest",
    "Details",
    "GenerateParameters",
    "GenerateRequest",
    "GenerateResponse",
    "GrammarType",
    "HySparseDetails",
    "HySparseParameters",
    "JsonGrammar",
    "JsonSchemaConfig",
    "JsonSchemaGrammar",
    "PrefillToken",
    "RegexGrammar",
    "SimpleToken",
    "StreamDetails",
    "StreamResponse",
    "Token",
]


class JsonSchemaConfig(Wire):
    # "schema" would hide a method of pydantic's base class.
    name: str | None = None
    json_schema: Any = Field(alias="schema")


class JsonGrammar(Wire):
    type: Literal["json", "json_object"]
    value: Any


class RegexGrammar(Wire):
    type: Literal["regex"]
    value: str


class JsonSchemaGrammar(Wire):
    type: Literal["json_schema"]
    value: JsonSchemaConfig


GrammarType = Annotated[JsonGrammar | RegexGrammar | JsonSchemaGrammar, Field(discriminator="type")]


class HySparseParameters(Wire):
    """What one request asks of HySparse. An unknown key is refused: it would change nothing."""

    model_config = ConfigDict(extra="forbid")

    sparsity_ratio: float | None = Field(
        default=None, description="Share of the tiles to leave out; 0 is dense.", examples=[0.65]
    )
    enable_sg: bool | None = Field(
        default=None, description="Always keep tokens at the boundaries of syntax nodes."
    )


class GenerateParameters(Wire):
    best_of: U64 | None = Field(default=None, examples=[1])
    temperature: F32 | None = Field(default=None, examples=[0.5])
    repetition_penalty: F32 | None = Field(default=None, examples=[1.03])
    frequency_penalty: F32 | None = Field(default=None, examples=[0.1])
    top_k: I32 | None = Field(default=None, examples=[10])
    top_p: F32 | None = Field(default=None, examples=[0.95])
    typical_p: F32 | None = Field(default=None, examples=[0.95])
    do_sample: bool = False
    max_new_tokens: U32 | None = Field(
        default=None, description="Default: all that fits into max_total_tokens.", examples=[20]
    )
    return_full_text: bool | None = None
    stop: list[str] = Field(default=[], examples=[["photographer"]])
    truncate: U64 | None = Field(default=None, description="Keep only the prompt's last tokens.")
    watermark: bool = False
    details: bool = False
    decoder_input_details: bool = False
    seed: U64 | None = None
    top_n_tokens: U32 | None = Field(default=None, examples=[5])
    grammar: GrammarType | None = None
    adapter_id: str | None = Field(default=None, description="Not supported: answered 422.")
    hy_sparse_config: HySparseParameters | None = Field(
        default=None, description="Needs a server started with --enable-hysparse (BICL)."
    )


def default_parameters() -> GenerateParameters:
    """TGI samples when a request has no ``parameters`` at all."""
    return GenerateParameters(do_sample=True)


class GenerateRequest(Wire):
    model_config = ConfigDict(
        json_schema_extra={"examples": [{"inputs": "My name is Olivier and I"}]}
    )

    inputs: str
    parameters: GenerateParameters = Field(default_factory=default_parameters)


class CompatGenerateRequest(GenerateRequest):
    stream: bool = False


class PrefillToken(Wire):
    id: int
    text: str
    logprob: float | None


class Token(Wire):
    id: int
    text: str
    logprob: float | None
    special: bool


class HySparseDetails(Wire):
    """What HySparse did in one request (BICL)."""

    sparsity_ratio: float = Field(description="Asked for.")
    actual_sparsity_ratio: float = Field(description="Share of the tiles that was left out.")
    tiles_read: int = Field(
        description="Tiles of a KV head that decode steps read, over all sparse layers."
    )
    tiles_total: int = Field(description="Tiles that dense steps would have read.")
    exercised: bool = Field(description="False: no tile was left out, all was dense.")
    attention_mass_kept: float | None = Field(
        description="Share of the attention mass in the tiles that were read, where measured."
    )
    attention_entropy: float | None = Field(description="Of the last shadow step, in nats.")
    attention_entropy_by_group: dict[str, float] = Field(
        description="The same of a layer before, among and after the sparse ones, by name."
    )
    shadow_steps: int = Field(description="Steps in which a dense shadow measured one layer.")
    fallback: str | None = Field(description="Why the request went back to the full cache.")
    text_kind: str | None = Field(description="Of the prompt, where it was classified.")


class CachedByTier(Wire):
    """Where ``cached_tokens`` were (BICL); left out when all were on the device."""

    device: int
    host: int
    disk: int


class BestOfSequence(Wire):
    generated_text: str
    finish_reason: str
    generated_tokens: int
    seed: int | None
    prefill: list[PrefillToken]
    tokens: list[Token]
    top_tokens: list[list[Token]] = Field(default=[], exclude_if=is_empty)
    cached_tokens: int = Field(description="Prompt tokens reused from the cache (BICL).")
    cached_tokens_by_tier: CachedByTier | None = Field(default=None, exclude_if=is_empty)
    hysparse: HySparseDetails | None = Field(default=None, exclude_if=is_empty)


class Details(Wire):
    finish_reason: str
    generated_tokens: int
    seed: int | None
    prefill: list[PrefillToken]
    tokens: list[Token]
    best_of_sequences: list[BestOfSequence] | None = Field(default=None, exclude_if=is_empty)
    top_tokens: list[list[Token]] = Field(default=[], exclude_if=is_empty)
    cached_tokens: int = Field(description="Prompt tokens reused from the cache (BICL).")
    cached_tokens_by_tier: CachedByTier | None = Field(default=None, exclude_if=is_empty)
    hysparse: HySparseDetails | None = Field(default=None, exclude_if=is_empty)


class GenerateResponse(Wire):
    generated_text: str
    details: Details | None = Field(default=None, exclude_if=is_empty)


class StreamDetails(Wire):
    finish_reason: str
    generated_tokens: int
    seed: int | None
    input_length: int
    cached_tokens: int = Field(description="Prompt tokens reused from the cache (BICL).")
    cached_tokens_by_tier: CachedByTier | None = Field(default=None, exclude_if=is_empty)
    hysparse: HySparseDetails | None = Field(default=None, exclude_if=is_empty)


class StreamResponse(Wire):
    index: int
    token: Token
    top_tokens: list[Token] = Field(default=[], exclude_if=is_empty)
    generated_text: str | None
    details: StreamDetails | None


class SimpleToken(Wire):
    id: int
    text: str
    start: int
    stop: int
