"""The progress display: a bar on a terminal, one line elsewhere, nothing for short work."""

from __future__ import annotations

import io

from tinydecode.progress import ProgressBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_bar_on_a_terminal() -> None:
    stream = Terminal()
    with ProgressBar("loading", stream) as bar:
        bar.INTERVAL = 0.0
        bar(0, 10_000_000)
        bar(5_000_000, 10_000_000)
        bar(10_000_000, 10_000_000)
    frames = stream.getvalue().split("\r")[1:]
    assert frames[0] == f"loading [{'.' * 30}]   0% 0 of 10 MB"
    assert frames[1] == f"loading [{'#' * 15}{'.' * 15}]  50% 5 of 10 MB"
    assert frames[2] == f"loading [{'#' * 30}] 100% 10 of 10 MB"
    assert frames[3] == "\x1b[K"  # the line is empty again


def test_one_line_in_a_log() -> None:
    stream = io.StringIO()
    with ProgressBar("loading", stream) as bar:
        for done in range(5):
            bar(done, 3_000_000)
    assert stream.getvalue() == "loading (3 MB)\n"


def test_short_work_shows_nothing() -> None:
    for stream in (Terminal(), io.StringIO()):
        with ProgressBar("loading", stream, delay=60.0) as bar:
            bar(1, 2)
        assert stream.getvalue() == ""


def test_empty_work_is_no_division_by_zero() -> None:
    stream = Terminal()
    ProgressBar("loading", stream)(0, 0)
    assert "0 of 0 MB" in stream.getvalue()
