"""On which models HySparse starts."""

from __future__ import annotations

from typing import Any

import pytest

from bicl.errors import ConfigError
from bicl.sparse.config import HySparseConfig
from bicl.sparse.refusals import ModelFacts, check_model, coarse_weights

LLAMA: dict[str, Any] = {"model_type": "llama", "num_hidden_layers": 32}
CONFIG = HySparseConfig()


def facts(**changes: Any) -> ModelFacts:
    names = ("model_id", "chat_template", "quantize", "speculation")
    options = {name: changes.pop(name) for name in names if name in changes}
    return ModelFacts.from_config(LLAMA | changes, **options)


def refusal(model: ModelFacts, config: HySparseConfig = CONFIG) -> str:
    with pytest.raises(ConfigError) as caught:
        check_model(config, model)
    return str(caught.value)


def test_a_plain_model_starts_with_the_layers_of_its_depth() -> None:
    found = check_model(CONFIG, facts())
    assert found.layers == tuple(range(10, 29))
    assert found.notes == ()


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "awq", "bits": 4},
        {"quant_method": "awq", "w_bit": 4},
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "gptq"},
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"a": {"weights": {"num_bits": 4}}},
        },
        {"quant_method": "hqq", "nbits": 3},
        {"quant_method": "mxfp4"},
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
        {"quant_method": "torchao", "quant_type": "int4_weight_only"},
        {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4WeightOnlyConfig"}}},
    ],
    ids=str,
)
def test_weights_of_few_bits_are_refused_unless_forced(quantization: dict[str, Any]) -> None:
    """(A60)"""
    model = facts(quantization_config=quantization)
    message = refusal(model)
    assert quantization["quant_method"] in message
    assert "--hysparse-force" in message
    assert "unquantised" in message
    (note,) = check_model(HySparseConfig(force=True), model).notes
    assert note.startswith("--hysparse-force: ")


@pytest.mark.parametrize(
    "quantization",
    [
        None,
        {"quant_method": "fp8"},
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        {"quant_method": "torchao", "quant_type": "int8_weight_only"},
        {"quant_method": "gptq", "bits": 8},
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"a": {"weights": {"num_bits": 8}}},
        },
    ],
    ids=str,
)
def test_weights_of_eight_bits_and_more_are_taken(quantization: dict[str, Any] | None) -> None:
    assert coarse_weights(quantization) == ""


@pytest.mark.parametrize(
    "name",
    [
        "deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
        "Qwen/QwQ-32B",
        "Qwen/Qwen3-30B-A3B-Thinking-2507",
        "microsoft/Phi-4-reasoning",
        "openai/gpt-oss-20b",
        "/models/Magistral-Small",
    ],
)
def test_reasoning_models_need_their_first_and_last_layers(name: str) -> None:
    """(A60)"""
    message = refusal(facts(model_id=name))
    assert "use --hysparse-layers 8-23/32" in message
    assert "--hysparse-force" in message
    check_model(HySparseConfig(layers="8-23/32"), facts(model_id=name))


@pytest.mark.parametrize(
    "name", ["meta-llama/Llama-3.1-8B-Instruct", "mistralai/Ministral-8B", "org/car1-7b", "o1o/x"]
)
def test_other_names_are_no_reasoning_models(name: str) -> None:
    assert facts(model_id=name).reasoning == ""


def test_a_chat_template_gives_a_reasoning_model_away() -> None:
    assert "<think>" in refusal(facts(chat_template="...<think>..."))


@pytest.mark.parametrize(
    ("changes", "full"),
    [
        ({"layer_types": ["sliding_attention", "full_attention"] * 16}, set(range(1, 32, 2))),
        ({"model_type": "gemma2"}, set(range(1, 32, 2))),
        ({"model_type": "gemma3_text"}, {5, 11, 17, 23, 29}),
        ({"use_sliding_window": True, "max_window_layers": 20}, set(range(20))),
    ],
    ids=["listed", "gemma2", "gemma3", "qwen2"],
)
def test_layers_with_a_window_stay_as_they_are(changes: dict[str, Any], full: set[int]) -> None:
    found = check_model(CONFIG, facts(sliding_window=512, **changes))
    assert set(found.layers or ()) == set(range(10, 29)) & full
    assert "have a sliding window" in found.notes[0]


def test_a_model_that_is_all_windows_is_refused() -> None:
    assert "nothing is left to skip" in refusal(facts(sliding_window=512))
    check_model(CONFIG, facts(sliding_window=512, use_sliding_window=False))


def test_speculation_is_refused_even_if_forced() -> None:
    """(A60)"""
    assert "speculation" in refusal(facts(speculation=True), HySparseConfig(force=True))


def test_a_model_too_shallow_for_the_layers_is_refused_with_its_own_numbers() -> None:
    message = refusal(ModelFacts(2), HySparseConfig(layers="10-11"))
    assert "names no layer of this model of 2" in message
    assert "0-1/2" in message
