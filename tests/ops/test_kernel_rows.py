"""The kernels that work row by row (norms, silu_mul, argmax) against twins and float64."""

from __future__ import annotations

import math

import oracle
import pytest
import torch
from tolerance import assert_as_good_as_twin

from tinydecode.ops import cuda, ref

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# One pack, an odd size, whole warps, a tail, and rows longer than the threads of a block.
HIDDEN = [8, 111, 2048, 4100, 9000]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", HIDDEN)
def test_rms_norm(bench, dtype: torch.dtype, hidden: int) -> None:
    x = (torch.randn(2, 2, hidden) * 3).to(dtype)
    weight = (torch.rand(hidden) + 0.5).to(dtype)
    expected = oracle.rms_norm(x, weight, 1e-5)
    results = []
    for seed, offset in ((1, 0), (2, 0), (3, 1)):  # 1: no pointer is aligned
        bench.schedule(seed, resident=seed)
        put_x, put_weight = bench.put(x, offset), bench.put(weight, offset)
        out = bench.blank((2, 2, hidden), dtype, offset)
        assert cuda.rms_norm(put_x, put_weight, 1e-5, out.tensor) is out.tensor
        out.assert_guards()
        assert torch.equal(put_x.cpu(), x) and torch.equal(put_weight.cpu(), weight)
        results.append(out.tensor)
    twin = ref.rms_norm(bench.put(x), bench.put(weight), 1e-5)
    assert_as_good_as_twin(results[0], twin, expected)
    assert torch.equal(results[0], results[1]), "depends on the schedule"
    assert torch.equal(results[0], results[2]), "depends on alignment"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", HIDDEN)
def test_add_rms_norm(bench, dtype: torch.dtype, hidden: int) -> None:
    x, residual = torch.randn(3, hidden).to(dtype), torch.randn(3, hidden).to(dtype)
    weight = (torch.rand(hidden) + 0.5).to(dtype)
    total = residual + x
    results = []
    for seed, offset in ((1, 0), (2, 0), (3, 3)):
        bench.schedule(seed)
        put_x, put_residual = bench.put(x, offset), bench.blank((3, hidden), dtype, offset)
        put_residual.tensor.copy_(residual)
        out = bench.blank((3, hidden), dtype, offset)
        cuda.add_rms_norm(put_x, put_residual.tensor, bench.put(weight, offset), 1e-5, out.tensor)
        out.assert_guards()
        put_residual.assert_guards("residual")
        assert torch.equal(put_residual.tensor.cpu(), total)
        assert torch.equal(put_x.cpu(), x)
        results.append(out.tensor)
    twin = ref.rms_norm(bench.put(total), bench.put(weight), 1e-5)
    assert_as_good_as_twin(results[0], twin, oracle.rms_norm(total, weight, 1e-5))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    # The fused form is the norm of the rounded sum, to the bit.
    assert torch.equal(results[0], cuda.rms_norm(bench.put(total), bench.put(weight), 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_in_place_of_x_and_with_strided_rows(bench, dtype: torch.dtype) -> None:
    x, weight = torch.randn(4, 3, 96).to(dtype), bench.put(torch.ones(96).to(dtype))
    expected = cuda.rms_norm(bench.put(x), weight, 1e-6)
    in_place = bench.put(x)
    cuda.rms_norm(in_place, weight, 1e-6, in_place)
    assert torch.equal(in_place, expected)
    zero = bench.put(torch.zeros(4, 3, 96).to(dtype))
    in_place = bench.put(x)
    cuda.add_rms_norm(in_place, zero, weight, 1e-6, in_place)
    assert torch.equal(in_place, expected)
    last = bench.put(x)[:, -1:]  # the last token of each row of a batch
    assert not last.is_contiguous()
    assert torch.equal(cuda.rms_norm(last, weight, 1e-6), expected[:, -1:])


def test_a_row_does_not_depend_on_the_number_of_rows(bench) -> None:
    x, weight = bench.put(torch.randn(5, 640)), bench.put(torch.rand(640))
    together = cuda.rms_norm(x, weight, 1e-5)
    for row in range(5):
        assert torch.equal(cuda.rms_norm(x[row : row + 1], weight, 1e-5), together[row : row + 1])


def test_norms_of_extreme_values(bench) -> None:
    # Squares that float16 cannot hold, and a row of zeros.
    x = torch.zeros(2, 256, dtype=torch.float16)
    x[0] = 60000.0
    out = cuda.rms_norm(bench.put(x), bench.put(torch.ones(256).half()), 1e-6).cpu()
    assert out[0].tolist() == [1.0] * 256 and out[1].tolist() == [0.0] * 256


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 77, 1536])
def test_silu_mul(bench, dtype: torch.dtype, width: int) -> None:
    gate_up = (torch.randn(3, 2 * width) * 4).to(dtype)
    results = []
    for offset in (0, 1):
        put = bench.put(gate_up, offset)
        out = bench.blank((3, width), dtype, offset)
        cuda.silu_mul(put, out.tensor)
        out.assert_guards()
        assert torch.equal(put.cpu(), gate_up)
        results.append(out.tensor)
    twin = ref.silu_mul(bench.put(gate_up))
    assert_as_good_as_twin(results[0], twin, oracle.silu_mul(gate_up))
    assert torch.equal(results[0], results[1]), "depends on alignment"
    # The tails of silu: 0 on the left, the identity on the right, never NaN.
    extreme = torch.tensor([-math.inf, -1e4, -100.0, 0.0, 100.0, 1e4] + [2.0] * 6).to(dtype)
    assert cuda.silu_mul(bench.put(extreme)).cpu()[1:].tolist() == [
        x * 2 for x in extreme[1:6].clamp(min=0).tolist()
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 9, 1000, 4099])
def test_argmax(bench, dtype: torch.dtype, vocab: int) -> None:
    logits = torch.randn(3, vocab).to(dtype)
    for seed, offset in ((1, 0), (2, 1)):
        bench.schedule(seed)
        out = bench.blank((3,), torch.int64)
        flag = torch.zeros(1, dtype=torch.int32, device=bench.device)
        cuda.argmax(bench.put(logits, offset), out.tensor, flag)
        out.assert_guards()
        # The first of equals: torch's own argmax does not promise which.
        first = [row.index(max(row)) for row in logits.tolist()]
        assert out.tensor.tolist() == first
        assert flag.item() == 0


def test_argmax_ties_and_signs(bench) -> None:
    logits = torch.full((4, 5000), -7.0)
    logits[0, [4999, 17, 3000]] = 2.5  # equal, far apart
    logits[1, 1234] = -3.0  # all negative
    logits[2] = -0.0
    logits[2, 40] = 0.0  # equal to -0
    logits[3] = -torch.inf
    flag = torch.zeros(1, dtype=torch.int32, device=bench.device)
    assert cuda.argmax(bench.put(logits)[:3], nonfinite=flag).tolist() == [17, 1234, 0]
    assert flag.item() == 0
    assert cuda.argmax(bench.put(logits)[3:], nonfinite=flag).tolist() == [0]
    assert flag.item() == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_argmax_flags_what_is_not_finite(bench, bad: float) -> None:
    logits = torch.randn(2, 3000)
    logits[0, 7], logits[1, 2999] = 50.0, bad
    flag = torch.zeros(1, dtype=torch.int32, device=bench.device)
    put = bench.put(logits)
    first = cuda.argmax(put[:1], nonfinite=flag)
    assert first.item() == 7 and flag.item() == 0
    both = cuda.argmax(put, nonfinite=flag)
    assert both[0].item() == 7 and flag.item() == 1
    assert (both[1].item() == 2999) == (bad == math.inf)
    cuda.argmax(put[:1], nonfinite=flag)
    assert flag.item() == 1, "the flag stays up"


def test_argmax_of_strided_rows(bench) -> None:
    logits = bench.put(torch.randn(2, 3, 600))[:, -1]
    assert cuda.argmax(logits).tolist() == logits.argmax(-1).tolist()
