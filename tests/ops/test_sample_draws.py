"""What the sampler draws, on distributions known exactly. A34."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from sampler_setup import (
    FILTERS,
    Setup,
    both,
    distribution,
    filters_of,
    flat,
    is_greedy,
    narrow,
    stairs,
)
from torch import Tensor

from tinydecode.ops import ref_sample, sample
from tinydecode.sampling import probabilities


def test_philox_known_answers() -> None:
    """Of the Random123 distribution's kat_vectors, philox4x32 10."""

    def words(*values: int) -> tuple[Tensor, ...]:
        return tuple(torch.tensor([value]) for value in values)

    cases = [
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, -1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0x299F31D0 << 32 | 0xA4093822),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ]
    for counter, key, expected in cases:
        found = ref_sample.philox(words(*counter), torch.tensor([key]))  # type: ignore[arg-type]
        assert tuple(int(x) for x in found) == expected


def test_scale_uniform_is_exact() -> None:
    generator = np.random.default_rng(1)
    for _ in range(200):
        u, total = (int(generator.integers(0, 2**62)) for _ in range(2))
        found = ref_sample.scale_uniform(torch.tensor([u]), torch.tensor(total))
        assert int(found) == u * total >> 62
    top = 2**62 - 1
    assert int(ref_sample.scale_uniform(torch.tensor([top]), torch.tensor(top))) == top * top >> 62


def chi_square(found: Tensor, p: Tensor) -> float:
    """Statistic of token ids against probabilities; a token without any must not come."""
    counts = torch.bincount(found, minlength=p.numel()).double()
    assert not bool(counts[p == 0].any())
    expected = p * found.numel()
    return float(((counts - expected)[p > 0] ** 2 / expected[p > 0]).sum())


@pytest.mark.parametrize(
    ("params", "expected", "limit"),
    [
        ({}, [0.64391, 0.23688, 0.08714, 0.03206], 21.1),
        ({"temperature": 0.7, "top_k": 2}, [0.80668, 0.19332, 0, 0], 15.1),
        ({"top_p": 0.9}, [0.66524, 0.24473, 0.09003, 0], 18.4),
        ({"log_min_p": math.log(0.2)}, [0.73106, 0.26894, 0, 0], 15.1),
        ({"temperature": 2.0}, [0.45499, 0.27597, 0.16738, 0.10152], 21.1),
        ({"temperature": 2.0, "top_k": 3, "top_p": 0.99}, [0.5065, 0.3072, 0.1863, 0], 18.4),
    ],
)
@pytest.mark.parametrize("module", [sample, ref_sample])
def test_draws_have_the_distribution(
    bench: Any, module: ModuleType, params: dict[str, Any], expected: list[float], limit: float
) -> None:
    # Rows are independent: their index is part of the generator's counter.
    rows = 50 if module is sample and bench.device.type == "cpu" else 500
    setup = Setup(bench, rows, 4, {**params, "seed": 99})
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).repeat(rows, 1)
    steps = 8 if rows == 50 else 2
    found = torch.tensor([setup.run(module, logits) for _ in range(steps)]).flatten()
    p = torch.tensor(expected, dtype=torch.float64)
    assert chi_square(found, p / p.sum()) < limit


@pytest.mark.cuda
@pytest.mark.parametrize("vocab", [4, 1000, 32000, 128256, 256000])
@pytest.mark.parametrize("params", [p for p in FILTERS if not is_greedy(p)])
def test_draws_of_large_vocabularies(vocab: int, params: dict[str, Any]) -> None:
    """Every token in 16 cells of about equal mass; the cells' counts against the exact masses."""
    bench = type("Cuda", (), {"device": torch.device("cuda"), "schedule": lambda *a: None})()
    logits = torch.randn(1, vocab) * 3
    p = probabilities(logits[0], filters_of(params))
    cells = (p.cumsum(0) * 16).clamp(max=15).long()
    mass = torch.zeros(16, dtype=torch.float64).index_add_(0, cells, p)
    rows = 256
    setup = Setup(bench, rows, vocab, {**params, "seed": 5})
    many = logits.cuda().expand(rows, vocab).contiguous()
    found = torch.tensor([setup.run(sample, many) for _ in range(80)]).flatten()
    assert bool((p[found] > 0).all())
    assert chi_square(cells[found], mass) < 44.3  # 15 degrees of freedom, p = 1e-4


@pytest.mark.cuda
@pytest.mark.parametrize("make", [flat, stairs, narrow])
@pytest.mark.parametrize("vocab", [128256, 256000])
def test_large_flat_rows_agree_with_the_twin(make: Any, vocab: int) -> None:
    bench = type("Cuda", (), {"device": torch.device("cuda"), "schedule": lambda *a: None})()
    logits = make(vocab)[None]
    for params in ({}, {"top_p": 0.63}, {"top_k": 50000, "top_p": 0.9, "log_min_p": -0.03}):
        kernel, twin = both(bench, logits, **params)
        for _ in range(5):
            assert kernel.run(sample, logits) == twin.run(ref_sample, logits)


def test_tail_tokens_come_at_their_true_rate(bench: Any) -> None:
    """20 nats down, 2^12 tokens, one 0 nats up: each uniform is the exact inverse of a point."""
    tail = 4096
    logits = torch.full((1, tail + 1), -20.0)
    logits[0, 0] = 0.0
    p, _ = distribution(bench, logits)
    share = tail * math.exp(-20) / (1 + tail * math.exp(-20))
    assert float(p[0, 1:].sum()) == pytest.approx(share, rel=2e-4)
    assert float(p[0, 7]) == pytest.approx(share / tail, rel=2e-4)
    # Points in the tail land on the tail: 12 bits of the uniform below what fp32 could tell apart.
    total = 2**42 + tail * round(math.exp(-20) * 2**42)
    uniforms = [2**62 - 1 - i * 2**33 for i in range(3)]
    for uniform in uniforms:
        point = uniform * total >> 62
        expected = 1 + (point - 2**42) // round(math.exp(-20) * 2**42)
        assert 0 < expected <= tail


@pytest.mark.cuda
def test_the_tail_is_really_drawn() -> None:
    """2^17 tokens 20 nats down share 2.7e-4 of the mass: 1000000 draws give about 270 of them."""
    bench = type("Cuda", (), {"device": torch.device("cuda"), "schedule": lambda *a: None})()
    tail, rows, steps = 2**17, 500, 2000
    logits = torch.full((1, tail + 1), -20.0)
    logits[0, 0] = 0.0
    many = logits.cuda().expand(rows, tail + 1).contiguous()
    setup = Setup(bench, rows, tail + 1, {"seed": 3})
    hits = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(steps):
        sample.sample_tokens(
            *(many, setup.state, setup.bias, setup.counts, setup.tokens, None, setup.ring),
            has_filters=True,
            has_logprobs=False,
        )
        hits += (setup.tokens != 0).sum()
    expected = rows * steps * tail * math.exp(-20) / (1 + tail * math.exp(-20))
    assert abs(int(hits) - expected) < 5 * math.sqrt(expected)
