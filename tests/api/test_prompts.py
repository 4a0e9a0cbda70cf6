"""Padded prompts, and their passes as graphs: the same logits whatever serves them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixtures import write_tiny
from torch import Tensor

from tinydecode import Engine, LlamaModel, ModelConfig, graphs, load_hf, prompts
from tinydecode.device_sampler import DeviceSampler, Stages
from tinydecode.kv_cache import KVCache
from tinydecode.sampling import SamplingParams
from tinydecode.weights import random_weights

SPREAD = (1, 15, 16, 17, 100, 128, 129)
CPU = torch.device("cpu")
TOLERANCE = 2e-4  # of fp32 logits of about 10


def ids(length: int, seed: int = 0) -> list[int]:
    """Token ids other than 0."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(1, 512, (length,), generator=generator).tolist()


# ---- lengths and layout --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("longest", "batch", "most", "expected"),
    [
        (1, 1, 512, 16),
        (16, 1, 512, 16),
        (17, 1, 512, 32),
        (33, 1, 512, 64),
        (65, 1, 512, 128),
        (129, 1, 512, 192),
        (512, 1, 512, 512),
        (513, 1, 512, None),
        (100000, 1, 512, None),
        (257, 1, 315, None),  # 320 rows would be too many
        (128, 4, 512, 128),
        (129, 4, 512, None),
        (1, 33, 512, None),
        (1, 1, 0, None),
    ],
)
def test_the_length_that_prompts_are_padded_to(
    longest: int, batch: int, most: int, expected: int | None
) -> None:
    assert prompts.padded_length(longest, batch, most) == expected


@pytest.mark.parametrize(
    ("hidden", "intermediate", "heads", "dim", "expected"),
    [
        (2048, 8192, 32, 64, 512),  # 61 million weights a layer
        (4096, 14336, 32, 128, 256),  # 218 million
        (8192, 28672, 64, 128, 64),  # 856 million
    ],
)
def test_larger_layers_hide_the_host_sooner(
    hidden: int, intermediate: int, heads: int, dim: int, expected: int
) -> None:
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "head_dim": dim}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": 8, "num_hidden_layers": 1}
    config = ModelConfig.from_dict(
        {"model_type": "llama", "vocab_size": 8, "rms_norm_eps": 1e-5, **sizes}
        | {"max_position_embeddings": 64}
    )
    most = prompts.most_rows(config)
    longest = [n for n in prompts.LENGTHS if prompts.padded_length(n, 1, most) is not None]
    assert longest[-1] == expected


def test_the_layout_of_a_copy() -> None:
    packed = prompts.pack([[3, 4, 5], [6]], 4, CPU)
    assert packed.dtype == torch.int64
    assert packed.tolist() == [3, 1, 3, 4, 5, 5, 6, 6, 6, 6]
    token_ids, lengths = prompts.unpack(packed, 2)
    assert token_ids.tolist() == [[3, 4, 5, 5], [6, 6, 6, 6]] and lengths.tolist() == [3, 1]


def test_ids_of_any_integer_type_become_python_integers() -> None:
    for given in ([3, np.int64(4)], (3, 4), torch.tensor([3, 4]), [np.int32(3), np.uint8(4)]):
        (row,) = prompts.check(given, 1, 8, 10)
        assert row == [3, 4] and set(map(type, row)) == {int}
    for bad, name in (([3, True], "True"), ([3, 4.0], "4.0"), (["a"], "'a'")):
        with pytest.raises(ValueError, match=f"token ids must be integers, found {name}"):
            prompts.check(bad, 1, 8, 10)
    for bad_id in (-1, 10, np.int64(10)):
        with pytest.raises(ValueError, match="is outside the vocabulary of 10"):
            prompts.check([3, bad_id], 1, 8, 10)


def test_a_look_at_whether_a_token_has_come() -> None:
    sampler = DeviceSampler(2, 30, CPU)
    for _ in range(2):
        sampler.begin(SamplingParams(), 0)
        assert not sampler.is_here()
        sampler.enqueue(torch.zeros(2, 30), None, Stages(False, False))
        sampler.launched += 1
        assert sampler.is_here()
        sampler.read()
        assert not sampler.is_here()


# ---- padding changes nothing, on the CPU ---------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LlamaModel:
    return load_hf(write_tiny(tmp_path_factory.mktemp("tiny")), device="cpu")


def padding(engine: Engine) -> Engine:
    """The engine, padding as on CUDA; its cache full of NaN."""
    engine.padded_rows = 512
    engine.cache.k.fill_(torch.nan)
    engine.cache.v.fill_(torch.nan)
    return engine


def cached(engine: Engine, row: int = 0) -> Tensor:
    """Keys and values of a row's tokens."""
    slots = slice(0, int(engine.cache.seq_lens[row]))
    return torch.stack([x[:, row, :, slots] for x in (engine.cache.k, engine.cache.v)])


@pytest.mark.parametrize("length", [*SPREAD, 512])
@torch.inference_mode()
def test_padding_leaves_logits_and_cache_alone(tiny: LlamaModel, length: int) -> None:
    plain, padded = Engine(tiny, max_seq_len=600), padding(Engine(tiny, max_seq_len=600))
    assert prompts.padded_length(length, 1, 512) is not None
    found, expected = padded.prefill(ids(length)), plain.prefill(ids(length))
    assert (found - expected).abs().max() < TOLERANCE
    assert padded.cache.seq_lens.tolist() == [length]
    assert (cached(padded) - cached(plain)).abs().max() < TOLERANCE
    for token in (7, 8, 9):
        found, expected = (e.step(torch.tensor([token])) for e in (padded, plain))
        assert (found - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("length", SPREAD)
@torch.inference_mode()
def test_padding_beyond_the_cache(tiny: LlamaModel, length: int) -> None:
    """The padded length is that of a roomy cache, bit for bit; what finds no slot is dropped."""
    roomy, tight = (padding(Engine(tiny, max_seq_len=n)) for n in (600, length))
    assert torch.equal(roomy.prefill(ids(length)), tight.prefill(ids(length)))
    assert torch.equal(cached(roomy), cached(tight))


@torch.inference_mode()
def test_rows_of_different_lengths(tiny: LlamaModel) -> None:
    both = padding(Engine(tiny, max_seq_len=128, batch_size=2))
    rows = [ids(70, 1), ids(5, 2)]
    logits = both.prefill(rows)
    for place, row in enumerate(rows):
        alone = Engine(tiny, max_seq_len=128)
        assert (logits[place] - alone.prefill(row)[0]).abs().max() < TOLERANCE
        assert (cached(both, place) - cached(alone)).abs().max() < TOLERANCE


def test_padded_generations(tiny: LlamaModel) -> None:
    for loop in (False, True):
        plain, padded = Engine(tiny, max_seq_len=96), padding(Engine(tiny, max_seq_len=96))
        plain.samples_on_device = padded.samples_on_device = loop
        for length in (1, 17, 90, 40):
            assert padded.generate(ids(length), 20)[0] == plain.generate(ids(length), 20)[0]


@torch.inference_mode()
def test_padding_uses_no_embedding_that_the_prompt_does_not(tmp_path: Path) -> None:
    model = load_hf(write_tiny(tmp_path), device="cpu")
    model.weights.embed_tokens[0] = torch.nan
    engine = padding(Engine(model, max_seq_len=64, batch_size=2))
    assert engine.prefill([ids(20), ids(3)]).isfinite().all()


# ---- the graphs' own logic, on the CPU -----------------------------------------------------


class _Recorded:
    """Stands for a captured graph: runs again what it recorded, on the same tensors."""

    def __init__(self, run: Callable[[], Tensor]) -> None:
        self.replay = run
        self.was_reset = False

    def reset(self) -> None:
        self.was_reset = True


@torch.inference_mode()
def test_passes_share_inputs_and_output_but_not_their_results(
    tiny: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured: list[_Recorded] = []

    def capture(_: KVCache, new_tokens: int, run: Callable[[], Tensor], *rest: Any) -> Any:
        assert 1 <= new_tokens <= 96 and rest[0] == "pool"
        captured.append(_Recorded(run))
        return captured[-1], run()

    monkeypatch.setattr(graphs, "_capture", capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    eager = padding(Engine(tiny, max_seq_len=96, batch_size=2))
    engine = padding(Engine(tiny, max_seq_len=96, batch_size=2))
    engine.graphs = graphs.Graphs(tiny, engine.cache, engine.sampler, 1, 512)
    lengths = [(90, 4), (3, 2), (16, 33), (1, 1), (96, 96), (5, 16), (64, 1)]
    results = []
    for a, b in lengths:
        rows = [ids(a, 1), ids(b, 2)]
        results.append((engine.prefill(rows), eager.prefill(rows)))
        assert torch.equal(cached(engine, 0), cached(eager, 0))
        assert torch.equal(cached(engine, 1), cached(eager, 1))
    for found, expected in results:
        assert torch.equal(found, expected)
    assert len(captured) == 3  # 16, 64 and 128, each of which came twice
    engine.close()
    assert all(graph.was_reset for graph in captured)


@torch.inference_mode()
def test_a_length_is_captured_when_it_comes_again(
    tiny: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single prompt does not pay for a capture; unless it is asked for."""
    captured: list[int] = []

    def capture(_: KVCache, new_tokens: int, run: Callable[[], Tensor], *rest: Any) -> Any:
        captured.append(new_tokens)
        return _Recorded(run), run()

    monkeypatch.setattr(graphs, "_capture", capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    engine = padding(Engine(tiny, max_seq_len=600))
    engine.graphs = graphs.Graphs(tiny, engine.cache, engine.sampler, 1, 512)
    eager = padding(Engine(tiny, max_seq_len=600))
    engine.graphs.prefill.capture(192)
    expected = [192]
    for length, what in [(9, []), (100, []), (150, []), (12, [16]), (9, []), (128, [128]), (5, [])]:
        assert torch.equal(engine.prefill(ids(length)), eager.prefill(ids(length)))
        expected += what
        assert captured == expected, length
    again = padding(Engine(tiny, max_seq_len=600))
    again.graphs = graphs.Graphs(tiny, again.cache, again.sampler, 1, 512)
    again.prefill(ids(9))
    assert captured == expected  # every engine counts for itself


# ---- graphs on a GPU -----------------------------------------------------------------------

MODELS = {
    "float32": {},
    "float16": {},
    "bfloat16": {},
    "wide": {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32},
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> LlamaModel:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 64, "num_hidden_layers": 2, "vocab_size": 512}
    config = ModelConfig.from_dict(
        {"model_type": "llama", "rms_norm_eps": 1e-5, "max_position_embeddings": 1024}
        | {**sizes, **MODELS[request.param]}
    )
    dtype = getattr(torch, "bfloat16" if request.param == "wide" else request.param)
    return LlamaModel(config, random_weights(config, device="cuda", dtype=dtype, std=0.05))


@pytest.mark.cuda
@torch.inference_mode()
def test_a_graph_gives_the_eager_logits_bit_for_bit(model: LlamaModel) -> None:
    """At first use, at the second, which captures, and later; and the same cache."""
    eager = Engine(model, max_seq_len=600)
    graphed = graphs.enable(Engine(model, max_seq_len=600))
    order = torch.randperm(4 * 9, generator=torch.Generator().manual_seed(1)).tolist()
    for turn in order:
        length = (*SPREAD, 512, 513)[turn % 9]
        prompt = ids(length, turn)
        assert torch.equal(graphed.prefill(prompt), eager.prefill(prompt)), length
        assert torch.equal(cached(graphed), cached(eager)), length
        assert graphed.cache.seq_lens.tolist() == [length]
    fresh = graphs.enable(Engine(model, max_seq_len=600), prompt_lengths=(100, 513))
    assert torch.equal(fresh.prefill(ids(100)), eager.prefill(ids(100)))


@pytest.mark.cuda
@pytest.mark.parametrize("length", SPREAD)
@pytest.mark.parametrize("use_graphs", [False, True])
@torch.inference_mode()
def test_capacity_does_not_show(model: LlamaModel, length: int, use_graphs: bool) -> None:
    """Padding beyond the cache is dropped."""
    roomy = padding(Engine(model, max_seq_len=600))
    expected = roomy.prefill(ids(length))
    tight = padding(Engine(model, max_seq_len=length))
    if use_graphs:
        graphs.enable(tight)
    for _ in range(2):
        assert torch.equal(tight.prefill(ids(length)), expected)
        assert torch.equal(cached(tight), cached(roomy))


@pytest.mark.cuda
@torch.inference_mode()
def test_graphed_rows_of_different_lengths(model: LlamaModel) -> None:
    eager = padding(Engine(model, max_seq_len=160, batch_size=2))
    graphed = graphs.enable(padding(Engine(model, max_seq_len=160, batch_size=2)))
    for a, b in ((70, 5), (1, 16), (129, 128), (5, 70), (160, 160)):
        rows = [ids(a, 1), ids(b, 2)]
        for _ in range(2):
            assert torch.equal(graphed.prefill(rows), eager.prefill(rows))
            for row in range(2):
                assert torch.equal(cached(graphed, row), cached(eager, row))


@pytest.mark.cuda
def test_graphed_generations(model: LlamaModel) -> None:
    eager = Engine(model, max_seq_len=200)
    graphed = graphs.enable(Engine(model, max_seq_len=200))
    options: dict[str, Any] = {"temperature": 0.8, "top_k": 50, "seed": 3}
    for length in (*SPREAD, 200):
        for how in ({}, options):
            prompt = ids(length)
            assert graphed.generate(prompt, 30, **how)[0] == eager.generate(prompt, 30, **how)[0]
    graphed.close()
    eager.close()
    again = graphs.enable(Engine(model, max_seq_len=200))
    expected = Engine(model, max_seq_len=200).generate(ids(100), 30)[0]
    assert again.generate(ids(100), 30)[0] == expected


@pytest.mark.cuda
@torch.inference_mode()
def test_prompts_enqueued_ahead_do_not_mix(model: LlamaModel) -> None:
    """Many prompts behind a busy device: memory that a copy will read is not written again."""
    for use_graphs in (False, True):
        engine = Engine(model, max_seq_len=256)
        if use_graphs:
            graphs.enable(engine)
        cases = [ids(1 + 13 * i % 200, i) for i in range(100)]
        expected = [engine.prefill(case).clone() for case in cases]
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)  # cycles: 0.1 s
        found = [engine.prefill(case) for case in cases]
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)


@pytest.mark.cuda
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.8, "top_k": 50, "seed": 1},
        {"temperature": 0.8, "seed": 1, "repetition_penalty": 1.2, "logit_bias": {4: 1.0}},
    ],
)
def test_nothing_waits_between_the_call_and_the_last_token(
    model: LlamaModel, options: dict[str, Any]
) -> None:
    """Nor is anything captured again."""
    engine = graphs.enable(Engine(model, max_seq_len=256))
    for _ in range(2):  # the second time captures
        expected = [engine.generate(ids(n), 50, **options)[0] for n in (100, 12)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "_capture", None)
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = [engine.generate(ids(n), 50, **options)[0] for n in (100, 12)]
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert found == expected


@pytest.mark.cuda
def test_memory_of_the_passes(model: LlamaModel) -> None:
    """They share what they need, and closing the engine gives it back."""

    def held() -> tuple[int, int]:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    with graphs.enable(Engine(model, max_seq_len=600)) as engine:
        for _ in range(2):
            engine.prefill(ids(100))  # what a process needs once
    outside = held()
    engine = graphs.enable(Engine(model, max_seq_len=600), prompt_lengths=[512])
    one = held()
    for length in prompts.LENGTHS:
        for _ in range(2):
            engine.prefill(ids(length))
    every = held()
    assert every[0] - one[0] < 2**20
    # The private pool holds the passes' scratch memory once, not eleven times.
    assert every[1] - one[1] <= 64 * 2**20
    engine.close()
    del engine
    after = held()
    assert after[0] - outside[0] < 2**20 and after[1] - outside[1] <= 16 * 2**20
