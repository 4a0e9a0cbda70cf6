"""Float64 versions of every op and of the model, written from the definitions, not from the twins.

Loops over rows, heads and positions: slow, obvious, independent.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tinydecode import ModelConfig
from tinydecode.rope import inv_freq
from tinydecode.weights import ModelWeights


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
    steps = torch.arange(x.shape[1], dtype=torch.float64, device=x.device)
    out = torch.empty(x.shape, dtype=torch.float64, device=x.device)
    for row, first in enumerate(first_positions):
        angle = (steps + first)[:, None] * frequencies.double().to(x.device)  # [T, D/2]
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


def llama_logits(config: ModelConfig, weights: ModelWeights, token_ids: Tensor) -> Tensor:
    """A prompt [T] from position 0 through a llama without biases, all of it, [T, V]."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    dim, eps, count = config.head_dim, config.rms_norm_eps, len(token_ids)
    frequencies = inv_freq(config)
    future = torch.ones(count, count, dtype=torch.bool, device=token_ids.device).triu(1)
    x = weights.embed_tokens[token_ids].double()
    for layer in weights.layers:
        normed = rms_norm(x, layer.input_layernorm, eps)
        qkv = (normed @ layer.qkv_proj.double().t()).view(1, count, heads + 2 * kv_heads, dim)
        q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], dim=2)
        q, k = rope(q, frequencies, [0])[0], rope(k, frequencies, [0])[0]
        attended = torch.empty(count, heads, dim, dtype=torch.float64, device=x.device)
        for head in range(heads):
            kv_head = head // (heads // kv_heads)
            scores = q[:, head] @ k[:, kv_head].t() / math.sqrt(dim)
            attended[:, head] = (
                torch.softmax(scores.masked_fill(future, -math.inf), -1) @ v[0, :, kv_head]
            )
        x = x + attended.flatten(1) @ layer.o_proj.double().t()
        normed = rms_norm(x, layer.post_attention_layernorm, eps)
        fed_forward = silu_mul(normed @ layer.gate_up_proj.double().t())
        x = x + fed_forward @ layer.down_proj.double().t()
    return rms_norm(x, weights.norm, eps) @ weights.lm_head.double().t()
