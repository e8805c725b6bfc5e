"""What the CUDA operators refuse at start, without a GPU."""

from __future__ import annotations

import pytest
import torch

from bicl.attention.pool import KVPool
from bicl.cache.layout import PageLayout
from bicl.errors import UnsupportedError
from bicl.ops.cuda.sparse import check_index
from bicl.sparse.index import LayerIndex, make_indexes


def index(
    kind: str = "centroids", dtype: torch.dtype = torch.bfloat16, dim: int = 64
) -> LayerIndex:
    layer = KVPool([PageLayout(2, dim, dtype)], 1, "cpu").layers[0]
    return make_indexes({0: layer}, kind, dtype)[0]


def test_an_index_of_centroids_is_taken_beside_models_of_16_bits() -> None:
    check_index(index())
    check_index(index(dtype=torch.float16, dim=80))


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (index("gate"), "kind 'centroids', not 'gate'"),
        (index("bounds"), "kind 'centroids', not 'bounds'"),
        (index(dtype=torch.float32), "float16 or bfloat16"),
        (index(dim=100), "multiple of 8 up to 256, got 100"),
        (index(dim=512), "multiple of 8 up to 256, got 512"),
    ],
    ids=["gate", "bounds", "float32", "head_dim 100", "head_dim 512"],
)
def test_what_the_kernels_do_not_read_is_refused_by_name(refused: LayerIndex, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        check_index(refused)
