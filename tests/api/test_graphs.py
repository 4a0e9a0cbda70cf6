"""Captured decoding against eager decoding, and what a capture may cost. A34, A35."""

from __future__ import annotations

import gc
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
from fixtures import write_markov, write_tiny

from tinydecode import Engine, Tokenizer, graphs, load_hf, ops
from tinydecode.demo import demo_model
from tinydecode.model import LlamaModel
from tinydecode.ops import ref

PROMPT = list(range(40))


def test_graphs_need_a_cuda_model(tmp_path: Path) -> None:
    engine = Engine(load_hf(write_tiny(tmp_path), device="cpu"))
    with pytest.raises(ValueError, match="CUDA graphs need a model on a CUDA device"):
        graphs.enable(engine)


class _Recorder:
    """Stands for torch.cuda.CUDAGraph: tells what was asked of it."""

    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        self._calls.append(f"begin {pool} {capture_error_mode}")

    def capture_end(self) -> None:
        self._calls.append("end")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a capture asks of CUDA, on the CPU."""
    made: list[str] = []
    side = mock.Mock()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: _Recorder(made))
    monkeypatch.setattr(graphs, "_side_stream", lambda _: side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: mock.Mock())
    for name in ("stream", "device"):
        monkeypatch.setattr(torch.cuda, name, lambda _: nullcontext())
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: made.append(name))
    monkeypatch.setattr(gc, "collect", lambda *_: made.append("collect"))
    return made


@pytest.mark.parametrize(("free", "before"), [(2**34, []), (2**20, ["empty_cache"])])
def test_a_capture_costs_no_more_than_it_must(
    tmp_path: Path, calls: list[str], monkeypatch: pytest.MonkeyPatch, free: int, before: list[str]
) -> None:
    """Nothing is waited for, collected or given back, unless memory is short."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 2**36))
    cache = Engine(load_hf(write_tiny(tmp_path), device="cpu"), max_seq_len=20).cache
    cache.seq_lens.fill_(7)
    lengths = []

    def run() -> torch.Tensor:
        calls.append("run")
        lengths.append(cache.seq_lens.item())
        return cache.seq_lens

    graphs._capture(cache, 3, run, "pool", 1)
    assert calls == ["run", *before, "begin pool thread_local", "run", "end"]
    assert lengths[0] == 17 and cache.seq_lens.item() == 7 and gc.isenabled()


def test_a_pass_that_fails_ends_its_capture(
    tmp_path: Path, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2**34, 2**36))
    cache = Engine(load_hf(write_tiny(tmp_path), device="cpu"), max_seq_len=20).cache

    def run() -> torch.Tensor:
        raise RuntimeError("no such kernel")

    with pytest.raises(RuntimeError, match="no such kernel"):
        graphs._capture(cache, 3, run, None, 0)
    assert calls == ["begin None thread_local", "end"] and gc.isenabled()


@pytest.mark.cuda
@pytest.mark.parametrize("steps", [0, -1, 33, 1.5, True])
def test_impossible_steps_per_launch_are_named(tmp_path: Path, steps: int) -> None:
    engine = Engine(load_hf(write_tiny(tmp_path), device="cuda"), max_seq_len=64)
    with pytest.raises(ValueError, match=f"steps_per_launch must be .* found {steps!r}"):
        graphs.enable(engine, steps_per_launch=steps)


@pytest.fixture(scope="module", params=[torch.float32, torch.float16, torch.bfloat16])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LlamaModel:
    return load_hf(write_tiny(tmp_path_factory.mktemp("tiny"), dtype=request.param), device="cuda")


@pytest.mark.cuda
def test_the_kernels_are_in_use() -> None:
    assert ops.backend_name(is_cuda=True) == "fused"


@pytest.mark.cuda
def test_graphed_greedy_equals_eager_greedy(tiny: LlamaModel) -> None:
    eager = Engine(tiny, max_seq_len=700)
    graphed = graphs.enable(Engine(tiny, max_seq_len=700))
    for prompt in (PROMPT, [7], list(range(300))):
        assert graphed.generate(prompt, 300)[0] == eager.generate(prompt, 300)[0]


@pytest.mark.cuda
@torch.inference_mode()
def test_graphed_logits_are_the_eager_ones_bit_for_bit(tiny: LlamaModel) -> None:
    eager = Engine(tiny, max_seq_len=128)
    graphed = graphs.enable(Engine(tiny, max_seq_len=128), verify=(5,))
    generator = torch.Generator().manual_seed(3)
    for engine in (eager, graphed):
        engine.prefill(PROMPT)
    for size in (1, 5, 1, 1, 3, 5, 9, 1):
        tokens = torch.randint(0, 512, (1, size), generator=generator).cuda()
        assert torch.equal(graphed.chunk(tokens), eager.chunk(tokens))
        assert torch.equal(graphed.cache.seq_lens, eager.cache.seq_lens)


@pytest.mark.cuda
def test_sampled_text_is_the_same_with_and_without_graphs(tiny: LlamaModel) -> None:
    eager = Engine(tiny, max_seq_len=128)
    graphed = graphs.enable(Engine(tiny, max_seq_len=128))
    options = {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.02, "seed": 11}
    assert graphed.generate(PROMPT, 60, **options)[0] == eager.generate(PROMPT, 60, **options)[0]
    # Greedy again: the device-side loop is not confused by steps driven from the host.
    assert graphed.generate(PROMPT, 60)[0] == eager.generate(PROMPT, 60)[0]


@pytest.mark.cuda
def test_the_fused_path_agrees_with_the_twins(tiny: LlamaModel) -> None:
    fused = Engine(tiny, max_seq_len=128)
    with torch.inference_mode():
        fused.prefill(PROMPT)
        logits = fused.step(torch.tensor([5], device="cuda"))
        with ops.forced(ref):
            twins = Engine(tiny, max_seq_len=128)
            twins.prefill(PROMPT)
            expected = twins.step(torch.tensor([5], device="cuda"))
    limit = 2e-4 if tiny.dtype == torch.float32 else 3e-2 * float(expected.abs().max())
    assert (logits - expected).abs().max() < limit


@pytest.mark.cuda
def test_what_is_left_in_the_cache_after_a_stop(tiny: LlamaModel) -> None:
    """The step launched ahead of the last token read is forgotten."""
    graphed = graphs.enable(Engine(tiny, max_seq_len=128))
    ids, _ = graphed.generate(PROMPT, 17)
    assert graphed.cache.seq_lens.tolist() == [40 + 16]
    stop = ids[9]
    shorter, stats = graphed.generate(PROMPT, 17, eos_token_ids=[stop])
    assert stats.finish_reason == "stop" and shorter == ids[: ids.index(stop)]
    assert graphed.cache.seq_lens.tolist() == [40 + len(shorter)]


@pytest.mark.cuda
def test_other_work_in_the_process_does_not_disturb_a_replay(tiny: LlamaModel) -> None:
    graphed = graphs.enable(Engine(tiny, max_seq_len=128))
    expected, _ = graphed.generate(PROMPT, 40)
    side = torch.cuda.Stream()
    noise = torch.randn(2048, 2048, device="cuda")
    stream = graphed.stream(PROMPT, 40)
    ids = []
    for event in stream:
        ids.append(event.token_id)
        with torch.cuda.stream(side):
            noise = (noise @ noise).clamp(-1, 1)
    assert ids == expected


@pytest.mark.cuda
def test_a34_draws_are_not_frozen_in_the_graph(tmp_path: Path) -> None:
    model = load_hf(write_markov(tmp_path, torch.zeros(100, 100)), device="cuda")
    engine = graphs.enable(Engine(model))
    texts = [engine.generate([0], 500, temperature=1.0, seed=seed)[0] for seed in (1, 2, 1)]
    assert texts[0] == texts[2] != texts[1]
    for period in range(1, 101):
        assert any(texts[0][i] != texts[0][i + period] for i in range(500 - period))
    counts = Counter(texts[0])
    assert sum((counts[t] - 5) ** 2 / 5 for t in range(100)) < 170
    assert Engine(model).generate([0], 500, temperature=1.0, seed=1)[0] == texts[0]


@pytest.mark.cuda
def test_a35_memory_does_not_grow_with_engines(tmp_path: Path) -> None:
    model = load_hf(write_tiny(tmp_path, dtype=torch.bfloat16), device="cuda")
    allocated, reserved = [], []
    for _ in range(10):
        engine = graphs.enable(Engine(model, max_seq_len=1024), verify=(5,))
        engine.generate(PROMPT, 8)
        engine.close()
        del engine
        gc.collect()
        torch.cuda.empty_cache()
        allocated.append(torch.cuda.memory_allocated())
        reserved.append(torch.cuda.memory_reserved())
    assert max(allocated) - allocated[0] <= 16 * 2**20
    assert max(reserved) - reserved[0] <= 64 * 2**20


@pytest.mark.cuda
def test_a35_memory_does_not_grow_with_generations(tiny: LlamaModel) -> None:
    engine = graphs.enable(Engine(tiny, max_seq_len=512))
    lengths = torch.randint(1, 200, (200, 2), generator=torch.Generator().manual_seed(5)).tolist()
    engine.generate([1] * 200, 200)
    before = torch.cuda.memory_allocated()
    for prompt, new in lengths:
        engine.generate([1] * prompt, new)
    assert torch.cuda.memory_allocated() - before < 16 * 2**20
    expected, _ = graphs.enable(Engine(tiny, max_seq_len=512)).generate(PROMPT, 50)
    assert engine.generate(PROMPT, 50)[0] == expected


@pytest.mark.cuda
def test_any_device_index(tmp_path: Path) -> None:
    last = torch.cuda.device_count() - 1
    model = load_hf(write_tiny(tmp_path), device=f"cuda:{last}")
    engine = graphs.enable(Engine(model, max_seq_len=128))
    expected, _ = Engine(load_hf(tmp_path, device="cpu"), max_seq_len=128).generate(PROMPT, 30)
    assert engine.generate(PROMPT, 30)[0] == expected
    assert torch.cuda.current_device() == 0


@pytest.mark.cuda
def test_the_demo_model_says_the_same_on_the_gpu() -> None:
    """fp32 on the GPU against fp32 on the CPU: equal tokens, or a near-tie where they part."""
    path = demo_model()
    tokenizer = Tokenizer(path)
    cpu = Engine(load_hf(path, device="cpu", dtype="float32"), max_seq_len=256)
    gpu = graphs.enable(Engine(load_hf(path, device="cuda", dtype="float32"), max_seq_len=256))
    for prompt in ("The capital of France is", "def fibonacci(n):\n", "Why is the sky blue?"):
        ids = tokenizer.encode(prompt)
        expected, _ = cpu.generate(ids, 64, ignore_eos=True)
        found, _ = gpu.generate(ids, 64, ignore_eos=True)
        if found == expected:
            continue
        at = next(i for i in range(64) if found[i] != expected[i])
        with torch.inference_mode():
            logits = cpu.prefill(ids + expected[:at])[0]
        gap = float(logits[expected[at]] - logits[found[at]])
        assert gap < 1e-3, f"{prompt!r} parts at token {at}, where the logits are {gap} apart"
