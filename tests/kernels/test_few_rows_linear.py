"""Products with few rows on the GPU against float32."""

from __future__ import annotations

import math

import pytest
import torch
from support.cases import pairwise

from bicl.ops.cuda import library
from bicl.ops.cuda.linear import add_linear, linear

pytestmark = pytest.mark.gpu

CASES = list(
    pairwise(
        dtype=(torch.float16, torch.bfloat16),
        rows=(1, 3, 8, 9, 16),
        outputs=(16, 48, 6144),
        depth=(64, 192, 576, 4096, 14336),
        bias=(False, True),
        add=(False, True),
        extra=(0, 8),
    )
)


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c.values())))
def test_products_are_those_of_float32(case: dict[str, object]) -> None:
    dtype, rows, outputs, depth, with_bias, add, extra = case.values()
    torch.manual_seed(0)
    x = torch.full((rows, depth + extra), math.nan, device="cuda").to(dtype)[:, :depth]
    x.copy_(torch.randn(rows, depth))
    weight = (torch.randn(outputs, depth, device="cuda") / math.sqrt(depth)).to(dtype)
    bias = torch.randn(outputs, device="cuda").to(dtype) if with_bias else None
    whole = torch.full((rows, outputs + extra), math.nan, device="cuda").to(dtype)
    out = whole[:, :outputs]
    if add:
        out.copy_(torch.randn(rows, outputs))
    expected = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    expected += out.double() if add else 0
    library.module().few_rows_linear(out, x, weight, bias, add, True)
    torch.testing.assert_close(
        out.double(), expected, rtol=torch.finfo(dtype).eps, atol=2e-5 * math.sqrt(depth)
    )
    assert bool(whole[:, outputs:].isnan().all())


@pytest.mark.parametrize("rows", [1, 8, 9, 100])
def test_both_forms_take_any_number_of_rows(rows: int) -> None:
    x, weight = torch.randn(rows, 128, device="cuda").half(), torch.randn(48, 128, device="cuda")
    weight = weight.half()
    expected = x.float() @ weight.float().t()
    out = linear(x, weight)
    torch.testing.assert_close(out.float(), expected, rtol=2e-3, atol=2e-2)
    add_linear(out, x, weight)
    torch.testing.assert_close(out.float(), 2 * expected, rtol=4e-3, atol=4e-2)


@pytest.mark.parametrize("pairs", [1, 8, 64])
def test_when_a_product_is_let_in_changes_no_bit(pairs: int) -> None:
    x, weight = torch.randn(1, 128, device="cuda").half(), torch.randn(48, 128, device="cuda")
    out, other = torch.ones(1, 48, device="cuda").half(), torch.ones(1, 48, device="cuda").half()
    add_linear(out, x, weight.half())
    add_linear(other, x, weight.half(), attention_pairs=pairs)
    assert torch.equal(out, other)


def test_what_does_not_fit_is_refused_by_name() -> None:
    rows = torch.zeros(17, 64, device="cuda").half()
    out = torch.zeros(17, 16, device="cuda").half()
    call = library.module().few_rows_linear
    with pytest.raises(ValueError, match="x has 17 rows; 16 are the most"):
        call(out, rows, rows[:16], None, False, False)
    with pytest.raises(ValueError, match="multiples of 16 and 64 are needed"):
        call(out[:2, :8], rows[:2], rows[:8], None, False, False)
    with pytest.raises(ValueError, match="weight has shape"):
        call(out[:2], rows[:2, :32], rows[:16], None, False, False)
    odd = torch.zeros(16, 68, device="cuda").half()
    with pytest.raises(ValueError, match="x rows must be 16-byte aligned"):
        call(out[:2], odd[:2, :64], rows[:16], None, False, False)
    with pytest.raises(ValueError, match="weight rows must be 16-byte aligned"):
        call(out[:2], rows[:2], odd[:, :64], None, False, False)
