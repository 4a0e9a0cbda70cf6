"""Inverse frequencies against hand-computed numbers (A04), cos/sin tables against math."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from fixtures import tiny_config

from tinydecode.config import ModelConfig
from tinydecode.rope import cos_sin, inv_freq


def llama3(factor: float) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def config(**overrides: Any) -> ModelConfig:
    return ModelConfig.from_dict(tiny_config(**overrides))


@pytest.mark.parametrize(
    ("head_dim", "factor", "expected"),
    [
        pytest.param(
            64,
            32.0,
            {
                0: 1.0,
                14: 3.211446e-03,
                15: 1.290548e-03,
                16: 4.295568e-04,
                17: 9.708288e-05,
                18: 1.946164e-05,
                31: 9.418307e-08,
            },
            id="Llama-3.2-1B",
        ),
        pytest.param(
            128,
            8.0,
            {
                28: 3.211446e-03,
                29: 2.166571e-03,
                30: 1.371894e-03,
                33: 3.126938e-04,
                35: 9.556212e-05,
                63: 3.068926e-07,
            },
            id="Llama-3.1-8B",
        ),
    ],
)
def test_llama3_numbers(head_dim: int, factor: float, expected: dict[int, float]) -> None:
    """A04. A table in bf16 would be off by up to 4e-3."""
    frequencies = inv_freq(
        config(head_dim=head_dim, rope_theta=500000.0, rope_scaling=llama3(factor))
    )
    assert frequencies.dtype == torch.float32
    assert frequencies.shape == (head_dim // 2,)
    for pair, value in expected.items():
        assert frequencies[pair].item() == pytest.approx(value, rel=1e-5)


def test_default_and_linear() -> None:
    # theta ** (-2i / 4) for D = 4 and theta = 10000: 1 and 1/100.
    assert inv_freq(config(head_dim=4)).tolist() == pytest.approx([1.0, 0.01], rel=1e-7)
    linear = {"rope_type": "linear", "factor": 4}
    scaled = inv_freq(config(head_dim=4, rope_scaling=linear))
    assert scaled.tolist() == pytest.approx([0.25, 0.0025], rel=1e-7)


@pytest.mark.parametrize("rope_type", ["linear", "llama3"])
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_against_transformers(rope_type: str, theta: float) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {**llama3(8.0), "rope_type": rope_type}
    keys = tiny_config(head_dim=96, rope_theta=theta, rope_scaling=scaling)
    theirs, _ = ROPE_INIT_FUNCTIONS[rope_type](LlamaConfig(**keys), torch.device("cpu"))
    torch.testing.assert_close(inv_freq(ModelConfig.from_dict(keys)), theirs, rtol=2e-6, atol=0)


def test_tables() -> None:
    model = config(head_dim=64, rope_theta=500000.0, rope_scaling=llama3(8.0))
    frequencies = inv_freq(model)
    cos, sin = cos_sin(model, 1000, "cpu")
    assert cos.shape == sin.shape == (1000, 32)
    assert cos.dtype == sin.dtype == torch.float32
    assert cos[0].eq(1).all() and sin[0].eq(0).all()
    for position in (1, 17, 999):
        for pair in (0, 1, 15, 31):
            angle = position * float(frequencies[pair])
            # An angle near 999 has a float32 spacing of 6e-5.
            assert cos[position, pair].item() == pytest.approx(math.cos(angle), abs=4e-5)
            assert sin[position, pair].item() == pytest.approx(math.sin(angle), abs=4e-5)


def test_longer_tables_start_with_the_shorter_one() -> None:
    short, long = cos_sin(config(), 33, "cpu"), cos_sin(config(), 700, "cpu")
    assert all(torch.equal(a, b[:33]) for a, b in zip(short, long, strict=True))


def test_no_positions() -> None:
    with pytest.raises(ValueError, match="max_seq_len is 0"):
        cos_sin(config(), 0, "cpu")
