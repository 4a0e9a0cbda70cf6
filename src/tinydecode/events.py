"""Tokens on their way to the caller: events, text, and where a generation ends."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tinydecode.sampling import Logprobs
from tinydecode.stats import Stats

if TYPE_CHECKING:
    from tinydecode.tokenizer import IncrementalDetokenizer


@dataclass(frozen=True)
class TokenEvent:
    """One step of a stream."""

    token_id: int | None  # None: no new token, only the text or the reason that closes the stream
    text: str | None  # completed text, "" while a character is held back; None without a tokenizer
    time: float  # seconds since the call until the token was in host memory
    from_draft: bool = False  # proposed by a draft and accepted
    finish_reason: str | None = None  # set on the last event: "stop" or "length"
    logprobs: Logprobs | None = None  # if asked for

    @property
    def logprob(self) -> float | None:
        """The token's log-probability under the model's own distribution, if asked for."""
        return None if self.logprobs is None else self.logprobs.logprob


class TokenStream:
    """An iterator of `TokenEvent` over one generation, with its `stats`.

    Dropping it half-way is fine; nothing runs between two events but steps already launched.
    """

    def __init__(self, events: Iterator[TokenEvent], stats: Stats) -> None:
        self._events = events
        self.stats = stats

    def __iter__(self) -> TokenStream:
        return self

    def __next__(self) -> TokenEvent:
        return next(self._events)


def check_stops(stops: str | Collection[str]) -> tuple[str, ...]:
    """Stop strings as a tuple; ValueError for one that is empty or no string."""
    found = (stops,) if isinstance(stops, str) else tuple(stops)
    for stop in found:
        if not isinstance(stop, str) or not stop:
            raise ValueError(f"stop must hold strings of at least one character, found {stop!r}")
    return found


def find_stop(text: str, stops: Sequence[str]) -> int | None:
    """Where the stop string begins that a reader of `text` would complete first; None without one.

    Of those completed by the same character the longest counts. So the answer does not depend on
    how the text was cut into tokens.
    """
    ends = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
    return min(ends)[1] if ends else None


def held_back(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end of `text` could be the beginning of a stop string."""
    longest = max((len(stop) for stop in stops), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        tail = text[-length:]
        if any(stop.startswith(tail) for stop in stops):
            return length
    return 0


class Output:
    """One row's tokens: decides where they end and turns them into events.

    With stop strings an event waits until its text can no longer be part of one; when one is found,
    the tokens whose text begins at or after it are dropped, and a token that it begins inside
    keeps the text before it.

    Args:
        limit: at most this many tokens.
        stop_ids: ids that end the row and are not returned.
        stops: strings that end it and are not returned; they need a detokenizer.
        detokenizer: fills the events' text.

    Attributes:
        finish_reason: "stop" or "length" once the row has ended.
        pushed: tokens given to `push`, the one that ended the row included.
        kept: tokens in the events returned so far.
    """

    def __init__(
        self,
        limit: int,
        stop_ids: Collection[int] = (),
        stops: Sequence[str] = (),
        detokenizer: IncrementalDetokenizer | None = None,
    ) -> None:
        if stops and detokenizer is None:
            raise ValueError("stop strings need a tokenizer: pass tokenizer=")
        self._limit = limit
        self._stop_ids = stop_ids
        self._stops = stops
        self._detokenizer = detokenizer
        self._waiting: list[TokenEvent] = []
        self._held = ""  # the text of the events that wait
        self.finish_reason: str | None = None
        self.pushed = 0
        self.kept = 0

    @property
    def cached(self) -> int:
        """New tokens that belong into the cache: what is kept, and was an input of a step."""
        return max(0, min(self.kept, self.pushed - 1))

    def push(
        self,
        token_id: int,
        time: float,
        logprobs: Logprobs | None = None,
        from_draft: bool = False,
    ) -> list[TokenEvent]:
        """The events that a new token lets out."""
        self.pushed += 1
        if token_id in self._stop_ids:
            return self._end("stop", time)
        text = None if self._detokenizer is None else self._detokenizer.push(token_id)
        self._waiting.append(TokenEvent(token_id, text, time, from_draft, None, logprobs))
        self._held += text or ""
        if self._stops and text:
            begin = find_stop(self._held, self._stops)
            if begin is not None:
                return self._cut(begin, time)
        if self.pushed == self._limit:
            return self._end("length", time)
        return self._release(len(self._held) - held_back(self._held, self._stops))

    def end_at_once(self) -> list[TokenEvent]:
        """The event of a row that was asked for no tokens."""
        return self._end("length", 0.0)

    def _release(self, safe: int, is_last: bool = False) -> list[TokenEvent]:
        """Let out the events whose text ends within the first `safe` held characters.

        A token without text may be part of a character that is not complete, so it goes with the
        text after it.
        """
        position = count = 0
        for number, event in enumerate(self._waiting, 1):
            end = position + len(event.text or "")
            if end > safe:
                break
            if event.text or is_last or not self._stops:
                count = number
            position = end
        released, self._waiting = self._waiting[:count], self._waiting[count:]
        self._held = self._held[position:]
        self.kept += count
        return released

    def _cut(self, begin: int, time: float) -> list[TokenEvent]:
        """A stop string begins at held character `begin`: what stands before it, and the end."""
        events = []
        position = 0
        for event in self._waiting:
            if position >= begin:
                break
            text = event.text or ""
            events.append(replace(event, text=text[: begin - position]))
            position += len(text)
        self.kept += len(events)
        # Text before the stop that no waiting token carries is the flushed end of a character.
        rest = self._held[position:begin]
        self._waiting, self._held = [], ""
        self.finish_reason = "stop"
        return [*events, TokenEvent(None, rest, time, finish_reason="stop")]

    def _end(self, reason: str, time: float) -> list[TokenEvent]:
        tail = None if self._detokenizer is None else self._detokenizer.flush()
        if tail:
            self._held += tail
            begin = find_stop(self._held, self._stops)
            if begin is not None:
                return self._cut(begin, time)
        self.finish_reason = reason
        events = self._release(len(self._held), is_last=True)
        if reason == "stop" or not events:
            return [*events, TokenEvent(None, tail, time, finish_reason=reason)]
        last = events[-1]
        text = None if last.text is None else last.text + (tail or "")
        return [*events[:-1], replace(last, text=text, finish_reason=reason)]
