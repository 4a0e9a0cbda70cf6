"""Where a row's text ends and which events it gives: stop strings, hold-back. A39."""

from __future__ import annotations

from pathlib import Path

import pytest
from fixtures import write_byte_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from tinydecode import Tokenizer
from tinydecode.events import Output, TokenEvent, check_stops, find_stop, held_back


class Pieces:
    """A detokenizer for which token i is the i-th of some pieces of text."""

    def __init__(self, pieces: list[str], tail: str = "") -> None:
        self._pieces = pieces
        self._tail = tail

    def push(self, token_id: int) -> str:
        return self._pieces[token_id]

    def flush(self) -> str:
        return self._tail


def stream(
    pieces: list[str], stops: list[str], limit: int = 100, tail: str = ""
) -> tuple[list[list[TokenEvent]], Output]:
    """The events after each token, up to the end; token 99 is the end of sequence."""
    output = Output(limit, {99}, stops, Pieces(pieces, tail))  # type: ignore[arg-type]
    batches = []
    for token in [*range(len(pieces)), 99]:
        batches.append(output.push(token, float(token)))
        if output.finish_reason is not None:
            break
    return batches, output


def text_of(batches: list[list[TokenEvent]]) -> str:
    return "".join(event.text or "" for batch in batches for event in batch)


def tokens_of(batches: list[list[TokenEvent]]) -> list[int]:
    return [e.token_id for batch in batches for e in batch if e.token_id is not None]


TEXT = "The quick brown fox"


@pytest.mark.parametrize(
    ("stops", "expected", "reason"),
    [
        (["own fox"], "The quick br", "stop"),
        (["own cat"], TEXT, "stop"),  # by the end of sequence
        (["own", "own fox"], "The quick br", "stop"),
        (["own fox", "own"], "The quick br", "stop"),
        (["fox", "own f"], "The quick br", "stop"),  # completed first
        (["q", "The"], "", "stop"),
        (["x"], TEXT[:-1], "stop"),
        (["T"], "", "stop"),
    ],
)
def test_a39_byte_by_byte(stops: list[str], expected: str, reason: str) -> None:
    batches, output = stream(list(TEXT), stops)
    assert text_of(batches) == expected
    assert tokens_of(batches) == list(range(len(expected)))
    assert output.finish_reason == reason
    assert output.kept == len(expected)
    last = batches[-1][-1]
    assert (last.token_id, last.finish_reason) == (None, "stop")
    # Nothing that could still be the beginning of a stop has been shown before it was decided.
    shown = ""
    for position, batch in enumerate(batches[: len(TEXT)]):
        shown += "".join(event.text or "" for event in batch)
        seen = TEXT[: position + 1]
        if output.finish_reason and position + 1 < len(batches):
            assert len(shown) <= len(seen) - held_back(seen, stops)


def test_a_stop_inside_a_token_keeps_what_stands_before_it() -> None:
    batches, output = stream(["The ", "quick br", "own fox", "!"], ["rown"])
    assert text_of(batches) == "The quick b"
    assert tokens_of(batches) == [0, 1]
    assert output.finish_reason == "stop" and output.cached == 2
    # The whole of the token waits, since its end may belong to the stop.
    assert [len(batch) for batch in batches] == [1, 0, 2]


def test_text_before_a_newline_is_kept() -> None:
    batches, output = stream(["?\n"], ["\n"])
    assert text_of(batches) == "?" and tokens_of(batches) == [0]
    batches, output = stream(["?", "\n"], ["\n"])
    assert text_of(batches) == "?" and tokens_of(batches) == [0] and output.cached == 1


def test_the_limit_lets_out_what_was_held_back() -> None:
    batches, output = stream(list("abo"), ["own"], limit=3)
    assert text_of(batches) == "abo"
    assert output.finish_reason == "length" and output.kept == 3 and output.cached == 2
    assert batches[-1][-1].finish_reason == "length"
    assert [event.time for event in batches[-1]] == [2.0]


def test_a_stop_in_the_flushed_tail() -> None:
    batches, output = stream(["a", ""], ["\ufffd"], limit=2, tail="\ufffd")
    assert text_of(batches) == "a" and output.finish_reason == "stop"
    assert tokens_of(batches) == [0]
    batches, _ = stream(["a", ""], ["x"], limit=2, tail="\ufffd")
    assert text_of(batches) == "a\ufffd"


def test_tokens_without_text_are_not_lost() -> None:
    """Special tokens and the first bytes of a character have no text of their own."""
    batches, _ = stream(["a", "", "", "b"], ["zz"])
    assert tokens_of(batches) == [0, 1, 2, 3]
    batches, _ = stream(["a", "", "", "\u4f60"], ["\u4f60"])
    assert tokens_of(batches) == [0]  # the character's bytes go with it


def test_find_stop_by_hand() -> None:
    assert find_stop("abcabd", ["abd", "ca"]) == 2
    assert find_stop("abc", ["c", "bc", "abc"]) == 0  # completed together: the longest
    assert find_stop("abc", []) is None
    assert held_back("abc", ["cd", "bcx"]) == 2
    assert held_back("abc", ["abc"]) == 0  # a whole stop is no beginning of one
    assert held_back("aaa", ["aab"]) == 2


@given(
    st.text("abc", max_size=12),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    st.data(),
)
def test_the_cut_does_not_depend_on_the_tokens(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    def first_completed() -> str:
        for end in range(len(text) + 1):
            begins = [end - len(s) for s in stops if text[:end].endswith(s)]
            if begins:
                return text[: min(begins)]
        return text

    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    edges = [0, *cuts, len(text)]
    pieces = [text[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    batches, output = stream(pieces, stops)
    expected = first_completed()
    assert text_of(batches) == expected
    assert tokens_of(batches) == list(range(output.kept))
    if expected != text:  # a token is kept if its text begins before the stop and there is some
        kept = [n for n, start in enumerate(edges[:-1]) if start < len(expected)]
        assert output.kept == len(kept)


@pytest.mark.parametrize("stop", [[""], ["a", 3], [None], ""])
def test_impossible_stops_are_named(stop: object) -> None:
    if stop == "":
        stop = [""]
    with pytest.raises(ValueError, match="stop must hold strings of at least one character"):
        check_stops(stop)  # type: ignore[arg-type]
    assert check_stops("ab") == ("ab",)


def test_stops_need_a_tokenizer() -> None:
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        Output(5, (), ("x",))


def test_split_characters_are_complete_in_every_event(tmp_path: Path) -> None:
    """A15 with a stop string behind the last character."""
    write_byte_tokenizer(tmp_path)
    data = "\U0001f600 \u4f60END".encode()
    output = Output(100, (), ("END",), Tokenizer(tmp_path).detokenizer([65]))
    events = [event for byte in data for event in output.push(byte, 0.0)]
    assert "".join(event.text or "" for event in events) == "\U0001f600 \u4f60"
    assert all("\ufffd" not in (event.text or "") for event in events)
    assert [event.token_id for event in events] == [*"\U0001f600 \u4f60".encode(), None]
