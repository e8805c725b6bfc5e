"""The twins of a model's small kernels against transformers' own words."""

from __future__ import annotations

import torch
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from bicl.ops.cpu.rotary import rotate
from bicl.ops.cpu.swiglu import swiglu


def test_heads_turn_as_in_transformers() -> None:
    torch.manual_seed(0)
    query, key, angle = torch.randn(5, 4, 64), torch.randn(5, 2, 64), torch.rand(5, 32) * 6
    angle = torch.cat((angle, angle), dim=-1)
    expected = apply_rotary_pos_emb(query, key, angle.cos(), angle.sin())
    rotate(query, key, angle.cos(), angle.sin())
    torch.testing.assert_close((query, key), expected)


def test_dims_behind_the_rotated_ones_stay() -> None:
    rows = torch.randn(3, 2, 96)
    query, key, quarter = rows.clone(), rows[:, :1].clone(), torch.full((3, 32), torch.pi / 2)
    rotate(query, key, quarter.cos(), quarter.sin())
    assert torch.equal(query[..., 32:], rows[..., 32:])
    torch.testing.assert_close(query[..., :16], -rows[..., 16:32])
    torch.testing.assert_close(key[..., 16:32], rows[:, :1, :16])


def test_gates_come_first() -> None:
    rows = torch.randn(3, 10)
    torch.testing.assert_close(swiglu(rows), F.silu(rows[:, :5]) * rows[:, 5:])
