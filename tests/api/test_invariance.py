"""The bits of a row's logits depend on the row alone.

Not on how many rows a pass has, on graph or eager, on max_seq_len, on the row's place in a batch,
on what lies in unused cache slots, or on the run. What a row is compared with is always the same:
its tokens one at a time, launched eagerly, by an engine of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from tinydecode import Engine, LlamaModel, ModelConfig, graphs, ops
from tinydecode.weights import random_weights

DEVICE = "cuda"
MAX_POSITION = 8192
VERIFY = 9  # rows of a pass that verifies eight drafted tokens
WIDEST = 9  # rows of a batch
MOST = 16  # tokens of a row that there are references for
# Around every length at which a chunk of keys may end: powers of two, and 4096 plus 128 and 256,
# since chunks are longer beyond (kernels/attention.cuh). Some passes start before an edge and end
# behind it.
EDGES = (64, 128, 256, 512, 1024, 4096, 4224, 4352)
CONTEXTS = sorted({0, 1, 31, 60, *(edge + d for edge in EDGES for d in (-4, -1, 0, 1))})
SOME_CONTEXTS = (1, 60, 64, 257, 511, 4093, 4225)
BF16, FP16 = torch.bfloat16, torch.float16

# heads, kv heads, head_dim, dtype of tiny models whose sizes divide nothing evenly.
TINY = [
    (6, 2, 64, BF16),
    (3, 1, 80, BF16),
    (4, 4, 96, BF16),
    (8, 1, 128, BF16),
    (4, 2, 256, BF16),
    (12, 3, 64, FP16),
    (2, 2, 80, FP16),
    (5, 1, 96, FP16),
    (6, 2, 128, FP16),
    (8, 1, 256, FP16),
]
SIZES = {"hidden_size": 328, "intermediate_size": 776, "vocab_size": 515, "num_hidden_layers": 2}
# The shapes of real models, fewer layers and a smaller vocabulary.
LARGE = {
    "hidden-2048": {"hidden_size": 2048, "intermediate_size": 8192},
    "hidden-4096": {"hidden_size": 4096, "intermediate_size": 14336, "head_dim": 128},
    "hidden-8192": {"hidden_size": 8192, "intermediate_size": 1032, "num_attention_heads": 64},
}


def make_model(dtype: torch.dtype, **sizes: int) -> LlamaModel:
    config = ModelConfig.from_dict(
        {"model_type": "llama", "rms_norm_eps": 1e-5, "max_position_embeddings": MAX_POSITION}
        | sizes
    )
    return LlamaModel(config, random_weights(config, device=DEVICE, dtype=dtype))


@dataclass
class Row:
    """A sequence of cached keys and values and the tokens that follow, and what they must give."""

    alone: Engine  # of batch 1 and eager, with room for every context
    seed: int = 0
    known: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # by context

    def __post_init__(self) -> None:
        self.model = self.alone.model
        config, device = self.model.config, self.model.device
        generator = torch.Generator(device).manual_seed(self.seed)
        layers, kv_heads = config.num_hidden_layers, config.num_key_value_heads
        shape = (2, layers, kv_heads, CONTEXTS[-1], config.head_dim)
        self.cached = torch.empty(shape, device=device, dtype=self.model.dtype)
        self.cached.normal_(generator=generator)
        self.tokens = torch.randint(config.vocab_size, (MOST,), generator=generator, device=device)

    def put(self, engine: Engine, context: int, row: int = 0) -> None:
        """Give a row of an engine its first `context` tokens, and nothing usable behind them."""
        for cache, cached in zip((engine.cache.k, engine.cache.v), self.cached, strict=True):
            cache[:, row, :, :context] = cached[:, :, :context]
            cache[:, row, :, context:] = torch.nan
        engine.cache.seq_lens[row] = context

    @torch.inference_mode()
    def expected(self, context: int) -> tuple[Tensor, Tensor]:
        """Logits [MOST, V] and the keys and values written, [2, L, K, MOST, D]."""
        if context not in self.known:
            self.put(self.alone, context)
            logits = torch.stack([self.alone.step(token)[0] for token in self.tokens.split(1)])
            assert torch.isfinite(logits).all()
            self.known[context] = logits, self.written(self.alone, context)
        return self.known[context]

    def written(self, engine: Engine, context: int, row: int = 0, count: int = MOST) -> Tensor:
        slots = slice(context, context + count)
        return torch.stack([x[:, row, :, slots] for x in (engine.cache.k, engine.cache.v)])

    def check(
        self, engine: Engine, logits: Tensor, context: int, what: str, row: int = 0, first: int = 0
    ) -> None:
        """Logits [T, V] of tokens `first` onwards, and what their pass wrote, are the expected."""
        expected, kv = self.expected(context)
        count = len(logits)
        tokens = slice(first, first + count)
        where = f"{what}, context {context}, row {row}"
        differ = (logits != expected[tokens]).sum(-1).tolist()
        assert not any(differ), f"{where}: logits that differ, token by token: {differ}"
        written = self.written(engine, context + first, row, count)
        assert torch.equal(written, kv[:, :, :, tokens]), f"{where}: other keys or values"


def tiny_name(case: tuple[int, int, int, torch.dtype]) -> str:
    heads, kv_heads, dim, dtype = case
    return f"D{dim}-H{heads}-K{kv_heads}-{str(dtype).removeprefix('torch.')}"


CASES = {
    tiny_name(case): {
        **SIZES,
        "num_attention_heads": case[0],
        "num_key_value_heads": case[1],
        "head_dim": case[2],
        "dtype": case[3],
    }
    for case in TINY
} | {
    name: {
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 32003,
        "num_hidden_layers": 2,
        "dtype": BF16,
        **sizes,
    }
    for name, sizes in LARGE.items()
}


@pytest.fixture(scope="module", params=CASES)
def rows(request: pytest.FixtureRequest) -> list[Row]:
    """As many rows as the widest batch has, of one model."""
    sizes = dict(CASES[request.param])
    model = make_model(sizes.pop("dtype"), **sizes)
    assert ops.fused_step(model.config, model.dtype, model.device) is not None
    alone = Engine(model, max_seq_len=MAX_POSITION)
    return [Row(alone, seed) for seed in range(WIDEST)]


@pytest.fixture
def row(rows: list[Row]) -> Row:
    return rows[0]


def pass_sizes(model: LlamaModel) -> list[int]:
    """1 to 9 rows, and the most that the fused step takes."""
    step = ops.fused_step(model.config, model.dtype, model.device)
    assert step is not None and step.MAX_ROWS >= VERIFY
    return [*range(1, VERIFY + 1), min(step.MAX_ROWS, MOST)]


@pytest.mark.cuda
@torch.inference_mode()
def test_rows_of_a_pass_and_graphs(row: Row) -> None:
    """Every size of a pass at every edge, eager and captured."""
    sizes = pass_sizes(row.model)
    with (
        Engine(row.model, max_seq_len=MAX_POSITION) as eager,
        graphs.enable(Engine(row.model, max_seq_len=MAX_POSITION), verify=sizes) as graphed,
    ):
        for context in CONTEXTS:
            for how, engine in (("eager", eager), ("graph", graphed)):
                for size in sizes:
                    row.put(engine, context)
                    logits = engine.chunk(row.tokens[None, :size])[0]
                    row.check(engine, logits, context, f"{how}, {size} rows")


@pytest.mark.cuda
@torch.inference_mode()
def test_passes_that_follow_each_other(row: Row) -> None:
    """A row written by passes of mixed sizes goes on as one written token by token."""
    with graphs.enable(Engine(row.model, max_seq_len=MAX_POSITION)) as engine:
        for context in SOME_CONTEXTS:
            row.put(engine, context)
            first = 0
            for size in (3, 1, 5, 2, 4, 1):
                logits = engine.chunk(row.tokens[None, first : first + size])[0]
                row.check(engine, logits, context, f"pass of {size}", first=first)
                first += size


@pytest.mark.cuda
@pytest.mark.parametrize("how", ["eager", "graph"])
@torch.inference_mode()
def test_max_seq_len(row: Row, how: str) -> None:
    """The cache's capacity; the tightest ends with the last token of the pass."""
    # An engine with graphs takes a while to make.
    for context in SOME_CONTEXTS if how == "eager" else (60, 511, 4225):
        for capacity in (context + VERIFY, context + VERIFY + 1, context + 331):
            with Engine(row.model, max_seq_len=capacity) as engine:
                if how == "graph":
                    graphs.enable(engine)
                for size in (1, 4, VERIFY):
                    row.put(engine, context)
                    logits = engine.chunk(row.tokens[None, :size])[0]
                    row.check(engine, logits, context, f"{how}, {size} rows, capacity {capacity}")


@pytest.mark.cuda
@pytest.mark.parametrize("how", ["eager", "graph"])
@pytest.mark.parametrize(("batch", "size"), [(2, 1), (2, 4), (3, 3), (WIDEST, 1), (4, 2)])
@torch.inference_mode()
def test_place_in_a_batch(rows: list[Row], batch: int, size: int, how: str) -> None:
    """Every row beside others of other lengths and contents, at every place."""
    with Engine(rows[0].model, max_seq_len=4400, batch_size=batch) as engine:
        if how == "graph":
            graphs.enable(engine)
        for turn in range(batch):
            order = rows[turn:batch] + rows[:turn]
            contexts = [SOME_CONTEXTS[(turn * 3 + i) % len(SOME_CONTEXTS)] for i in range(batch)]
            for place, (one, context) in enumerate(zip(order, contexts, strict=True)):
                one.put(engine, context, place)
            logits = engine.chunk(torch.stack([one.tokens[:size] for one in order]))
            for place, (one, context) in enumerate(zip(order, contexts, strict=True)):
                one.check(engine, logits[place], context, f"{how}, {size} rows each", place)


@pytest.mark.cuda
@pytest.mark.parametrize(("size", "context"), [(1, 256), (1, 4225), (4, 511), (VERIFY, 4093)])
@torch.inference_mode()
def test_a_thousand_replays(row: Row, size: int, context: int) -> None:
    """Always the same bits, and always the expected ones; nothing waits for the host between."""
    with graphs.enable(Engine(row.model, max_seq_len=MAX_POSITION)) as engine:
        graphed = engine.graphs.chunk(size)  # type: ignore[union-attr]
        row.put(engine, context)
        expected = row.expected(context)[0][None, :size]
        differ = torch.zeros(1000, dtype=torch.bool, device=expected.device)
        for replay in range(1000):
            engine.cache.seq_lens.fill_(context)
            graphed.token_ids.copy_(row.tokens[None, :size])
            graphed.replay()
            differ[replay] = (graphed.logits != expected).any()
        assert not differ.any(), f"replays that differ: {differ.nonzero().flatten().tolist()[:20]}"
        row.check(engine, graphed.logits[0], context, f"replays of {size} rows")


@pytest.mark.cuda
@torch.inference_mode()
def test_replays_back_to_back(row: Row) -> None:
    """A hundred passes on end, ten times over: none may overtake the one before it."""
    with graphs.enable(Engine(row.model, max_seq_len=512)) as engine:
        graphed = engine.graphs.chunk(1)  # type: ignore[union-attr]
        runs = []
        for _ in range(10):
            row.put(engine, 200)
            graphed.token_ids.copy_(row.tokens[None, :1])
            for _ in range(100):
                graphed.replay()
            runs.append((graphed.logits.clone(), row.written(engine, 200, count=100)))
        for logits, written in runs:
            assert torch.isfinite(logits).all() and torch.isfinite(written).all()
            assert torch.equal(logits, runs[0][0]) and torch.equal(written, runs[0][1])


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@torch.inference_mode()
def test_capacity_and_run_on_the_cpu(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the torch path promises as well: neither the cache's size nor the run shows."""
    monkeypatch.setitem(globals(), "DEVICE", "cpu")
    model = make_model(dtype, **SIZES, num_attention_heads=6, num_key_value_heads=2, head_dim=64)
    row = Row(Engine(model, max_seq_len=1024))
    for context in (0, 1, 63, 64, 65, 127, 256, 513):
        for capacity in (context + MOST, 700, 700):
            with Engine(row.model, max_seq_len=capacity) as engine:
                row.put(engine, context)
                logits = [engine.step(token)[0] for token in row.tokens.split(1)]
                row.check(engine, torch.stack(logits), context, f"capacity {capacity}")
