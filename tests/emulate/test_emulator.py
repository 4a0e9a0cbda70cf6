"""The emulator itself: what it computes, and that it finds the faults it claims to find."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from emulate.harness import HERE, KERNELS, EmulationError, Kernels, build, compiler
from torch import Tensor

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a host C++ compiler")
SEEDS = range(1, 9)


@pytest.fixture(scope="module")
def emulated() -> Kernels:
    return Kernels(build([HERE / "selftest.cu"]))


def ints(*shape: int) -> Tensor:
    return torch.full(shape, -1, dtype=torch.int32)


def wrong_under_some_schedule(emulated: Kernels, run: Callable[[], bool]) -> bool:
    """Whether `run`, which says if the result was right, fails for at least one seed."""
    for seed in SEEDS:
        emulated.schedule(seed)
        if not run():
            return True
    return False


@pytest.mark.parametrize("dynamic", [0, 1])
@pytest.mark.parametrize("resident", [1, 3])
def test_block_barrier_and_shared_memory(emulated: Kernels, dynamic: int, resident: int) -> None:
    source = torch.arange(4 * 96, dtype=torch.int32)
    expected = source.view(4, 96).flip(1).flatten()

    def right(barrier: int) -> bool:
        out = ints(4 * 96)
        emulated.reverse(source, out, 4, 96, dynamic, barrier, 0, 0)
        return torch.equal(out, expected)

    for seed in SEEDS:
        emulated.schedule(seed, resident)
        assert right(barrier=1)
    assert wrong_under_some_schedule(emulated, lambda: right(barrier=0))


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        ("divergent", "divergent barrier"),
        ("deserted", r"selftest.cu:\d+: deadlock .* 1 of 64 threads ended"),
        ("overrun", "past the end of dynamic shared memory"),
    ],
)
def test_faults_are_reported_and_the_next_launch_works(
    emulated: Kernels, kernel: str, message: str
) -> None:
    for seed in SEEDS:
        emulated.schedule(seed)
        with pytest.raises(EmulationError, match=message):
            getattr(emulated, kernel)(ints(64), 0, 0)
        out = ints(128)
        emulated.teams(out, 0, 0)
        assert out[:2].tolist() == [63, 62]


def test_warp_operations(emulated: Kernels) -> None:
    lanes = list(range(32))
    expected = [
        [7] * 32,
        [i ^ 5 for i in lanes],
        [i if i < 3 else i - 3 for i in lanes],
        [i if i > 28 else i + 3 for i in lanes],
        [i if i % 8 > 4 else i + 3 for i in lanes],
        [sum(1 << i for i in lanes if i % 3 == 0)] * 32,
        [1] * 32,
        [0] * 32,
        [31] * 32,
    ]
    for seed in SEEDS:
        emulated.schedule(seed)
        out = ints(9, 32)
        emulated.warp(out, 0, 0)
        assert out.tolist() == expected


def test_atomics_across_blocks(emulated: Kernels) -> None:
    for resident in (1, 4):
        emulated.schedule(3, resident)
        counters, out = torch.zeros(2, dtype=torch.int32), ints(1)
        emulated.atomic(counters, out, 0, 0)
        assert out.item() == 5 * sum(range(64))


def test_blocks_that_wait_for_one_another(emulated: Kernels) -> None:
    emulated.schedule(1, resident=6)
    arrived, out = torch.zeros(1, dtype=torch.int32), ints(6 * 32)
    emulated.grid_barrier(arrived, out, 6, 0, 0)
    assert out.unique().tolist() == [6]


def test_bulk_copies_through_a_ring(emulated: Kernels) -> None:
    source = torch.arange(10 * 128, dtype=torch.int32)

    def right(wait: int) -> bool:
        out = ints(10 * 128)
        try:
            emulated.ring(source, out, 10, wait, 0, 0)
        except EmulationError:
            return False
        return torch.equal(out, 2 * source)

    for seed in SEEDS:
        emulated.schedule(seed)
        assert right(wait=1)
    assert wrong_under_some_schedule(emulated, lambda: right(wait=0))


def test_async_copies_land_by_group(emulated: Kernels) -> None:
    source = torch.arange(256, dtype=torch.int32)
    expected = source.view(2, 128).flip(1).flatten()

    def right(first: int) -> bool:
        out = ints(256)
        emulated.async_copy(source, out, first, 0, 0)
        return torch.equal(out, expected)

    for seed in SEEDS:
        emulated.schedule(seed)
        assert right(first=1)
    assert wrong_under_some_schedule(emulated, lambda: right(first=2))


def test_named_barriers(emulated: Kernels) -> None:
    for seed in SEEDS:
        emulated.schedule(seed)
        out = ints(128)
        emulated.teams(out, 0, 0)
        assert torch.equal(out, torch.arange(128, dtype=torch.int32).view(2, 64).flip(1).flatten())


def test_matrix_instruction_by_its_fragment_map(emulated: Kernels) -> None:
    # Small integers: exact in bf16 and in every order of additions.
    a = torch.randint(-8, 9, (16, 16)).to(torch.bfloat16)
    b = torch.randint(-8, 9, (16, 8)).to(torch.bfloat16)
    d = torch.full((16, 8), float("nan"))
    emulated.mma(a, b, d, 0, 0)
    assert torch.equal(d, a.float() @ b.float())


def test_float16_and_bfloat16_round_as_torch_does(emulated: Kernels, tmp_path: Path) -> None:
    source = tmp_path / "convert.cu"
    source.write_text(
        '#include "cuda_bf16.h"\n'
        'extern "C" int td_convert(const float* x, uint16_t* half, uint16_t* bf16, float* back,\n'
        "                          int64_t n, int, void*) {\n"
        "  for (int64_t i = 0; i < n; ++i) {\n"
        "    half[i] = __float2half_rn(x[i]).raw;\n"
        "    bf16[i] = __float2bfloat16_rn(x[i]).raw;\n"
        "    back[i] = __half2float(__float2half_rn(x[i]));\n"
        "  }\n"
        "  return 0;\n"
        "}\n"
    )
    kernels = Kernels(build([source]))
    exponents = torch.randint(-30, 18, (20000,)).float()
    x = torch.cat((torch.randn(20000) * exponents.exp2(), torch.randn(5000) * 1e-7))
    x = torch.cat((x, torch.tensor([0.0, -0.0, 65519.0, 65520.0, 1e6, -1e6, 2.0**-24, 2.0**-25])))
    half, bf16 = torch.empty_like(x, dtype=torch.float16), torch.empty_like(x, dtype=torch.bfloat16)
    back = torch.empty_like(x)
    kernels.convert(x, half, bf16, back, x.numel(), 0, 0)
    assert torch.equal(half, x.half()) and torch.equal(back, x.half().float())
    assert torch.equal(bf16, x.bfloat16())


def test_host_code_remembers_until_the_gpu_changes(emulated: Kernels) -> None:
    calls, out = ints(1), ints(128)
    for expected in (1, 2, 3, 1, 2, 3):
        if expected == 1:
            emulated.schedule()
        emulated.counted(calls, out, 0, 0)
        assert calls.item() == expected


CLUSTER_FAULTS = {
    "none": 0,
    "no start": 1,
    "no wait": 2,
    "few bytes": 3,
    "many bytes": 4,
    "one buffer": 5,
}


def cluster_sum(emulated: Kernels, fault: str, ranks: int, blocks: int, rounds: int) -> bool:
    """Whether the sums over clusters are right."""
    source = torch.randint(0, 100, (rounds, blocks, 64), dtype=torch.int32)
    totals = source.view(rounds, blocks // ranks, -1).sum(-1).float()
    expected = totals.repeat_interleave(64 * ranks, dim=1).view(rounds, blocks, 64)
    out = torch.full((rounds, blocks, 64), float("nan"))
    emulated.cluster_sum(source, out, ranks, blocks, rounds, CLUSTER_FAULTS[fault], 0, 0)
    return torch.equal(out, expected)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_sum_over_a_cluster(emulated: Kernels, ranks: int) -> None:
    for seed in SEEDS:
        emulated.schedule(seed, resident=seed % 3 + 1)
        assert cluster_sum(emulated, "none", ranks, blocks=16, rounds=5)


# What comes of each fault, under the one schedule or the other.
UNDER_WAY = "a block ended with stores to it under way"
HAS_ENDED = "store to the shared memory of a block that has ended"
DEADLOCK = "threads ended"
WRONG = "wrong sums"
OUTCOMES = {
    "no start": {
        "store to the shared memory of a block that has not begun",
        "the other block has not set up the mbarrier",
        "no fence and barrier of the cluster since the other block set up the mbarrier",
    },
    "no wait": {WRONG},
    "few bytes": {WRONG, DEADLOCK, UNDER_WAY, HAS_ENDED},
    "many bytes": {DEADLOCK},
    "one buffer": {WRONG, DEADLOCK, UNDER_WAY, HAS_ENDED},
}


@pytest.mark.parametrize("fault", OUTCOMES)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_faults_in_the_sum_over_a_cluster(emulated: Kernels, ranks: int, fault: str) -> None:
    found = set()
    rounds = 1 if fault == "few bytes" else 5  # too few of them are too many in a later round
    for seed in range(1, 17):
        emulated.schedule(seed)
        try:
            if not cluster_sum(emulated, fault, ranks, blocks=ranks, rounds=rounds):
                found.add(WRONG)
        except EmulationError as error:
            text = str(error).rpartition(": ")[2]
            found.add(DEADLOCK if text.endswith(DEADLOCK) else text)
    assert found
    assert found <= OUTCOMES[fault]
    if fault == "no start":
        assert "store to the shared memory of a block that has not begun" in found
    if fault in ("few bytes", "one buffer"):
        assert WRONG in found or UNDER_WAY in found


def test_blocks_of_a_cluster_that_end_at_once(emulated: Kernels) -> None:
    out = torch.full((8, 64), -1.0)
    for seed in SEEDS:
        emulated.schedule(seed)
        emulated.cluster_idle(1, 1, out, 0, 0)
        assert out[:, 0].tolist() == [0, 2, -1, -1, 0, 2, -1, -1]
        with pytest.raises(EmulationError, match=rf"selftest.cu:\d+: {HAS_ENDED}"):
            emulated.cluster_idle(2, 1, out, 0, 0)


def test_blocks_of_a_cluster_that_end_too_early(emulated: Kernels) -> None:
    early = set()
    for seed in range(1, 65):
        emulated.schedule(seed)
        try:
            emulated.cluster_idle(1, 0, torch.empty(8, 64), 0, 0)
        except EmulationError as error:
            early.add(str(error).rpartition(": ")[2])
    assert early == {UNDER_WAY, HAS_ENDED}


@pytest.mark.parametrize(
    ("which", "message"),
    [
        (0, r"deadlock in block \(1, 0, 0\): thread \d+ waits here; 0 of 64 threads ended"),
        (1, "cluster_wait without a cluster_arrive"),
        (2, "cluster_arrive again without a cluster_wait between"),
        (3, "store to block 2 of a cluster of 2"),
        (4, "store in another block at an address outside dynamic shared memory"),
        (5, "store that is not aligned to its 8 bytes"),
        (6, "divergent warp: other lanes are at .*selftest.cu"),
        (7, "mbarrier in another block at an address outside dynamic shared memory"),
        (8, "the other block has not set up the mbarrier"),
        (9, "no fence and barrier of the cluster since the other block set up the mbarrier"),
        (10, "no fence and barrier of the cluster since the other block set up the mbarrier"),
    ],
)
def test_misuse_of_clusters_is_reported(emulated: Kernels, which: int, message: str) -> None:
    for seed in SEEDS:
        emulated.schedule(seed)
        with pytest.raises(EmulationError, match=rf"selftest.cu:\d+: .*{message}"):
            emulated.cluster_misuse(which, 0, 0)
    emulated.cluster_misuse(-1, 0, 0)


def test_launches_of_clusters_are_checked(emulated: Kernels) -> None:
    room = ints(1)
    for clusters in (0, 3):
        emulated.schedule(clusters=clusters)
        emulated.cluster_room(8, 0, room, 0, 0)
        assert room.item() == clusters
    invalid_cluster_size = "cudaError 912"
    with pytest.raises(RuntimeError, match=invalid_cluster_size):
        emulated.cluster_room(16, 0, room, 0, 0)
    emulated.cluster_room(16, 1, room, 0, 0)
    with pytest.raises(RuntimeError, match=invalid_cluster_size):
        emulated.cluster_room(17, 1, room, 0, 0)
    source, out = torch.zeros(4, 64, dtype=torch.int32), torch.empty(4, 64)
    with pytest.raises(EmulationError, match="must divide the grid"):
        emulated.cluster_sum(source, out, 3, 4, 1, 0, 0, 0)
    emulated.schedule(capability=8)
    with pytest.raises(EmulationError, match="before compute capability 9"):
        emulated.cluster_sum(source, out, 2, 4, 1, 0, 0, 0)
    emulated.schedule(clusters=0)
    with pytest.raises(EmulationError, match="no room for a cluster"):
        emulated.cluster_sum(source, out, 2, 4, 1, 0, 0, 0)


@pytest.mark.build
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_the_same_sources_are_cuda(tmp_path: Path) -> None:
    command = ["nvcc", "-std=c++17", "-arch=sm_90", f"-I{KERNELS}", "-c", "-o", tmp_path / "o.o"]
    subprocess.run([*command, HERE / "selftest.cu"], check=True)
