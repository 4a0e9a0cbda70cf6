"""A drafter for benchmarks: works like another one, and is right as often as wanted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tinydecode.speculative.drafter import Call, ModelDrafter, Proposal
from tinydecode.speculative.ngram import NgramDrafter


class ScriptedDrafter:
    """Replaces what a drafter proposed by the known text, with mistakes at a chosen rate.

    It costs what the drafter inside costs, so that the cost of rounds can be measured with random
    weights. Greedy calls only make sense: the known text is what the target would choose.

    Args:
        inner: does the work; its tokens are thrown away.
        text: prompt, and what plain decoding gave after it.
        rate: share of the tokens that are right: exactly so many of every hundred, in random order,
            since a text is short for chance to even out.
        vocab_size: V of the target.
    """

    def __init__(
        self,
        inner: ModelDrafter | NgramDrafter,
        text: Sequence[int],
        rate: float,
        vocab_size: int,
    ) -> None:
        self.inner = inner
        self.is_free = inner.is_free
        random = np.random.default_rng(0)
        hundreds = [random.permutation(100) < round(100 * rate) for _ in range(0, len(text), 100)]
        is_right = np.concatenate(hundreds)[: len(text)]
        wrong = (np.asarray(text) + 1) % vocab_size
        self.script: list[int] = np.where(is_right, np.asarray(text), wrong).tolist()

    def begin(self, call: Call) -> None:
        """See `Drafter`."""
        self.inner.begin(call)

    def room(self, history_length: int) -> int:
        """See `Drafter`; the script's end is a limit too."""
        return min(self.inner.room(history_length), len(self.script) - history_length)

    def propose(self, history: Sequence[int], count: int) -> Proposal:
        """See `Drafter`."""
        self.inner.propose(history, count)
        return Proposal(self.script[len(history) : len(history) + count], None)
