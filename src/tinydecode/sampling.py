"""Sampling options and the one place where logits become a distribution.

The order is fixed: repetition penalty, temperature, top-k, top-p, min-p. A filter sees what the
ones before it left. Everything after the logits is float64, so that a token 20 nats down is drawn
at its true rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


class NonFiniteLogitsError(RuntimeError):
    """The model produced logits from which no token can be chosen (NaN, +inf, or all -inf)."""


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen. Every field's neutral value switches it off.

    Raises:
        ValueError: a value is impossible; the text names the option and the value found.
    """

    temperature: float = 0.0  # 0 is greedy: the most likely token, ties to the lowest id
    top_k: int | None = 0  # keep the k most likely tokens; 0 or None keeps all
    top_p: float | None = 1.0  # keep the fewest tokens whose probabilities reach top_p
    min_p: float | None = 0.0  # keep tokens at least min_p times as likely as the best
    repetition_penalty: float = 1.0  # > 1 makes tokens seen before less likely
    seed: int | None = None  # of this call alone; None draws a fresh one

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, 0.0, math.inf)
        _check_number("top_p", 1.0 if self.top_p is None else self.top_p, 0.0, 1.0)
        _check_number("min_p", self.min_p or 0.0, 0.0, 1.0)
        _check_number("repetition_penalty", self.repetition_penalty, 0.0, math.inf)
        if self.repetition_penalty == 0:
            raise ValueError("repetition_penalty must be above 0, found 0")
        for name, value in (("top_k", self.top_k or 0), ("seed", self.seed or 0)):
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 0:
                raise ValueError(f"{name} must be an integer >= 0, found {value!r}")

    @property
    def is_greedy(self) -> bool:
        """Whether the choice involves no randomness."""
        return self.temperature == 0 or self.top_k == 1


def _check_number(name: str, value: float, low: float, high: float) -> None:
    is_number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not low <= value <= high:
        limits = (
            f"between {low:g} and {high:g}" if math.isfinite(high) else f"finite and >= {low:g}"
        )
        raise ValueError(f"{name} must be a number {limits}, found {value!r}")


def penalise_repetition(logits: Tensor, history: Sequence[int], penalty: float) -> Tensor:
    """Make tokens that occurred before less likely: once per distinct token.

    Positive logits are divided by the penalty and negative ones multiplied, so that both move down.

    Args:
        logits: [V].
        history: token ids of the prompt and of what was generated so far.
        penalty: above 0; 1 returns the logits unchanged.

    Returns:
        [V], a new tensor unless nothing changes.

    Source: Keskar et al., "CTRL", section 4.1.
    """
    if penalty == 1.0 or not history:
        return logits
    seen = torch.tensor(sorted(set(history)), device=logits.device)
    values = logits[seen]
    return logits.index_copy(0, seen, torch.where(values > 0, values / penalty, values * penalty))


def probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """The distribution a token is drawn from, after temperature and all filters.

    Args:
        logits: float32 [V], any repetition penalty already applied. -inf bans a token.
        params: temperature 0 gives all mass to the best token (ties to the lowest id).

    Returns:
        float64 [V], sums to 1, zero where a filter removed the token.
    """
    if params.is_greedy:
        one_hot = torch.zeros(logits.shape, dtype=torch.float64, device=logits.device)
        one_hot[logits.argmax()] = 1.0
        return one_hot
    # The best token's logit is taken off before the division: any temperature > 0 is then safe.
    wide = logits.double()
    p = torch.exp((wide - wide.max()) / params.temperature)
    vocab = p.numel()
    if params.top_k and params.top_k < vocab:
        p = _keep_most_likely(p, params.top_k)
    if params.top_p is not None and params.top_p < 1.0:
        p = _keep_nucleus(p / p.sum(), params.top_p)
    if params.min_p:
        p = torch.where(p >= params.min_p * p.max(), p, 0.0)
    return p / p.sum()


def _keep_most_likely(p: Tensor, count: int) -> Tensor:
    """Zero all but the `count` largest of [V]; of equal ones the lowest ids stay."""
    threshold = p.topk(count).values[-1]
    above = p > threshold
    ties = (p == threshold).nonzero()[:, 0][: count - int(above.sum())]
    above[ties] = True
    return torch.where(above, p, 0.0)


def _keep_nucleus(p: Tensor, top_p: float) -> Tensor:
    """Zero all but the fewest tokens of [V] whose probabilities sum to at least top_p."""
    # Tokens below (1 - top_p) / V cannot all together reach 1 - top_p, so none of them is in the
    # nucleus: sorting the rest is enough, and the rest is small.
    candidates = (p >= (1.0 - top_p) / p.numel()).nonzero()[:, 0]
    ordered, order = p[candidates].sort(descending=True, stable=True)
    before = ordered.cumsum(0) - ordered
    kept = candidates[order[(before < top_p).index_fill(0, before.new_zeros(1).long(), True)]]
    return torch.zeros_like(p).index_copy(0, kept, p[kept])


def draw(p: Tensor, uniform: float) -> int:
    """The token at a point of the cumulative distribution.

    Args:
        p: float64 [V], sums to 1 up to rounding.
        uniform: in [0, 1), with 53 random bits.

    Returns:
        A token id of nonzero probability.
    """
    cumulative = p.cumsum(0)
    point = cumulative[-1:] * uniform
    index = int(torch.searchsorted(cumulative, point, right=True))
    # The product above may round up to the total; the last token with mass is the right answer.
    return index if index < p.numel() else int(p.nonzero()[-1])


def non_finite_error(step: int) -> NonFiniteLogitsError:
    """The error for logits of generation step `step` (1 is the one after the prompt)."""
    return NonFiniteLogitsError(
        f"non-finite logits at step {step}: the weights or the activations overflowed, or every "
        "token is banned; a wider dtype (bfloat16 or float32) may help"
    )


class Sampler:
    """Chooses tokens for one call, with a random generator of its own.

    The generator is counter-based (Philox), one draw per row and step; torch's and numpy's global
    states are neither read nor written.
    """

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        entropy = np.random.SeedSequence().entropy if params.seed is None else params.seed
        self.seed = int(entropy) % 2**63  # type: ignore[arg-type]
        self._random = np.random.Generator(np.random.Philox(self.seed))
        self._step = 0

    def __call__(self, logits: Tensor, histories: Sequence[Sequence[int]]) -> list[int]:
        """Choose one token a row.

        Args:
            logits: float32 [B, V].
            histories: per row, the token ids so far; read only when there is a repetition penalty.

        Raises:
            NonFiniteLogitsError: a row has NaN or +inf, or nothing above -inf.
        """
        self._step += 1
        if self.params.repetition_penalty != 1.0:
            rows = [
                penalise_repetition(row, history, self.params.repetition_penalty)
                for row, history in zip(logits, histories, strict=True)
            ]
            logits = torch.stack(rows)
        best, greedy = logits.max(dim=-1)  # NaN wins a maximum, so `best` tells of any
        if not bool(torch.isfinite(best).all()):
            raise non_finite_error(self._step)
        if self.params.is_greedy:
            return [int(token) for token in greedy.tolist()]
        uniforms = self._random.random(len(logits))
        return [
            draw(probabilities(row, self.params), float(u))
            for row, u in zip(logits, uniforms, strict=True)
        ]
