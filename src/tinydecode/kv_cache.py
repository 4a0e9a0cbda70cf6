"""The static key/value cache: allocated once, never resized, its lengths on the device.

Rollback is ``cache.seq_lens.fill_(n)``: nothing else records how far along a row is, and slots past
a row's length may hold anything, so forgetting tokens costs nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tinydecode import rope
from tinydecode.config import ModelConfig


class KVCache:
    """Keys and values of every layer, plus the rotary tables for the positions they can hold.

    Attributes:
        k: [L, B, K, S, D] keys, already rotated. A head's slots are contiguous.
        v: [L, B, K, S, D] values.
        seq_lens: int32 [B] on the device: tokens cached per row.
        cos: float32 [S, D/2], row = position = slot.
        sin: float32 [S, D/2].
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        batch_size: int,
        max_seq_len: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Allocate the cache. Its slots are left uninitialised on purpose: nothing may read them.

        Args:
            config: gives L, K and D.
            batch_size: rows B.
            max_seq_len: slots S a row.
            device: where everything lives.
            dtype: of keys and values.
        """
        shape = (
            config.num_hidden_layers,
            batch_size,
            config.num_key_value_heads,
            max_seq_len,
            config.head_dim,
        )
        self.k = torch.empty(shape, device=device, dtype=dtype)
        self.v = torch.empty(shape, device=device, dtype=dtype)
        self.seq_lens = torch.zeros(batch_size, device=device, dtype=torch.int32)
        self.cos, self.sin = rope.cos_sin(config, max_seq_len, device)

    @property
    def batch_size(self) -> int:
        """Rows B."""
        return self.k.shape[1]

    @property
    def max_seq_len(self) -> int:
        """Slots S a row."""
        return self.k.shape[3]

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values together."""
        return 2 * self.k.numel() * self.k.element_size()

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, each [B, K, S, D]; views."""
        return self.k[index], self.v[index]

    def reset(self) -> None:
        """Forget every token."""
        self.seq_lens.zero_()
