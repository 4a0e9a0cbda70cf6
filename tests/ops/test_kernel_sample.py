"""The sampling kernels against their twin and against float64. A21 to A25."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from sampler_setup import (
    FILTERS,
    Setup,
    assert_equal,
    both,
    distribution,
    filters_of,
    flat,
    is_greedy,
    narrow,
    stairs,
)

from tinydecode.ops import ref_sample, sample
from tinydecode.sampling import SamplingParams, adjust, probabilities


@pytest.mark.parametrize("params", FILTERS)
@pytest.mark.parametrize("vocab", [1, 5, 100, 1023, 1024, 1025, 4099])
def test_kernel_and_twin_choose_alike(bench: Any, params: dict[str, Any], vocab: int) -> None:
    torch.manual_seed(vocab)
    logits = torch.randn(2, vocab) * 3
    kernel, twin = both(bench, logits, **params)
    for seed in range(3):
        bench.schedule(seed + 1)
        assert kernel.run(sample, logits) == twin.run(ref_sample, logits)
    assert_equal(kernel, twin)
    assert kernel.rows["draws"].tolist() == [0 if is_greedy(params) else 3] * 2


@pytest.mark.parametrize("params", FILTERS)
@pytest.mark.parametrize("vocab", [1, 3, 777, 5000])
def test_distribution_is_that_of_probabilities(
    bench: Any, params: dict[str, Any], vocab: int
) -> None:
    logits = torch.randn(3, vocab) * 3
    p, z = distribution(bench, logits, **params)
    assert torch.equal(z, logits) or is_greedy(params)
    for row in range(3):
        expected = probabilities(logits[row], filters_of(params))
        assert torch.equal(p[row] > 0, expected > 1e-12)
        torch.testing.assert_close(p[row], expected, rtol=2e-5, atol=1e-12)


@pytest.mark.parametrize("make", [flat, stairs, narrow])
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"top_k": 2500, "top_p": 0.7, "log_min_p": math.log(0.97)},
        {"top_k": 4001},
        {"top_p": 0.63},
        {"log_min_p": math.log(0.98)},
    ],
)
def test_many_tokens_in_the_deciding_bins(bench: Any, make: Any, params: dict[str, Any]) -> None:
    vocab = 6001
    logits = make(vocab)[None]
    kernel, twin = both(bench, logits, **params)
    for seed in range(2):
        bench.schedule(seed + 1)
        assert kernel.run(sample, logits) == twin.run(ref_sample, logits)
    p, _ = distribution(bench, logits, **params)
    expected = probabilities(logits[0], filters_of(params))
    # The edge of a nucleus may move by one token where float64 and integers round apart.
    same = (p[0] > 0) == (expected > 0)
    assert int((~same).sum()) <= 1
    torch.testing.assert_close(p[0][same], expected[same], rtol=1e-3, atol=0.0)


@pytest.mark.parametrize(
    "params",
    [{}, {"top_p": 0.9}, {"top_k": 700, "top_p": 0.95}, {"top_p": 0.99, "log_min_p": -4.0}],
)
def test_the_block_that_comes_last_chooses(bench: Any, params: dict[str, Any]) -> None:
    vocab = 9001  # five blocks a row, and any of them may be the last
    torch.manual_seed(7)
    logits = torch.randn(2, vocab) * 2
    kernel, twin = both(bench, logits, **params)
    for seed in range(12):
        bench.schedule(seed + 1, resident=1 + seed % 5, multiprocessors=1 + seed % 3)
        assert kernel.run(sample, logits) == twin.run(ref_sample, logits)
    assert_equal(kernel, twin)


def test_a_long_list_of_few(bench: Any) -> None:
    """More tokens than a list has places where one block serves a top-k: the row is gone over."""
    vocab = 3000
    for scale in (0.0, 1e-7, 1e-3):
        logits = torch.randn(1, vocab) * scale
        for options in ({}, {"top_p": 0.6}, {"log_min_p": -1e-3}):
            kernel, twin = both(bench, logits, top_k=40, **options)
            for _ in range(2):
                assert kernel.run(sample, logits) == twin.run(ref_sample, logits)


def test_ties_go_by_id(bench: Any) -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0, 1.0, 0.0, 1.0]])
    for k, expected in ((1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (4, [1, 2, 3, 5])):
        p, _ = distribution(bench, logits, top_k=k)
        assert p[0].nonzero()[:, 0].tolist() == expected
    greedy = Setup(bench, 1, 6, {"temperature": 0.0})
    assert greedy.run(sample, logits, has_filters=False) == [1]
    signs = torch.tensor([[-0.0, 0.0, -1.0]])
    assert Setup(bench, 1, 3, {"temperature": 0.0}).run(sample, signs) == [0]


# ---- stages 1 and 2 ------------------------------------------------------------------------


@pytest.mark.parametrize("has_filters", [True, False])
def test_bias_and_penalties(bench: Any, has_filters: bool) -> None:
    vocab = 1500
    params = {"repetition": 1.3, "presence": 0.4, "frequency": 0.2, "has_bias": 1, "has_counts": 1}
    params["temperature"] = 0.7 if has_filters else 0.0
    logits = torch.randn(2, vocab)
    kernel, twin = both(bench, logits, **params)
    prompt = list(range(0, vocab, 3))
    options = SamplingParams(
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.2,
        logit_bias={5: 2.5, 1499: -1.0},
        banned_token_ids=[7, 8],
    )
    for setup in (kernel, twin):
        setup.counts[:, prompt] = ref_sample.IN_PROMPT
        setup.bias[[5, 1499]] = torch.tensor([2.5, -1.0], device=bench.device)
        setup.bias[[7, 8]] = -math.inf
    outputs: list[list[int]] = [[], []]
    for _ in range(4):
        found = kernel.run(sample, logits, has_filters)
        assert found == twin.run(ref_sample, logits, has_filters)
        for row, token in enumerate(found):
            if not has_filters:  # greedy: the best of the logits as `adjust` has them
                adjusted = adjust(logits[row], options, prompt, outputs[row])
                assert token == int(adjusted.argmax())
            outputs[row].append(token)
    assert_equal(kernel, twin)
    for row in range(2):
        generated = kernel.counts[row].cpu() & (ref_sample.IN_PROMPT - 1)
        assert generated.sum() == 4
        assert all(generated[token] == outputs[row].count(token) for token in outputs[row])


def test_a24_by_hand_in_the_kernel(bench: Any) -> None:
    logits = torch.tensor([[2.0, -2.0, 0.5]])
    setup = Setup(bench, 1, 3, {"repetition": 1.5, "has_counts": 1})
    setup.counts[0, 0], setup.counts[0, 1] = 3, 1
    raw = sample.distribution(logits.to(bench.device), setup.state, setup.bias, setup.counts).cpu()
    z = raw[32:44].view(torch.float32)
    torch.testing.assert_close(z, torch.tensor([4 / 3, -3.0, 0.5]))


# ---- a step's traces -----------------------------------------------------------------------


def test_stops_freeze_a_row(bench: Any) -> None:
    logits = torch.zeros(2, 50)
    logits[0, 9] = logits[1, 11] = 5.0
    options = {"temperature": 0.0, "stops": [3, 9], "has_counts": 1}
    kernel, twin = both(bench, logits, **options)
    for setup, module in ((kernel, sample), (twin, ref_sample)):
        setup.tokens[:] = 1
        assert setup.run(module, logits, has_filters=False) == [9, 11]
        assert setup.rows["is_done"].tolist() == [1, 0]
        assert setup.token(0) == 9  # the host learns what stopped it
        counts = setup.counts.clone()
        other = torch.zeros(2, 50)
        other[:, 20] = 5.0
        # Row 0 is over: its token and counts stay, the pass's slot is taken back.
        assert setup.run(module, other, has_filters=False) == [9, 20]
        assert setup.seq_lens.tolist() == [6, 7]
        assert setup.token(0) == -1
        assert torch.equal(setup.counts[0], counts[0])
        assert setup.rows["sequence"].tolist() == [2, 2]
        assert setup.rows["draws"].tolist() == [0, 0]
    assert_equal(kernel, twin)


def test_a_row_ends_at_its_limit(bench: Any) -> None:
    logits = torch.randn(2, 50)
    kernel, twin = both(bench, logits)
    for setup, module in ((kernel, sample), (twin, ref_sample)):
        start = ref_sample.PARAMS.itemsize + 16
        setup.state[start : start + 4] = torch.tensor([2, 0, 0, 0], dtype=torch.uint8)
        for _ in range(4):
            setup.run(module, logits)
        assert setup.rows["is_done"].tolist() == [1, 0]
        assert setup.rows["remaining"].tolist() == [0, 0]
        assert setup.seq_lens.tolist() == [7 - 2, 7]
        assert setup.rows["draws"].tolist() == [2, 4]
    assert_equal(kernel, twin)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("has_filters", [True, False])
@pytest.mark.parametrize("place", [0, 1500])
def test_a25_what_is_not_finite_is_told(
    bench: Any, bad: float, has_filters: bool, place: int
) -> None:
    logits = torch.randn(2, 1501)
    logits[1, place] = bad
    kernel, twin = both(bench, logits, temperature=1.0 if has_filters else 0.0)
    for setup, module in ((kernel, sample), (twin, ref_sample)):
        setup.run(module, logits, has_filters)
        assert setup.token(0) >= 0
        assert setup.token(1) == -1
        assert setup.rows["is_done"].tolist() == [0, 1]
        assert setup.tokens[1] == -5
    assert_equal(kernel, twin)


def test_a25_everything_banned_is_told(bench: Any) -> None:
    for has_filters in (True, False):
        setup = Setup(bench, 1, 9, {"has_bias": 1, "temperature": float(has_filters)})
        setup.bias[:] = -math.inf
        setup.run(sample, torch.zeros(1, 9), has_filters)
        assert setup.token() == -1
    # One token left, and -inf from a mask of the caller's own, are fine.
    mask = torch.full((1, 3000), -math.inf)
    mask[0, 2999] = -50.0
    assert Setup(bench, 1, 3000).run(sample, mask) == [2999]


@pytest.mark.parametrize("vocab", [3, 700, 2500])
@pytest.mark.parametrize("params", [{}, {"top_k": 4, "top_p": 0.9}, {"temperature": 0.0}])
def test_logprobs(bench: Any, vocab: int, params: dict[str, Any]) -> None:
    logits = torch.randn(1, vocab) * 2
    count = min(5, vocab)
    kernel, twin = both(bench, logits, num_logprobs=5, **params)
    kernel.run(sample, logits, True, True)
    twin.run(ref_sample, logits, True, True)
    assert_equal(kernel, twin)
    found, other = kernel.words(0, count), twin.words(0, count)
    plain = logits[0].double().log_softmax(0)
    after = probabilities(logits[0], filters_of(params)).log()
    best = plain.sort(descending=True).indices[:count].tolist()
    assert [top[0] for top in found.top] == [top[0] for top in other.top] == best
    for words in (found, other):
        assert words.logprob == pytest.approx(float(plain[words.token]), abs=1e-5)
        assert words.sampled_logprob == pytest.approx(float(after[words.token]), abs=1e-5)
        for token, logprob, sampled in words.top:
            assert logprob == pytest.approx(float(plain[token]), abs=1e-5)
            assert sampled == pytest.approx(float(after[token]), abs=1e-5)
