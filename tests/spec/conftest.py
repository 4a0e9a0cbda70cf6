"""The device of a speculation test, as a word."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def where(request: pytest.FixtureRequest) -> str:
    return str(request.param)
