"""Float64 versions of every op, written from the definitions and not from the twins.

Loops over rows, heads and positions: slow, obvious, independent.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight."""
    wide = x.double()
    return wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate * sigmoid(gate) * up."""
    half = gate_up.shape[-1] // 2
    gate, up = gate_up[..., :half].double(), gate_up[..., half:].double()
    return gate * torch.sigmoid(gate) * up


def rope(x: Tensor, frequencies: Tensor, first_positions: list[int]) -> Tensor:
    """Complex rotation of pair (i, i + D/2) by position * frequency[i], x [B, T, heads, D]."""
    half = x.shape[-1] // 2
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double())
    steps = torch.arange(x.shape[1], dtype=torch.float64)
    out = torch.empty(x.shape, dtype=torch.float64)
    for row, first in enumerate(first_positions):
        angle = (steps + first)[:, None] * frequencies.double()  # [T, D/2]
        turned = pairs[row] * torch.polar(torch.ones_like(angle), angle)[:, None, :]
        out[row] = torch.cat((turned.real, turned.imag), dim=-1)
    return out


def attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, cached: list[int]) -> Tensor:
    """softmax(q k / sqrt(D)) v over keys 0 .. cached + t, one query head at a time."""
    batch, new_tokens, heads, dim = q.shape
    group = heads // k_cache.shape[1]
    out = torch.empty(batch, new_tokens, heads, dim, dtype=torch.float64)
    for row in range(batch):
        for t in range(new_tokens):
            end = cached[row] + t + 1
            for head in range(heads):
                k = k_cache[row, head // group, :end].double()
                v = v_cache[row, head // group, :end].double()
                scores = k @ q[row, t, head].double() / math.sqrt(dim)
                out[row, t, head] = torch.softmax(scores, 0) @ v
    return out.flatten(2)
