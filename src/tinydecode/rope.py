"""Rotary embedding: inverse frequencies for every supported rope type, and cos/sin tables.

Pairs follow Hugging Face's rotate-half convention: dimension i turns with dimension i + D/2.
"""

import math

import torch
from torch import Tensor

from tinydecode.config import ModelConfig


def inv_freq(config: ModelConfig) -> Tensor:
    """Angle in radians by which each pair turns per token.

    Unscaled, pair i turns by theta ** (-2i / D). `linear` divides every frequency by factor.
    `llama3` keeps the pairs that turn more than high_freq_factor times within
    original_max_position_embeddings tokens, divides those that turn less than low_freq_factor
    times by factor, and interpolates in between.

    Returns:
        [D/2] float32 on the CPU, computed in float64.

    Source: Su et al., "RoFormer", section 3.4; Llama 3.1's config, rope_type "llama3".
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    frequencies = config.rope_theta**-exponents
    scaling = config.rope_scaling
    if scaling.rope_type == "linear":
        frequencies = frequencies / scaling.factor
    elif scaling.rope_type == "llama3":
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
        kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)  # 1: as it is, 0: divided by factor
        frequencies = frequencies * (kept + (1 - kept) / scaling.factor)
    return frequencies.float()


def cos_sin(
    config: ModelConfig, max_seq_len: int, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every pair's angle at every position.

    Angles are formed in float32, as transformers does, and on the CPU, so that the tables have
    the same bits on every device.

    Args:
        config: gives head_dim, rope_theta and rope_scaling.
        max_seq_len: S, the number of positions, at least 1.
        device: where the tables go.

    Returns:
        cos, sin: each [S, D/2] float32.

    Raises:
        ValueError: max_seq_len is below 1.
    """
    if max_seq_len < 1:
        raise ValueError(f"max_seq_len is {max_seq_len}, expected at least 1")
    angles = torch.outer(torch.arange(max_seq_len, dtype=torch.float32), inv_freq(config))
    return angles.cos().to(device), angles.sin().to(device)
