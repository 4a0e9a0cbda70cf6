"""Sampled speculation has the target's distribution, and a wrong accept rule is noticed. A30."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from spec.models import ROW_DRAFT, ROW_TARGET, engine, markov
from spec.statistic import LIMITS, chi_square, pair_probabilities, pairs
from torch import Tensor

from tinydecode import speculative
from tinydecode.sampling import draw
from tinydecode.speculative import ModelDrafter, NgramDrafter, Proposal, rule

# Of the target's row, by hand: exp(z / T), filtered, normalised.
CASES: list[tuple[dict[str, Any], tuple[float, ...]]] = [
    ({"temperature": 1.0}, (0.64391, 0.23688, 0.08714, 0.03206)),
    ({"temperature": 0.7, "top_k": 2}, (0.80668, 0.19332, 0.0, 0.0)),
    ({"temperature": 1.0, "top_p": 0.9}, (0.66524, 0.24473, 0.09003, 0.0)),
    ({"temperature": 2.0, "min_p": 0.3}, (0.50648, 0.30720, 0.18632, 0.0)),
]


def tokens(where: str, drafter: Any, k: Any, count: int, options: dict[str, Any]) -> list[int]:
    """`count` tokens of the target; every one is an independent draw."""
    target = engine(markov(ROW_TARGET, where), 1024)
    made: list[int] = []
    seed = 0
    while len(made) < count:
        left = min(1000, count - len(made))
        made += speculative.generate(
            target, drafter, [0, 1, 2, 3], k, left, ignore_eos=True, seed=seed, **options
        )[0]
        seed += 1
    return made


def draft(where: str, name: str) -> Any:
    if name == "ngram":
        return NgramDrafter()
    return ModelDrafter(engine(markov(ROW_DRAFT, where), 1024))


def assert_distribution(found: list[int], expected: Sequence[float]) -> None:
    p = dict(enumerate(expected))
    for drawn, of in ((found, p), (pairs(found), pair_probabilities(p))):
        statistic, freedom = chi_square(drawn, of)
        assert statistic < LIMITS[freedom], (statistic, freedom)


@pytest.mark.parametrize(
    ("case", "k", "name"),
    [
        (0, 1, "wrong draft"),
        (1, 4, "wrong draft"),
        (2, 1, "wrong draft"),
        (3, 4, "wrong draft"),
        (0, 4, "ngram"),
        (1, 1, "ngram"),
    ],
)
def test_tokens_and_pairs(where: str, case: int, k: int, name: str) -> None:
    options, expected = CASES[case]
    found = tokens(where, draft(where, name), k, 1500, options)
    assert_distribution(found, expected)


@pytest.mark.long
@pytest.mark.parametrize("name", ["wrong draft", "ngram"])
@pytest.mark.parametrize("k", [1, 4, "auto"])
@pytest.mark.parametrize(("options", "expected"), CASES)
def test_twenty_thousand_tokens(
    where: str, options: dict[str, Any], expected: tuple[float, ...], k: Any, name: str
) -> None:
    assert_distribution(tokens(where, draft(where, name), k, 20_000, options), expected)


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize(("options", "expected"), CASES)
def test_the_rule_alone(options: dict[str, Any], expected: tuple[float, ...], k: int) -> None:
    """Without a model around it: many more draws, of the first token and of the first two."""
    from tinydecode.sampling import SamplingParams, probabilities

    params = SamplingParams(**options)
    p = probabilities(torch.tensor(ROW_TARGET), params)
    q = probabilities(torch.tensor(ROW_DRAFT), params)
    assert torch.allclose(p, torch.tensor(expected, dtype=torch.float64), atol=1e-5)
    generator = torch.Generator().manual_seed(k)
    first, blocks = [], []
    for _ in range(4000):
        u = torch.rand(2 * k + 1, generator=generator, dtype=torch.float64).tolist()
        drafted = [draw(q, x) for x in u[:k]]
        accepted, token = rule.accept([p] * (k + 1), [q] * k, drafted, u[k:])
        block = [*drafted[:accepted], token]
        first.append(block[0])
        blocks += block
    of = dict(enumerate(expected))
    for drawn in (first, blocks):
        statistic, freedom = chi_square(drawn, of)
        assert statistic < LIMITS[freedom]


def _draws_from_p(p: Any, q: Any, tokens: Sequence[int], u: Sequence[float]) -> tuple[int, int]:
    """Broken: after a rejection the next token is drawn from p, not from (p - q)+."""
    accepted, token = rule_accept(p, q, tokens, u)
    return (accepted, draw(p[accepted], u[-1])) if accepted < len(tokens) else (accepted, token)


def _draws_anew(p: Any, q: Any, tokens: Sequence[int], u: Sequence[float]) -> tuple[int, int]:
    """Broken: stands if equal to a draw of the target; otherwise another draw of it."""
    for row, token in enumerate(tokens):
        if draw(p[row], u[row]) != token:
            return row, draw(p[row], u[-1])
    return len(tokens), draw(p[len(tokens)], u[-1])


def _never_rejects(p: Any, q: Any, tokens: Sequence[int], u: Sequence[float]) -> Any:
    return len(tokens), draw(p[len(tokens)], u[-1])


rule_accept = rule.accept


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("broken", [_draws_from_p, _draws_anew, _never_rejects])
def test_a_broken_rule_is_noticed(monkeypatch: pytest.MonkeyPatch, broken: Any, k: int) -> None:
    monkeypatch.setattr(rule, "accept", broken)
    options, expected = CASES[0]
    found = tokens("cpu", draft("cpu", "wrong draft"), k, 1500, options)
    with pytest.raises(AssertionError):
        assert_distribution(found, expected)


@pytest.mark.parametrize("mistake", ["q before the filters", "q of a greedy draft"])
def test_a_q_not_drawn_from_is_noticed(monkeypatch: pytest.MonkeyPatch, mistake: str) -> None:
    drafter = draft("cpu", "wrong draft")
    honest = drafter.propose
    raw = torch.full((8,), -1e4, dtype=torch.float64)
    raw[:4] = torch.tensor(ROW_DRAFT)
    q: Tensor = raw.softmax(0)

    def propose(history: Sequence[int], count: int) -> Proposal:
        drawn = honest(history, count).tokens
        return Proposal([2] * count if mistake == "q of a greedy draft" else drawn, [q] * count)

    monkeypatch.setattr(drafter, "propose", propose)
    options, expected = CASES[0 if mistake == "q of a greedy draft" else 1]
    found = tokens("cpu", drafter, 1, 3000, options)
    with pytest.raises(AssertionError):
        assert_distribution(found, expected)


def test_rule_by_hand() -> None:
    p = torch.tensor([[0.5, 0.3, 0.2], [0.0, 0.0, 1.0], [0.25, 0.25, 0.5]], dtype=torch.float64)
    q = torch.tensor([[0.2, 0.6, 0.2], [0.0, 0.5, 0.5]], dtype=torch.float64)
    # Token 1: p/q = 1/2. Rejected, the residual (0.3, 0, 0) leaves token 0 alone.
    assert rule.accept(p, q, [1, 2], [0.49, 0.9, 0.1]) == (2, 0)
    assert rule.accept(p, q, [1, 2], [0.51, 0.9, 0.999]) == (0, 0)
    # p >= q stands whatever the uniform; p = 0 never does.
    assert rule.accept(p, q, [0, 2], [0.999999, 0.999999, 0.3]) == (2, 1)
    assert rule.accept(p, q, [2, 1], [0.0, 0.0, 0.7]) == (1, 2)
    # One-hot q: probability p, then p without the token.
    assert rule.accept(p, None, [0, 2], [0.49, 0.0, 0.6]) == (2, 2)
    assert rule.accept(p, None, [0, 2], [0.51, 0.0, 0.59]) == (0, 1)
    assert rule.accept(p, None, [0, 2], [0.51, 0.0, 0.61]) == (0, 2)
    assert rule.accept(p, None, [], [0.79]) == (0, 1)
    # Greedy rows: accept while the best token matches, then the best token.
    one_hot = torch.eye(3, dtype=torch.float64)
    assert rule.accept(one_hot, None, [0, 1], [0.9, 0.9, 0.9]) == (2, 2)
    assert rule.accept(one_hot, None, [0, 2], [0.9, 0.0, 0.0]) == (1, 1)
