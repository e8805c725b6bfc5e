"""Rotary embedding in place, for TGI's models on a GPU without its kernels package."""

import triton
import triton.language as tl


@triton.jit
def _rotate(x1, x2, cos, sin, token_stride, head_stride, width, BLOCK: tl.constexpr):
    token, head = tl.program_id(0), tl.program_id(1)
    i = tl.arange(0, BLOCK)
    inside = i < width
    place = token * token_stride + head * head_stride + i
    c = tl.load(cos + token * width + i, inside).to(tl.float32)
    s = tl.load(sin + token * width + i, inside).to(tl.float32)
    a = tl.load(x1 + place, inside).to(tl.float32)
    b = tl.load(x2 + place, inside).to(tl.float32)
    tl.store(x1 + place, a * c - b * s, inside)
    tl.store(x2 + place, b * c + a * s, inside)


def apply_rotary(x1, x2, cos, sin, out1, out2, conj):
    assert out1.data_ptr() == x1.data_ptr()
    tokens, heads, width = x1.shape
    cos, sin = cos.contiguous(), sin.contiguous()
    block = triton.next_power_of_2(width)
    strides = x1.stride(0), x1.stride(1)
    _rotate[(tokens, heads)](x1, x2, cos, sin, *strides, width, BLOCK=block, num_warps=1)
