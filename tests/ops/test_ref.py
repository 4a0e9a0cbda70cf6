"""The twins by hand and against the float64 oracle; the CPU equivalents against both."""

from __future__ import annotations

import math

import oracle
import pytest
import torch
from tolerance import assert_as_good_as_twin

from tinydecode.ops import cpu, ref

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def close_to_oracle(result: torch.Tensor, expected: torch.Tensor, roundings: int) -> None:
    """Within a few roundings of the storage dtype, relative to the largest value."""
    step = torch.finfo(result.dtype).eps
    error = (result.double() - expected).abs().max()
    assert error <= roundings * step * expected.abs().max(), f"error {error:.3e}"


# ---- by hand -------------------------------------------------------------------------------


@pytest.mark.parametrize("module", [ref, cpu])
def test_rms_norm_by_hand(module) -> None:
    x = torch.tensor([[3.0, -4.0, 0.0, 0.0]])  # mean square 25/4, root 2.5
    out = module.rms_norm(x, torch.tensor([1.0, 2.0, 5.0, 5.0]), 0.0)
    torch.testing.assert_close(out, torch.tensor([[1.2, -3.2, 0.0, 0.0]]))
    # eps sits inside the root: mean square 6.25 + 2.75 = 9.
    out = module.rms_norm(x, torch.ones(4), 2.75)
    torch.testing.assert_close(out, torch.tensor([[1.0, -4 / 3, 0.0, 0.0]]))


@pytest.mark.parametrize("module", [ref, cpu])
def test_add_rms_norm_updates_the_residual_and_norms_the_sum(module) -> None:
    x, residual = torch.tensor([[1.0, -1.0]]), torch.tensor([[2.0, -3.0]])
    out = module.add_rms_norm(x, residual, torch.ones(2), 0.0)
    assert residual.tolist() == [[3.0, -4.0]]
    root = math.sqrt(12.5)
    torch.testing.assert_close(out, torch.tensor([[3 / root, -4 / root]]))
    assert x.tolist() == [[1.0, -1.0]]


@pytest.mark.parametrize("module", [ref, cpu])
def test_rope_turns_a_pair_by_its_position(module) -> None:
    # D = 4, frequencies (pi/2, pi/4): at position 2 the pairs turn by pi and pi/2.
    angle = torch.arange(4.0)[:, None] * torch.tensor([math.pi / 2, math.pi / 4])
    q = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 1, 4)
    k = q.clone()
    module.rope(q, k, angle.cos(), angle.sin(), torch.tensor([2], dtype=torch.int32))
    # Pair (1, 3) by pi: (-1, -3). Pair (2, 4) by pi/2: (-4, 2).
    expected = torch.tensor([-1.0, -4.0, -3.0, 2.0]).view(1, 1, 1, 4)
    torch.testing.assert_close(q, expected)
    torch.testing.assert_close(k, expected)


@pytest.mark.parametrize("module", [ref, cpu])
def test_silu_mul_by_hand(module) -> None:
    out = module.silu_mul(torch.tensor([0.0, math.log(3.0), 7.0, 4.0]))
    # sigmoid(log 3) = 3/4
    torch.testing.assert_close(out, torch.tensor([0.0, math.log(3.0) * 0.75 * 4.0]))


@pytest.mark.parametrize("module", [ref, cpu])
def test_attention_by_hand(module) -> None:
    # Two keys seen with scores 0 and log 3: weights 1/4 and 3/4. A third slot holds NaN.
    q = torch.tensor([2.0 * math.log(3.0), 0.0, 0.0, 0.0]).view(1, 1, 1, 4)  # scale is 1/2
    k = torch.tensor([[0.0, 5.0, 5.0, 5.0], [1.0, 7.0, 7.0, 7.0], [math.nan] * 4])
    v = torch.tensor([[4.0, 0.0, 8.0, 0.0], [0.0, 4.0, 8.0, 0.0], [math.nan] * 4])
    q_only = torch.tensor([1], dtype=torch.int32)
    out = module.attention(q, k.view(1, 1, 3, 4), v.view(1, 1, 3, 4), q_only)
    torch.testing.assert_close(out.flatten(), torch.tensor([1.0, 3.0, 8.0, 0.0]))


@pytest.mark.parametrize("module", [ref, cpu])
def test_kv_append_writes_only_its_slots(module) -> None:
    k = torch.arange(1.0, 9.0).view(1, 2, 2, 2)
    k_cache, v_cache = torch.full((1, 2, 5, 2), -1.0), torch.full((1, 2, 5, 2), -1.0)
    module.kv_append(k, k * 10, k_cache, v_cache, torch.tensor([2], dtype=torch.int32))
    blank = [-1.0, -1.0]
    assert k_cache[0, 0].tolist() == [blank, blank, [1.0, 2.0], [5.0, 6.0], blank]
    assert k_cache[0, 1].tolist() == [blank, blank, [3.0, 4.0], [7.0, 8.0], blank]
    assert v_cache[0, 1].tolist() == [blank, blank, [30.0, 40.0], [70.0, 80.0], blank]


def test_argmax_by_hand() -> None:
    nan, inf = math.nan, math.inf
    flag = torch.zeros(1, dtype=torch.int32)
    logits = torch.tensor([[1.0, 3.0, 3.0], [-5.0, -7.0, -6.0]])
    assert ref.argmax(logits, None, flag).tolist() == [1, 0]
    assert flag.item() == 0
    out = torch.empty(2, dtype=torch.int64)
    assert ref.argmax(torch.tensor([[nan, 3.0, 1.0], [2.0, nan, 9.0]]), out, flag) is out
    assert out.tolist() == [1, 2] and flag.item() == 1
    for row in ([nan, 0.0], [inf, 0.0], [-inf, 0.0]):
        flag.zero_()
        ref.argmax(torch.tensor([row]), None, flag)
        assert flag.item() == 1


# ---- against float64 -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [64, 111, 2048])
def test_norms_against_oracle(dtype: torch.dtype, hidden: int) -> None:
    x, residual = torch.randn(2, 3, hidden).to(dtype), torch.randn(2, 3, hidden).to(dtype)
    weight = (torch.rand(hidden) + 0.5).to(dtype)
    expected = oracle.rms_norm(x, weight, 1e-5)
    twin = ref.rms_norm(x, weight, 1e-5)
    close_to_oracle(twin, expected, 3)
    assert_as_good_as_twin(cpu.rms_norm(x, weight, 1e-5), twin, expected)

    total = (x.double() + residual.double()).to(dtype)
    twin_residual = residual.clone()
    twin = ref.add_rms_norm(x, twin_residual, weight, 1e-5)
    assert torch.equal(twin_residual, total)
    assert torch.equal(twin, ref.rms_norm(total, weight, 1e-5))
    fast = cpu.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, total)
    assert_as_good_as_twin(fast, twin, oracle.rms_norm(total, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul_against_oracle(dtype: torch.dtype) -> None:
    gate_up = (torch.randn(3, 2 * 77) * 4).to(dtype)
    expected = oracle.silu_mul(gate_up)
    twin = ref.silu_mul(gate_up)
    close_to_oracle(twin, expected, 3)
    assert_as_good_as_twin(cpu.silu_mul(gate_up), twin, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("starts", [[0], [37], [5, 0, 90]])
def test_rope_against_oracle(dtype: torch.dtype, starts: list[int]) -> None:
    frequencies = 10000.0 ** (-torch.arange(32, dtype=torch.float64) / 32)
    angle = torch.arange(100, dtype=torch.float64)[:, None] * frequencies
    cos, sin = angle.cos().float(), angle.sin().float()
    # Views into packed qkv, as the model passes them.
    qkv = torch.randn(len(starts), 7, 6 + 2 + 2, 64).to(dtype)
    q, k, v = qkv.split((6, 2, 2), dim=2)
    untouched = v.clone()
    expected_q, expected_k = (oracle.rope(x, frequencies, starts) for x in (q, k))
    fast = qkv.clone()
    seq_lens = torch.tensor(starts, dtype=torch.int32)
    ref.rope(q, k, cos, sin, seq_lens)
    close_to_oracle(q, expected_q, 2)
    close_to_oracle(k, expected_k, 2)
    assert torch.equal(v, untouched)
    fast_q, fast_k, fast_v = fast.split((6, 2, 2), dim=2)
    cpu.rope(fast_q, fast_k, cos, sin, seq_lens)
    assert_as_good_as_twin(fast_q, q, expected_q)
    assert_as_good_as_twin(fast_k, k, expected_k)
    assert torch.equal(fast_v, untouched)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("cached", "new_tokens", "heads", "kv_heads", "dim"),
    [
        ([0], 1, 4, 4, 64),
        ([62, 63], 1, 6, 2, 64),  # the last key of a chunk, the first of the next
        ([64, 0], 5, 8, 1, 80),
        ([127, 3, 200], 3, 7, 7, 96),
        ([185], 9, 9, 3, 64),
    ],
)
def test_attention_against_oracle(
    dtype: torch.dtype,
    poison: float,
    cached: list[int],
    new_tokens: int,
    heads: int,
    kv_heads: int,
    dim: int,
) -> None:
    slots = max(cached) + new_tokens + 70
    q = torch.randn(len(cached), new_tokens, heads, dim).to(dtype)
    k_cache = torch.randn(len(cached), kv_heads, slots, dim).to(dtype)
    v_cache = torch.randn(len(cached), kv_heads, slots, dim).to(dtype)
    for row, length in enumerate(cached):
        k_cache[row, :, length + new_tokens :] = poison
        v_cache[row, :, length + new_tokens :] = poison
    expected = oracle.attention(q, k_cache, v_cache, cached)
    seq_lens = torch.tensor(cached, dtype=torch.int32)
    twin = ref.attention(q, k_cache, v_cache, seq_lens)
    # Float32 sums over hundreds of keys; in the 16-bit dtypes one rounding at the end.
    close_to_oracle(twin, expected, 16 if dtype == torch.float32 else 1)
    assert_as_good_as_twin(cpu.attention(q, k_cache, v_cache, seq_lens), twin, expected)
    # The capacity of the cache does not change a bit of the twin.
    wider = [torch.nn.functional.pad(x, (0, 0, 0, 300), value=poison) for x in (k_cache, v_cache)]
    assert torch.equal(ref.attention(q, *wider, seq_lens), twin)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (5, 1)])
def test_prefill_attention_against_oracle(dtype: torch.dtype, heads: int, kv_heads: int) -> None:
    q = torch.randn(2, 33, heads, 64).to(dtype)
    k, v = torch.randn(2, 33, kv_heads, 64).to(dtype), torch.randn(2, 33, kv_heads, 64).to(dtype)
    expected = oracle.attention(q, k.transpose(1, 2), v.transpose(1, 2), [0, 0])
    twin = ref.prefill_attention(q, k, v)
    close_to_oracle(twin, expected, 16 if dtype == torch.float32 else 1)
    assert_as_good_as_twin(cpu.prefill_attention(q, k, v), twin, expected)


def test_out_is_written_and_returned() -> None:
    x, weight = torch.randn(2, 64), torch.ones(64)
    out = torch.full((2, 64), math.nan)
    assert ref.rms_norm(x, weight, 1e-5, out) is out
    assert torch.equal(out, ref.rms_norm(x, weight, 1e-5))
    half = torch.full((2, 32), math.nan)
    assert ref.silu_mul(x, half) is half
    assert torch.equal(half, ref.silu_mul(x))
