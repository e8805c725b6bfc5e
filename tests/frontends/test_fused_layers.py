"""Decoder layers in fewer launches say what they said."""

from __future__ import annotations

import pytest
import torch
from support.driving import generate, random_prompt, request, running
from support.tiny_models import FAMILIES, tiny_loaded, tiny_model
from torch import nn
from transformers import PreTrainedModel

from bicl.frontends.transformers import BiclCache, register
from bicl.frontends.transformers.fused_layers import fuse, fuse_layers
from bicl.frontends.transformers.geometry import cache_argument

PROMPT = torch.arange(4, 104)[None]
NEXT = torch.tensor([[7]])
FUSED = sorted(name for name in FAMILIES if name.startswith(("llama", "mistral", "qwen")))


def bicl_model(family: str, **overrides: object) -> PreTrainedModel:
    register()
    return tiny_model(family, "bicl", **overrides)


def logits(model: PreTrainedModel) -> torch.Tensor:
    """Of a prompt and a token behind it."""
    cache = {cache_argument(model): BiclCache(model)}
    with torch.inference_mode():
        return torch.cat([model(ids, **cache).logits for ids in (PROMPT, NEXT)], dim=1)


@pytest.mark.parametrize("family", FUSED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fused_layers_give_what_they_gave(family: str, dtype: torch.dtype) -> None:
    model = bicl_model(family).to(dtype)
    expected = logits(model)
    assert fuse_layers(model) == model.config.num_hidden_layers
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    difference = (logits(model).float() - expected.float()).abs().max()
    assert difference <= tolerance * expected.float().abs().max()


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_an_engine_turns_keys_where_it_stores_them(family: str) -> None:
    """The packed cache is handed rows that are not turned yet."""
    loaded, fused = tiny_loaded(family), tiny_loaded(family)
    assert fuse_layers(fused.model) == fused.model.config.num_hidden_layers
    results = []
    for model in (loaded, fused):
        with running(model, max_total_tokens=512) as engine:
            first = generate(engine, *[request(random_prompt(n, n), 12) for n in (1, 90, 200)])
            results.append([result.ids for result in first])
    assert results[0] == results[1]


def test_the_product_behind_attention_is_told_of_its_pairs() -> None:
    model = bicl_model("llama")
    fuse_layers(model)
    told: list[int | None] = []
    for layer in model.model.layers:
        product = layer.forward._add_linear

        def noted(*given: object, _product=product, attention_pairs=None) -> None:
            told.append(attention_pairs)
            _product(*given, attention_pairs=attention_pairs)

        layer.forward._add_linear = noted
    logits(model)
    heads = model.config.num_key_value_heads
    layers = model.config.num_hidden_layers
    steps = [PROMPT.numel() * heads, None] * layers + [heads, None] * layers
    assert told[-len(steps) :] == steps  # ahead of them the cache tries the model


def test_products_with_a_bias_and_a_part_that_is_no_gate() -> None:
    model = bicl_model("llama", attention_bias=True, mlp_bias=True)
    for layer in model.model.layers:
        for linear in layer.modules():
            if isinstance(linear, nn.Linear):
                nn.init.normal_(linear.bias)
        layer.mlp.act_fn = nn.GELU()
    expected = logits(model)
    assert fuse_layers(model) == model.config.num_hidden_layers
    torch.testing.assert_close(logits(model), expected, atol=1e-3, rtol=1e-4)


def test_joined_weights_keep_their_names_and_numbers() -> None:
    model = bicl_model("qwen2")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    fuse_layers(model)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    attention = model.model.layers[0].self_attn
    storages = {getattr(attention, f"{x}_proj").weight.untyped_storage().data_ptr() for x in "qkv"}
    assert len(storages) == 1


def test_other_weights_can_be_loaded_into_fused_layers() -> None:
    model, other = bicl_model("qwen2"), bicl_model("qwen2")
    for weight in other.parameters():
        nn.init.normal_(weight, std=0.05)
    expected = logits(other)
    fuse_layers(model)
    logits(model)
    model.load_state_dict(other.state_dict())
    torch.testing.assert_close(logits(model), expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(FUSED)))
def test_layers_of_other_parts_stay_as_they_are(family: str) -> None:
    model = bicl_model(family)
    expected = logits(model)
    assert fuse_layers(model) == 0
    assert torch.equal(logits(model), expected)


def test_layers_that_stay_are_told() -> None:
    assert fuse(bicl_model("llama")) == ()
    assert fuse(bicl_model("gemma2"))[0].startswith("3 of 3 decoder layers")


def test_a_layer_that_computes_something_else_stays_as_it_is() -> None:
    """The same parts, another order of dims in the rotation, as GLM's."""
    model = bicl_model("llama")
    changed = model.model.layers[1]
    original = type(changed.self_attn).forward

    def forward(module: nn.Module, hidden_states: torch.Tensor, **keywords: object) -> object:
        cos, sin = keywords.pop("position_embeddings")  # type: ignore[misc]
        keywords["position_embeddings"] = (cos, -sin)
        return original(module, hidden_states, **keywords)

    changed.self_attn.forward = forward.__get__(changed.self_attn)
    expected = logits(model)
    assert fuse_layers(model) == model.config.num_hidden_layers - 1
    torch.testing.assert_close(logits(model), expected, atol=1e-3, rtol=1e-4)


def test_too_little_memory_is_not_taken_for_an_unusual_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_memory(*args: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr("bicl.ops.cpu.linear.linear", no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        fuse_layers(bicl_model("llama"))


def test_training_goes_the_old_way() -> None:
    model = bicl_model("llama")
    fuse_layers(model)
    layer = model.model.layers[0]
    hidden = torch.randn(1, 3, model.config.hidden_size)
    kept = hidden.clone()
    embeddings = model.model.rotary_emb(hidden, torch.arange(3)[None])
    cache = {cache_argument(model): BiclCache(model)}
    with torch.no_grad():
        layer(hidden, position_embeddings=embeddings, attention_mask=None, **cache)
    assert torch.equal(hidden, kept)
