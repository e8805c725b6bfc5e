"""HySparse's flags in front of text-generation-inference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bicl.errors import ConfigError
from bicl.frontends.tgi.config import OverlayConfig
from bicl.hardware import Verdict
from bicl.launcher.flags import split
from bicl.launcher.model_config import ModelConfig
from bicl.launcher.plan import Launch, plan_launch
from bicl.settings import settings_of
from bicl.sparse.settings import HySparseSettings, write_config_file

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
ON = "--enable-hysparse "


def plan(
    command: str,
    model: dict[str, Any] | None = LLAMA,
    template: str | None = None,
    hardware: Verdict = Verdict(),  # noqa: B008 - frozen
    **environ: str,
) -> Launch:
    config = None
    if model is not None:
        config = replace(ModelConfig.from_dict(model), chat_template=template)
    return plan_launch(split(command.split(), environ), config, hardware)


def refusal(*arguments: Any, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        plan(*arguments, **options)
    return str(caught.value)


def test_flags_reach_the_shard_through_the_environment() -> None:
    launch = plan(ON + "--hysparse-sparsity-ratio 0.7 --hysparse-layers=8-23 --model-id m -p 80")
    assert launch.arguments == ("--model-id", "m", "-p", "80")
    shard = OverlayConfig.from_environment(launch.environment)
    assert shard.hysparse is not None
    assert (shard.hysparse.sparsity_ratio, shard.hysparse.layers) == (0.7, "8-23")
    assert any("70% of the tiles" in note for note in launch.notes)


@pytest.mark.parametrize(("flags", "size"), [("", "32"), ("--block-size 64", "64")])
def test_pages_are_small_unless_asked_for(flags: str, size: str) -> None:
    launch = plan(f"{ON}{flags} --model-id m")
    assert launch.environment["BICL_BLOCK_SIZE"] == size
    assert OverlayConfig.from_environment(launch.environment).block_size == int(size)
    (note,) = [note for note in launch.notes if note.startswith(f"pages of {size} tokens")]
    assert ("HySparse" in note) == (not flags)
    by_variable = plan("--model-id m", BICL_ENABLE_HYSPARSE="1", BICL_BLOCK_SIZE="64")
    assert by_variable.environment["BICL_BLOCK_SIZE"] == "64"


def test_the_environment_enables_it_too_and_a_flag_wins() -> None:
    launch = plan(
        "--hysparse-sparsity-ratio 0.5",
        BICL_ENABLE_HYSPARSE="1",
        BICL_HYSPARSE_SPARSITY_RATIO="0.7",
        BICL_HYSPARSE_SHADOW_INTERVAL="16",
    )
    shard = OverlayConfig.from_environment(launch.environment)
    assert shard.hysparse is not None
    assert shard.hysparse.sparsity_ratio == 0.5
    assert shard.guard.shadow_interval == 16


def test_without_it_nothing_is_said() -> None:
    launch = plan("--model-id m")
    assert not any("HYSPARSE" in name for name in launch.environment)
    assert OverlayConfig.from_environment(launch.environment).hysparse is None


def test_every_setting_of_the_embedded_server_is_a_flag_here() -> None:
    for setting in settings_of("hysparse", HySparseSettings):
        value = setting.choices[0] if setting.choices else "1"
        words = [setting.flag] + ([] if setting.type is bool else [value])
        assert split(words, {}).ours[setting.flag]


def test_a_file_that_tune_wrote_is_read(tmp_path) -> None:
    from bicl.sparse.config import HySparseConfig

    path = tmp_path / "hysparse.json"
    write_config_file(path, HySparseConfig(sparsity_ratio=0.55, max_k=99), accuracy_drop=0.001)
    launch = plan(f"{ON} --hysparse-config {path} --hysparse-max-k 77")
    shard = OverlayConfig.from_environment(launch.environment)
    assert shard.hysparse is not None
    assert (shard.hysparse.sparsity_ratio, shard.hysparse.max_k) == (0.55, 77)


@pytest.mark.parametrize(
    ("command", "parts"),
    [
        (ON + "--hysparse-mode compact", ["--hysparse-mode compact", "router", "bicl serve"]),
        (ON + "--hysparse-enable-sg", ["--hysparse-enable-sg", "token ids", "bicl serve"]),
        (ON + "--speculate 2", ["speculation", "leave --speculate"]),
        (ON + "--quantize awq", ["--quantize awq", "accuracy", "--hysparse-force"]),
        (ON + "--quantize bitsandbytes-nf4", ["nf4", "accuracy", "--hysparse-force"]),
        (ON + "--hysparse-sparsity-ratio 1.5", ["--hysparse-sparsity-ratio 1.5", "0.95"]),
        (ON + "--hysparse-sparsity-ratio x", ["BICL_HYSPARSE_SPARSITY_RATIO", "float"]),
        (ON + "--hysparse-sparsity-ratio", ["--hysparse-sparsity-ratio needs a value"]),
        (ON + "--hysparse-mode fast", ["--hysparse-mode", "select", "compact"]),
        (
            ON + "--hysparse-kind-rules code=0.8:4",
            ["--hysparse-kind-rules code=0.8:4", "`bicl serve`"],
        ),
        (ON + "--hysparse-layers 28-10", ["--hysparse-layers 28-10", "smaller number first"]),
        ("--hysparse-sparsity-ratio 0.5", ["needs --enable-hysparse"]),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name_with_a_remedy(
    command: str, parts: list[str]
) -> None:
    """(A60, A72)"""
    message = refusal(command)
    for part in parts:
        assert part in message


def test_quantised_checkpoints_and_reasoning_models_are_refused_unless_forced() -> None:
    """(A60)"""
    gptq = LLAMA | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    assert "gptq weights of 4 bits" in refusal(ON, gptq)
    assert "<think>" in refusal(ON, template="{{ '<think>' }}")
    assert "use --hysparse-layers 8-23/32" in refusal(ON, template="<think>")
    plan(ON + "--hysparse-layers 8-23/32", template="<think>")
    forced = plan(ON + "--hysparse-force", gptq, "<think>")
    assert sum(note.startswith("--hysparse-force: ") for note in forced.notes) == 2


def test_a_model_that_is_all_windows_is_refused() -> None:
    mistral = LLAMA | {"model_type": "mistral", "sliding_window": 4096}
    assert "has a sliding window (4096 tokens)" in refusal(ON, mistral)


def test_stock_text_generation_inference_cannot_honour_it() -> None:
    old = Verdict("T4 is older than Ampere")
    assert "--enable-hysparse cannot be honoured" in refusal(ON, hardware=old)
    assert "BICL_ENABLE_HYSPARSE cannot be honoured" in refusal(
        "", hardware=old, BICL_ENABLE_HYSPARSE="1"
    )


def test_an_unreadable_model_is_left_to_the_shard_which_is_said() -> None:
    assert any("the shard does" in note for note in plan(ON, None).notes)
