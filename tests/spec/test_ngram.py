"""The n-gram index against a search of the whole history."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinydecode.speculative import NgramDrafter
from tinydecode.speculative.ngram import NgramIndex


def search(history: list[int], max_n: int, min_n: int, count: int) -> list[int]:
    """Longest suffix first, most recent earlier occurrence; the copy may run into itself."""
    for size in range(max_n, min_n - 1, -1):
        for end in range(len(history) - 1, size - 1, -1):
            if len(history) >= size and history[end - size : end] == history[-size:]:
                text = list(history)
                for _ in range(count):
                    text.append(text[end])
                    end += 1
                return text[len(history) :]
    return []


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=60),
    st.integers(1, 5),
    st.integers(0, 4),
    st.integers(1, 20),
    st.lists(st.integers(1, 7), max_size=20),
)
def test_index_finds_what_a_search_finds(
    tokens: list[int], max_n: int, spread: int, count: int, steps: list[int]
) -> None:
    min_n = max(1, max_n - spread)
    index = NgramIndex(max_n, min_n)
    length = 0
    for step in [*steps, len(tokens)]:  # as a generation does: a few tokens at a time
        length = min(length + step, len(tokens))
        index.extend(tokens[:length])
        assert index.lookup(count) == search(tokens[:length], max_n, min_n, count)


@pytest.mark.parametrize(
    ("history", "sizes", "expected"),
    [
        ([1, 2, 3, 9, 1, 2], (3, 1), [3, 9, 1, 2]),
        ([5, 1, 2, 7, 8, 2, 6, 1, 2], (3, 1), [7, 8, 2, 6]),  # two match, though one is nearer
        ([1, 2, 3, 1, 2, 4, 1, 2], (2, 2), [4, 1, 2, 4]),  # most recent; runs into itself
        ([7, 7], (3, 1), [7, 7, 7, 7]),
        ([1, 2, 3, 4], (3, 1), []),
        ([1], (3, 1), []),
        ([1, 2, 3, 3], (4, 2), []),  # one matches, but is too short
    ],
)
def test_by_hand(history: list[int], sizes: tuple[int, int], expected: list[int]) -> None:
    index = NgramIndex(*sizes)
    index.extend(history)
    assert index.lookup(4) == expected


def test_a_step_at_a_long_history_is_fast() -> None:
    """Under 1 ms at 100K tokens; the least of many, since the machine may be busy."""
    history = [(i * i) % 5003 for i in range(100_000)]
    drafter = NgramDrafter(5, 1)
    drafter.propose(history, 8)
    times = []
    for i in range(50):
        history.append((i * 7919) % 5003)
        started = time.perf_counter()
        drafter.propose(history, 8)
        times.append(time.perf_counter() - started)
    assert min(times) < 1e-3


@pytest.mark.parametrize("sizes", [(0, 1), (3, 0), (2, 3), (True, 1), (2.0, 1), (3, -1)])
def test_impossible_sizes_are_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="min_n|max_n"):
        NgramDrafter(*sizes)
