"""Faster equivalents of the twins in `ref`, made of torch's own fused operators.

Each is tested equal to its twin to rounding. Lengths are read on the host, which costs nothing on
the CPU; only the part of the cache that holds tokens is touched.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tinydecode.ops import ref

rms_norm = ref.rms_norm
add_rms_norm = ref.add_rms_norm
argmax = ref.argmax


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, seq_lens: Tensor) -> None:
    """As `ref.rope`; one row of one token skips the gather."""
    if q.shape[0] != 1:
        return ref.rope(q, k, cos, sin, seq_lens)
    start, new_tokens = int(seq_lens), q.shape[1]
    c, s = cos[start : start + new_tokens, None, :], sin[start : start + new_tokens, None, :]
    for x in (q, k):
        first, second = x.float().chunk(2, dim=-1)
        x.copy_(torch.cat((first * c - second * s, second * c + first * s), dim=-1))
    return None


def kv_append(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, seq_lens: Tensor) -> None:
    """As `ref.kv_append`, one slice per row."""
    new_tokens, slots = k.shape[1], k_cache.shape[2]
    for row, start in enumerate(seq_lens.tolist()):
        count = min(new_tokens, slots - start)
        k_cache[row, :, start : start + count] = k[row, :count].transpose(0, 1)
        v_cache[row, :, start : start + count] = v[row, :count].transpose(0, 1)


def rope_kv_append(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seq_lens: Tensor,
) -> None:
    """As `ref.rope_kv_append`."""
    rope(q, k, cos, sin, seq_lens)
    kv_append(k, v, k_cache, v_cache, seq_lens)


def silu_mul(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """As `ref.silu_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    result = F.silu(gate).mul_(up)
    return result if out is None else out.copy_(result)


def attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seq_lens: Tensor,
    scale: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """As `ref.attention`, through scaled_dot_product_attention, row by row."""
    batch, new_tokens, heads, dim = q.shape
    kv_heads = k_cache.shape[1]
    group = heads // kv_heads
    result = q.new_empty(batch, new_tokens, heads * dim) if out is None else out
    for row, cached in enumerate(seq_lens.tolist()):
        end = cached + new_tokens
        # Queries of a group become rows of their kv head: no copy of the cache for its sharers.
        grouped = q[row].view(new_tokens, kv_heads, group, dim).permute(1, 2, 0, 3)
        grouped = grouped.reshape(1, kv_heads, group * new_tokens, dim)
        mask = None
        if new_tokens > 1:
            mask = torch.ones(new_tokens, end, dtype=torch.bool, device=q.device).tril(cached)
            mask = mask.repeat(group, 1)
        attended = F.scaled_dot_product_attention(
            grouped, k_cache[row, None, :, :end], v_cache[row, None, :, :end], mask, scale=scale
        )
        attended = attended.view(kv_heads, group, new_tokens, dim).permute(2, 0, 1, 3)
        result[row] = attended.reshape(new_tokens, heads * dim)
    return result


def prefill_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """As `ref.prefill_attention`, through scaled_dot_product_attention. Runs on any device."""
    batch, new_tokens, heads, dim = q.shape
    group = heads // k.shape[2]
    # Written out rather than `enable_gqa=True`, which torch 2.4 does not have.
    k = k.repeat_interleave(group, dim=2)
    v = v.repeat_interleave(group, dim=2)
    attended = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, scale=scale
    )
    return attended.transpose(1, 2).reshape(batch, new_tokens, heads * dim)
