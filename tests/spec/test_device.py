"""The rounds on the device: when they are used, what they leave, what they cost."""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest
import torch
from spec.conftest import really_fits
from spec.models import engine, tiny

from tinydecode import speculative
from tinydecode.events import Output
from tinydecode.sampling import SamplingParams
from tinydecode.speculative import ModelDrafter, NgramDrafter, device
from tinydecode.speculative.scripted import ScriptedDrafter
from tinydecode.stats import Stats
from tinydecode.token_loop import Call


def call_of(**options: Any) -> Call:
    params = SamplingParams(**options)
    return Call([[1]], [Output(9)], [9], params, frozenset(), None, Stats(), time.perf_counter())


@pytest.mark.cuda
def test_which_calls_run_on_the_device() -> None:
    target, draft = engine(tiny("cuda"), 64), engine(tiny("cuda"), 64)
    for drafter in (ModelDrafter(draft), NgramDrafter(), NgramDrafter(16, 1)):
        assert really_fits(target, drafter, call_of())
        assert really_fits(target, drafter, call_of(temperature=1.0, top_p=0.9, logit_bias={3: 1}))
        for options in ({"repetition_penalty": 1.1}, {"presence_penalty": 1}, {"logprobs": 0}):
            assert not really_fits(target, drafter, call_of(**options))
    assert not really_fits(target, NgramDrafter(17, 1), call_of())
    assert not really_fits(engine(tiny("cpu"), 64), NgramDrafter(), call_of())


def test_a_scripted_draft_is_right_as_often_as_asked(where: str) -> None:
    target, draft = engine(tiny(where), 512), engine(tiny(where, seed=5), 512)
    prompt = list(range(20))
    expected, _ = target.generate(prompt, 200)
    for inner in (NgramDrafter(), ModelDrafter(draft)):
        for rate, low, high in ((1.0, 1.0, 1.0), (0.0, 0.0, 0.0), (0.8, 0.5, 0.85)):
            drafter = ScriptedDrafter(inner, prompt + expected, rate, 512)
            found, stats = speculative.generate(target, drafter, prompt, 4, 200)
            assert found == expected
            assert stats.acceptance_rate is not None and low <= stats.acceptance_rate <= high


def test_streams_may_be_dropped_and_engines_used_again(where: str) -> None:
    target, drafter = engine(tiny(where), 256), ModelDrafter(engine(tiny(where, 0.002), 256))
    prompt = list(range(30))
    expected = target.generate(prompt, 40)[0]
    for count in (1, 2, 7, 20):
        stream = speculative.stream(target, drafter, prompt, 4, 40)
        taken = [next(stream).token_id for _ in range(count)]
        assert taken == expected[:count]
        del stream
        gc.collect()
        assert speculative.generate(target, drafter, prompt, 4, 40)[0] == expected
        assert target.generate(prompt, 40)[0] == expected
    stream = speculative.stream(target, drafter, prompt, 4, 40)
    next(stream)
    target.generate(prompt, 3)
    with pytest.raises(RuntimeError, match="another call used this engine"):
        list(stream)


def test_every_k_shares_one_pair(where: str) -> None:
    target, drafter = engine(tiny(where), 256), ModelDrafter(engine(tiny(where), 256))
    expected = target.generate([5, 6, 7], 60)[0]
    for k in (1, 8, "auto", 3, "auto"):
        assert speculative.generate(target, drafter, [5, 6, 7], k, 60)[0] == expected
        sampled = speculative.generate(target, drafter, [5, 6, 7], k, 60, temperature=1.0)[0]
        assert len(sampled) == 60
    assert len(target.rounds) <= 1
    target.close()
    assert not target.rounds


def test_plain_steps_in_between_are_caught_up(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft of the same weights is accepted always, also after steps that it did not see."""
    from tinydecode.speculative.length import AdaptiveLength

    pattern = iter([3, 0, 0, 2, 0, 5, 5, 0, 0, 0, 0, 0, 0, 1, 1, 8, 0, 2, 3, 0] * 20)
    monkeypatch.setattr(AdaptiveLength, "_choose", lambda self: next(pattern))
    target, drafter = engine(tiny(where), 512), ModelDrafter(engine(tiny(where), 512))
    monkeypatch.setattr(AdaptiveLength, "ran", lambda *_: None)
    lengths = (1, 2, 3, 5, 8, 15)
    assert lengths == speculative.length.AUTO_LENGTHS
    found, stats = speculative.generate(target, drafter, list(range(12)), "auto", 150)
    assert found == target.generate(list(range(12)), 150)[0]
    assert stats.acceptance_rate == 1.0 and stats.rounds < stats.target_passes


@pytest.mark.parametrize("where", ["cpu"])  # a replayed graph calls nothing that could be watched
def test_a_draft_keeps_the_slots_that_its_prompt_pass_wrote(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written again by a step they would differ from the target's in their last bits."""
    target, drafter = engine(tiny(where), 256), ModelDrafter(engine(tiny(where, 0.01), 256))
    model, cache = drafter.engine.model, drafter.engine.cache
    passes: list[tuple[int, int]] = []
    chunk = model.chunk

    def watched(token_ids: torch.Tensor, into: Any) -> torch.Tensor:
        if into is cache:
            passes.append((int(cache.seq_lens), token_ids.shape[1]))
        return chunk(token_ids, into)

    monkeypatch.setattr(model, "chunk", watched)
    monkeypatch.setattr(speculative.length.AdaptiveLength, "_choose", lambda self: next(pattern))
    for start in (0, 1, 20):  # rounds of one token before the first draft
        for prompt in ([1], list(range(12))):
            pattern = iter([0] * start + [3, 1, 0, 2] * 40)
            passes.clear()
            ids, _ = speculative.generate(target, drafter, prompt, "auto", 60)
            assert ids == target.generate(prompt, 60)[0]
            assert start or passes[0] == (len(prompt), 1)
            assert min(at for at, _ in passes) == len(prompt)
            assert max(rows for _, rows in passes) <= 16


@pytest.mark.cuda
def test_memory_comes_back() -> None:
    """A35: engines with graphs, drafts and rounds, made and closed."""
    model = tiny("cuda")
    after: list[int] = []
    for _ in range(10):
        target, draft = engine(model, 512), engine(model, 512)
        for drafter in (ModelDrafter(draft), NgramDrafter()):
            speculative.generate(target, drafter, [1, 2, 3], 4, 8)
        target.close()
        draft.close()
        del target, draft, drafter
        gc.collect()
        torch.cuda.synchronize()
        after.append(torch.cuda.memory_allocated())
    assert max(after) - after[0] < 16 * 2**20


@pytest.mark.cuda
def test_graphs_and_launches_one_by_one_agree() -> None:
    from tinydecode import Engine

    eager, graphed = Engine(tiny("cuda"), 256), engine(tiny("cuda"), 256)
    options = {"temperature": 0.9, "top_p": 0.95, "seed": 5}
    for make in (NgramDrafter, lambda: ModelDrafter(Engine(tiny("cuda", 0.002), 256))):
        texts = [
            speculative.generate(which, make(), list(range(20)), 4, 100, **options)[0]
            for which in (eager, graphed)
        ]
        assert texts[0] == texts[1]
    assert device.AHEAD >= 1
