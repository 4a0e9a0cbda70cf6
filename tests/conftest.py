"""Devices, markers and the shared models of the tests."""

from __future__ import annotations

import os

import pytest
import torch

# The models here are tiny: a second thread costs more than it brings, and more so beside other
# processes that have the same idea.
torch.set_num_threads(1)

REQUIRE_CUDA = os.environ.get("TD_REQUIRE_CUDA", "") not in ("", "0")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip `cuda` tests where there is no GPU, unless TD_REQUIRE_CUDA turns that into failures.

    Tests marked `long` are left out unless -m asks for them.
    """
    if "long" not in (config.option.markexpr or ""):
        config.hook.pytest_deselected(items=[item for item in items if "long" in item.keywords])
        items[:] = [item for item in items if "long" not in item.keywords]
    if torch.cuda.is_available() or REQUIRE_CUDA:
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "cuda" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The CPU, and a GPU where there is one: one test body covers both."""
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
