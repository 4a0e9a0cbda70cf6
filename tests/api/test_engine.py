"""The engine: limits, stops, streams, recovery after errors. A18 to A20, A25, A26.

Everything runs on the CPU by both token loops, and on a GPU without and with graphs.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import cycle_table, tiny_config, write_byte_tokenizer, write_markov, write_tiny
from makers import MAKERS, Maker

from tinydecode import NonFiniteLogitsError, Tokenizer
from tinydecode.model import LlamaModel
from tinydecode.stats import Stats, percentile

PROMPT = list(range(40))


@pytest.fixture(scope="module", params=MAKERS)
def make(request: pytest.FixtureRequest) -> Maker:
    return Maker(*request.param)


@pytest.fixture(scope="module")
def tiny(make: Maker, tmp_path_factory: pytest.TempPathFactory) -> LlamaModel:
    return make.load(write_tiny(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def cycle(make: Maker, tmp_path_factory: pytest.TempPathFactory) -> LlamaModel:
    """1 -> 2 -> 3 -> 4 -> 5 -> 1, end-of-sequence id 4."""
    directory = tmp_path_factory.mktemp("cycle")
    write_markov(directory, cycle_table([1, 2, 3, 4, 5], 16), eos_token_id=4)
    return make.load(directory)


@pytest.fixture(scope="module")
def uniform(make: Maker, tmp_path_factory: pytest.TempPathFactory) -> LlamaModel:
    return make.load(write_markov(tmp_path_factory.mktemp("flat"), torch.zeros(100, 100)))


# ---- capacity ------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "expected"), [(63, 2), (64, 1)])
def test_a18_the_last_token_needs_no_slot(
    make: Maker, tiny: LlamaModel, length: int, expected: int
) -> None:
    ids, stats = make(tiny, max_seq_len=64).generate(list(range(length)), 1000)
    assert len(ids) == stats.new_tokens == expected
    assert stats.finish_reason == "length"


@pytest.mark.parametrize("length", [65, 1000])
def test_a18_a_prompt_too_long_is_refused_and_poisons_nothing(
    make: Maker, tiny: LlamaModel, length: int
) -> None:
    engine = make(tiny, max_seq_len=64)
    expected, _ = make(tiny, max_seq_len=64).generate(PROMPT[:10], 20)
    for call in (engine.generate, engine.stream, engine.prefill):
        with pytest.raises(ValueError, match=f"prompt has {length} tokens, the cache holds 64"):
            call([1] * length)
    assert engine.generate(PROMPT[:10], 20)[0] == expected


def test_a19_exact_capacity_and_the_last_slot(make: Maker, tiny: LlamaModel) -> None:
    longest, _ = make(tiny, max_seq_len=300).generate(PROMPT, 261)
    assert len(longest) == 261
    for max_seq_len in (41, 48, 63, 64, 65, 127, 128, 129, 256):
        ids, stats = make(tiny, max_seq_len=max_seq_len).generate(PROMPT, 10000)
        assert len(ids) == max_seq_len - 40 + 1
        assert ids == longest[: len(ids)]
        assert stats.finish_reason == "length"


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 63, 64, 65])
@torch.inference_mode()
def test_a20_unused_slots_may_hold_anything(
    make: Maker, tiny: LlamaModel, poison: float, length: int
) -> None:
    def logits(fill: float) -> list[torch.Tensor]:
        engine = make(tiny, max_seq_len=96)
        engine.cache.k.fill_(fill)
        engine.cache.v.fill_(fill)
        out = [engine.prefill(list(range(length)))]
        out += [engine.step(make.tokens(token)) for token in (7, 8, 9)]
        out.append(engine.chunk(make.tokens([1, 2, 3, 4])))
        return out

    for clean, poisoned in zip(logits(0.0), logits(poison), strict=True):
        assert torch.equal(clean, poisoned)


@torch.inference_mode()
def test_a20_between_two_generations(make: Maker, tiny: LlamaModel) -> None:
    engine = make(tiny, max_seq_len=96)
    expected, _ = engine.generate(PROMPT, 30)
    engine.cache.k.fill_(math.nan)
    engine.cache.v.fill_(math.inf)
    assert engine.generate(PROMPT, 30)[0] == expected


@pytest.mark.parametrize("count", range(21))
def test_exactly_max_new_tokens(make: Maker, tiny: LlamaModel, count: int) -> None:
    ids, stats = make(tiny, max_seq_len=96).generate(PROMPT, count)
    assert len(ids) == stats.new_tokens == count
    assert stats.finish_reason == "length"
    stream = make(tiny, max_seq_len=96).stream(PROMPT, count)
    events = list(stream)
    assert [event.token_id for event in events if event.token_id is not None] == ids
    assert [event.finish_reason for event in events] == [None] * (len(events) - 1) + ["length"]


# ---- stops ---------------------------------------------------------------------------------


def test_end_of_sequence_is_neither_returned_nor_counted(make: Maker, cycle: LlamaModel) -> None:
    engine = make(cycle)
    ids, stats = engine.generate([1], 20)
    assert (ids, stats.new_tokens, stats.finish_reason) == ([2, 3], 2, "stop")
    events = list(engine.stream([1], 20))
    assert [(event.token_id, event.finish_reason) for event in events] == [
        (2, None),
        (3, None),
        (None, "stop"),
    ]
    assert engine.generate([1], 6, ignore_eos=True)[0] == [2, 3, 4, 5, 1, 2]
    assert engine.generate([1], 20, eos_token_ids=[1, 3])[0] == [2]
    assert engine.generate([3], 20)[0] == []
    assert engine.generate([1], 2)[1].finish_reason == "length"


# ---- streams -------------------------------------------------------------------------------


def test_a_stream_can_be_abandoned(make: Maker, tiny: LlamaModel) -> None:
    engine = make(tiny, max_seq_len=96)
    expected, _ = engine.generate(PROMPT, 10)
    stream = engine.stream(PROMPT, 10)
    assert [next(stream).token_id for _ in range(3)] == expected[:3]
    assert engine.generate(PROMPT, 10)[0] == expected
    # The cache now belongs to the later call: going on would mix two texts.
    with pytest.raises(RuntimeError, match="another call used this engine"):
        next(stream)
    assert engine.generate(PROMPT, 10)[0] == expected


def test_an_error_in_the_consumer_leaves_the_engine_usable(make: Maker, tiny: LlamaModel) -> None:
    engine = make(tiny, max_seq_len=96)
    expected, _ = engine.generate(PROMPT, 10)
    with pytest.raises(KeyboardInterrupt):
        for _ in engine.stream(PROMPT, 10):
            raise KeyboardInterrupt
    assert engine.generate(PROMPT, 10)[0] == expected


def test_stream_text_joins_to_the_decoded_whole(make: Maker, tmp_path: Path) -> None:
    text = "é 😀!"
    chain = [ord("<"), *text.encode(), 257]
    write_markov(tmp_path, cycle_table(chain, 512), eos_token_id=257)
    write_byte_tokenizer(tmp_path)
    engine, tokenizer = make(make.load(tmp_path)), Tokenizer(tmp_path)
    pieces = [event.text for event in engine.stream([ord("<")], 50, tokenizer=tokenizer)]
    assert "".join(pieces) == text  # type: ignore[arg-type]
    assert all("\ufffd" not in piece for piece in pieces)  # type: ignore[operator]
    # Cut inside the emoji: the joined stream is the decoded text, one replacement character.
    ids, _ = engine.generate([ord("<")], 5)
    pieces = [event.text for event in engine.stream([ord("<")], 5, tokenizer=tokenizer)]
    assert "".join(pieces) == tokenizer.decode(ids) == "é \ufffd"  # type: ignore[arg-type]


# ---- sampling through the engine -----------------------------------------------------------


def test_a26_seeds(make: Maker, uniform: LlamaModel) -> None:
    engine = make(uniform)

    def text(seed: int | None) -> list[int]:
        ids, stats = engine.generate([0], 50, temperature=1.0, seed=seed)
        assert stats.seed is not None and (seed is None or stats.seed == seed)
        return ids

    first = text(1)
    assert text(1) == first
    text(3)
    assert text(1) == first
    before = torch.get_rng_state()
    torch.manual_seed(9)
    assert text(1) == first
    torch.set_rng_state(before)
    text(1)
    assert torch.equal(torch.get_rng_state(), before)
    assert len({tuple(text(seed)) for seed in range(1, 21)}) == 20
    assert len({tuple(text(None)) for _ in range(5)}) == 5
    # An unseeded run is repeatable from its stats.
    ids, stats = engine.generate([0], 50, temperature=1.0)
    assert text(stats.seed) == ids


def test_repetition_penalty_counts_prompt_and_output(make: Maker, cycle: LlamaModel) -> None:
    # Logit 20 for the successor, 0 elsewhere: dividing by 1e9 makes a repeat lose to... nothing
    # else, since 0 stays 0. So 2e-8 still wins and the chain goes on.
    ids, _ = make(cycle).generate([1], 8, repetition_penalty=1e9, ignore_eos=True)
    assert ids == [2, 3, 4, 5, 1, 2, 3, 4]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a25_nan_in_the_head_is_an_error(make: Maker, tmp_path: Path, temperature: float) -> None:
    model = make.load(write_tiny(tmp_path))
    model.weights.lm_head[17] = math.nan
    engine = make(model)
    with pytest.raises(NonFiniteLogitsError, match="non-finite logits at step 1:"):
        engine.generate(PROMPT, 5, temperature=temperature)
    model.weights.lm_head[17] = 0.0
    assert len(engine.generate(PROMPT, 5)[0]) == 5


def test_a25_fp16_overflow_is_an_error(make: Maker, tmp_path: Path) -> None:
    model = make.load(write_tiny(tmp_path, dtype=torch.float16))
    model.weights.layers[0].down_proj.mul_(60000.0)  # activations pass 65504
    with pytest.raises(NonFiniteLogitsError, match="non-finite logits at step 1:"):
        make(model).generate(PROMPT, 5)


# ---- bad input -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        ([], {}, "empty prompt"),
        ([512], {}, "token id 512 is outside the vocabulary of 512"),
        ([-1], {}, "token id -1 is outside the vocabulary of 512"),
        ([1.5], {}, "token ids must be integers, found 1.5"),
        ([[1], [2]], {}, r"expected 1 prompt\(s\) \(batch_size\), found 2"),
        ([1], {"max_new_tokens": -1}, "max_new_tokens must be an integer >= 0, found -1"),
        ([1], {"max_new_tokens": 2.0}, "max_new_tokens must be an integer >= 0, found 2.0"),
        ([1], {"temperature": -0.5}, "temperature must be .* found -0.5"),
        ([1], {"temperature": math.nan}, "temperature must be .* found nan"),
        ([1], {"top_p": 2}, "top_p must be .* found 2"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(
    make: Maker, tiny: LlamaModel, ids: Any, options: dict[str, Any], message: str
) -> None:
    engine = make(tiny, max_seq_len=64)
    engine.generate(PROMPT, 3)
    before = engine.cache.seq_lens.clone()
    with pytest.raises(ValueError, match=message):
        engine.generate(ids, **options)
    with pytest.raises(ValueError, match=message):
        engine.stream(ids, **options)
    assert torch.equal(engine.cache.seq_lens, before)


@pytest.mark.parametrize("size", [0, -1, 1.5, "64", True])
def test_impossible_engine_sizes_are_named(make: Maker, tiny: LlamaModel, size: Any) -> None:
    with pytest.raises(ValueError, match=f"max_seq_len must be an integer >= 1, found {size!r}"):
        make(tiny, max_seq_len=size)
    with pytest.raises(ValueError, match=f"batch_size must be an integer >= 1, found {size!r}"):
        make(tiny, batch_size=size)


def test_a_cache_beyond_the_models_context_is_refused(make: Maker, tiny: LlamaModel) -> None:
    with pytest.raises(ValueError, match="max_seq_len 1025 exceeds the model's context of 1024"):
        make(tiny, max_seq_len=1025)


def test_a_closed_engine_says_so(make: Maker, tiny: LlamaModel) -> None:
    with make(tiny) as engine:
        engine.generate(PROMPT, 1)
    with pytest.raises(RuntimeError, match="this engine is closed"):
        engine.generate(PROMPT, 1)
    engine.close()


# ---- batches -------------------------------------------------------------------------------


def test_batch_rows_equal_their_single_runs(make: Maker, tiny: LlamaModel) -> None:
    prompts = [[5, 6, 7], list(range(30)), [400]]
    engine = make(tiny, max_seq_len=48, batch_size=3)
    rows, stats = engine.generate(prompts, 30)
    for row, ids in enumerate(prompts):
        alone, alone_stats = make(tiny, max_seq_len=48).generate(ids, 30)
        assert rows[row] == alone
        assert stats.finish_reasons[row] == alone_stats.finish_reason
    assert [len(row) for row in rows] == [30, 48 - 30 + 1, 30]
    assert stats.new_tokens == 79
    assert stats.prompt_tokens == 34


def test_batch_rows_stop_on_their_own(make: Maker, cycle: LlamaModel) -> None:
    rows, stats = make(cycle, batch_size=2).generate([[1], [5]], 3)
    assert rows == [[2, 3], [1, 2, 3]]
    assert stats.finish_reasons == ["stop", "length"]
    with pytest.raises(ValueError, match="stream serves batch_size 1"):
        make(cycle, batch_size=2).stream([1])


# ---- stats ---------------------------------------------------------------------------------


def test_percentile_by_hand() -> None:
    values = [4.0, 1.0, 3.0, 2.0]
    assert percentile(values, 50) == 2.0
    assert percentile(values, 99) == 4.0
    assert percentile([], 50) is None


def test_stats_by_hand() -> None:
    stats = Stats(3, 4, "stop", ["stop"], 7, step_times=[0.5, 0.6, 0.8, 1.5])
    assert stats.ttft_s == 0.5
    assert stats.itl_p50_s == pytest.approx(0.2)
    assert stats.itl_p99_s == pytest.approx(0.7)
    assert stats.tok_s == pytest.approx(3.0)
    assert "TTFT 500.0 ms" in stats.summary() and "3.0 tok/s" in stats.summary()


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_stats_are_json_safe(make: Maker, tiny: LlamaModel, count: int) -> None:
    _, stats = make(tiny).generate(PROMPT, count)
    values = json.loads(json.dumps(stats.to_dict(), allow_nan=False))
    assert values["new_tokens"] == count
    assert (values["ttft_s"] is None) == (count == 0)
    assert (values["tok_s"] is None) == (count < 2)
    assert isinstance(stats.summary(), str)


def test_a_config_with_a_small_context_limits_the_engine(make: Maker, tmp_path: Path) -> None:
    write_tiny(tmp_path, tiny_config(max_position_embeddings=32))
    assert make(make.load(tmp_path)).max_seq_len == 32
