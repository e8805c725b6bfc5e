"""The transformers door: every family equals eager attention with transformers' own cache."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support.tiny_models import FAMILIES, tiny_model

from bicl.attention.backend import make_backend
from bicl.attention.metadata import AttentionMetadata
from bicl.attention.pool import KVPool
from bicl.errors import ConfigError, InvalidInputError, UnsupportedError
from bicl.frontends.transformers import (
    ATTENTION_NAME,
    BiclCache,
    PackedCache,
    inspect_model,
    register,
    unregister,
)
from bicl.frontends.transformers.geometry import cache_argument


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    with register():
        yield


def ids(length: int, seed: int = 0, batch: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 199, (batch, length), generator=generator)


def generate(model, input_ids, mask=None, cache=None, new_tokens=12):
    out = model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids) if mask is None else mask,
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=None,
        return_dict_in_generate=True,
        output_logits=True,
        **({} if cache is None else {cache_argument(model): cache}),
    )
    return out.sequences, torch.stack(out.logits, 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_generate_equals_eager(family: str) -> None:
    eager, paged = tiny_model(family, "eager"), tiny_model(family, ATTENTION_NAME)
    prompt = ids(130)
    tokens, logits = generate(eager, prompt)
    paged_tokens, paged_logits = generate(paged, prompt, cache=BiclCache(paged))
    torch.testing.assert_close(paged_logits, logits, atol=2e-4, rtol=1e-4)
    assert paged_tokens.tolist() == tokens.tolist()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("page_size", [32, 64])
def test_left_padded_batch_equals_eager(family: str, page_size: int) -> None:
    eager, paged = tiny_model(family, "eager"), tiny_model(family, ATTENTION_NAME)
    lengths = [1, 63, 64, 65, 100]
    prompt, mask = ids(100, batch=5), torch.ones(5, 100, dtype=torch.long)
    for row, length in enumerate(lengths):
        prompt[row, : 100 - length], mask[row, : 100 - length] = 0, 0
    tokens, logits = generate(eager, prompt, mask)
    paged_tokens, paged_logits = generate(
        paged, prompt, mask, BiclCache(paged, page_size=page_size, num_pages=3)
    )
    torch.testing.assert_close(paged_logits, logits, atol=2e-4, rtol=1e-4)
    assert paged_tokens.tolist() == tokens.tolist()


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral-window"])
@pytest.mark.parametrize("chunk", [7, 50, 64])
def test_chunked_forward_equals_one_forward(family: str, chunk: int) -> None:
    """Chunk edges need not align to pages. (A21)"""
    model, eager = tiny_model(family, ATTENTION_NAME), tiny_model(family, "eager")
    prompt, cache = ids(150), BiclCache(model)
    with torch.inference_mode():
        expected = eager(prompt).logits
        parts = [
            model(part, **{cache_argument(model): cache}).logits
            for part in prompt.split(chunk, dim=1)
        ]
    torch.testing.assert_close(torch.cat(parts, 1), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_step_equals_eager(family: str) -> None:
    """Prefill, extend and decode rows of three sequences in one packed call. (A2, A9)"""
    model, eager = tiny_model(family, ATTENTION_NAME), tiny_model(family, "eager")
    sequences = [ids(n, seed=n)[0] for n in (97, 130, 66)]
    steps = [(0, 64, 1), (97, 129, 65), (97, 130, 66)]  # lengths after each step
    backend = make_backend("cpu")
    layouts = inspect_model(model).layouts(torch.float32, page_size=64, tile=64, swizzle=False)
    pool = KVPool(layouts, 10, "cpu", fill=float("nan"))
    cache, tables = PackedCache(pool, backend), torch.randperm(9).view(3, 3) + 1
    logits: list[list[torch.Tensor]] = [[], [], []]
    before = (0, 0, 0)
    for after in steps:
        rows = [range(a, b) for a, b in zip(before, after, strict=True)]
        flat = [(s, i) for s, row in enumerate(rows) for i in row]
        cache.meta = AttentionMetadata(
            page_table=tables.int(),
            cache_seqlens=torch.tensor(after, dtype=torch.int32),
            cu_seqlens_q=torch.tensor([0, *map(len, rows)]).cumsum(0).int(),
            slot_mapping=torch.tensor([int(tables[s, i // 64]) * 64 + i % 64 for s, i in flat]),
            max_q=max(map(len, rows)),
            max_k=max(after),
        )
        backend.plan(cache.meta)
        with torch.inference_mode():
            out = model(
                input_ids=torch.stack([sequences[s][i] for s, i in flat])[None],
                position_ids=torch.tensor([i for _, i in flat])[None],
                use_cache=True,
                **{cache_argument(model): cache},
            ).logits[0]
        for sequence, part in enumerate(out.split([len(row) for row in rows])):
            logits[sequence].append(part)
        before = after
    for sequence, parts in zip(sequences, logits, strict=True):
        with torch.inference_mode():
            expected = eager(sequence[None]).logits[0]
        torch.testing.assert_close(torch.cat(parts), expected, atol=2e-4, rtol=1e-4)


def test_full_layers_see_past_the_window_of_others() -> None:
    """Each layer keeps its own window. (A9)"""
    geometry = inspect_model(tiny_model("gemma3", ATTENTION_NAME))
    assert [layer.window_left for layer in geometry.layers] == [64, -1, 64]


def test_second_turn_reuses_the_cache() -> None:
    model, eager = tiny_model("llama", ATTENTION_NAME), tiny_model("llama", "eager")
    cache = BiclCache(model)
    first, _ = generate(model, ids(60), cache=cache)
    prompt = torch.cat([first, ids(20, seed=5)], 1)
    tokens, _ = generate(model, prompt, cache=cache)
    expected, _ = generate(eager, prompt)
    assert tokens.tolist() == expected.tolist()


def test_crop_forgets_the_last_tokens() -> None:
    model, eager = tiny_model("llama", ATTENTION_NAME), tiny_model("llama", "eager")
    prompt, cache = ids(140), BiclCache(model)
    with torch.inference_mode():
        model(ids(140, seed=9), **{cache_argument(model): cache})
        cache.crop(-140)
        model(prompt[:, :130], **{cache_argument(model): cache})
        cache.crop(-70)
        logits = model(prompt[:, 60:], **{cache_argument(model): cache}).logits
        expected = eager(prompt).logits[:, 60:]
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)


def test_registration_is_explicit_and_reversible() -> None:
    unregister()
    with pytest.raises((ValueError, KeyError)):
        tiny_model("llama", ATTENTION_NAME)
    with register():
        tiny_model("llama", ATTENTION_NAME)
    with pytest.raises((ValueError, KeyError)):
        tiny_model("llama", ATTENTION_NAME)


@pytest.mark.parametrize(
    ("model_type", "options", "reason"),
    [
        ("bloom", {"n_layer": 2, "n_head": 4}, "does not go through"),
        ("gpt_oss", {"num_local_experts": 2, "head_dim": 32}, "attention sinks"),
        ("mamba", {}, "Mamba"),
        ("t5", {"d_model": 32}, "encoder-decoder"),
        (
            "qwen3_next",
            {"head_dim": 32, "num_experts": 2, "num_hidden_layers": 4},
            "Qwen3Next",
        ),
        (
            "deepseek_v2",
            {"n_routed_experts": 2, "first_k_dense_replace": 3},
            "DeepseekV2",
        ),
    ],
)
def test_models_that_pages_cannot_serve_are_refused_by_name(model_type, options, reason) -> None:
    """(A9, A45, A48)"""
    from support.tiny_models import COMMON
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type](**{**COMMON, **options})
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    with pytest.raises((ConfigError, ValueError), match=reason):  # some refuse by themselves
        inspect_model(auto.from_config(config, attn_implementation=ATTENTION_NAME).eval())


def test_model_loaded_without_our_attention_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match="set_attn_implementation"):
        BiclCache(tiny_model("llama", "eager"))


def test_call_without_our_cache_is_refused_with_the_remedy() -> None:
    model = tiny_model("llama", ATTENTION_NAME)
    with pytest.raises(UnsupportedError, match=r"BiclCache\(model\)"):
        model(ids(5), use_cache=False)


def test_beam_search_is_refused() -> None:
    model = tiny_model("llama", ATTENTION_NAME)
    with pytest.raises(UnsupportedError, match="beam search"):
        model.generate(
            ids(5),
            attention_mask=torch.ones(1, 5),
            num_beams=2,
            max_new_tokens=4,
            **{cache_argument(model): BiclCache(model)},
        )


def test_other_batch_size_is_refused() -> None:
    model = tiny_model("llama", ATTENTION_NAME)
    cache = BiclCache(model)
    with torch.inference_mode():
        model(ids(5), **{cache_argument(model): cache})
        with pytest.raises(InvalidInputError, match="1 sequences, the call has 2"):
            model(ids(5, batch=2), **{cache_argument(model): cache})
