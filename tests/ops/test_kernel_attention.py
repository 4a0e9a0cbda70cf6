"""Split-KV attention against its twin and float64, and what its bits must not depend on."""

from __future__ import annotations

import math

import oracle
import pytest
import torch
import torch.nn.functional as F
from tolerance import assert_as_good_as_twin
from torch import Tensor

from tinydecode.ops import cuda, ref

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Lengths around the boundaries of chunks (multiples of 64) and of long chunks (4096 and on); groups
# that fill tiles of 4, 8 and 16 rows, that do not, and that need several.
SHAPES = [  # (cached, new tokens, heads, kv heads, head_dim)
    ([0], 1, 4, 4, 64),  # one key
    ([62, 63, 64], 1, 3, 1, 64),
    ([130], 1, 7, 1, 80),
    ([127, 5], 2, 6, 2, 96),
    ([199], 1, 8, 2, 128),
    ([60, 300], 5, 4, 1, 128),
    ([61], 9, 9, 1, 64),
    ([70, 0], 16, 2, 2, 80),
    ([90], 3, 9, 1, 256),
    ([40], 8, 8, 2, 128),  # T * G: 32 rows
    ([4095, 4300], 2, 2, 1, 64),
]


ROOM = 64  # clusters: enough for all that is launched here


@pytest.fixture(autouse=True)
def _room_for_clusters(bench) -> None:
    bench.schedule(clusters=ROOM)


class Case:
    """Random q and caches with poisoned tails, on a bench."""

    def __init__(
        self,
        bench,
        dtype: torch.dtype,
        cached: list[int],
        tokens: int,
        heads: int,
        kv_heads: int,
        dim: int,
        poison: float = math.nan,
        spare: int = 30,
    ) -> None:
        batch, slots = len(cached), max(cached) + tokens + spare
        self.cached, self.heads, self.dim = cached, heads, dim
        # q is a view into packed qkv, and large enough for some weights to dominate.
        qkv = torch.randn(batch, tokens, heads + 2, dim).to(dtype) * 1.5
        self.host_q = qkv[:, :, :heads]
        self.q = bench.put(qkv)[:, :, :heads]
        self.host_caches = [torch.randn(batch, kv_heads, slots, dim).to(dtype) for _ in range(2)]
        for row, length in enumerate(cached):
            for cache in self.host_caches:
                cache[row, :, length + tokens :] = poison
        self.caches = [bench.put(cache) for cache in self.host_caches]
        self.seq_lens = bench.put(torch.tensor(cached, dtype=torch.int32))

    def run(self, **options) -> Tensor:
        return cuda.attention(self.q, *self.caches, self.seq_lens, **options)

    def twin(self) -> Tensor:
        return ref.attention(self.q, *self.caches, self.seq_lens)

    def oracle(self) -> Tensor:
        return oracle.attention(self.host_q, *self.host_caches, self.cached)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_twin_and_oracle(bench, dtype: torch.dtype, shape: tuple) -> None:
    case = Case(bench, dtype, *shape)
    before = [x.clone() for x in (case.q, *case.caches)]
    results = []
    for seed, clusters in ((1, ROOM), (2, 0)):
        # The smaller GPU has blocks that walk over several chunks, and no clusters.
        bench.schedule(seed, resident=2 * seed - 1, multiprocessors=3 - seed, clusters=clusters)
        out = bench.blank((*case.q.shape[:2], case.heads * case.dim), dtype)
        assert case.run(out=out.tensor) is out.tensor
        out.assert_guards()
        results.append(out.tensor)
    assert_as_good_as_twin(results[0], case.twin(), case.oracle())
    assert torch.equal(results[0], results[1]), "depends on the schedule"
    for x, y in zip((case.q, *case.caches), before, strict=True):
        assert torch.equal(x.nan_to_num(), y.nan_to_num()), "an input was written"


@pytest.mark.parametrize(("tokens", "heads"), [(1, 8), (2, 1), (3, 3), (4, 2)])
@pytest.mark.parametrize("keys", [4, 63, 64, 65, 130, 300, 1023, 1024, 1025])
def test_clusters_change_no_bit(bench, keys: int, tokens: int, heads: int) -> None:
    """Around the edges of parts, and of the 16 that there can be; capacities without spare slots.

    The short row leaves most blocks of its cluster without keys.
    """
    dtype = torch.float16 if tokens % 2 else torch.bfloat16
    shape = ([keys - tokens, 5 - tokens], tokens, heads, 1, 64)
    case = Case(bench, dtype, *shape, spare=tokens // 2)
    slots = case.caches[0].shape[2]
    size = cuda.attention_workspace(2, tokens, heads, 64, slots, bench.device).numel() // 4
    bench.schedule(1, clusters=0)
    workspace = bench.blank((size,), torch.float32)
    expected = case.run(workspace=workspace.tensor)
    assert_as_good_as_twin(expected, case.twin(), case.oracle())
    for seed in range(1, 3 if keys > 1000 else 5):
        bench.schedule(seed, resident=seed, clusters=ROOM)
        workspace = bench.blank((size,), torch.float32)
        assert torch.equal(case.run(workspace=workspace.tensor), expected)
        if bench.device.type == "cpu":  # up to 64 slots there is one block, which is no cluster
            in_cluster = bool(workspace.tensor.isnan().all())
            assert in_cluster == (slots > 64), "was not launched in clusters"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [SHAPES[2], SHAPES[6], SHAPES[8]], ids=str)
def test_before_sm_80(bench, dtype: torch.dtype, shape: tuple) -> None:
    """Where the tensor cores do not do, 16-bit types take the kernel of float32."""
    case = Case(bench, dtype, *shape)
    bench.schedule(capability=7, clusters=0)
    assert_as_good_as_twin(case.run(), case.twin(), case.oracle())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 0.0])
def test_what_lies_past_the_end_does_not_matter(bench, dtype, poison: float) -> None:
    shape = ([100, 3], 2, 4, 2, 64)
    torch.manual_seed(1)
    clean = Case(bench, dtype, *shape).run()
    torch.manual_seed(1)
    assert torch.equal(Case(bench, dtype, *shape, poison=poison).run(), clean)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 1, 64), (3, 3, 128), (9, 1, 80)])
def test_bits_do_not_depend_on_how_many_tokens(bench, dtype, heads, kv_heads, dim) -> None:
    """A query row is the same alone (decoding) and among others (verifying a draft)."""
    tokens, cached = 6, [122, 60]  # token 6 of row 0 opens a new chunk
    case = Case(bench, dtype, cached, tokens, heads, kv_heads, dim)
    together = case.run()
    for first, count in ((0, 1), (1, 1), (2, 3), (5, 1)):
        seq_lens = case.seq_lens + first
        # What a later token wrote is garbage to an earlier one, even when it is infinite.
        caches = [cache.clone() for cache in case.caches]
        for cache in caches:
            for row, length in enumerate(cached):
                cache[row, :, length + first + count :] = math.inf
        part = cuda.attention(case.q[:, first : first + count], *caches, seq_lens)
        assert torch.equal(part, together[:, first : first + count]), f"token {first}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_does_not_see_the_later_ones(bench, dtype) -> None:
    case = Case(bench, dtype, [70], 3, 4, 2, 64)
    clean = case.run()
    for cache in case.caches:
        cache[:, :, 71:] = math.inf  # tokens 1 and 2 of this very call
    assert torch.equal(case.run()[:, 0], clean[:, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_capacity_batch_or_the_gpu(bench, dtype) -> None:
    case = Case(bench, dtype, [150, 64, 7], 2, 4, 2, 64)
    together = case.run()
    wider = [F.pad(cache, (0, 0, 0, 333), value=math.nan) for cache in case.caches]
    assert torch.equal(cuda.attention(case.q, *wider, case.seq_lens), together)
    for row in range(3):
        one = slice(row, row + 1)
        caches = [cache[one] for cache in case.caches]
        assert torch.equal(cuda.attention(case.q[one], *caches, case.seq_lens[one]), together[one])
    # More or fewer multiprocessors only change which block does which chunk.
    for multiprocessors in (1, 50):
        bench.schedule(5, multiprocessors=multiprocessors, clusters=ROOM)
        assert torch.equal(case.run(), together)


def test_scale_and_workspace(bench) -> None:
    case = Case(bench, torch.float32, [66], 2, 4, 2, 64)
    scaled = Case.__new__(Case)
    scaled.__dict__.update(case.__dict__)
    scaled.q = case.q * 8.0  # 64 ** -0.5 = 1/8, exactly
    assert torch.equal(scaled.run(scale=1 / 64), case.run())
    slots = case.caches[0].shape[2]
    size = cuda.attention_workspace(1, 2, 4, 64, slots, bench.device).numel()
    workspace = bench.blank((size // 4,), torch.float32)
    assert torch.equal(case.run(workspace=workspace.tensor), case.run())
    workspace.assert_guards("workspace")


def test_large_scores_do_not_overflow(bench) -> None:
    # Scores of 1e4 and more: only their differences may be exponentiated.
    q, k = torch.full((1, 1, 1, 64), 40.0), torch.full((1, 1, 130, 64), 30.0)
    v = torch.arange(130.0).view(1, 1, 130, 1).expand(1, 1, 130, 64).contiguous()
    k[0, 0, 77] = 30.1  # this key takes everything
    seq_lens = bench.put(torch.tensor([129], dtype=torch.int32))
    out = cuda.attention(bench.put(q), bench.put(k), bench.put(v), seq_lens)
    assert torch.equal(out.cpu(), torch.full((1, 1, 64), 77.0))
