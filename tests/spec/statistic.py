"""Chi-square of what was drawn against what should have been."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping

LIMITS = {1: 15.1, 2: 18.4, 3: 21.1, 8: 31.8, 15: 44.3, 63: 113.5}  # p = 1e-4, by freedom


def chi_square(drawn: Iterable[Hashable], expected: Mapping[Hashable, float]) -> tuple[float, int]:
    """(statistic, degrees of freedom); infinite if something impossible was drawn.

    Args:
        drawn: what came.
        expected: probability of each outcome; those of 0 must not come.
    """
    counts = Counter(drawn)
    total = sum(counts.values())
    possible = {outcome: p for outcome, p in expected.items() if p > 0}
    if any(outcome not in possible for outcome in counts):
        return float("inf"), len(possible) - 1
    statistic = sum((counts[o] - total * p) ** 2 / (total * p) for o, p in possible.items())
    return statistic, len(possible) - 1


def pairs(tokens: list[int]) -> list[tuple[int, int]]:
    """Neighbours, each token in one pair."""
    return list(zip(tokens[::2], tokens[1::2], strict=False))


def pair_probabilities(p: Mapping[int, float]) -> dict[tuple[int, int], float]:
    """Of two independent draws."""
    return {(a, b): p[a] * p[b] for a in p for b in p}
