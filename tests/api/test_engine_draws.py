"""What whole engines draw, on F-MARKOV models whose distributions are known. A21 to A24, A34."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import MASKED, write_markov
from makers import MAKERS, Maker
from torch import Tensor

from tinydecode.model import LlamaModel
from tinydecode.sampling import SamplingParams, probabilities

ROWS = 8  # of a batch: draws of a step
FOUR = [2.0, 1.0, 0.0, -1.0]  # the live tokens; the others are masked


@pytest.fixture(scope="module", params=MAKERS)
def make(request: pytest.FixtureRequest) -> Maker:
    return Maker(*request.param)


def model_of(make: Maker, directory: Path, row: Tensor) -> LlamaModel:
    """A model with these logits after every token."""
    sizes: dict[str, Any] = {"max_position_embeddings": 8192}
    return make.load(write_markov(directory, row.expand(len(row), -1).contiguous(), **sizes))


@pytest.fixture(scope="module")
def four(make: Maker, tmp_path_factory: pytest.TempPathFactory) -> LlamaModel:
    row = torch.full((64,), MASKED)
    row[:4] = torch.tensor(FOUR)
    return model_of(make, tmp_path_factory.mktemp("four"), row)


def draws(make: Maker, model: LlamaModel, steps: int, **options: Any) -> Tensor:
    """ROWS * steps tokens."""
    with make(model, max_seq_len=steps + 1, batch_size=ROWS) as engine:
        rows, _ = engine.generate([[0]] * ROWS, steps, **options)
    return torch.tensor(rows).flatten()


def chi_square(found: Tensor, p: Tensor) -> float:
    counts = torch.bincount(found, minlength=len(p)).double()
    assert not bool(counts[p == 0].any()), "a token without mass was drawn"
    expected = p * len(found)
    return float(((counts - expected)[p > 0] ** 2 / expected[p > 0]).sum())


# Limits at p = 1e-4, by degrees of freedom.
@pytest.mark.parametrize(
    ("options", "expected", "limit"),
    [
        ({}, [0.64391, 0.23688, 0.08714, 0.03206], 21.1),
        ({"temperature": 0.7, "top_k": 2}, [0.80668, 0.19332, 0, 0], 15.1),
        ({"top_p": 0.9}, [0.66524, 0.24473, 0.09003, 0], 18.4),
        ({"min_p": 0.2}, [0.73106, 0.26894, 0, 0], 15.1),
        ({"temperature": 2.0}, [0.45499, 0.27597, 0.16738, 0.10152], 21.1),
        (
            {"temperature": 2.0, "top_k": 3, "top_p": 0.99, "min_p": 0.1},
            [0.50648, 0.30720, 0.18632, 0],
            18.4,
        ),
        ({"logit_bias": {0: -1.0}, "banned_token_ids": [3]}, [0.42232, 0.42232, 0.15536, 0], 18.4),
    ],
)
def test_each_filter(
    make: Maker, four: LlamaModel, options: dict[str, Any], expected: list[float], limit: float
) -> None:
    found = draws(make, four, 100, **{"temperature": 1.0, "seed": 11, **options})
    p = torch.zeros(64, dtype=torch.float64)
    p[:4] = torch.tensor(expected, dtype=torch.float64)
    assert chi_square(found, p / p.sum()) < limit


def test_penalties_change_the_distribution_as_said(make: Maker, four: LlamaModel) -> None:
    """The second of two tokens, after each first one: 16 cells."""
    counts = torch.zeros(4, 4, dtype=torch.float64)
    options: dict[str, Any] = {"repetition_penalty": 1.5, "presence_penalty": 0.5, "temperature": 1}
    with make(four, max_seq_len=8, batch_size=ROWS) as engine:
        for seed in range(100):
            rows, _ = engine.generate([[5]] * ROWS, 2, seed=seed, **options)
            for first, second in rows:
                counts[first, second] += 1
    statistic = 0.0
    for first in range(4):
        row = torch.tensor(FOUR, dtype=torch.float64)
        row[first] = row[first] / 1.5 if row[first] > 0 else row[first] * 1.5
        row[first] -= 0.5
        expected = row.softmax(0) * counts[first].sum()
        statistic += float(((counts[first] - expected) ** 2 / expected).sum())
    assert statistic < 39.1  # 12 degrees of freedom, p = 1e-4


@pytest.mark.parametrize("vocab", [250, 1000])
def test_larger_vocabularies(make: Maker, tmp_path: Path, vocab: int) -> None:
    """16 cells of about equal mass, every filter on."""
    row = (torch.randn(vocab) * 16).round() / 8
    model = model_of(make, tmp_path, row)
    for options in ({"temperature": 1.3}, {"top_k": 200, "top_p": 0.97, "min_p": 0.01}):
        params = SamplingParams(**{"temperature": 1.0, **options})
        p = probabilities(row, params)
        cells = (p.cumsum(0) * 16).clamp(max=15).long()
        mass = torch.zeros(16, dtype=torch.float64).index_add_(0, cells, p)
        found = draws(make, model, 60, **{"temperature": 1.0, "seed": 3, **options})
        assert bool((p[found] > 0).all())
        assert chi_square(cells[found], mass) < 44.3


@pytest.mark.parametrize("temperature", [0.0, 1e-8, 1e-5, 1e-3, 0.01])
def test_a21_tiny_temperatures(make: Maker, tmp_path: Path, temperature: float) -> None:
    row = torch.zeros(16)
    row[0], row[1] = 5.0, 4.875
    model = model_of(make, tmp_path, row)
    assert draws(make, model, 25, temperature=temperature, seed=1).tolist() == [0] * 25 * ROWS


def test_a22_top_k_bounds(make: Maker, tmp_path: Path) -> None:
    row = (torch.randn(64) * 8).round() / 8
    model = model_of(make, tmp_path, row)
    off = draws(make, model, 20, temperature=1.0, seed=4)
    for top_k in (0, None, 64, 1064):
        assert torch.equal(draws(make, model, 20, temperature=1.0, seed=4, top_k=top_k), off)
    best = draws(make, model, 5, temperature=1.0, top_k=1)
    assert bool((best == int(row.argmax())).all())


def test_a23_top_p_and_min_p_edges(make: Maker, tmp_path: Path) -> None:
    row = torch.full((16,), MASKED)
    row[:3] = torch.tensor([0.5, 0.3, 0.2]).log()
    model = model_of(make, tmp_path, row)
    cases: list[tuple[dict[str, float], int]] = [
        ({"top_p": 1.0}, 3),
        ({"top_p": 0.0}, 1),
        ({"top_p": 1e-9}, 1),
        ({"top_p": 0.49}, 1),
        ({"top_p": 0.79}, 2),
        ({"top_p": 0.81}, 3),
        ({"min_p": 0.0}, 3),
        ({"min_p": 0.59}, 2),
        ({"min_p": 0.61}, 1),
        ({"min_p": 1.0}, 1),
        ({"top_k": 1, "top_p": 0.8}, 1),
    ]
    for options, kept in cases:
        found = draws(make, model, 20, **{"temperature": 1.0, "seed": 2, **options})
        assert sorted(set(found.tolist())) == list(range(kept)), options


def test_a34_draws_follow_one_another_freely(make: Maker, tmp_path: Path) -> None:
    model = model_of(make, tmp_path, torch.zeros(100))
    with make(model, max_seq_len=512) as engine:
        texts = [engine.generate([0], 250, temperature=1.0, seed=seed)[0] for seed in (1, 2, 1)]
    assert texts[0] == texts[2] != texts[1]
    for period in range(1, 101):
        assert any(texts[0][i] != texts[0][i + period] for i in range(250 - period))
    flat = torch.full((100,), 0.01, dtype=torch.float64)
    assert chi_square(torch.tensor(texts[0]), flat) < 170
    # Rows of a batch draw their own numbers.
    rows = draws(make, model, 40, temperature=1.0, seed=1).view(ROWS, 40).tolist()
    assert len({tuple(row) for row in rows}) == ROWS


def test_the_two_loops_of_the_cpu_draw_from_one_distribution(tmp_path: Path) -> None:
    """Not the same numbers: float64 by id on the host, integers by rank on the device."""
    host, device = Maker("cpu", "host"), Maker("cpu", "device")
    row = torch.full((64,), MASKED)
    row[:4] = torch.tensor(FOUR)
    model = model_of(host, tmp_path, row)
    p = torch.zeros(64, dtype=torch.float64)
    p[:4] = torch.tensor(FOUR, dtype=torch.float64).softmax(0)
    for make in (host, device):
        assert chi_square(draws(make, model, 100, temperature=1.0, seed=8), p) < 21.1
    assert math.isclose(float(p.sum()), 1.0)
