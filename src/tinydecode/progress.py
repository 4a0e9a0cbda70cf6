"""A progress display on a terminal; a single line anywhere else."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TextIO


class ProgressBar:
    """Shows how much of something is done: call it with (bytes done, bytes in total).

    On a terminal one line is redrawn and removed at the end. Elsewhere (a log, a pipe) the title
    is printed once, when the first report comes.

    Args:
        title: what is going on, such as "loading".
        stream: where to write; standard error if None.
        delay: seconds to wait before the first display, so that short work shows nothing.
    """

    WIDTH = 30  # cells of the bar
    INTERVAL = 0.05  # seconds between redraws

    def __init__(self, title: str, stream: TextIO | None = None, delay: float = 0.0) -> None:
        self._title = title
        self._stream = stream if stream is not None else sys.stderr
        self._is_terminal = self._stream.isatty()
        self._next_draw = time.monotonic() + delay
        self._shown = False

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now < self._next_draw:
            return
        if self._is_terminal:
            self._next_draw = now + self.INTERVAL
            fraction = min(done / total, 1.0) if total > 0 else 0.0
            bar = ("#" * int(fraction * self.WIDTH)).ljust(self.WIDTH, ".")
            amount = f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB"
            self._write(f"\r{self._title} [{bar}] {fraction:4.0%} {amount}")
        elif not self._shown:
            self._write(f"{self._title} ({total / 1e6:,.0f} MB)\n")
        self._shown = True

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._is_terminal and self._shown:
            self._write("\r\x1b[K")  # back to an empty line
