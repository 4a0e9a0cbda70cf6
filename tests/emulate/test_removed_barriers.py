"""Every barrier and every wait of the kernels, removed one at a time, must be missed by a test."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from emulate.harness import (
    KERNELS,
    EmulationError,
    Kernels,
    behind_cuda_ops,
    build,
    compiler,
)
from torch import Tensor

from tinydecode.ops import cuda, ref, step

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a host C++ compiler")
SEEDS = range(1, 13)


def occurrences(name: str, pattern: str) -> list[int]:
    """Offsets of a pattern in a kernel source."""
    return [found.start() for found in re.finditer(pattern, (KERNELS / name).read_text())]


def mutant(folder: Path, name: str, offset: int, old: str, new: str, *compiled: str) -> Kernels:
    """kernels/ with one piece of text replaced; only `compiled` are built."""
    copied = folder / "kernels"
    shutil.copytree(KERNELS, copied)
    text = (copied / name).read_text()
    assert text.startswith(old, offset)
    (copied / name).write_text(text[:offset] + new + text[offset + len(old) :])
    only_head_dim_64(copied / "attention.cuh")
    sources = [copied / source for source in compiled]
    return Kernels(build(sources, include=copied, flags=["-O0", "-Wno-error"]))


def only_head_dim_64(header: Path) -> None:
    """No test here takes another, and most of the time would go into compiling for them."""
    text, count = re.subn(r" *case (?!64)\d+:\n.*;\n", "", header.read_text())
    assert count == 4
    header.write_text(text)


def assert_noticed(kernels: Kernels, run: Callable[[], Tensor], expected: Tensor) -> None:
    with behind_cuda_ops(kernels):
        for seed in SEEDS:
            kernels.schedule(seed, multiprocessors=1, clusters=64)
            try:
                if not torch.allclose(run(), expected, rtol=1e-3, atol=1e-5):
                    return
            except EmulationError:
                return
    pytest.fail("no schedule shows that anything is missing")


ATTENTION = {  # and a dtype that comes by
    "attention.cu": torch.float32,
    "attention_tensor.cu": torch.float16,
    "attention_simple.cu": torch.float32,
}


def attention_inputs(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """What takes every barrier of the kernels to be right.

    Without tensor cores five tokens are two tiles of rows, and with 150 keys and four kv heads a
    block does all three chunks. On tensor cores three blocks of a cluster of four share the keys.
    """
    q = torch.randn(1, 5, 4, 64).to(dtype)
    k_cache, v_cache = (torch.randn(1, 4, 160, 64).to(dtype) for _ in range(2))
    return q, k_cache, v_cache, torch.tensor([145], dtype=torch.int32)


def attention_mutations(pattern: str) -> list[tuple[str, int]]:
    return [(name, offset) for name in ATTENTION for offset in occurrences(name, pattern)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_nothing_is_noticed_when_nothing_is_removed(dtype: torch.dtype) -> None:
    kernels = Kernels(build())
    inputs = attention_inputs(dtype)
    with pytest.raises(pytest.fail.Exception, match="no schedule shows"):
        assert_noticed(kernels, lambda: cuda.attention(*inputs), ref.attention(*inputs))


@pytest.mark.parametrize(("name", "offset"), attention_mutations(r"__syncthreads\(\);"))
def test_barriers_of_attention(tmp_path: Path, name: str, offset: int) -> None:
    kernels = mutant(tmp_path, name, offset, "__syncthreads();", "", *ATTENTION)
    inputs = attention_inputs(ATTENTION[name])
    assert_noticed(kernels, lambda: cuda.attention(*inputs), ref.attention(*inputs))


@pytest.mark.parametrize(("name", "offset"), attention_mutations(r"cp_async_wait<1>"))
def test_waits_of_attention(tmp_path: Path, name: str, offset: int) -> None:
    kernels = mutant(tmp_path, name, offset, "cp_async_wait<1>", "cp_async_wait<9>", *ATTENTION)
    inputs = attention_inputs(ATTENTION[name])
    assert_noticed(kernels, lambda: cuda.attention(*inputs), ref.attention(*inputs))


IN_CLUSTERS = [  # what is taken out, and what is left instead
    (r"cluster_arrive\(\);", ";"),
    (r"cluster_wait\(\);", ";"),
    (r"mbarrier_init\(meeting\.arrived, 1\);", ";"),
    (r"mbarrier_init_fence\(\);", ";"),
    (r"mbarrier_expect\([^;]*\);", ";"),
    (r"mbarrier_expect\([^;]*\);", "mbarrier_arrive(meeting.arrived);"),
    (r"mbarrier_wait_remote\(meeting\.arrived, 0\);", ";"),
]


@pytest.mark.parametrize(("pattern", "left"), IN_CLUSTERS)
def test_what_blocks_of_attention_wait_for(tmp_path: Path, pattern: str, left: str) -> None:
    places = [
        (path.name, found.start(), found.group())
        for path in KERNELS.glob("attention*")
        for found in re.finditer(pattern, path.read_text())
    ]
    assert len(places) == 1
    kernels = mutant(tmp_path, *places[0], left, *ATTENTION)
    inputs = attention_inputs(torch.float16)
    assert_noticed(kernels, lambda: cuda.attention(*inputs), ref.attention(*inputs))


def test_barrier_of_block_reduce(tmp_path: Path) -> None:
    (offset,) = occurrences("common.cuh", r"__syncthreads\(\);")
    kernels = mutant(tmp_path, "common.cuh", offset, "__syncthreads();", "", "rms_norm.cu")
    x, weight = torch.randn(2, 2048), torch.ones(2048)
    assert_noticed(kernels, lambda: cuda.rms_norm(x, weight, 1e-5), ref.rms_norm(x, weight, 1e-5))


LINEAR_SEEDS = (58, *range(1, 9))  # 58 holds a warp back while the others load their part of x


def linear_runs(rows: int) -> tuple[Callable[[], Tensor], Tensor]:
    """Normed and plain products on one block: groups of tiles, and more stages than the ring has.

    The rows of one are short enough to stay in registers, or in shared memory if there are many.
    """
    short, long, width = 264, 4104, 36
    x, short_x = torch.randn(1, rows, long).half(), torch.randn(1, rows, short).half()
    norm = torch.rand(long).half()
    down = torch.randn(72, long).mul(long**-0.5).half()
    gate_up = torch.randn(24, long).mul(long**-0.5).half()
    short_gate_up = torch.randn(2 * width, short).mul(short**-0.5).half()
    residual = torch.randn(1, rows, 72).half()

    def run(module: ModuleType) -> Tensor:
        added = residual.clone()
        module.linear_add(x, down, added)
        parts = [
            added,
            module.linear_gate_up(x, norm, gate_up, 1e-5),
            module.linear_gate_up(short_x, norm[:short].clone(), short_gate_up, 1e-5),
        ]
        return torch.cat(parts, dim=-1).float()

    return lambda: run(step), run(ref)


def linear_mutations() -> list[tuple[str, int, str, int]]:
    """What is taken out of linear*.cu*, and the rows of activations that notice.

    Barriers, waits for a stage or for activations; of many rows also for the lanes of a warp.
    """
    pieces = [
        r"__syncthreads\(\);",
        r"named_barrier\(kConsumerBarrier, kConsumers\);",
        r"mbarrier_wait\(&header\.(?:full|empty)\[place\.slot\], place\.parity\);",
    ]
    of_many_rows = [*pieces, r"cp_async_wait<kMaxSlots - 1>\(\);", r"__syncwarp\(\);"]
    files = [
        *[(name, pieces, 3) for name in ("linear.cu", "linear_activations.cuh", "linear_ring.cuh")],
        *[(name, of_many_rows, 9) for name in ("linear_rows.cuh", "linear_shared_rows.cuh")],
    ]
    return [
        (name, found.start(), found.group(), rows)
        for name, patterns, rows in files
        for pattern in patterns
        for found in re.finditer(pattern, (KERNELS / name).read_text())
    ]


@pytest.mark.parametrize(("name", "offset", "piece", "rows"), linear_mutations())
def test_barriers_and_waits_of_linear(
    tmp_path: Path, name: str, offset: int, piece: str, rows: int
) -> None:
    kernels = mutant(tmp_path, name, offset, piece, ";", "linear.cu")
    run, expected = linear_runs(rows)
    with behind_cuda_ops(kernels):
        for seed in LINEAR_SEEDS:
            kernels.schedule(seed, multiprocessors=1)
            try:
                if not torch.allclose(run(), expected, rtol=2e-2, atol=2e-2):
                    return
            except EmulationError:
                return
    pytest.fail("no schedule shows that anything is missing")


@pytest.mark.parametrize("rows", [3, 9])
def test_linear_is_right_when_nothing_is_removed(rows: int) -> None:
    kernels = Kernels(build())
    run, expected = linear_runs(rows)
    with behind_cuda_ops(kernels):
        for seed in LINEAR_SEEDS:
            kernels.schedule(seed, multiprocessors=1)
            assert torch.allclose(run(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("rows", "capability"), [(9, 12), (12, 12), (16, 12), (16, 8)])
def test_many_rows_where_shared_memory_is_small(tmp_path: Path, rows: int, capability: int) -> None:
    """99 KB: one chunk of activations, a ring of one stage or none; none before sm_90."""
    limit = "launcher.attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin)"
    (offset,) = occurrences("linear.cu", re.escape(limit))
    kernels = mutant(tmp_path, "linear.cu", offset, limit, "99 * 1024", "linear.cu")
    run, expected = linear_runs(rows)
    with behind_cuda_ops(kernels):
        for seed in (1, 2, 3):
            kernels.schedule(seed, multiprocessors=1, capability=capability)
            assert torch.allclose(run(), expected, rtol=2e-2, atol=2e-2)
