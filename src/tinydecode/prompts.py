"""Prompts on their way to the model: checked, padded, and packed for one copy to the device.

On CUDA a short prompt is padded to one of a few lengths, so that its pass can be a captured graph
(`graphs.GraphedPrefill`): launched one by one, its kernels take the host three times as long as the
GPU (16 layers: 4.0 ms for 1.4 ms; H200, bf16, 128 tokens, 2026-12). It is padded without graphs as
well. The matrix products choose their order of additions by the shape, so only equal shapes give
equal bits, and whether a graph serves a prompt must not show in the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tinydecode.config import ModelConfig

# Multiples of 64, the tile of the matrix products: the padding then costs next to nothing.
LENGTHS: tuple[int, ...] = (16, 32, *range(64, 513, 64))
# Rows times weights of a layer whose products keep a fast GPU (600 TFLOP/s) busy for as long as the
# host takes to launch a layer (0.25 ms). Beyond it the host is no obstacle and padding only costs.
_HIDES_THE_HOST = 2**36


def is_batch(ids: Sequence[int] | Sequence[Sequence[int]]) -> bool:
    """Whether this is a list of prompts rather than one."""
    return len(ids) > 0 and isinstance(ids[0], (Sequence, Tensor))


def check(ids: Any, batch_size: int, max_seq_len: int, vocab_size: int) -> list[list[int]]:
    """Prompts as lists, one per row, after every check that can fail before a launch.

    Raises:
        ValueError: see `Engine.prefill`.
    """
    prompts: list[Any] = ids.tolist() if isinstance(ids, Tensor) else list(ids)
    rows = [list(row) for row in prompts] if is_batch(prompts) else [prompts]
    if len(rows) != batch_size:
        raise ValueError(f"expected {batch_size} prompt(s) (batch_size), found {len(rows)}")
    for row in rows:
        if not row:
            raise ValueError("empty prompt: give at least one token id")
        if len(row) > max_seq_len:
            raise ValueError(
                f"the prompt has {len(row)} tokens, the cache holds {max_seq_len} "
                "(max_seq_len); shorten the prompt or make a larger engine"
            )
        # The common case without a look at each token: this is part of the time to first token.
        if set(map(type, row)) == {int} and min(row) >= 0 and max(row) < vocab_size:
            continue
        for token in row:
            if isinstance(token, bool) or not isinstance(token, (int, np.integer)):
                raise ValueError(f"token ids must be integers, found {token!r}")
            if not 0 <= token < vocab_size:
                raise ValueError(f"token id {token} is outside the vocabulary of {vocab_size}")
        row[:] = [int(token) for token in row]
    return rows


def most_rows(config: ModelConfig) -> int:
    """Tokens, those of all prompts of a pass together, up to which padding pays on CUDA."""
    heads = 2 * config.num_attention_heads + 2 * config.num_key_value_heads
    layer: int = config.hidden_size * (heads * config.head_dim + 3 * config.intermediate_size)
    rows: int = _HIDES_THE_HOST // layer
    return min(max(rows, LENGTHS[2]), LENGTHS[-1])


def padded_length(longest: int, batch_size: int, most: int) -> int | None:
    """The length to pad prompts to; None where the pass stays as it is.

    Neither the cache's capacity nor what ran before enters, so none of them shows in the logits.
    The padding may therefore reach beyond the cache, which drops it.

    Args:
        longest: tokens of the longest prompt.
        batch_size: prompts in the pass.
        most: from `most_rows`; 0 pads nothing.
    """
    length = next((length for length in LENGTHS if length >= longest), None)
    return length if length is not None and length * batch_size <= most else None


def pack(rows: list[list[int]], length: int, device: torch.device) -> Tensor:
    """Prompts and their lengths in host memory, to be copied to the device in one go.

    For a GPU the memory is pinned and the copy should be asynchronous: torch's allocator of pinned
    memory gives a block to nobody else while a copy from it is under way, even if it was freed.

    A prompt is padded with its own last token: the embedding of one it does not have might hold NaN
    or be too large for 16 bits, and NaN would reach real rows through a weight of zero.

    Returns:
        int64 [B * (1 + length)]: the lengths, then the rows.
    """
    flat = [len(row) for row in rows]
    for row in rows:
        flat += row
        flat += row[-1:] * (length - len(row))
    packed = torch.from_numpy(np.array(flat, dtype=np.int64))  # faster than torch.tensor
    return packed.pin_memory() if device.type == "cuda" else packed


def unpack(packed: Tensor, batch_size: int) -> tuple[Tensor, Tensor]:
    """Views into what `pack` made: token_ids [B, T] and lengths [B]."""
    return packed[batch_size:].view(batch_size, -1), packed[:batch_size]
