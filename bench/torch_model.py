"""The model through torch alone: cuBLAS, scaled_dot_product_attention, few kernels between them.

What the fused step and the prefill are compared with. Lengths are Python numbers, so that a
captured step reads exactly the keys in its context; rope turns the packed q, k, v in one go and the
residual is added inside the matrix products. It ends at the logits, in the weights' dtype.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from tinydecode import ModelConfig, ops, rope
from tinydecode.ops import ref
from tinydecode.weights import random_weights


class TorchModel:
    """Random weights, those of `random_weights` with the same seed, and a cache of one row.

    Args:
        config: of a llama without biases.
        slots: cache capacity S.
        device: where everything lives.
        dtype: of weights and cache.
    """

    def __init__(
        self, config: ModelConfig, slots: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.config = config
        with ops.forced(ref):  # weights as the twins see them
            self.weights = random_weights(config, device=device, dtype=dtype)
        shape = (config.num_hidden_layers, 1, 2 * config.num_key_value_heads, slots)
        self.cache = torch.zeros(*shape, config.head_dim, device=device, dtype=dtype)  # k, then v
        cos, sin = rope.cos_sin(config, slots, device)
        # [S, D]: x * cos + roll(x, D / 2) * sin is the rotation.
        self._cos = torch.cat((cos, cos), dim=-1).to(dtype)
        self._sin = torch.cat((-sin, sin), dim=-1).to(dtype)

    def tables(self, start: int, new_tokens: int) -> tuple[Tensor, Tensor]:
        """[T, H + 2K, D] each: the rotation of a step's packed q, k, v; values do not turn."""
        config = self.config
        kv_heads = config.num_key_value_heads
        turning = config.num_attention_heads + kv_heads
        cos = self._cos[start : start + new_tokens, None].repeat(1, turning + kv_heads, 1)
        sin = self._sin[start : start + new_tokens, None].repeat(1, turning + kv_heads, 1)
        cos[:, turning:], sin[:, turning:] = 1, 0
        return cos, sin

    def step(self, token_ids: Tensor, start: int, tables: tuple[Tensor, Tensor]) -> Tensor:
        """[1, T] tokens behind `start` cached ones -> logits [T, V]."""
        cos, sin = tables
        kv_heads, new_tokens = self.config.num_key_value_heads, token_ids.shape[1]
        heads = self.config.num_attention_heads
        bias = causal_lower_right(new_tokens, start + new_tokens) if new_tokens > 1 else None

        def attend(qkv: Tensor, index: int) -> Tensor:
            turned = (qkv * cos).addcmul_(qkv.roll(qkv.shape[-1] // 2, -1), sin)
            by_head = turned.transpose(0, 1)[None]  # [1, H + 2K, T, D]
            cache = self.cache[index, :, :, : start + new_tokens]
            cache[:, :, start:] = by_head[:, heads:]
            keys, values = cache[:, :kv_heads], cache[:, kv_heads:]
            return F.scaled_dot_product_attention(
                by_head[:, :heads], keys, values, bias, enable_gqa=True
            )

        return self._logits(self._layers(token_ids, attend))

    def prefill(self, token_ids: Tensor) -> Tensor:
        """[1, T] tokens from position 0 -> the last one's logits [1, V]."""
        kv_heads, new_tokens = self.config.num_key_value_heads, token_ids.shape[1]
        heads = self.config.num_attention_heads
        cos, sin = self._cos[:new_tokens, None], self._sin[:new_tokens, None]

        def attend(qkv: Tensor, index: int) -> Tensor:
            turning = qkv[:, : heads + kv_heads]
            turned = (turning * cos).addcmul_(turning.roll(qkv.shape[-1] // 2, -1), sin)
            by_head = turned.transpose(0, 1)[None]
            values = qkv[:, heads + kv_heads :].transpose(0, 1)[None]
            keys = by_head[:, heads:]
            self.cache[index, :, :kv_heads, :new_tokens] = keys
            self.cache[index, :, kv_heads:, :new_tokens] = values
            return F.scaled_dot_product_attention(
                by_head[:, :heads], keys, values, is_causal=True, enable_gqa=True
            )

        return self._logits(self._layers(token_ids, attend)[-1:])

    def _layers(self, token_ids: Tensor, attend) -> Tensor:  # type: ignore[no-untyped-def]
        """[1, T] -> [T, E]; attend([T, H + 2K, D], layer) -> [1, H, T, D]."""
        config, new_tokens = self.config, token_ids.shape[1]
        hidden, eps = (config.hidden_size,), config.rms_norm_eps
        x = F.embedding(token_ids[0], self.weights.embed_tokens)
        for index, layer in enumerate(self.weights.layers):
            normed = F.rms_norm(x, hidden, layer.input_layernorm, eps)
            qkv = F.linear(normed, layer.qkv_proj).view(new_tokens, -1, config.head_dim)
            attended = attend(qkv, index)[0].transpose(0, 1).reshape(new_tokens, -1)
            x.addmm_(attended, layer.o_proj.t())
            normed = F.rms_norm(x, hidden, layer.post_attention_layernorm, eps)
            gate, up = F.linear(normed, layer.gate_up_proj).chunk(2, dim=-1)
            x.addmm_(F.silu(gate).mul_(up), layer.down_proj.t())
        return x

    def _logits(self, x: Tensor) -> Tensor:
        hidden, eps = (self.config.hidden_size,), self.config.rms_norm_eps
        return F.linear(F.rms_norm(x, hidden, self.weights.norm, eps), self.weights.lm_head)
