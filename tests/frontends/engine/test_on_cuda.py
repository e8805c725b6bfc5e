"""The engine on a GPU: CUDA kernels, decode through CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from support.driving import generate, request, running
from support.tiny_models import byte_tokenizer, tiny_model

from bicl.frontends.http.loader import LoadedModel, describe
from bicl.frontends.transformers import register

pytestmark = pytest.mark.gpu

PROMPT_LENGTHS = (1, 5, 63, 64, 65, 130, 200)
NEW_TOKENS = 24


def loaded_on_cuda(family: str, dtype: torch.dtype) -> LoadedModel:
    register()
    model = tiny_model(family, "bicl").to("cuda", dtype)
    return describe(model, byte_tokenizer(), model_id=family, sha="tiny")


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randint(4, 260, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS
    ]


def assert_plausible(
    loaded: LoadedModel, prompt: list[int], ids: list[int], **overrides: object
) -> None:
    """Each token is the float32 model's choice after what came before it, or so nearly tied with it
    that errors on both logits, each twice that of transformers in the model's dtype, explain it."""
    rows = slice(len(prompt) - 1, -1)
    same = tiny_model(loaded.model_id, "eager", **overrides).to("cuda", loaded.dtype)
    with torch.inference_mode():
        tokens = torch.tensor([prompt + ids], device="cuda")
        rounded = same(tokens).logits[0, rows].float()
        exact = same.float()(tokens).logits[0, rows]
    error = (rounded - exact).abs().max()
    chosen = exact[torch.arange(len(ids)), torch.tensor(ids)]
    gap = exact.max(-1).values - chosen
    assert gap.max() <= 4 * error, (gap.max().item(), error.item())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("family", ["llama", "mistral-window", "gemma2", "phi3-head96", "qwen2"])
def test_greedy_on_cuda_follows_transformers(family: str, dtype: torch.dtype) -> None:
    loaded = loaded_on_cuda(family, dtype)
    with running(loaded, max_batch_size=8, max_batch_prefill_tokens=150) as engine:
        results = generate(engine, *[request(prompt, NEW_TOKENS) for prompt in prompts()])
        assert engine.snapshot().graph_misses == 0
    for prompt, result in zip(prompts(), results, strict=True):
        assert_plausible(loaded, prompt, result.ids)


def test_graphs_give_the_bits_of_eager_decode() -> None:
    """Batch 7 in a graph of 8: padding rows change nothing. (A52, A53)"""
    loaded = loaded_on_cuda("llama", torch.float16)
    answers = []
    for graphs in (True, False):
        with running(loaded, max_batch_size=8, cuda_graphs=graphs) as engine:
            results = generate(engine, *[request(prompt, NEW_TOKENS) for prompt in prompts()])
            answers.append([(r.ids, [t.token.logprob for t in r.tokens]) for r in results])
    assert answers[0] == answers[1]


def test_the_largest_batch_is_captured() -> None:
    """(A54)"""
    loaded = loaded_on_cuda("llama", torch.float16)
    with running(loaded, max_batch_size=3) as engine:
        generate(engine, *[request(prompt, NEW_TOKENS) for prompt in prompts()])
        assert engine.snapshot().graph_misses == 0


def test_pages_of_fp8_serve_on_cuda() -> None:
    loaded = loaded_on_cuda("llama", torch.float16)
    with running(loaded, max_batch_size=8, kv_dtype=torch.float8_e4m3fn) as engine:
        results = generate(engine, *[request(prompt, NEW_TOKENS) for prompt in prompts()])
    assert all(len(result.ids) == NEW_TOKENS for result in results)


def test_warm_prompts_and_copied_pages_answer_like_cold_ones() -> None:
    loaded = loaded_on_cuda("llama", torch.float16)
    prompt = prompts()[-1]
    with running(loaded, max_batch_size=4) as engine:
        cold, warm, shared = (
            generate(engine, request(ids, NEW_TOKENS))[0]
            for ids in (prompt, prompt, [*prompt[:127], *reversed(prompt[127:])])
        )
    assert warm.done.usage.cached_tokens >= 192
    assert shared.done.usage.cached_tokens == 127
    assert_plausible(loaded, prompt, cold.ids)
    assert_plausible(loaded, prompt, warm.ids)
    assert_plausible(loaded, [*prompt[:127], *reversed(prompt[127:])], shared.ids)


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_time_of_stores_is_told_for_every_kind_of_step(cuda_graphs: bool) -> None:
    loaded = loaded_on_cuda("llama", torch.float16)
    with running(loaded, max_batch_size=8, cuda_graphs=cuda_graphs) as engine:
        assert engine.snapshot().decode_store_time == 0  # nobody was served yet
        generate(engine, *[request(prompt, NEW_TOKENS) for prompt in prompts()])
        stats = engine.snapshot()
    assert 0 < stats.prefill_store_time < stats.prefill_time
    # A graph's stores are a difference of two short times, which may come out as nothing.
    assert stats.decode_store_time < stats.decode_time
    assert cuda_graphs or stats.decode_store_time > 0


def loaded_for_tiers() -> LoadedModel:
    register()
    model = tiny_model("llama", "bicl", head_dim=128).to("cuda", torch.bfloat16)
    return describe(model, byte_tokenizer(), model_id="llama", sha="tiny")


def forget_pool(engine) -> None:
    """Everything leaves the pool for host memory, and NaN takes its place."""
    assert engine._tiers.settle(30)
    manager = engine._scheduler.manager
    with engine._lock:
        seq = manager.acquire([1] * manager.max_tokens, reuse=False)
        assert seq is not None
        manager.release(seq, keep=False)
    for layer in engine._runner.pool.layers:
        layer.pages.fill_(torch.nan)
    torch.cuda.synchronize()


@pytest.mark.parametrize("length", [65, 129, 900, 961, 1000])
@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_prefix_from_host_memory_gives_the_tokens_of_one_from_the_pool(
    length: int, cuda_graphs: bool
) -> None:
    """With the same shapes bit for bit the same; 65, 129 and 961 leave one token to compute, which
    goes through a graph. 900 and 1000 leave a started page, which the pool copies and host memory
    does not have: other shapes, in which a near tie may turn."""
    loaded = loaded_for_tiers()
    ids = torch.randint(4, 260, (length,), generator=torch.Generator().manual_seed(1)).tolist()
    config = {"num_pages": 40, "max_total_tokens": 2048, "host_cache_bytes": 1 << 28}
    with running(loaded, cuda_graphs=cuda_graphs, **config) as engine:
        engine._tiers.costs.prefill_tokens_per_second = 0.0  # so small a model is computed sooner
        generate(engine, request(ids, 1))
        (pool,) = generate(engine, request(ids, 20))
        forget_pool(engine)
        (host,) = generate(engine, request(ids, 20))
        stats = engine.snapshot()
    if host.ids != pool.ids:
        assert host.done.usage.cached_tokens < pool.done.usage.cached_tokens
        assert_plausible(loaded, ids, host.ids, head_dim=128)
        assert_plausible(loaded, ids, pool.ids, head_dim=128)
    assert host.done.usage.cached_host_tokens == (length - 1) // 64 * 64
    assert stats.tiers.loaded_bytes > 0
    assert not stats.tiers.failures


def test_constant_pressure_on_cuda_gives_what_an_empty_server_gives() -> None:
    """Pool and host memory both too small, requests overlapping: copies both ways all the time."""
    loaded = loaded_for_tiers()
    shared = torch.randint(4, 260, (300,), generator=torch.Generator().manual_seed(2)).tolist()
    prompts = [[*shared, *[10 + n] * (20 * n + 1)] for n in range(12)]
    config = {"num_pages": 24, "max_total_tokens": 1024, "max_batch_size": 4}
    with running(loaded, **config, prefix_caching=False) as engine:
        expected = [generate(engine, request(ids, 12))[0] for ids in prompts]
    with running(loaded, **config, host_cache_bytes=1 << 23) as engine:
        for layer in engine._runner.pool.layers:
            layer.pages.fill_(torch.nan)
        for _ in range(4):
            results = generate(engine, *[request(ids, 12) for ids in prompts])
            for ids, result, cold in zip(prompts, results, expected, strict=True):
                if result.ids != cold.ids:  # other shapes may turn a near tie
                    assert_plausible(loaded, ids, result.ids, head_dim=128)
        stats = engine.snapshot()
    assert stats.evicted_pages > 0
    assert stats.host_hit_tokens > 0
    assert not stats.tiers.failures
