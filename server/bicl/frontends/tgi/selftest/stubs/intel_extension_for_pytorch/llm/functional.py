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


def bgmv_shrink(rows, weights, out, adapters, scale):
    """One adapter a row; a negative one is none. ``weights``: ``[adapters, rank, hidden]``."""
    for row, adapter in enumerate(adapters.tolist()):
        if adapter >= 0:
            out[row] += scale * (weights[adapter] @ rows[row])


def bgmv_expand(rows, weights, out, adapters, add_inputs):
    assert add_inputs
    bgmv_shrink(rows, weights, out, adapters, 1.0)


def sgmv_shrink(rows, weights, out, starts, lengths, adapters, count, longest, scale):
    """One adapter a run of rows."""
    for start, length, adapter in zip(
        starts.tolist(), lengths.tolist(), adapters.tolist(), strict=True
    ):
        if adapter >= 0:
            run = slice(start, start + length)
            out[run] += scale * (rows[run] @ weights[adapter].T)


def sgmv_expand(rows, weights, out, starts, lengths, adapters, count, longest, add_inputs):
    assert add_inputs
    sgmv_shrink(rows, weights, out, starts, lengths, adapters, count, longest, 1.0)


def __getattr__(name):
    """Operators of the vision towers exist by name; text never calls them."""
    if name.startswith("__"):
        raise AttributeError(name)
    raise NotImplementedError(f"{name} has no stand-in on the CPU")
