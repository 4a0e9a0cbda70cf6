"""How many tokens to draft: a fixed number, or what pays at the moment."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tinydecode.speculative.drafter import Drafter

MAX_LENGTH = 15  # a verify pass of 16 rows is the largest that the fused step takes
AUTO_LENGTHS = (1, 2, 3, 5, 8, 15)  # few, because on CUDA each is a captured pass of its own


class FixedLength:
    """Always the same number of tokens."""

    def __init__(self, count: int) -> None:
        self.longest = self.choice = count
        self.lengths = (count,)

    def choose(self) -> int:
        """Tokens to draft next."""
        return self.choice

    def ran(self, proposed: int, rows: int, draft_s: float, verify_s: float) -> None:
        """A pass is over; nothing to learn."""

    def judged(self, proposed: int, accepted: int) -> None:
        """A draft was judged; nothing to learn."""


class AdaptiveLength:
    """The number of tokens with the most text per second, by what this call has measured.

    Expected tokens of a round that drafts k are ``1 + sum over j <= k of P(token j stands)``, from
    decaying counts per position; its time is k draft steps plus a verify pass of k + 1 rows, as
    measured. 0, plain decoding, is one of the choices. While it is taken, drafts that cost nothing
    are made and counted all the same; others are tried again after pauses that double.

    Args:
        is_free: of the drafter.
        lengths: the numbers to choose from, ascending, without 0.
    """

    _DECAY = 0.95  # of the counts, a judged draft
    _MARGIN = 1.02  # speculation must promise this much more than plain decoding
    _FIRST_PAUSE, _LONGEST_PAUSE = 16, 256  # tokens

    def __init__(self, is_free: bool, lengths: Sequence[int] = AUTO_LENGTHS) -> None:
        self.longest = max(lengths)
        self.lengths = tuple(lengths)
        self._is_free = is_free
        self._hits = [0.0] * self.longest
        self._trials = [0.0] * self.longest
        self._verify: dict[int, deque[float]] = {}  # rows -> seconds of the latest passes
        self._draft: deque[float] = deque(maxlen=9)  # seconds a token
        self._pause = self._FIRST_PAUSE
        self._paused = 0  # passes since drafting stopped
        self._passes = 0
        self._is_probe = False
        self.choice = 0  # the latest

    def choose(self) -> int:
        """Tokens to draft next; 0 for a plain step."""
        self.choice = self._choose()
        return self.choice

    def _choose(self) -> int:
        self._passes += 1
        self._is_probe = False
        if self._passes in (2, 3) and not self._is_free:
            return 0  # speculation is judged by the time of a plain step
        best = max(self.lengths, key=self._rate)
        if self._rate(best) >= self._MARGIN * self._rate(0):
            self._paused = 0
            return best
        self._paused += 1
        if not self._is_free and self._paused > self._pause:
            self._paused = 0
            self._is_probe = True
            return self.lengths[min(1, len(self.lengths) - 1)]
        return 0

    def ran(self, proposed: int, rows: int, draft_s: float, verify_s: float) -> None:
        """Learn what a pass cost.

        Args:
            proposed: tokens that the drafter made for it.
            rows: of the verify pass; 1 is a plain step.
            draft_s: seconds in the drafter.
            verify_s: seconds in the target, the choice of tokens included.
        """
        self._verify.setdefault(rows, deque(maxlen=9)).append(verify_s)
        if proposed:
            self._draft.append(draft_s / proposed)

    def judged(self, proposed: int, accepted: int) -> None:
        """Learn how far a draft of `proposed` tokens stood."""
        for position in range(min(accepted + 1, proposed, self.longest)):
            self._hits[position] = self._hits[position] * self._DECAY + (position < accepted)
            self._trials[position] = self._trials[position] * self._DECAY + 1.0
        if self._is_probe:
            good = accepted == proposed
            doubled = min(2 * self._pause, self._LONGEST_PAUSE)
            self._pause = self._FIRST_PAUSE if good else doubled

    def _rate(self, count: int) -> float:
        """Tokens per second expected of rounds that draft `count`."""
        drafting = statistics.median(self._draft) if self._draft else 0.0
        return self._tokens(count) / (count * drafting + self._verify_seconds(count + 1))

    def _tokens(self, count: int) -> float:
        trials, hits = sum(self._trials), sum(self._hits)
        pooled = (hits + 2.0) / (trials + 3.0)  # hopeful until something is known
        tokens = stands = 1.0
        for position in range(count):
            # Two imagined trials at the pooled rate: deep positions are seldom seen.
            stands *= (self._hits[position] + 2 * pooled) / (self._trials[position] + 2)
            tokens += stands
        return tokens

    def _verify_seconds(self, rows: int) -> float:
        """Median of the latest passes with so many rows, between the measured ones a line.

        The first pass of a size does not count: graphs are captured and caches are filled there.
        """
        known = {
            size: statistics.median(list(times)[1:] or times)
            for size, times in self._verify.items()
            if len(times) > 1 or size == 1
        }
        if not known:
            return 1.0 + 0.02 * rows
        below = max((size for size in known if size <= rows), default=None)
        above = min((size for size in known if size >= rows), default=None)
        if below is None:
            assert above is not None
            return known[above]
        if above is None:  # hopeful, so that it is tried once
            return known[below] * (1.0 + 0.02 * (rows - below))
        if above == below:
            return known[below]
        share = (rows - below) / (above - below)
        return known[below] * (1 - share) + known[above] * share


class Shadow:
    """Drafts that are made to be counted only, while plain decoding is the choice.

    Args:
        length: learns from them.
        drafter: makes them, at next to no cost.
        counts_misses: that there is nothing to draft counts as a token that fell, since a verify
            pass would have had its rows anyway.
    """

    def __init__(
        self,
        length: FixedLength | AdaptiveLength,
        drafter: Drafter,
        counts_misses: bool = False,
    ) -> None:
        self._length, self._drafter = length, drafter
        self._counts_misses = counts_misses
        self._pending: list[int] = []
        self._stood = self._size = 0

    def start(self, history: Sequence[int]) -> None:
        """Draft after `history`, unless the last draft is still undecided."""
        room = self._drafter.room(len(history))
        if self._drafter.is_free and not self._pending and room >= 1:
            size = min(self._length.longest, room)
            self._pending = list(self._drafter.propose(history, size).tokens)
            self._stood, self._size = 0, len(self._pending)
            if not self._pending and self._counts_misses:
                self._length.judged(1, 0)

    def drop(self) -> None:
        """Forget the draft: something else decides."""
        self._pending = []

    def decide(self, token: int) -> None:
        """Compare with the token that came."""
        if not self._pending:
            return
        if token == self._pending.pop(0):
            self._stood += 1
            if self._pending:
                return
        self._length.judged(self._size, self._stood)
        self._pending = []
