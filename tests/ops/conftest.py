"""Where kernel tests run: emulated on the host everywhere, and on a GPU where there is one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from emulate.harness import Guarded, Kernels, behind_cuda_ops, build, compiler
from torch import Tensor


@dataclass(frozen=True)
class Bench:
    """A place where `tinydecode.ops.cuda` works.

    Attributes:
        device: of the tensors to give it.
        schedule: chooses another order of events (nothing on a GPU, which has its own).
    """

    device: torch.device
    schedule: Callable[..., None]

    def put(self, x: Tensor, offset: int = 0) -> Tensor:
        """A copy on the device, NaN around it; `offset` elements off a 16-byte boundary."""
        return Guarded.of(x, self.device, offset=offset).tensor

    def blank(self, shape: tuple[int, ...], dtype: torch.dtype, offset: int = 0) -> Guarded:
        """An output to be, NaN inside and around it."""
        return Guarded(shape, dtype, self.device, offset=offset)


@pytest.fixture(scope="session")
def emulated_library() -> Path:
    if compiler() is None:
        pytest.skip("needs a host C++ compiler")
    return build()


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.cuda)])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    if request.param == "cuda":
        yield Bench(torch.device("cuda"), lambda *args, **kwargs: None)
        return
    kernels = Kernels(request.getfixturevalue("emulated_library"))
    with behind_cuda_ops(kernels):
        yield Bench(torch.device("cpu"), kernels.schedule)
