"""The device of a speculation test, as a word."""

from __future__ import annotations

from unittest import mock

import pytest

from tinydecode import Engine
from tinydecode.speculative import Drafter, device
from tinydecode.token_loop import Call

really_fits = device.fits


PLACES = ["cpu", "twins", *(pytest.param(x, marks=pytest.mark.cuda) for x in ("cuda", "driven"))]


@pytest.fixture(params=PLACES)
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The CPU; the device's loop on the CPU, by its twins; a GPU; a GPU driven by the host."""
    if request.param == "twins":
        monkeypatch.setattr(device, "fits", fits_anywhere)
    if request.param == "driven":
        monkeypatch.setattr(device, "fits", lambda *_: False)
    return {"twins": "cpu", "driven": "cuda"}.get(request.param, request.param)


def fits_anywhere(engine: Engine, drafter: Drafter, call: Call) -> bool:
    with mock.patch.object(engine, "samples_on_device", True):
        return really_fits(engine, drafter, call)
