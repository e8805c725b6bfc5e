"""Rotary embedding and fused norms; tensors are changed in place where TGI expects it."""

import torch


def rotary_embedding(query, key, sin, cos, rotary_dim, halves):
    for rows in (query, key):
        width = cos.shape[-1]
        if halves:
            first, second = rows[..., :width], rows[..., width : 2 * width]
        else:
            first, second = rows[..., 0 : 2 * width : 2], rows[..., 1 : 2 * width : 2]
        rotated = first * cos - second * sin, second * cos + first * sin
        first.copy_(rotated[0])
        second.copy_(rotated[1])


def add_rms_norm(residual, hidden, weight, bias, eps, add_back):
    hidden = _add(residual, hidden, add_back)
    wide = hidden.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    out = weight * scaled.to(hidden.dtype)
    return out if bias is None else out + bias


def add_layer_norm(residual, hidden, weight, bias, eps, add_back):
    hidden = _add(residual, hidden, add_back)
    return torch.nn.functional.layer_norm(hidden, hidden.shape[-1:], weight, bias, eps)


def _add(residual, hidden, add_back):
    if residual is None:
        return hidden
    total = residual + hidden
    if add_back:
        residual.copy_(total)
    return total
