"""Sampling options and the one place where logits become a distribution.

The order is fixed; each stage sees what the ones before it left:

1. logit bias added, banned tokens set to -inf
2. repetition penalty (prompt and output), then presence and frequency penalty (output alone)
3. temperature
4. top-k
5. top-p
6. min-p

`adjust` is 1 and 2, `probabilities` is 3 to 6. Everything from 3 on is float64 here, so that a
token 20 nats down is drawn at its true rate. On a GPU the same order runs in kernels/sample*.cu,
whose twin is `ops.ref_sample`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

MAX_LOGPROBS = 20  # alternatives reported a token


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
    presence_penalty: float = 0.0  # taken off the logits of tokens generated before
    frequency_penalty: float = 0.0  # the same once for each time a token was generated
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # added to a token's logit
    banned_token_ids: Collection[int] = ()  # never chosen
    logprobs: int | None = None  # report the token's logprobs and those of this many others

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, 0.0, math.inf)
        _check_number("top_p", 1.0 if self.top_p is None else self.top_p, 0.0, 1.0)
        _check_number("min_p", self.min_p or 0.0, 0.0, 1.0)
        _check_number("repetition_penalty", self.repetition_penalty, 0.0, math.inf)
        if self.repetition_penalty == 0:
            raise ValueError("repetition_penalty must be above 0, found 0")
        _check_number("presence_penalty", self.presence_penalty, -math.inf, math.inf)
        _check_number("frequency_penalty", self.frequency_penalty, -math.inf, math.inf)
        for name, value in (("top_k", self.top_k or 0), ("seed", self.seed or 0)):
            if not _is_integer(value) or value < 0:
                raise ValueError(f"{name} must be an integer >= 0, found {value!r}")
        if self.logprobs is not None:
            if not _is_integer(self.logprobs) or not 0 <= self.logprobs <= MAX_LOGPROBS:
                raise ValueError(
                    f"logprobs must be an integer from 0 to {MAX_LOGPROBS} or None, "
                    f"found {self.logprobs!r}"
                )
        bias = dict(self.logit_bias or {})
        banned = tuple(self.banned_token_ids or ())
        for name, ids in (("logit_bias", bias), ("banned_token_ids", banned)):
            for token in ids:
                if not _is_integer(token) or token < 0:
                    raise ValueError(f"{name} must name token ids >= 0, found {token!r}")
        for token, shift in bias.items():
            if shift != -math.inf:  # which bans the token
                _check_number(f"logit_bias of token {token}", shift, -math.inf, math.inf)
        # Copies: a caller who changes theirs later does not change a call under way.
        object.__setattr__(self, "logit_bias", {int(t): float(v) for t, v in bias.items()})
        object.__setattr__(self, "banned_token_ids", tuple(int(t) for t in banned))

    @property
    def is_greedy(self) -> bool:
        """Whether the choice involves no randomness."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        """Whether the choice depends on the tokens so far other than through the logits."""
        penalties = (self.repetition_penalty - 1.0, self.presence_penalty, self.frequency_penalty)
        return any(penalties)

    @property
    def has_bias(self) -> bool:
        """Whether some tokens' logits are shifted or masked."""
        return bool(self.logit_bias or self.banned_token_ids)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ValueError if a token id in the options is outside a vocabulary."""
        for name, ids in (
            ("logit_bias", self.logit_bias),
            ("banned_token_ids", self.banned_token_ids),
        ):
            for token in ids:
                if token >= vocab_size:
                    raise ValueError(
                        f"{name}: token id {token} is outside the vocabulary of {vocab_size}"
                    )


def _is_integer(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _check_number(name: str, value: float, low: float, high: float) -> None:
    is_number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not low <= value <= high:
        if math.isfinite(high):
            limits = f"between {low:g} and {high:g}"
        else:
            limits = f"finite and >= {low:g}" if math.isfinite(low) else "that is finite"
        raise ValueError(f"{name} must be a number {limits}, found {value!r}")


# ---- stages 1 and 2 ------------------------------------------------------------------------


def adjust(
    logits: Tensor,
    params: SamplingParams,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
) -> Tensor:
    """Logit bias, banned tokens and the three penalties, in this order.

    Args:
        logits: float32 [V].
        params: which of them apply; with none the logits are returned as they are.
        prompt: token ids of the prompt: the repetition penalty counts them.
        output: token ids generated so far: every penalty counts them.

    Returns:
        float32 [V], a new tensor unless nothing changes.
    """
    if params.has_bias:
        logits = logits + bias_row(params, logits.shape[0], logits.device)
    if params.has_penalties:
        logits = penalise_repetition(logits, [*prompt, *output], params.repetition_penalty)
        logits = _penalise_output(logits, output, params)
    return logits


def bias_row(params: SamplingParams, vocab_size: int, device: torch.device | str) -> Tensor:
    """What stage 1 adds to the logits: float32 [V], -inf for a banned token."""
    bias = torch.zeros(vocab_size)
    for token, value in params.logit_bias.items():
        bias[token] = value
    bias[list(params.banned_token_ids)] = -math.inf
    return bias.to(device)


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


def _penalise_output(logits: Tensor, output: Sequence[int], params: SamplingParams) -> Tensor:
    """Take the presence penalty once and the frequency penalty n times off a token seen n times."""
    if not output or not (params.presence_penalty or params.frequency_penalty):
        return logits
    times = Counter(output)
    tokens = torch.tensor(list(times), device=logits.device)
    counts = torch.tensor(list(times.values()), device=logits.device, dtype=logits.dtype)
    values = logits[tokens] - params.presence_penalty - params.frequency_penalty * counts
    return logits.index_copy(0, tokens, values)


# ---- stages 3 to 6 -------------------------------------------------------------------------


def probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """The distribution a token is drawn from: temperature and all filters.

    Args:
        logits: float32 [V], from `adjust`. -inf bans a token.
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


# ---- what was chosen -----------------------------------------------------------------------


@dataclass(frozen=True)
class TopLogprob:
    """One of the most likely tokens of a step."""

    token_id: int
    logprob: float  # under the model's own distribution
    sampled_logprob: float  # under the one drawn from; -inf if a filter removed it


@dataclass(frozen=True)
class Logprobs:
    """Natural logarithms of a chosen token's probabilities, before and after everything here."""

    logprob: float  # under softmax of the model's logits: before bias, penalties, temperature
    sampled_logprob: float  # under the distribution drawn from; 0 when greedy
    top: tuple[TopLogprob, ...] = ()  # the model's own favourites, best first

    def to_dict(self) -> dict[str, object]:
        """For JSON: minus infinity, which a filter left, becomes None."""

        def finite(value: float) -> float | None:
            return value if math.isfinite(value) else None

        return {
            "logprob": finite(self.logprob),
            "sampled_logprob": finite(self.sampled_logprob),
            "top": [
                {
                    "token_id": top.token_id,
                    "logprob": finite(top.logprob),
                    "sampled_logprob": finite(top.sampled_logprob),
                }
                for top in self.top
            ],
        }


@dataclass(frozen=True)
class Choice:
    """A token, and its logprobs if the parameters ask for them."""

    token_id: int
    logprobs: Logprobs | None = None
    from_draft: bool = False


def logprobs_of(token: int, logits: Tensor, p: Tensor, count: int) -> Logprobs:
    """Logprobs of a token and of the `count` most likely ones.

    Args:
        token: the one chosen.
        logits: float32 [V] as the model gave them.
        p: float64 [V], the distribution the token was drawn from.
        count: alternatives.
    """
    plain = logits.double().log_softmax(0)
    best = plain.sort(descending=True, stable=True).indices[:count].tolist() if count else []
    after = p.log()
    return Logprobs(
        float(plain[token]),
        float(after[token]),
        tuple(TopLogprob(i, float(plain[i]), float(after[i])) for i in best),
    )


class Sampler:
    """Chooses tokens for one call, with a random generator of its own; on the CPU.

    The generator is counter-based (Philox), one draw per row and step; torch's and numpy's global
    states are neither read nor written.
    """

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self.seed = fresh_seed() if params.seed is None else int(params.seed) % 2**63
        self._random = np.random.Generator(np.random.Philox(self.seed))
        self._step = 0

    def __call__(self, logits: Tensor, histories: Sequence[Sequence[int]]) -> list[int]:
        """`sample` without logprobs and with prompts that count as output: token ids alone."""
        return [choice.token_id for choice in self.sample(logits, [()] * len(logits), histories)]

    def sample(
        self,
        logits: Tensor,
        prompts: Sequence[Sequence[int]],
        outputs: Sequence[Sequence[int]],
    ) -> list[Choice]:
        """Choose one token a row.

        Args:
            logits: float32 [B, V].
            prompts: per row, the token ids of the prompt; read only when there are penalties.
            outputs: per row, the token ids generated so far; likewise.

        Raises:
            NonFiniteLogitsError: a row has NaN or +inf, or nothing above -inf.
        """
        self._step += 1
        params = self.params
        adjusted = logits
        if params.has_bias or params.has_penalties:
            triples: Iterable[tuple[Tensor, Sequence[int], Sequence[int]]]
            triples = zip(logits, prompts, outputs, strict=True)
            adjusted = torch.stack([adjust(row, params, *history) for row, *history in triples])
        best, greedy = adjusted.max(dim=-1)  # NaN wins a maximum, so `best` tells of any
        if not bool(torch.isfinite(best).all()):
            raise non_finite_error(self._step)
        if params.is_greedy and params.logprobs is None:
            return [Choice(int(token)) for token in greedy.tolist()]
        choices = []
        for row, uniform in enumerate(self._random.random(len(logits))):
            p = probabilities(adjusted[row], params)
            token = int(greedy[row]) if params.is_greedy else draw(p, float(uniform))
            asked = params.logprobs
            found = None if asked is None else logprobs_of(token, logits[row], p, asked)
            choices.append(Choice(token, found))
        return choices


def fresh_seed() -> int:
    """A seed nobody chose, 63 bits, from the operating system."""
    return int(np.random.SeedSequence().generate_state(1, np.uint64)[0]) % 2**63
