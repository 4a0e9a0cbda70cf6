"""The fused products of the decode step against their twins and float64."""

from __future__ import annotations

import oracle
import pytest
import torch
from tolerance import assert_as_good_as_twin
from torch import Tensor

from tinydecode.ops import ref, step

DTYPES = [torch.float16, torch.bfloat16]
EPS = 1e-5


def tensors(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    return [(torch.randn(shape) * shape[-1] ** -0.5).to(dtype) for shape in shapes]


def product(x: Tensor, weight: Tensor) -> Tensor:
    return x.double() @ weight.double().T


# K: one block of columns less than full, odd blocks, more than one stage; activations of more than
# 8 rows that stay in shared memory, and that do not fit into it.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"),
    [
        (1, 8, 8),
        (1, 576, 40),
        (3, 264, 100),
        (1, 4104, 24),
        (9, 2120, 16),
        (16, 7176, 9),
        (12, 576, 100),
    ],
)
def test_linear_add(bench, dtype: torch.dtype, rows: int, inputs: int, outputs: int) -> None:
    x = torch.randn(1, rows, inputs).to(dtype)
    (weight,) = tensors(dtype, (outputs, inputs))
    residual = torch.randn(1, rows, outputs).to(dtype)
    results = []
    for seed, multiprocessors in ((1, 2), (2, 1), (3, 3)):
        bench.schedule(seed, resident=seed, multiprocessors=multiprocessors)
        out = bench.blank((1, rows, outputs), dtype)
        out.tensor.copy_(residual)
        step.linear_add(bench.put(x), bench.put(weight), out.tensor)
        out.assert_guards()
        results.append(out.tensor)
    twin = bench.put(residual)
    ref.linear_add(bench.put(x), bench.put(weight), twin)
    assert_as_good_as_twin(results[0], twin, residual.double() + product(x, weight))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "hidden", "width"),
    [
        (1, 64, 4),
        (1, 576, 36),
        (4, 1152, 12),
        (11, 264, 20),
        (2, 4104, 4),
        (1, 6152, 12),
        (10, 6152, 12),
    ],
)
def test_linear_gate_up(bench, dtype: torch.dtype, rows: int, hidden: int, width: int) -> None:
    x = (torch.randn(rows, 1, hidden) * 3).to(dtype)
    norm = (torch.rand(hidden) + 0.5).to(dtype)
    weight = torch.randn(2 * width, hidden).mul(2 * hidden**-0.5).to(dtype)
    expected = oracle.silu_mul(product(oracle.rms_norm(x, norm, EPS), weight))
    bench.schedule(4, resident=2, multiprocessors=2)
    out = step.linear_gate_up(bench.put(x), bench.put(norm), bench.put(weight), EPS)
    twin = ref.linear_gate_up(bench.put(x), bench.put(norm), bench.put(weight), EPS)
    assert_as_good_as_twin(out, twin, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "hidden", "vocab"), [(1, 256, 100), (2, 2056, 17), (9, 128, 64)])
def test_linear_logits(bench, dtype: torch.dtype, rows: int, hidden: int, vocab: int) -> None:
    x = torch.randn(1, rows, hidden).to(dtype)
    norm = (torch.rand(hidden) + 0.5).to(dtype)
    (weight,) = tensors(dtype, (vocab, hidden))
    bench.schedule(5, resident=2, multiprocessors=3)
    out = step.linear_logits(bench.put(x), bench.put(norm), bench.put(weight), EPS)
    assert out.dtype == torch.float32
    twin = ref.linear_logits(bench.put(x), bench.put(norm), bench.put(weight), EPS)
    expected = product(oracle.rms_norm(x, norm, EPS), weight)
    # The twin rounds its logits to the storage dtype; the kernel does not.
    assert_as_good_as_twin(out, twin, expected)
    assert (out.double().cpu() - expected).norm() < (twin.double().cpu() - expected).norm()


def test_linear_logits_advances_the_lengths(bench) -> None:
    x = torch.randn(3, 2, 72).half()
    norm = torch.rand(72).half()
    (weight,) = tensors(torch.float16, (24, 72))
    seq_lens = bench.put(torch.tensor([0, 41, 7], dtype=torch.int32))
    with_lengths = step.linear_logits(
        bench.put(x), bench.put(norm), bench.put(weight), EPS, seq_lens
    )
    assert seq_lens.tolist() == [2, 43, 9]
    alone = step.linear_logits(bench.put(x), bench.put(norm), bench.put(weight), EPS)
    assert torch.equal(with_lengths, alone)
    assert seq_lens.tolist() == [2, 43, 9]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [1, 30, 64, 2056])
def test_embed(bench, dtype: torch.dtype, hidden: int) -> None:
    table = torch.randn(37, hidden).to(dtype)
    token_ids = torch.tensor([[0, 36, 5], [5, 1, 35]])
    out = step.embed(bench.put(token_ids), bench.put(table))
    assert torch.equal(out.cpu(), ref.embed(token_ids, table))
    outside = step.embed(bench.put(torch.tensor([[-4, 37]])), bench.put(table))
    assert torch.equal(outside[0].cpu(), table[[0, 36]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("starts", "tokens", "heads", "kv_heads", "dim"),
    [([5], 1, 4, 2, 64), ([0, 9], 3, 3, 1, 80), ([30], 9, 2, 2, 128), ([13], 4, 2, 1, 96)],
)
def test_linear_qkv(
    bench, dtype: torch.dtype, starts: list[int], tokens: int, heads: int, kv_heads: int, dim: int
) -> None:
    hidden, slots, batch = 264, 41, len(starts)
    x = torch.randn(batch, tokens, hidden).to(dtype)
    norm = (torch.rand(hidden) + 0.5).to(dtype)
    (weight,) = tensors(dtype, ((heads + 2 * kv_heads) * dim, hidden))
    frequencies = 10000.0 ** (-torch.arange(dim // 2, dtype=torch.float64) / (dim // 2))
    angle = torch.arange(slots, dtype=torch.float64)[:, None] * frequencies
    cos, sin = angle.cos().float(), angle.sin().float()
    seq_lens = torch.tensor(starts, dtype=torch.int32)

    def run(module) -> list[Tensor]:
        k_cache = bench.blank((batch, kv_heads, slots, dim), dtype)
        v_cache = bench.blank((batch, kv_heads, slots, dim), dtype)
        q = module.linear_qkv(
            bench.put(x),
            bench.put(norm),
            bench.put(weight),
            EPS,
            heads,
            bench.put(cos),
            bench.put(sin),
            k_cache.tensor,
            v_cache.tensor,
            seq_lens.to(bench.device),
        )
        k_cache.assert_guards("k_cache")
        v_cache.assert_guards("v_cache")
        new = []
        for cache in (k_cache.tensor, v_cache.tensor):
            rows = [cache[b, :, start : start + tokens] for b, start in enumerate(starts)]
            new.append(torch.stack(rows).transpose(1, 2))  # [B, T, K, D]
            written = int((~cache.isnan()).sum())
            assert written == batch * tokens * kv_heads * dim, "slots beside the new ones"
        return [q, *new]

    bench.schedule(6, resident=2, multiprocessors=2)
    qkv = product(oracle.rms_norm(x, norm, EPS), weight).view(batch, tokens, -1, dim)
    q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=2)
    expected = [oracle.rope(q, frequencies, starts), oracle.rope(k, frequencies, starts), v]
    for name, found, twin, want in zip("qkv", run(step), run(ref), expected, strict=True):
        assert_as_good_as_twin(found, twin, want, name)


# 4192: from one row to eight the activations stay in registers below, from nine in shared memory.
@pytest.mark.parametrize("inputs", [2192, 4192])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_number_of_rows(
    bench, dtype: torch.dtype, inputs: int
) -> None:
    x = torch.randn(1, 16, inputs).to(dtype)
    norm = torch.rand(inputs).to(dtype)
    weight, down = tensors(dtype, (24, inputs), (16, inputs))
    x, norm, weight, down = (bench.put(t) for t in (x, norm, weight, down))

    def run(rows: Tensor) -> list[Tensor]:
        residual = torch.ones(*rows.shape[:2], 16, dtype=dtype, device=rows.device)
        step.linear_add(rows.contiguous(), down, residual)
        rows = rows.contiguous()
        return [
            residual,
            step.linear_gate_up(rows, norm, weight, EPS),
            step.linear_logits(rows, norm, weight, EPS),
        ]

    alone = [run(x[:, row : row + 1]) for row in range(16)]
    for count in (2, 8, 9, 13, 16) if inputs < 4096 else (8, 9, 16):
        for i, together in enumerate(run(x[:, :count])):
            for row in range(count):
                assert torch.equal(together[:, row], alone[row][i][:, 0]), f"{count} rows"
