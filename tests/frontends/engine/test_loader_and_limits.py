"""Loading, sizing and the sizes of captured graphs: what is refused at start, and how."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.tiny_models import byte_tokenizer, tiny_loaded, tiny_model

from bicl.attention.widening import ROOM_BYTES
from bicl.errors import ConfigError
from bicl.frontends.http import loader
from bicl.frontends.http.engine import Engine, EngineConfig, sizing
from bicl.frontends.http.engine.graphs import capture_sizes
from bicl.frontends.http.engine.sizing import num_pages, page_bytes
from bicl.frontends.http.loader import bundled_model_path, load_model


@pytest.fixture
def folder(tmp_path):
    """A model saved as transformers saves it."""
    path = tmp_path / "model"
    tiny_model("llama", "eager").save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


def test_local_folder_loads_with_its_facts(folder) -> None:
    loaded = load_model(str(folder))
    assert loaded.model_type == "llama"
    assert loaded.dtype is torch.float32
    assert loaded.vocab_size == 260
    assert loaded.eos_token_ids == {2}
    assert loaded.max_position == 1024
    assert [layer.head_dim for layer in loaded.geometry.layers] == [64, 64, 64]
    assert loaded.sha == load_model(str(folder)).sha


def test_changed_weights_change_the_name_of_the_pages(folder) -> None:
    """(A12, A18)"""
    before = load_model(str(folder)).sha
    tiny_model("llama", "eager", hidden_size=64).save_pretrained(folder)
    assert load_model(str(folder)).sha != before


def test_several_gguf_files_ask_for_one(tmp_path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=r"2 GGUF files \(a.gguf, b.gguf\)"):
        load_model(str(tmp_path))


@pytest.mark.parametrize(("suffix", "expected"), [(".gguf", torch.bfloat16), ("", "auto")])
def test_a_gguf_file_gets_a_dtype_that_a_gpus_kernels_take(
    folder, monkeypatch, suffix: str, expected
) -> None:
    """transformers calls it float32, whatever its weights were."""
    told = []

    def from_pretrained(source, **options):
        told.append(options["dtype"])
        raise OSError("enough")

    monkeypatch.setattr(loader, "_device", lambda device: torch.device(device))
    monkeypatch.setattr(loader.AutoTokenizer, "from_pretrained", lambda *_, **__: None)
    monkeypatch.setattr(loader.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    path = folder / f"model{suffix}" if suffix else folder
    if suffix:
        path.touch()
    with pytest.raises(ConfigError, match="enough"):
        load_model(str(path), device="cuda")
    assert told == [expected]


@pytest.mark.parametrize(
    ("model_id", "options", "message"),
    [
        ("/no/such/folder", {}, "no such file or folder"),
        ("./nothing-here", {}, "no such file or folder"),
        ("someone/unreachable", {}, "neither a local path nor reachable"),
        (__file__, {}, "no .gguf"),
        ("x", {"dtype": "int3"}, "dtype 'int3' is not supported"),
        ("x", {"device": "tpu7"}, "device 'tpu7'"),
        ("x", {"device": "meta"}, "use cpu or cuda"),
    ],
    ids=str,
)
def test_what_cannot_be_loaded_says_why(model_id, options, message) -> None:
    with pytest.raises(ConfigError, match=message):
        load_model(model_id, **options)


def test_bundled_model_tokenizes_and_chats(smollm2) -> None:
    """Special tokens, template and end-of-sequence id survive the GGUF file."""
    assert bundled_model_path() is not None
    tokenizer = smollm2.tokenizer
    assert smollm2.eos_token_ids == {2}
    text = "naïve 😀 text"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.convert_ids_to_tokens(tokenizer("<|im_start|>").input_ids) == ["<|im_start|>"]


# --- sizing ------------------------------------------------------------------------------------
def test_cache_memory_becomes_pages(tiny) -> None:
    one = page_bytes(tiny, EngineConfig())
    assert one == 3 * 2 * 2 * 64 * 64 * 4  # layers, K and V, heads, tokens, dims, float32
    assert num_pages(tiny, EngineConfig(cache_memory_bytes=10 * one + 5)) == 10


def test_fp8_on_a_gpu_leaves_room_for_widened_pages(tiny, monkeypatch) -> None:
    monkeypatch.setattr(sizing, "free_bytes", lambda device: ROOM_BYTES + (1 << 20))
    on_gpu = replace(tiny, device=torch.device("cuda"))
    for loaded, dtype, free in (
        (on_gpu, torch.float8_e4m3fn, 1 << 20),
        (on_gpu, torch.bfloat16, ROOM_BYTES + (1 << 20)),
        (tiny, torch.float8_e4m3fn, ROOM_BYTES + (1 << 20)),
    ):
        config = EngineConfig(
            kv_dtype=dtype, num_pages=free // page_bytes(tiny, EngineConfig(kv_dtype=dtype))
        )
        assert num_pages(loaded, config) == config.num_pages
        with pytest.raises(ConfigError, match=f"{free} are free"):
            num_pages(loaded, replace(config, num_pages=config.num_pages + 1))


def test_cache_too_large_for_the_machine_says_what_fits(tiny) -> None:
    """(A36)"""
    with pytest.raises(ConfigError, match=r"at most \d+ pages would fit"):
        num_pages(tiny, EngineConfig(num_pages=1 << 40))


def test_cache_too_small_for_a_page_is_refused(tiny) -> None:
    with pytest.raises(ConfigError, match="one page needs"):
        num_pages(tiny, EngineConfig(cache_memory_bytes=100))


@pytest.mark.parametrize("name", ["max_total_tokens", "max_batch_size", "num_pages"])
def test_limits_must_be_positive(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is 0"):
        EngineConfig(**{name: 0})


@pytest.mark.parametrize("page_size", [16, 48, 100, 128])
def test_page_size_is_refused_at_start(tiny, page_size: int) -> None:
    """(A47)"""
    with pytest.raises(ConfigError, match="page_size"):
        Engine(tiny, EngineConfig(page_size=page_size))


@pytest.mark.parametrize("family", ["gemma3", "mistral-window", "qwen3", "phi3-head96"])
@pytest.mark.parametrize("page_size", [32, 64])
def test_engine_serves_other_families(family: str, page_size: int) -> None:
    """Windows, softcaps and padded heads, with reuse on and off. (A9, A48, A72)"""
    from support.driving import (
        assert_same_greedy,
        generate,
        greedy_reference,
        plain_twin,
        request,
        running,
    )

    loaded = tiny_loaded(family)
    ids = torch.randint(4, 199, (150,), generator=torch.Generator().manual_seed(3)).tolist()
    reference = greedy_reference(plain_twin(loaded), ids, 10)
    with running(loaded, page_size=page_size, max_batch_prefill_tokens=70) as engine:
        for _ in range(2):
            (result,) = generate(engine, request(ids, 10))
            assert_same_greedy(result.ids, *reference)
    assert result.done.usage.cached_tokens >= 128


@pytest.mark.parametrize(
    ("largest", "sizes"),
    [(1, [1]), (3, [1, 2, 3]), (4, [1, 2, 4]), (20, [1, 2, 4, 8, 16, 20])],
)
def test_captured_sizes_end_at_the_maximum(largest: int, sizes: list[int]) -> None:
    """(A54)"""
    assert capture_sizes(largest) == sizes
