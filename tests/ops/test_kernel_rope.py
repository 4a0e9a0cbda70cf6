"""rope, kv_append and their fusion against twins and float64."""

from __future__ import annotations

import oracle
import pytest
import torch
from tolerance import assert_as_good_as_twin
from torch import Tensor

from tinydecode.ops import cuda, ref

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [  # (cached, new tokens, heads, kv heads, head_dim)
    ([0], 1, 4, 1, 64),
    ([37], 1, 9, 3, 80),
    ([5, 0, 90], 7, 7, 7, 96),
    ([3, 90], 2, 6, 2, 128),
    ([11], 3, 2, 1, 256),
    ([2, 1], 4, 3, 1, 10),  # half a head does not fill packs
]
SLOTS = 100


def tables(dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """(frequencies in float64, cos, sin) for SLOTS positions."""
    frequencies = 10000.0 ** (-torch.arange(dim // 2, dtype=torch.float64) / (dim // 2))
    angle = torch.arange(SLOTS, dtype=torch.float64)[:, None] * frequencies
    return frequencies, angle.cos().float(), angle.sin().float()


def split(qkv: Tensor, heads: int, kv_heads: int) -> list[Tensor]:
    """q, k, v as views into packed qkv, as the model passes them."""
    return list(qkv.split((heads, kv_heads, kv_heads), dim=2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("cached", "tokens", "heads", "kv_heads", "dim"), SHAPES)
def test_rope_and_kv_append(
    bench, dtype: torch.dtype, cached: list[int], tokens: int, heads: int, kv_heads: int, dim: int
) -> None:
    batch = len(cached)
    frequencies, cos, sin = tables(dim)
    cos, sin = bench.put(cos), bench.put(sin)
    qkv = torch.randn(batch, tokens, heads + 2 * kv_heads, dim).to(dtype)
    seq_lens = bench.put(torch.tensor(cached, dtype=torch.int32))
    cache_shape = (batch, kv_heads, SLOTS, dim)

    twin = bench.put(qkv)
    twin_q, twin_k, twin_v = split(twin, heads, kv_heads)
    ref.rope(twin_q, twin_k, cos, sin, seq_lens)
    expected_q, expected_k = (
        oracle.rope(x, frequencies, cached)
        for x in qkv.split((heads, kv_heads, kv_heads), dim=2)[:2]
    )

    results = []
    for seed, offset, fused in ((1, 0, False), (2, 1, False), (3, 0, True), (4, 1, True)):
        bench.schedule(seed, resident=2)
        packed = bench.blank(qkv.shape, dtype, offset)
        packed.tensor.copy_(qkv)
        q, k, v = split(packed.tensor, heads, kv_heads)
        caches = [bench.blank(cache_shape, dtype, offset) for _ in range(2)]
        k_cache, v_cache = (c.tensor for c in caches)
        if fused:
            cuda.rope_kv_append(q, k, v, cos, sin, k_cache, v_cache, seq_lens)
        else:
            cuda.rope(q, k, cos, sin, seq_lens)
            cuda.kv_append(k, v, k_cache, v_cache, seq_lens)
        for guarded in (packed, *caches):
            guarded.assert_guards()
        assert torch.equal(v, twin_v), "v is only read"
        for row, start in enumerate(cached):
            stop = min(start + tokens, SLOTS)
            for cache, new in ((k_cache, k), (v_cache, v)):
                kept = new[row, : stop - start].transpose(0, 1)
                assert torch.equal(cache[row, :, start:stop], kept)
                assert cache[row, :, :start].isnan().all() and cache[row, :, stop:].isnan().all()
        results.append((q, k))
    q, k = results[0]
    # Positions past the table repeat its last row; nobody reads them, and the oracle has no limit.
    inside = [min(tokens, SLOTS - start) for start in cached]
    for row, count in enumerate(inside):
        for name, x, y, z in (("q", q, twin_q, expected_q), ("k", k, twin_k, expected_k)):
            assert_as_good_as_twin(x[row, :count], y[row, :count], z[row, :count], name)
    for other_q, other_k in results[1:]:
        assert torch.equal(other_q, q) and torch.equal(other_k, k)


def test_tokens_past_the_end_are_dropped(bench) -> None:
    k = bench.put(torch.randn(1, 4, 2, 8))
    k_cache, v_cache = (bench.blank((1, 2, 5, 8), torch.float32) for _ in range(2))
    full = bench.put(torch.tensor([3], dtype=torch.int32))
    cuda.kv_append(k, k, k_cache.tensor, v_cache.tensor, full)
    assert torch.equal(k_cache.tensor[0, :, 3:], k[0, :2].transpose(0, 1))
    assert k_cache.tensor[0, :, :3].isnan().all()
    k_cache.assert_guards(), v_cache.assert_guards()
