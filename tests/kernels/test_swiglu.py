"""The gated activation on the GPU against its twin."""

from __future__ import annotations

import math

import pytest
import torch
from support.cases import pairwise

from bicl.ops.cpu.swiglu import swiglu as twin
from bicl.ops.cuda import library
from bicl.ops.cuda.swiglu import swiglu

pytestmark = pytest.mark.gpu

CASES = list(
    pairwise(
        dtype=(torch.float16, torch.bfloat16),
        width=(1, 8, 100, 1536, 14336),
        tokens=(1, 33, 700),
        offset=(0, 1, 8),
    )
)


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c.values())))
def test_products_equal_the_twin_but_for_a_rounding(case: dict[str, object]) -> None:
    dtype, width, tokens, offset = case.values()
    torch.manual_seed(0)
    whole = torch.full((tokens, 2 * width + offset + 8), math.nan).to(dtype)
    rows = whole[:, offset : offset + 2 * width]
    rows.copy_(torch.randn(tokens, 2 * width) * 4)
    rows[0, 0], rows[0, width] = -100.0, 3.0  # exp(100) exceeds float32
    got = swiglu(whole.cuda()[:, offset : offset + 2 * width])
    assert got.dtype == dtype
    torch.testing.assert_close(
        got.cpu().float(), twin(rows.float()), rtol=2 * torch.finfo(dtype).eps, atol=1e-6
    )


def test_wrong_rows_are_refused_by_name() -> None:
    rows = torch.zeros(2, 12, device="cuda").half()
    with pytest.raises(ValueError, match="gate_up has shape"):
        library.module().swiglu(rows[:, :5], rows, False)
    with pytest.raises(ValueError, match="dtype of out"):
        library.module().swiglu(rows[:, :6].bfloat16(), rows, False)
