"""Drafting without a model: copy what followed the last tokens when they occurred before."""

from __future__ import annotations

from collections.abc import Sequence

from tinydecode.speculative.drafter import Call, Proposal


class NgramIndex:
    """Where each run of min_n to max_n tokens ended last, kept up to date as tokens arrive.

    A step adds (max_n - min_n + 1) entries a new token and looks as many up, whatever the length
    of the history.

    Args:
        max_n: longest run looked up, the first to be tried.
        min_n: shortest.
    """

    def __init__(self, max_n: int, min_n: int) -> None:
        self._sizes = range(max_n, min_n - 1, -1)
        self._ends: dict[tuple[int, ...], int] = {}  # run of tokens -> index after its last one
        self._history: list[int] = []

    def extend(self, history: Sequence[int]) -> None:
        """Take in what `history` has beyond what was taken in before.

        Runs that end with the history are left out: nothing follows them yet, and a lookup must
        not find itself.
        """
        known = self._history
        start = len(known)
        known.extend(history[start:])
        ends = self._ends
        for size in self._sizes:
            for end in range(max(start, size), len(known)):
                ends[tuple(known[end - size : end])] = end

    def lookup(self, count: int) -> list[int]:
        """The `count` tokens after the most recent earlier occurrence of the longest known suffix.

        The copy may run into itself: past the end of the history it goes on with its own tokens,
        so a period repeats. Empty when no suffix occurred before.
        """
        known = self._history
        for size in self._sizes:
            end = self._ends.get(tuple(known[-size:])) if size <= len(known) else None
            if end is not None:
                copied = known[end : end + count]
                period = len(known) - end
                while len(copied) < count:
                    copied.append(copied[len(copied) - period])
                return copied
        return []


class NgramDrafter:
    """Drafts by looking the last tokens up in the prompt and in what was generated.

    The longest suffix of max_n to min_n tokens that occurred before wins, and of its occurrences
    the most recent; what followed it there is the draft.

    Args:
        max_n: longest suffix looked up, in tokens.
        min_n: shortest; 1 to max_n.

    Raises:
        ValueError: not 1 <= min_n <= max_n.
    """

    is_free = True

    def __init__(self, max_n: int = 3, min_n: int = 1) -> None:
        for name, value in (("max_n", max_n), ("min_n", min_n)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer >= 1, found {value!r}")
        if min_n > max_n:
            raise ValueError(f"min_n must be at most max_n = {max_n}, found {min_n}")
        self.max_n = max_n
        self.min_n = min_n
        self._index = NgramIndex(max_n, min_n)

    def begin(self, call: Call) -> None:
        """Forget the last call."""
        self._index = NgramIndex(self.max_n, self.min_n)

    def room(self, history_length: int) -> int:
        """Tokens it could draft: no limit of its own."""
        return 1 << 30

    def propose(self, history: Sequence[int], count: int) -> Proposal:
        """Up to `count` tokens to follow `history`, none when its end is new."""
        self._index.extend(history)
        return Proposal(self._index.lookup(count), None)
