"""Sampling: bounds, filters by hand, and the distribution of draws. A21 to A24, A26."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tinydecode.sampling import (
    NonFiniteLogitsError,
    Sampler,
    SamplingParams,
    adjust,
    draw,
    penalise_repetition,
    probabilities,
)

NO_HISTORY: list[list[int]] = [[]]


def kept(p: list[float], **options: float) -> list[int]:
    """Which tokens of a distribution survive the filters."""
    params = SamplingParams(**{"temperature": 1.0, **options})
    result = probabilities(torch.tensor(p).log(), params)
    assert result.dtype == torch.float64
    assert math.isclose(float(result.sum()), 1.0, abs_tol=1e-12)
    return result.nonzero()[:, 0].tolist()


def chi_square(counts: Counter[int], expected: list[float]) -> float:
    total = sum(counts.values())
    assert not [token for token in counts if expected[token] == 0], "a banned token was drawn"
    return sum((counts[t] - total * p) ** 2 / (total * p) for t, p in enumerate(expected) if p)


def draws(logits: list[float], count: int, **options: float) -> Counter[int]:
    """One draw from each of `count` steps of one seeded sampler."""
    sampler = Sampler(SamplingParams(**{"temperature": 1.0, "seed": 7, **options}))
    row = torch.tensor([logits])
    return Counter(sampler(row, NO_HISTORY)[0] for _ in range(count))


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1e-8, 1e-5, 1e-3, 0.01])
def test_a21_tiny_temperatures_pick_the_best(temperature: float) -> None:
    row = torch.tensor([[5.0, 4.875, 0.0, 0.0]])
    for seed in range(200):
        assert Sampler(SamplingParams(temperature, seed=seed))(row, NO_HISTORY) == [0]


@pytest.mark.parametrize("temperature", [-1.0, math.nan, math.inf, -math.inf, "hot", None, True])
def test_a21_impossible_temperatures_are_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match=r"temperature must be .* found"):
        SamplingParams(temperature)


def test_a22_top_k_bounds() -> None:
    logits = torch.randn(50).tolist()
    off = draws(logits, 200)
    for top_k in (0, None, 50, 1050):
        assert draws(logits, 200, top_k=top_k) == off
    with pytest.raises(ValueError, match="top_k must be an integer >= 0, found -5"):
        SamplingParams(1.0, top_k=-5)
    best = max(range(50), key=lambda i: logits[i])
    assert draws(logits, 200, top_k=1) == Counter({best: 200})


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"top_p": 1.0}, [0, 1, 2]),
        ({"top_p": None}, [0, 1, 2]),
        ({"top_p": 0.0}, [0]),
        ({"top_p": 1e-9}, [0]),
        ({"top_p": 0.49}, [0]),
        ({"top_p": 0.79}, [0, 1]),
        ({"top_p": 0.81}, [0, 1, 2]),
        ({"min_p": 0.0}, [0, 1, 2]),
        ({"min_p": 0.59}, [0, 1]),
        ({"min_p": 0.61}, [0]),
        ({"min_p": 1.0}, [0]),
        ({"top_k": 2, "top_p": 0.6}, [0]),  # top-p sees 0.625, 0.375 after top-k
        ({"top_k": 2, "top_p": 0.63}, [0, 1]),
    ],
)
def test_a23_filters(options: dict[str, float], expected: list[int]) -> None:
    assert kept([0.5, 0.3, 0.2], **options) == expected
    shuffled = kept([0.2, 0.5, 0.3], **options)
    assert sorted((i - 1) % 3 for i in shuffled) == expected  # 0.2 is token 2 of the first order


def test_a23_combined_filters_give_the_best() -> None:
    row = torch.tensor([[0.5, 0.3, 0.2]]).log()
    for seed in range(1000):
        params = SamplingParams(0.01, top_k=1, top_p=0.8, seed=seed)
        assert Sampler(params)(row, NO_HISTORY) == [0]


def test_ties() -> None:
    assert kept([0.25] * 4, top_k=2) == [0, 1]  # the lowest ids stay
    assert kept([0.25] * 4, min_p=1.0) == [0, 1, 2, 3]  # all equally likely: all stay
    assert kept([0.25] * 4, top_p=0.5) == [0, 1]
    assert kept([0.1, 0.4, 0.4, 0.1], top_k=3) == [0, 1, 2]
    assert Sampler(SamplingParams())(torch.tensor([[1.0, 3.0, 3.0]]), NO_HISTORY) == [1]


def test_a24_repetition_penalty() -> None:
    logits = torch.tensor([2.0, -2.0, 0.5])
    torch.testing.assert_close(
        penalise_repetition(logits, [0, 0, 0, 1], 1.5), torch.tensor([4 / 3, -3.0, 0.5])
    )
    assert logits.tolist() == [2.0, -2.0, 0.5]
    assert torch.equal(penalise_repetition(logits, [], 1.5), logits)
    assert torch.equal(penalise_repetition(logits, [0, 1], 1.0), logits)
    for penalty in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="repetition_penalty"):
            SamplingParams(1.0, repetition_penalty=penalty)
    # Greedy obeys it too: token 0 falls from 2.0 to 2/3 and below token 1.
    sampler = Sampler(SamplingParams(repetition_penalty=3.0))
    assert sampler(torch.tensor([[2.0, 1.0]]), [[0]]) == [1]


def test_presence_and_frequency_penalties_by_hand() -> None:
    logits = torch.tensor([2.0, -2.0, 0.5, 1.0])
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    # The prompt does not count; token 0 came twice, token 1 once.
    assert adjust(logits, params, prompt=[3, 3], output=[0, 1, 0]).tolist() == [1.0, -2.75, 0.5, 1]
    assert adjust(logits, params, prompt=[3], output=[]) is logits
    # The repetition penalty comes first: 2 / 2 - 0.5 - 0.25.
    both = SamplingParams(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    assert adjust(logits, both, prompt=[3], output=[0]).tolist() == [0.25, -2.0, 0.5, 0.5]
    # Negative penalties favour repeats.
    favour = SamplingParams(presence_penalty=-1.0)
    assert adjust(logits, favour, output=[2]).tolist() == [2.0, -2.0, 1.5, 1.0]


def test_bias_and_bans_come_before_the_penalties() -> None:
    logits = torch.tensor([1.0, 2.0, 3.0])
    params = SamplingParams(
        logit_bias={0: 3.0, 1: -math.inf}, banned_token_ids=[2], repetition_penalty=2.0
    )
    assert adjust(logits, params, prompt=[0, 1, 2]).tolist() == [2.0, -math.inf, -math.inf]
    assert logits.tolist() == [1.0, 2.0, 3.0]
    assert Sampler(params)(logits[None], [[]]) == [0]
    everything = SamplingParams(banned_token_ids=[0, 1, 2])
    with pytest.raises(NonFiniteLogitsError, match="every token is banned"):
        Sampler(everything)(logits[None], [[]])
    with pytest.raises(ValueError, match="logit_bias: token id 3 is outside the vocabulary of 3"):
        SamplingParams(logit_bias={3: 1.0}).check_vocabulary(3)


def test_logprobs_before_and_after() -> None:
    row = torch.tensor([[0.5, 0.3, 0.2]]).log()
    params = SamplingParams(1.0, top_k=1, logit_bias={2: 9.0}, logprobs=2)
    (choice,) = Sampler(params).sample(row, [[]], [[]])
    assert choice.token_id == 2 and choice.logprobs is not None
    assert math.isclose(choice.logprobs.logprob, math.log(0.2), rel_tol=1e-6)
    assert choice.logprobs.sampled_logprob == 0.0
    assert [top.token_id for top in choice.logprobs.top] == [0, 1]
    assert [top.sampled_logprob for top in choice.logprobs.top] == [-math.inf, -math.inf]
    assert math.isclose(choice.logprobs.top[1].logprob, math.log(0.3), rel_tol=1e-6)
    greedy = Sampler(SamplingParams(logprobs=0)).sample(row, [[]], [[]])[0]
    assert greedy.logprobs is not None and greedy.logprobs.top == ()


@pytest.mark.parametrize(
    ("name", "value"),
    [("top_p", -0.1), ("top_p", 1.1), ("top_p", math.nan), ("min_p", 2.0), ("seed", -1)]
    + [("min_p", math.nan), ("top_k", 1.5), ("seed", "x"), ("presence_penalty", math.inf)]
    + [("frequency_penalty", math.nan), ("logprobs", 21), ("logprobs", True), ("logprobs", -1)],
)
def test_bad_values_are_named(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} must be .* found {value!r}"):
        SamplingParams(1.0, **{name: value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logit_bias": {-1: 0.5}}, "logit_bias must name token ids >= 0, found -1"),
        ({"logit_bias": {"a": 0.5}}, "logit_bias must name token ids >= 0, found 'a'"),
        ({"logit_bias": {4: math.nan}}, "logit_bias of token 4 must be a number that is finite"),
        ({"logit_bias": {4: math.inf}}, "logit_bias of token 4 must be a number that is finite"),
        ({"banned_token_ids": [1.5]}, "banned_token_ids must name token ids >= 0, found 1.5"),
    ],
)
def test_bad_biases_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(1.0, **options)  # type: ignore[arg-type]


# Chi-square limits at p = 1e-4.
@pytest.mark.parametrize(
    ("options", "expected", "limit"),
    [
        ({}, [0.64391, 0.23688, 0.08714, 0.03206], 21.1),
        ({"temperature": 0.7, "top_k": 2}, [0.80668, 0.19332, 0, 0], 15.1),
        ({"top_p": 0.9}, [0.66524, 0.24473, 0.09003, 0], 18.4),
        ({"min_p": 0.2}, [0.73106, 0.26894, 0, 0], 15.1),
        ({"temperature": 2.0}, [0.45499, 0.27597, 0.16738, 0.10152], 21.1),
    ],
)
def test_draws_have_the_distribution(
    options: dict[str, float], expected: list[float], limit: float
) -> None:
    expected = [p / sum(expected) for p in expected]
    assert chi_square(draws([2.0, 1.0, 0.0, -1.0], 6000, **options), expected) < limit


def test_tail_tokens_are_drawn_at_their_true_rate() -> None:
    # 2^21 tokens 20 nats below one: together 0.00431 of the mass, each 2.05e-9.
    tail = 2**21
    logits = torch.full((tail + 1,), -20.0)
    logits[0] = 0.0
    p = probabilities(logits, SamplingParams(1.0))
    share = tail * math.exp(-20) / (1 + tail * math.exp(-20))
    assert math.isclose(float(p[1:].sum()), share, rel_tol=1e-9)
    # The cumulative distribution resolves single tail tokens: their points land on themselves.
    for token in (1, 2, 1000, tail):
        point = float(p[:token].sum() + p[token] / 2)
        assert draw(p, point) == token


@given(st.lists(st.floats(-30, 30), min_size=1, max_size=20), st.floats(0, 1, exclude_max=True))
def test_draw_returns_a_token_with_mass(logits: list[float], uniform: float) -> None:
    p = probabilities(torch.tensor(logits), SamplingParams(1.0, top_k=3))
    assert p[draw(p, uniform)] > 0


def test_a26_seeds() -> None:
    row = torch.zeros(1, 100)

    def text(seed: int | None) -> list[int]:
        sampler = Sampler(SamplingParams(1.0, seed=seed))
        return [sampler(row, NO_HISTORY)[0] for _ in range(50)]

    first = text(1)
    text(5)
    assert text(1) == first
    before = torch.get_rng_state()
    torch.manual_seed(9)
    assert text(1) == first
    torch.set_rng_state(before)
    text(1)
    assert torch.equal(torch.get_rng_state(), before)
    assert len({tuple(text(seed)) for seed in range(1, 21)}) == 20
    assert len({tuple(text(None)) for _ in range(5)}) == 5


@pytest.mark.parametrize("row", [[math.nan, 1.0], [math.inf, 1.0], [-math.inf, -math.inf]])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a25_non_finite_logits_are_an_error(row: list[float], temperature: float) -> None:
    with pytest.raises(NonFiniteLogitsError, match="non-finite logits at step 1:"):
        Sampler(SamplingParams(temperature))(torch.tensor([row]), NO_HISTORY)


def test_a_banned_token_is_never_drawn() -> None:
    assert set(draws([-math.inf, 0.0, 0.0], 500)) == {1, 2}
