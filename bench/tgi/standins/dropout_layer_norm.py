"""Residual addition and norm in one kernel, for TGI's models on a GPU without its package."""

import torch
import triton
import triton.language as tl


@triton.jit
def _norm(
    x, residual, weight, bias, out, total, width, eps,
    HAS_RESIDUAL: tl.constexpr, HAS_BIAS: tl.constexpr, RMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    inside = i < width
    v = tl.load(x + row * width + i, inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        v += tl.load(residual + row * width + i, inside, other=0.0).to(tl.float32)
        tl.store(total + row * width + i, v, inside)
    if not RMS:
        v = tl.where(inside, v - tl.sum(v) / width, 0.0)
    v *= tl.rsqrt(tl.sum(v * v) / width + eps)
    v *= tl.load(weight + i, inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        v += tl.load(bias + i, inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + i, v, inside)


def dropout_add_ln_fwd(x, residual, weight, bias, *rest):
    eps, rms = rest[5], rest[-1]
    x = x.contiguous()
    rows, width = x.shape
    out = torch.empty_like(x)
    total = torch.empty_like(x) if residual is not None else None
    _norm[(rows,)](
        x, residual, weight, bias, out, total, width, eps,
        HAS_RESIDUAL=residual is not None, HAS_BIAS=bias is not None, RMS=rms,
        BLOCK=triton.next_power_of_2(width), num_warps=8,
    )  # fmt: skip
    return out, total
