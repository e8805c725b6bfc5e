"""Norms on the GPU against their twin in float32."""

from __future__ import annotations

import math

import pytest
import torch
from support.cases import pairwise

from bicl.ops.cpu.rms_norm import rms_norm as twin
from bicl.ops.cuda import library
from bicl.ops.cuda.rms_norm import rms_norm

pytestmark = pytest.mark.gpu

CASES = list(
    pairwise(
        dtype=(torch.float16, torch.bfloat16),
        width=(1, 64, 100, 128, 4096, 9000),
        tokens=(1, 33, 700),
        rows=("contiguous", "parts of a product", "odd strides"),
    )
)


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c.values())))
def test_rows_equal_the_twin_but_for_a_rounding(case: dict[str, object]) -> None:
    dtype, width, tokens, kind = case.values()
    torch.manual_seed(0)
    extra = {"contiguous": 0, "parts of a product": 64, "odd strides": 3}[kind]
    whole = torch.full((tokens, 2, width + extra), math.nan).to(dtype)
    rows = whole[..., extra:]
    rows.copy_(torch.randn(rows.shape) * 3)
    weight = torch.randn(width).to(dtype)
    got = rms_norm(whole.cuda()[..., extra:], weight.cuda(), 1e-5)
    assert got.dtype == dtype
    torch.testing.assert_close(
        got.cpu().float(),
        twin(rows.float(), weight.float(), 1e-5),
        rtol=2 * torch.finfo(dtype).eps,
        atol=1e-6,
    )


def test_wrong_rows_are_refused_by_name() -> None:
    rows = torch.zeros(2, 12, device="cuda").half()
    with pytest.raises(ValueError, match="weight has shape"):
        library.module().rms_norm(rows, rows, rows[0, :5], 1e-5, False)
    with pytest.raises(ValueError, match="weight must have the dtype of x"):
        library.module().rms_norm(rows, rows, rows[0].float(), 1e-5, False)
