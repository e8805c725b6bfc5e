"""TGI's calls over BICL pages, beside float32 attention over plain K and V."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compare import same_precision_attention

from bicl.frontends.tgi import kv_cache as module
from bicl.frontends.tgi.attention import attention, paged_attention
from bicl.frontends.tgi.config import OverlayConfig, overlay_config
from bicl.frontends.tgi.kv_cache import KVCache, KVScales, get_kv_scales, nominal_share

CPU = torch.device("cpu")
ABSURD = 1 << 29  # a page id that nothing may follow
ONE = torch.ones(())
UNSCALED = KVScales(ONE, ONE)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """New pages are full of NaN."""
    monkeypatch.setattr(module, "overlay_config", lambda: OverlayConfig(poison=True))
    yield
    overlay_config.cache_clear()


class Layer:
    """One layer's cache, and the K and V that went into it."""

    def __init__(
        self, heads: int = 2, head_size: int = 64, dtype: torch.dtype = torch.float32
    ) -> None:
        self.cache = KVCache(
            num_blocks=12, num_heads=heads, head_size=head_size, dtype=dtype, device=CPU
        )
        self.heads, self.head_size = heads, head_size
        self.generator = torch.Generator().manual_seed(3)
        self.rows: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def write(self, tables: list[list[int]], starts: list[int], counts: list[int]) -> Any:
        """Store tokens as TGI does: views into one fused qkv row. Returns the query view."""
        total = sum(counts)
        fused = self.random(total, (2 * self.heads + 2 * self.heads) * self.head_size)
        query, key, value = fused.split(
            [2 * self.heads * self.head_size] + 2 * [self.heads * self.head_size], dim=1
        )
        key = key.view(total, self.heads, self.head_size)
        value = value.view(total, self.heads, self.head_size)
        slots = [
            table[t // 64] * 64 + t % 64
            for table, start, count in zip(tables, starts, counts, strict=True)
            for t in range(start, start + count)
        ]
        self.cache.store(key=key, value=value, slots=torch.tensor(slots), kv_scales=UNSCALED)
        at = 0
        for table, start, count in zip(tables, starts, counts, strict=True):
            kept = self.rows.setdefault(table[0], [])[:start]
            kept += zip(key[at : at + count], value[at : at + count], strict=True)
            self.rows[table[0]] = kept
            at += count
        return query.view(total, 2 * self.heads, self.head_size)

    def truth(
        self, table: list[int], query: torch.Tensor, length: int, **options: Any
    ) -> torch.Tensor:
        key, value = (torch.stack(each) for each in zip(*self.rows[table[0]][:length], strict=True))
        return same_precision_attention(
            query, key, value, **{"scale": 0.1, "causal": True} | options
        )


def seqlen(inputs: list[int], cached: list[int], *, prefill: bool, max_k: int | None = None) -> Any:
    """TGI's Seqlen."""
    queries = inputs if prefill else [1] * len(inputs)
    ends = torch.tensor([0, *queries], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    longest = max(i + c for i, c in zip(inputs, cached, strict=True))
    return SimpleNamespace(
        input_lengths=torch.tensor(inputs, dtype=torch.int32),
        cache_lengths=torch.tensor(cached, dtype=torch.int32),
        cu_seqlen_q=ends,
        max_q=max(queries),
        max_k=longest if max_k is None else max_k,
    )


def table_of(*tables: list[int], columns: int = 6) -> torch.Tensor:
    """Padded with ids that lie far outside the pool, as TGI's uninitialised entries may."""
    padded = [table + [ABSURD] * (columns - len(table)) for table in tables]
    return torch.tensor(padded, dtype=torch.int32)


def prefill(
    layer: Layer, query: torch.Tensor, step: Any, table: torch.Tensor, **options: Any
) -> Any:
    return attention(
        query=query,
        key=query,
        value=query,
        kv_cache=layer.cache,
        kv_scales=UNSCALED,
        seqlen=step,
        block_tables=table,
        softmax_scale=0.1,
        **options,
    )


def decode(
    layer: Layer, query: torch.Tensor, step: Any, table: torch.Tensor, max_s: int, **options: Any
) -> Any:
    return paged_attention(
        query, layer.cache, None, 0.1, table, step, max_s, kv_scales=UNSCALED, **options
    )


def close(got: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("head_size", [64, 80, 96, 100, 120, 128, 192, 256])
def test_prefill_mixes_chunks_fresh_prompts_and_single_tokens(head_size: int) -> None:
    """Head sizes that no tile divides are padded exactly. (A48)"""
    layer, tables = Layer(head_size=head_size), [[5, 2, 9], [7], [3, 1]]
    layer.write(tables[:1], [0], [100])
    layer.write(tables[2:], [0], [69])
    query = layer.write(tables, [100, 0, 69], [31, 17, 1])
    out = prefill(layer, query, seqlen([31, 17, 1], [100, 0, 69], prefill=True), table_of(*tables))
    parts = query.split([31, 17, 1])
    expected = [layer.truth(t, q, n) for t, q, n in zip(tables, parts, (131, 17, 70), strict=True)]
    close(out, torch.cat(expected))
    assert out.is_contiguous()


def test_decode_sees_the_token_of_the_same_step_across_a_page_edge() -> None:
    layer, table = Layer(), [4, 8]
    layer.write([table], [0], [63])
    for length in (64, 65, 66):
        query = layer.write([table], [length - 1], [1])
        out = decode(
            layer, query, seqlen([1], [length - 1], prefill=False), table_of(table), length
        )
        close(out, layer.truth(table, query, length))


def test_speculated_rows_are_longer_than_the_sequence_bound() -> None:
    """TGI's max_k does not count the drafts; max_s does."""
    layer, table = Layer(), [4, 8]
    layer.write([table], [0], [62])
    query = layer.write([table], [62], [3])
    step = seqlen([1, 2, 3], [62, 62, 62], prefill=False, max_k=63)
    out = decode(layer, query, step, table_of(table, table, table), 65)
    close(out, torch.cat([layer.truth(table, query[i : i + 1], 63 + i) for i in range(3)]))


def test_rejected_drafts_are_overwritten_back_across_a_page_edge() -> None:
    layer, table = Layer(), [4, 8]
    layer.write([table], [0], [62])
    layer.write([table], [62], [4])
    query = layer.write([table], [63], [1])
    out = decode(layer, query, seqlen([1], [63], prefill=False), table_of(table), 64)
    close(out, layer.truth(table, query, 64))


def test_rewriting_the_last_slot_leaves_the_rest_of_a_shared_page_bit_identical() -> None:
    layer, table = Layer(), [6]
    layer.write([table], [0], [64])
    before = layer.cache.backend.gather(
        layer.cache.layer,
        torch.tensor([table], dtype=torch.int32),
        torch.tensor([63], dtype=torch.int32),
    )
    layer.write([table], [63], [1])
    after = layer.cache.backend.gather(
        layer.cache.layer,
        torch.tensor([table], dtype=torch.int32),
        torch.tensor([63], dtype=torch.int32),
    )
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old, new)


def test_graph_padding_rows_give_zero_and_write_page_0_together() -> None:
    """(A52, A53)"""
    layer, table = Layer(), [4]
    layer.write([table], [0], [10])
    query = layer.write([table, [0], [0]], [10, 0, 0], [1, 1, 1])
    step = seqlen([1, 0, 0], [10, 0, 0], prefill=False, max_k=300)
    out = decode(layer, query, step, table_of(table, [], [], columns=300), 300)
    close(out[:1], layer.truth(table, query[:1], 11))
    assert not out[1:].any()


@pytest.mark.parametrize("window", [1, 40, 64, 500])
def test_windows_are_inclusive_in_prefill_and_decode(window: int) -> None:
    layer, table = Layer(), [5, 2]
    query = layer.write([table], [0], [100])
    out = prefill(
        layer, query, seqlen([100], [0], prefill=True), table_of(table), window_size_left=window
    )
    close(out, layer.truth(table, query, 100, window_left=window))
    query = layer.write([table], [100], [1])
    step = seqlen([1], [100], prefill=False)
    out = decode(layer, query, step, table_of(table), 101, window_size_left=window)
    close(out, layer.truth(table, query, 101, window_left=window))


def test_softcap_and_missing_causality_are_followed() -> None:
    layer, table = Layer(), [5, 2]
    query = layer.write([table], [0], [70])
    step = seqlen([70], [0], prefill=True)
    out = prefill(layer, query, step, table_of(table), softcap=0.7)
    close(out, layer.truth(table, query, 70, softcap=0.7))
    out = prefill(layer, query, step, table_of(table), causal=False)
    close(out, layer.truth(table, query, 70, causal=False))


def test_one_kv_head_serves_all_query_heads() -> None:
    layer, table = Layer(heads=1), [5]
    query = layer.write([table], [0], [20])
    out = prefill(layer, query, seqlen([20], [0], prefill=True), table_of(table))
    close(out, layer.truth(table, query, 20))


def test_lengths_are_summed_and_planned_once_for_all_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = Layer(), Layer()
    plans: list[Any] = []
    backend = first.cache.backend
    plan = backend.plan
    monkeypatch.setattr(backend, "plan", lambda meta: (plans.append(meta), plan(meta)))
    step, table = seqlen([5], [0], prefill=True), table_of([3])
    for layer in (first, second):
        prefill(layer, layer.write([[3]], [0], [5]), step, table)
    assert len(plans) == 1


def test_prompt_gives_the_same_rows_wherever_it_was_cut() -> None:
    whole, cut, table = Layer(), Layer(), [5, 2]
    query = whole.write([table], [0], [100])
    expected = prefill(whole, query, seqlen([100], [0], prefill=True), table_of(table))
    key, value = (torch.stack(each) for each in zip(*whole.rows[5], strict=True))
    parts, at = [], 0
    for count in (31, 50, 19):
        span = slice(at, at + count)
        slots = torch.tensor([table[t // 64] * 64 + t % 64 for t in range(at, at + count)])
        cut.cache.store(key=key[span], value=value[span], slots=slots, kv_scales=UNSCALED)
        step = seqlen([count], [at], prefill=True)
        parts.append(prefill(cut, query[span], step, table_of(table)))
        at += count
    close(torch.cat(parts), expected)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_pages_use_the_layers_scales(dtype: torch.dtype) -> None:
    layer = Layer(dtype=dtype)
    scales = KVScales(torch.tensor(0.5), torch.tensor(2.0))
    key, value = layer.random(10, 2, 64), layer.random(10, 2, 64)
    layer.cache.store(key=key, value=value, slots=torch.arange(64, 74), kv_scales=scales)
    table, length = torch.tensor([[1]], dtype=torch.int32), torch.tensor([10], dtype=torch.int32)
    got = layer.cache.backend.gather(layer.cache.layer, table, length)
    for stored, exact, scale in zip(got, (key, value), (0.5, 2.0), strict=True):
        close(stored.float(), (exact / scale).to(dtype).float() * scale)


def test_fp8_without_scales_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """(A50)"""
    module._say_unscaled.cache_clear()
    layer = Layer(dtype=torch.float8_e5m2)
    layer.write([[1]], [0], [3])
    layer.write([[1]], [3], [3])
    assert sum("no k_scale" in record.message for record in caplog.records) == 1


def test_wrong_rows_are_a_runtime_error() -> None:
    """The only kind that makes TGI stop a shard whose state is in doubt."""
    layer = Layer()
    rows = torch.zeros(1, 2, 32)
    with pytest.raises(RuntimeError, match="bicl: storing keys and values failed"):
        layer.cache.store(
            key=rows, value=rows, slots=torch.zeros(1, dtype=torch.int64), kv_scales=UNSCALED
        )


@pytest.mark.parametrize(
    ("head_size", "share"), [(64, 1.0), (128, 1.0), (80, 80 / 128), (96, 0.75)]
)
def test_padding_lowers_the_memory_that_tgi_counts_with(head_size: int, share: float) -> None:
    """(A35)"""
    Layer(head_size=head_size)
    assert nominal_share() == pytest.approx(share)


class Checkpoint:
    device = "cpu"

    def __init__(self, **tensors: float) -> None:
        self.tensors = {f"attn.{name}": torch.tensor(value) for name, value in tensors.items()}

    def has_tensor(self, name: str) -> bool:
        return name in self.tensors

    def get_tensor(self, name: str, *, to_dtype: bool = True) -> torch.Tensor:
        assert not to_dtype, "scales stay float32"
        return self.tensors[name]


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ({}, (1.0, 1.0)),
        ({"k_scale": 0.5, "v_scale": 0.25}, (0.5, 0.25)),
        ({"kv_scale": 0.125}, (0.125, 0.125)),
        ({"k_scale": 0.5, "kv_scale": 0.125}, (0.125, 0.125)),
    ],
)
def test_scales_come_from_the_checkpoint(
    tensors: dict[str, float], expected: tuple[float, float]
) -> None:
    scales = get_kv_scales(Checkpoint(**tensors), "attn")
    assert (scales.key_scale_cpu, scales.value_scale_cpu) == expected


def test_scales_must_be_scalars() -> None:
    with pytest.raises(ValueError, match="key_scale must be a scalar"):
        KVScales(torch.ones(2), ONE)
