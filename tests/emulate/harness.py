"""Builds kernels/*.cu for the host and calls the td_* entries on CPU tensors.

The library has the very entry points of kernels/td_api.h, so a test drives the emulated kernels
as `tinydecode._C` drives the real ones. See emu.h for what the emulator does and does not find.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent
KERNELS = HERE.parents[1] / "kernels"
LAUNCH_FAILURE = 719
FLAGS = [
    *("-std=c++17", "-O1", "-fPIC", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE"),
    *("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"),
    *("-DTD_EMULATE", '-DTD_ARCHS="host"'),
]


def compiler() -> str | None:
    """The host compiler, or None where there is none."""
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")


def build(
    sources: Sequence[Path] | None = None, *, include: Path = KERNELS, flags: Sequence[str] = ()
) -> Path:
    """Compile the emulator and some kernel sources into one shared library.

    Libraries and the object files of sources are kept in the temporary folder under a hash of
    everything that goes into them, so that only a change is compiled again.

    Args:
        sources: .cu files; all of kernels/ when None.
        include: the folder of common.cuh.
        flags: further compiler flags.
    """
    sources = sorted(KERNELS.glob("*.cu")) if sources is None else list(sources)
    folder = Path(tempfile.gettempdir()) / f"tinydecode-emulate-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    headers = [*HERE.glob("*.h"), *(HERE / "shim").iterdir()]
    headers += [*include.glob("*.cuh"), *include.glob("*.h")]
    digest = hashlib.sha256("\0".join([str(compiler()), *FLAGS, *flags]).encode())
    for path in sorted(headers):
        digest.update(path.name.encode() + path.read_bytes())
    options = [*FLAGS, f"-I{HERE / 'shim'}", f"-I{include}", f"-I{HERE}", *flags]

    def compile_one(source: Path) -> Path:
        of_source = digest.copy()
        of_source.update(source.name.encode() + source.read_bytes())
        target = folder / f"{of_source.hexdigest()[:24]}.o"
        return _once(target, lambda partial: _compile(source, partial, options))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, sorted([*HERE.glob("*.cpp"), *sources])))
    linked = hashlib.sha256("\0".join(map(str, objects)).encode())
    command = [str(compiler()), "-shared", *map(str, objects), "-o"]
    library = folder / f"{linked.hexdigest()[:24]}.so"
    return _once(library, lambda partial: _run([*command, str(partial)]))


def _once(target: Path, make: Callable[[Path], None]) -> Path:
    """The target, made by `make` where there is none."""
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=target.parent) as work:
            partial = Path(work) / target.name
            make(partial)
            partial.rename(target)  # atomic: another test process may be making the same
    return target


def _compile(source: Path, target: Path, options: Sequence[str]) -> None:
    _run([str(compiler()), *options, "-x", "c++", "-c", str(source), "-o", str(target)])
    if source.suffix == ".cu":
        # Kernels have no static variables but shared memory, which the scheduler must find. (A
        # section attribute would say so in the source, but GCC ignores it inside templates.)
        _run(["objcopy", "--rename-section", ".bss=td_shared", str(target)])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"


class EmulationError(Exception):
    """What the emulator found: a deadlock, a divergent barrier, a write out of bounds."""


class Kernels:
    """The td_* entries of a library, callable like the functions of `tinydecode._C`.

    Pointers and integers are passed as int, factors as float; for tests that call entries directly,
    tensors stand for their address.
    """

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.emu_error.restype = ctypes.c_char_p
        self.schedule()

    def schedule(
        self,
        seed: int = 1,
        resident: int = 1,
        multiprocessors: int = 2,
        capability: int = 9,
        clusters: int = 1,
    ) -> None:
        """Choose the order of fibers, and what the GPU is like.

        Static variables of the kernels' files start anew: host code may have looked at the GPU.

        Args:
            seed: of the order of fibers, and of all else that is left to chance.
            resident: blocks that run side by side; clusters, where a launch has them.
            multiprocessors: of the GPU.
            capability: its major compute capability.
            clusters: what cudaOccupancyMaxActiveClusters says. With 0 launches of clusters fail.
        """
        self._library.emu_configure(
            ctypes.c_uint64(seed), resident, multiprocessors, capability, clusters
        )

    def __getattr__(self, name: str) -> Callable[..., int | None]:
        if name.startswith("_"):
            raise AttributeError(name)
        function = getattr(self._library, f"td_{name}")
        returns_a_number = name.endswith("_workspace")
        function.restype = ctypes.c_int64 if returns_a_number else ctypes.c_int

        def call(*arguments: object) -> int | None:
            result = int(function(*map(_argument, arguments)))
            if returns_a_number:
                return result
            if result == LAUNCH_FAILURE:
                raise EmulationError(self._library.emu_error().decode())
            if result != 0:
                raise RuntimeError(f"td_{name} returned cudaError {result}")
            return None

        return call


def _argument(value: object) -> object:
    if isinstance(value, Tensor):
        value = value.data_ptr()
    if isinstance(value, float):
        return ctypes.c_float(value)
    assert isinstance(value, int)
    return ctypes.c_int64(value)  # a callee that takes fewer bits reads the low ones


@contextmanager
def behind_cuda_ops(kernels: Kernels) -> Iterator[None]:
    """Make tinydecode.ops.cuda work on CPU tensors, with these kernels behind its checks."""
    from tinydecode.ops import cuda

    with mock.patch.multiple(
        cuda, _native=kernels, _DEVICE_TYPE="cpu", _current_stream=lambda index: 0
    ):
        yield


GUARD = 64  # elements on either side of a guarded tensor


class Guarded:
    """A tensor between guard bands, optionally at an address that is not aligned to 16 bytes.

    Attributes:
        tensor: the tensor, filled with NaN (or -1 for integers) until a kernel writes it.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        offset: int = 0,
    ) -> None:
        count = math.prod(shape)
        self._poison = float("nan") if dtype.is_floating_point else -1
        self._start = GUARD + offset
        size = count + 2 * GUARD + offset
        self._buffer = torch.full((size,), self._poison, dtype=dtype, device=device)
        self.tensor = self._buffer[self._start : self._start + count].view(*shape)

    @classmethod
    def of(cls, values: Tensor, device: torch.device | str = "cpu", *, offset: int = 0) -> Guarded:
        """A guarded copy: reading outside it gives NaN."""
        guarded = cls(values.shape, values.dtype, device, offset=offset)
        guarded.tensor.copy_(values)
        return guarded

    def assert_guards(self, what: str = "tensor") -> None:
        """Nothing was written outside the tensor."""
        count = self.tensor.numel()
        for side in (self._buffer[: self._start], self._buffer[self._start + count :]):
            intact = side.isnan() if side.is_floating_point() else side == self._poison
            assert bool(intact.all()), f"{what}: written outside its bounds"
