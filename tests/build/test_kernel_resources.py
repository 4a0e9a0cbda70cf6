"""Registers and spills of the kernels in the wheels, against ci/kernel_resources.json."""

from __future__ import annotations

import json
import os
from pathlib import Path

import kernel_resources
import pytest

WHEELS = [Path(p) for p in os.environ.get("TD_WHEELS", "").split(os.pathsep) if p]
OUTPUT = """
arch = sm_80
 Function void (anonymous namespace)::norm_kernel<float, (int)4>(float const*, float*, long):
  REG:26 STACK:0 SHARED:128 LOCAL:0 CONSTANT[0]:388 TEXTURE:0 SURFACE:0 SAMPLER:0
arch = sm_90
 Function void (anonymous namespace)::norm_kernel<float, (int)4>(float const*, float*, long):
  REG:24 STACK:16 SHARED:1152 LOCAL:8 CONSTANT[0]:564 TEXTURE:0 SURFACE:0 SAMPLER:0
"""


def test_reading_and_comparing() -> None:
    """Fewer registers pass; more of them, new stack bytes, a new or a missing kernel do not."""
    found = kernel_resources.parse(OUTPUT)
    name = "norm_kernel<float, (int)4>"
    assert found == {name: {"sm_80": [26, 0], "sm_90": [24, 24]}}
    assert kernel_resources.compare({name: {"sm_80": [30, 0], "sm_90": [24, 24]}}, found) == []
    (fault,) = kernel_resources.compare({name: {"sm_80": [26, 0], "sm_90": [24, 0]}}, found)
    assert "sm_90: 24 registers, 24 bytes" in fault
    (fault,) = kernel_resources.compare({name: {"sm_80": [25, 0], "sm_90": [24, 24]}}, found)
    assert "sm_80: 26 registers" in fault
    assert len(kernel_resources.compare({"gone": {}}, found)) == 3


@pytest.mark.build
@pytest.mark.parametrize("wheel", WHEELS, ids=lambda w: w.name.split("-")[0])
def test_nothing_got_worse(wheel: Path) -> None:
    table = json.loads(kernel_resources.TABLE.read_text())
    found = kernel_resources.measure(wheel)
    assert found, "no kernel was found in the wheel"
    faults = kernel_resources.compare(table[kernel_resources.variant_of(wheel)], found)
    assert not faults, "\n".join(faults)
