"""Page tables over shared memory, and the check that catches a wrong contestant."""

import pytest
import torch

from bench.kernels.arena import Arena, LatentBatch, PagedBatch
from bench.kernels.check import (
    TOLERANCE,
    decode_error,
    mla_error,
    prefill_error,
    relative_error,
)
from bench.kernels.impls import Contestant, Prepared
from bench.kernels.impls.bicl import key_value as tiled_key_value
from bench.kernels.impls.bicl_latent import latents
from bench.kernels.impls.token_major import key_value
from bench.kernels.shapes import HEAD_DIM, LATENT_HEADS, Heads, latent_bytes
from bicl.attention import reference
from bicl.attention.mla import LatentAttention, latent_layout
from bicl.cache.layout import PageLayout

HEADS = Heads(4, 2)


@pytest.fixture(scope="module")
def arena():
    return Arena(64 << 20, device="cpu")


@pytest.mark.parametrize("page_size", [1, 64, 128])
def test_sets_share_no_page(arena, page_size):
    batch = PagedBatch(arena, HEADS, (300, 1, 64), (1, 1, 1), rotations=3)
    ids = torch.cat(batch.page_ids(page_size))
    assert ids.unique().numel() == ids.numel() == batch.num_pages(page_size)
    assert int(ids.max()) < batch.num_pages(page_size)


def test_rotations_of_ragged_batches_fit_into_the_arena(arena):
    batch = PagedBatch.decode(arena, Heads(32, 8), (1,) * 64)
    key, value = arena.token_major(batch.num_pages(128), 128, 8)
    assert key.numel() + value.numel() <= arena.flat.numel()


def test_tables_list_each_sequences_pages_in_order(arena):
    torch.manual_seed(5)
    ids = PagedBatch(arena, HEADS, (130, 64), (1, 1), 1).page_ids(64)[0]
    torch.manual_seed(5)
    table = PagedBatch(arena, HEADS, (130, 64), (1, 1), 1).page_tables(64)[0]
    assert table.tolist() == [ids[:3].tolist(), [int(ids[3]), 0, 0]]


def test_last_page_and_indptr(arena):
    batch = PagedBatch(arena, HEADS, (130, 64, 1), (1, 1, 1), 1)
    assert batch.last_page_len(64).tolist() == [2, 64, 1]
    assert batch.page_indptr(64).tolist() == [0, 3, 4, 5]


def test_tiles_are_read_back_by_the_layouts_formula(arena):
    lengths = (70, 3)
    batch = PagedBatch(arena, HEADS, lengths, (1, 1), 1)
    layer = arena.tiles(PageLayout(HEADS.kv, HEAD_DIM, torch.bfloat16), batch.num_pages(64))
    table = batch.page_tables(64)[0]
    expected = reference.gather(layer, table, batch.cache_seqlens)
    for plane, truth in enumerate(expected):
        parts = [tiled_key_value(layer, table, lengths, i)[plane] for i in range(2)]
        assert torch.equal(torch.cat(parts).float(), truth)


def contestant(factor: float) -> Contestant:
    """Attention by the reference over token-major pages, times ``factor``."""

    def prepare(batch: PagedBatch) -> Prepared:
        cache = batch.arena.token_major(batch.num_pages(64), 64, batch.heads.kv)
        read = key_value(batch, cache, batch.page_ids(64)[0], 64)

        def call() -> torch.Tensor:
            bounds = batch.cu_seqlens_q.tolist()
            parts = [
                reference.attention(
                    batch.query[bounds[i] : bounds[i + 1]],
                    *read(i),
                    scale=HEAD_DIM**-0.5,
                    causal=True,
                )[0]
                for i in range(len(batch.lengths))
            ]
            return torch.cat(parts) * factor

        return Prepared([call], read)

    return Contestant("reference", prepare)


@pytest.mark.parametrize("error_of", [decode_error, prefill_error])
def test_a_right_contestant_passes_and_a_wrong_one_does_not(arena, error_of):
    assert error_of(contestant(1.0), arena, HEADS) < TOLERANCE
    assert error_of(contestant(1.1), arena, HEADS) == pytest.approx(0.1, rel=0.01)


def test_an_output_that_is_no_number_is_infinitely_wrong():
    truth = torch.ones(2)
    assert relative_error(torch.tensor([1.0, float("nan")]), truth) == float("inf")


def latent_contestant(factor: float) -> Contestant:
    def prepare(batch: PagedBatch) -> Prepared:
        attention = LatentAttention("cpu", max_batch=8, num_heads=16)
        layer = batch.arena.tiles(latent_layout(torch.bfloat16), batch.num_pages(64))
        table = batch.page_tables(64)[0]

        def call() -> torch.Tensor:
            out = attention.decode(batch.query, layer, table, batch.cache_seqlens, scale=576**-0.5)
            return out * factor

        return Prepared([call], lambda index: latents(layer, table, batch.lengths, index))

    return Contestant("twin", prepare)


def test_contestants_over_latents_are_checked_too(arena):
    assert mla_error(latent_contestant(1.0), arena, LATENT_HEADS) < TOLERANCE
    assert mla_error(latent_contestant(1.1), arena, LATENT_HEADS) == pytest.approx(0.1, rel=0.02)


def test_sets_of_latents_fit_into_the_arena(arena):
    batch = LatentBatch.decode(arena, LATENT_HEADS, (4096, 1))
    assert batch.num_pages(64) * 64 * 1152 <= arena.num_bytes
    assert batch.query.shape == (2, 16, 576)
    assert latent_bytes(batch.lengths) == 4097 * 1152
