"""The device loop: no host synchronisation, tokens by number, several steps a launch, the ring."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import cycle_table, write_markov, write_tiny

from tinydecode import Engine, graphs, load_hf
from tinydecode.device_sampler import SLOTS, DeviceSampler, Stages
from tinydecode.model import LlamaModel
from tinydecode.ops import ref_sample
from tinydecode.sampling import SamplingParams

PROMPT = list(range(40))
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.05, "seed": 1}


# ---- the sampler on the CPU ----------------------------------------------------------------


def test_steps_are_read_by_their_number() -> None:
    sampler = DeviceSampler(2, 30, torch.device("cpu"))
    stages = Stages(has_filters=False, has_logprobs=False)
    sampler.begin(SamplingParams(), 0)
    logits = torch.zeros(2, 30)
    expected = []
    for step in range(3 * SLOTS):  # the ring goes round
        logits.zero_()
        logits[0, step % 30] = logits[1, (step + 1) % 30] = 1.0
        expected.append([step % 30, (step + 1) % 30])
        sampler.enqueue(logits, None, stages)
        sampler.launched += 1
        choices, _ = sampler.read()
        assert [choice.token_id for choice in choices if choice is not None] == expected[-1]


def test_a_new_generation_skips_what_was_launched_and_not_read() -> None:
    sampler = DeviceSampler(1, 30, torch.device("cpu"))
    stages = Stages(has_filters=True, has_logprobs=False)
    sampler.launched = 2**32 - 2  # the number wraps
    for token in (4, 9):
        sampler.begin(SamplingParams(1.0), 1, limits=[10])
        logits = torch.full((1, 30), -1e4)
        logits[0, token] = 0.0
        for _ in range(3):
            sampler.enqueue(logits, None, stages)
            sampler.launched += 1
        choices, _ = sampler.read()
        assert choices[0] is not None and choices[0].token_id == token


def test_a_step_that_never_comes_is_an_error() -> None:
    sampler = DeviceSampler(1, 30, torch.device("cpu"))
    sampler.begin(SamplingParams(), 0)
    started = time.perf_counter()
    with pytest.raises(RuntimeError, match="the device finished without step 1"):
        sampler.read()
    assert time.perf_counter() - started < 5


def test_the_layout_of_the_state() -> None:
    assert ref_sample.PARAMS.itemsize == 184 and ref_sample.ROW.itemsize == 24
    sampler = DeviceSampler(1, 30, torch.device("cpu"))
    params = SamplingParams(0.5, 7, 0.9, 0.1, 1.2, None, 0.3, 0.4, {1: 2.0})
    sampler.begin(params, 77, [[3, 3, 4]], {5, 6}, [9])
    found = sampler._state.numpy()[:184].view(ref_sample.PARAMS)[0]
    assert (found["seed"], found["top_k"], found["num_stops"]) == (77, 7, 2)
    assert found["stops"][:2].tolist() == [5, 6]
    assert found["top_p"] == 0.9 and found["temperature"] == 0.5
    assert sampler._bias[1] == 2.0 and sampler._bias.sum() == 2.0
    assert sampler._counts[0].nonzero()[:, 0].tolist() == [3, 4]


# ---- on a GPU ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LlamaModel:
    return load_hf(write_tiny(tmp_path_factory.mktemp("tiny"), dtype=torch.bfloat16), device="cuda")


@pytest.mark.cuda
@pytest.mark.parametrize("options", [{}, SAMPLED, {**SAMPLED, "logprobs": 3}])
def test_nothing_waits_for_the_device(tiny: LlamaModel, options: dict[str, Any]) -> None:
    """From the first to the last token no call waits: torch's own watch, and a trace of CUDA's."""
    engine = graphs.enable(Engine(tiny, max_seq_len=256))
    expected, _ = engine.generate(PROMPT, 100, **options)
    stream = engine.stream(PROMPT, 100, **options)
    ids = [next(stream).token_id]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        torch.cuda.set_sync_debug_mode("error")
        try:
            ids += [next(stream).token_id for _ in range(99)]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()  # ours: the only one that the trace may show
    assert ids == expected
    names = [event.name for event in trace.events()]
    waits = [name for name in names if "ynchronize" in name]
    assert len(waits) <= 2, waits  # ours, and the profiler's own at its end
    copies = [name for name in names if name.startswith("cudaMemcpy")]
    assert len(copies) <= 1, copies  # the rollback's, at most


@pytest.mark.cuda
@pytest.mark.parametrize("options", [{}, SAMPLED])
def test_a_change_of_parameters_captures_nothing(
    tiny: LlamaModel, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = graphs.enable(Engine(tiny, max_seq_len=256), prompt_lengths=[len(PROMPT)])

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("captured")

    monkeypatch.setattr(graphs, "_capture", refuse)
    for more in (
        {},
        {"repetition_penalty": 1.3},
        {"logit_bias": {4: 1.0}},
        {"stop_token_ids": [4]},
    ):
        for seed in (1, 2):
            engine.generate(PROMPT, 5, **{**options, "seed": seed, **more})
    if options:
        engine.generate(PROMPT, 5, temperature=1.7, top_k=3)
        engine.generate(PROMPT, 5, temperature=0.1, min_p=0.5)


@pytest.mark.cuda
@pytest.mark.parametrize("steps", [2, 4, 7])
@pytest.mark.parametrize("options", [{}, SAMPLED])
def test_several_steps_a_launch(tiny: LlamaModel, steps: int, options: dict[str, Any]) -> None:
    single = graphs.enable(Engine(tiny, max_seq_len=128))
    several = graphs.enable(Engine(tiny, max_seq_len=128), steps_per_launch=steps)
    for count in (*range(12), 60, 89, 200):
        expected, stats = single.generate(PROMPT, count, **options)
        found, other = several.generate(PROMPT, count, **options)
        assert found == expected and other.finish_reason == stats.finish_reason
        assert several.cache.seq_lens.tolist() == single.cache.seq_lens.tolist()
        stop = expected[len(expected) // 2 :][:1]
        first, _ = single.generate(PROMPT, count, stop_token_ids=stop, **options)
        second, _ = several.generate(PROMPT, count, stop_token_ids=stop, **options)
        assert first == second
        assert several.cache.seq_lens.tolist() == single.cache.seq_lens.tolist()


@pytest.mark.cuda
def test_steps_after_the_end_change_nothing_on_the_device(tmp_path: Path) -> None:
    model = load_hf(
        write_markov(tmp_path, cycle_table([1, 2, 3, 4, 5], 16), eos_token_id=4), device="cuda"
    )
    engine = graphs.enable(Engine(model, max_seq_len=64))
    assert engine.generate([1], 20)[0] == [2, 3]
    torch.cuda.synchronize()
    # The device froze by itself: its own length, before and after the host's rollback, is the same.
    lengths = []
    step = engine.graphs.step(graphs.GREEDY)  # type: ignore[union-attr]
    for _ in range(5):
        step.replay()
        lengths += engine.cache.seq_lens.tolist()
    assert lengths == [3] * 5
    assert engine.sampler.tokens.tolist() == [4]


@pytest.mark.cuda
def test_the_pinned_ring_and_the_torch_twin_agree(tmp_path: Path) -> None:
    """Kernels write the ring themselves, the twin by a copy: same tokens.

    The logits are multiples of 1/8, so that twins and kernels see the same ones.
    """
    from tinydecode import ops
    from tinydecode.ops import ref

    table = torch.randint(-16, 17, (64, 64), generator=torch.Generator().manual_seed(5)) / 8
    model = load_hf(write_markov(tmp_path, table), device="cuda")
    expected = [Engine(model, max_seq_len=64).generate([3, 9], 20, **o)[0] for o in ({}, SAMPLED)]
    with ops.forced(ref):
        for use_graphs in (False, True):
            engine = Engine(model, max_seq_len=64)
            if use_graphs:
                graphs.enable(engine)
            assert [engine.generate([3, 9], 20, **o)[0] for o in ({}, SAMPLED)] == expected


@pytest.mark.cuda
def test_gpu_and_wall_time_agree(tiny: LlamaModel) -> None:
    engine = graphs.enable(Engine(tiny, max_seq_len=600))
    engine.generate(PROMPT, 500)
    _, stats = engine.generate(PROMPT, 500)
    assert stats.gpu_ms_per_token is not None and stats.wall_ms_per_token is not None
    assert stats.wall_ms_per_token < 1.1 * stats.gpu_ms_per_token
