"""The C++ layout (``csrc/common/layout.cuh``) against the Python one; needs no GPU."""

import numpy as np
import pytest
import torch

from bicl.cache.layout import PageLayout
from bicl.ops.cuda import library

pytestmark = pytest.mark.skipif(
    not library.library_path().exists(), reason="kernels are not built: run `make kernels`"
)

SHAPES = [(64, 64), (64, 32), (32, 32)]
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("page_size", "tile"), SHAPES)
@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128, 160, 192, 256, 576])
def test_cpp_layout_equals_python_layout(
    head_dim: int, page_size: int, tile: int, dtype: torch.dtype
) -> None:
    layout = PageLayout(4, head_dim, dtype, page_size=page_size, tile=tile)
    offsets = np.full((page_size, layout.padded_head_dim), -1, dtype=np.int64)
    library.module().layout_offsets(
        torch.from_numpy(offsets), page_size, tile, layout.element_bytes
    )
    np.testing.assert_array_equal(offsets, layout.plane_offsets)
