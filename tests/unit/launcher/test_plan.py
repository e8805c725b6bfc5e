"""What the shim decides from a command line, a model and a machine."""

from __future__ import annotations

import re
from typing import Any

import pytest

from bicl.errors import ConfigError
from bicl.hardware import Verdict
from bicl.launcher.flags import describe_flags, split
from bicl.launcher.model_config import ModelConfig
from bicl.launcher.plan import Launch, plan_launch

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
HEAD_96 = {"model_type": "phi3", "hidden_size": 3072, "num_attention_heads": 32}
HEAD_80 = {"model_type": "phi", "hidden_size": 2560, "num_attention_heads": 32}
VISION = LLAMA | {"model_type": "llava_next", "vision_config": {}}
OLD_GPU = Verdict("T4 is older than Ampere")


def plan(
    command: str = "",
    model: dict[str, Any] | None = LLAMA,
    hardware: Verdict = Verdict(),  # noqa: B008 - frozen
    **environ: str,
) -> Launch:
    config = None if model is None else ModelConfig.from_dict(model)
    return plan_launch(split(command.split(), environ), config, hardware)


def refusal(*arguments: Any, **environ: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        plan(*arguments, **environ)
    return str(caught.value)


def test_tgis_flags_pass_through_in_order_and_ours_are_taken_out() -> None:
    launch = plan(
        "--model-id m --block-size 64 --port 80 --deterministic -p 80 --block-size=32 --json-output"
    )
    assert launch.arguments == ("--model-id", "m", "--port", "80", "-p", "80", "--json-output")
    assert launch.environment["BICL_BLOCK_SIZE"] == "32"
    assert launch.environment["BICL_DETERMINISTIC"] == "1"


def test_attention_is_set_and_prefix_caching_left_to_tgi() -> None:
    launch = plan()
    assert launch.environment["ATTENTION"] == "flashdecoding"
    assert "PREFIX_CACHING" not in launch.environment


@pytest.mark.parametrize("size", ["16", "48", "100", "128", "256", "", "64tokens"])
def test_block_size_without_kernel_is_refused_with_the_list(size: str) -> None:
    """(A47)"""
    assert "use one of ['32', '64', 'auto']" in refusal(f"--block-size={size}")


def test_block_size_without_value_is_refused() -> None:
    assert "--block-size '' is not supported" in refusal("--block-size")


@pytest.mark.parametrize(
    ("model", "command", "size"),
    [
        (LLAMA, "", "64"),
        (HEAD_96, "", "32"),
        (HEAD_80, "", "64"),
        (HEAD_96, "--block-size 64", "64"),
        (LLAMA, "--max-total-tokens 256", "32"),
        (LLAMA, "--max-total-tokens 8192", "64"),
        (None, "", "64"),
    ],
)
def test_auto_block_size_follows_head_and_length(
    model: dict[str, Any] | None, command: str, size: str
) -> None:
    assert plan(command, model).environment["BICL_BLOCK_SIZE"] == size


def test_padded_heads_are_said_with_what_they_cost() -> None:
    """(A48)"""
    assert "head_dim 80 is stored in 128: the cache holds 62%" in " ".join(plan("", HEAD_80).notes)


def test_environment_gives_our_flags_values_too() -> None:
    assert plan(BICL_BLOCK_SIZE="32").environment["BICL_BLOCK_SIZE"] == "32"
    assert plan("--block-size 64", BICL_BLOCK_SIZE="32").environment["BICL_BLOCK_SIZE"] == "64"


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("BICL_DISABLE", "yes", "BICL_DISABLE is 'yes'; use 1 or 0"),
        ("BICL_DETERMINISTIC", "on", "BICL_DETERMINISTIC is 'on'; use 1 or 0"),
        ("BICL_ENABLE_HYSPARSE", "2", "BICL_ENABLE_HYSPARSE is '2'; use 1 or 0"),
        ("BICL_BLOCK_SIZE", "48", "BICL_BLOCK_SIZE is '48'; use one of ['32', '64', 'auto']"),
    ],
)
def test_what_the_environment_says_is_not_guessed_at(name: str, value: str, words: str) -> None:
    assert refusal(**{name: value}) == words


def test_switches_of_the_environment_that_are_off_or_empty_are_off() -> None:
    for off in ("0", "false", "FALSE", ""):
        launch = plan(BICL_DISABLE=off, BICL_DETERMINISTIC=off, BICL_BLOCK_SIZE="")
        assert "BICL_DISABLE" not in launch.environment
        assert launch.environment["BICL_DETERMINISTIC"] == "0"
    assert plan(BICL_DETERMINISTIC="True").environment["BICL_DETERMINISTIC"] == "1"


def test_tiers_reach_the_shards_and_are_told() -> None:
    launch = plan("--host-cache-size 64GiB --disk-cache-dir /x --disk-cache-size=1TB")
    wanted = {"HOST_CACHE_SIZE": "64GiB", "DISK_CACHE_DIR": "/x", "DISK_CACHE_SIZE": "1TB"}
    assert {f"BICL_{k}": v for k, v in wanted.items()}.items() <= launch.environment.items()
    assert any("64GiB of host memory, then in 1TB on /x" in note for note in launch.notes)
    assert "BICL_HOST_CACHE_SIZE" not in plan().environment


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("--host-cache-size", "--host-cache-size needs a value"),
        ("--host-cache-size auto", "give text-generation-inference a size"),
        ("--host-cache-size much", "--host-cache-size 'much' is not a size"),
        ("--disk-cache-dir /x", "belong together"),
        ("--disk-cache-dir /x --disk-cache-size 1TB", "--host-cache-size 0 leaves no memory"),
    ],
)
def test_tiers_that_cannot_work_are_refused(command: str, words: str) -> None:
    assert words in refusal(command)


def test_tiers_need_tags_and_no_images() -> None:
    """(A72)"""
    assert "two images" in refusal("--host-cache-size 1GiB", VISION)
    off = {"BICL_VERIFY_PREFIXES": "0"}
    assert "BICL_VERIFY_PREFIXES=0" in refusal("--host-cache-size 1GiB", LLAMA, **off)


def test_unusable_hardware_runs_stock_and_says_why() -> None:
    launch = plan("--model-id m", hardware=OLD_GPU)
    assert launch.environment == {"BICL_DISABLE": "1"}
    assert launch.notes == ["T4 is older than Ampere; stock text-generation-inference runs instead"]


def test_version_3_on_unusable_hardware_falls_back_with_one_sentence() -> None:
    """(A46)"""
    launch = plan("--flash-attn-version 3", hardware=OLD_GPU)
    assert len(launch.notes) == 1
    assert launch.environment == {"BICL_DISABLE": "1"}


@pytest.mark.parametrize("flag", ["--block-size 64", "--deterministic"])
def test_flags_that_cannot_be_honoured_fail(flag: str) -> None:
    """(A72)"""
    assert "cannot be honoured: T4" in refusal(flag, LLAMA, OLD_GPU)


def test_version_2_and_disable_run_stock() -> None:
    for launch in (plan("--flash-attn-version 2"), plan(BICL_DISABLE="1")):
        assert launch.environment == {"BICL_DISABLE": "1"}


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"model_type": "bloom"}, "ALiBi"),
        ({"model_type": "falcon", "alibi": True}, "ALiBi"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "encoder-decoder"),
        ({"model_type": "mamba"}, "not a KV cache"),
    ],
)
def test_models_without_pages_run_stock_and_it_is_said(model: dict[str, Any], words: str) -> None:
    """(A45)"""
    launch = plan("", model)
    assert launch.environment == {"BICL_DISABLE": "1"}
    assert re.search(words, launch.notes[0])


def test_speculation_with_vision_is_refused() -> None:
    assert "wrong slots" in refusal("--speculate 2", VISION)
    assert plan("--speculate 0", VISION).environment["ATTENTION"] == "flashdecoding"


def test_prefix_caching_is_not_forced_onto_vision_models() -> None:
    assert "PREFIX_CACHING" in refusal("", VISION, PREFIX_CACHING="true")


def test_pages_are_not_shared_between_adapters() -> None:
    """(A11)"""
    assert plan(LORA_ADAPTERS="a").environment["ATTENTION"] == "flashdecoding"
    assert "--lora-adapters" in refusal("", LLAMA, PREFIX_CACHING="1", LORA_ADAPTERS="a")


@pytest.mark.parametrize(
    ("command", "more", "words"),
    [
        ("", {"head_dim": 512}, "head_dim 512 is larger than 256, the largest"),
        ("--dtype float32", {}, "--dtype float32 is not supported .* use one of"),
    ],
)
def test_what_no_kernel_takes_is_refused_before_anything_is_loaded(
    command: str, more: dict[str, Any], words: str
) -> None:
    """(A48)"""
    assert re.search(words, refusal(command, LLAMA | more))
    assert plan("--dtype bfloat16", LLAMA | {"head_dim": 256}).environment["ATTENTION"]


@pytest.mark.parametrize("shards", ["3", "16"])
def test_shards_that_do_not_divide_kv_heads_are_refused_with_both_numbers(shards: str) -> None:
    """(A49)"""
    assert f"--num-shard {shards} does not divide the model's 8 KV heads" in refusal(
        f"--num-shard {shards}"
    )


def test_one_kv_head_is_replicated() -> None:
    model = LLAMA | {"num_key_value_heads": 1}
    assert plan("--num-shard 2", model).environment["ATTENTION"] == "flashdecoding"


def test_foreign_attention_in_the_environment_is_refused() -> None:
    assert "ATTENTION=paged" in refusal(ATTENTION="paged")


@pytest.mark.parametrize(
    ("command", "graphs"),
    [
        ("", None),
        ("--max-batch-size 4", "1,2,4"),
        ("--max-batch-size 3", "1,2,3"),
        ("--max-batch-size 100", "1,2,4,8,16,32,100"),
        ("--max-batch-size 4 --speculate 2", "1,2,4,8,12"),
        ("--max-batch-size 4 --cuda-graphs 0", None),
    ],
)
def test_graphs_are_captured_up_to_the_largest_batch_and_include_it(
    command: str, graphs: str | None
) -> None:
    """(A54)"""
    assert plan(command).environment.get("CUDA_GRAPHS") == graphs


def test_help_names_what_can_be_used_and_nothing_else() -> None:
    text = describe_flags()
    assert "--block-size <32|64|auto>" in text
    assert "--hysparse-sparsity-ratio <FLOAT>" in text
    for variable in ("BICL_DISABLE=1", "BICL_METRICS_PORT=<PORT>", "BICL_VERIFY_PREFIXES=0"):
        assert variable in text


@pytest.mark.parametrize(
    ("raw", "head_dim", "kv_heads"),
    [
        (LLAMA, 128, 8),
        (LLAMA | {"head_dim": 64}, 64, 8),
        ({"text_config": LLAMA, "vision_config": {}}, 128, 8),
        ({"n_embd": 768, "n_head": 12, "model_type": "gpt2"}, 64, 12),
        ({"hidden_size": 4544, "num_attention_heads": 71, "multi_query": True}, 64, 1),
        ({"model_type": "deepseek_v2", "hidden_size": 2048, "num_attention_heads": 16}, 192, 16),
        ({}, None, None),
    ],
)
def test_config_is_read_as_tgi_reads_it(
    raw: dict[str, Any], head_dim: int | None, kv_heads: int | None
) -> None:
    config = ModelConfig.from_dict(raw)
    assert (config.head_dim, config.num_kv_heads) == (head_dim, kv_heads)
