"""What a call may ask of the token loop, in every kind of engine. A06, A15, A16, A39; logits hook.

`test_engine.py` has limits, streams and seeds; `test_engine_draws.py` the distributions.
"""

from __future__ import annotations

import gc
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import (
    SPM_IDS,
    cycle_table,
    edit_json,
    write_byte_tokenizer,
    write_json,
    write_markov,
    write_spm_tokenizer,
    write_tiny,
)
from makers import MAKERS, Maker

from tinydecode import Engine, NonFiniteLogitsError, Tokenizer
from tinydecode.model import LlamaModel
from tinydecode.sampling import Logprobs, SamplingParams, adjust

PROMPT = list(range(40))
PIECES = ["Th", "e ", "qui", "ck", " b", "r", "o", "wn", " f", "ox"]
SENTENCE = "The quick brown fox"


@pytest.fixture(scope="module", params=MAKERS)
def make(request: pytest.FixtureRequest) -> Maker:
    return Maker(*request.param)


@pytest.fixture(scope="module")
def tiny(make: Maker, tmp_path_factory: pytest.TempPathFactory) -> LlamaModel:
    return make.load(write_tiny(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def speaker(make: Maker, tmp_path_factory: pytest.TempPathFactory) -> tuple[LlamaModel, Tokenizer]:
    """After "<" it says SENTENCE in PIECES, ids 261 and up, then the end of sequence."""
    directory = tmp_path_factory.mktemp("speaker")
    write_byte_tokenizer(directory, pieces=PIECES)
    chain = [ord("<"), *range(261, 261 + len(PIECES)), 257]
    write_markov(directory, cycle_table(chain, 512), eos_token_id=257)
    return make.load(directory), Tokenizer(directory)


def cached(engine: Engine) -> list[int]:
    lengths: list[int] = engine.cache.seq_lens.tolist()
    return lengths


# ---- stops ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        (["own fox"], "The quick br"),
        (["own cat"], SENTENCE),
        (["own", "own fox"], "The quick br"),
        ("quick", "The "),
        (["T"], ""),
    ],
)
def test_a39_stop_strings(
    make: Maker, speaker: tuple[LlamaModel, Tokenizer], stop: Any, text: str
) -> None:
    model, tokenizer = speaker
    engine = make(model, max_seq_len=64)
    options: dict[str, Any] = {"tokenizer": tokenizer, "stop": stop}
    ids, stats = engine.generate([60], 40, **options)
    assert tokenizer.decode(ids) == text
    assert stats.finish_reason == "stop" and stats.new_tokens == len(ids)
    # Steps launched past the stop are gone: the cache holds prompt and text, nothing else.
    assert cached(engine) == [1 + len(ids)]
    stream = engine.stream([60], 40, **options)
    events = list(stream)
    assert "".join(event.text or "" for event in events) == text
    assert [event.token_id for event in events] == [*ids, None]
    assert stream.stats.new_tokens == len(ids)
    # And the engine goes on as if nothing had been there.
    assert tokenizer.decode(engine.generate([60], 40)[0]) == SENTENCE


def test_a_stop_needs_a_tokenizer(make: Maker, tiny: LlamaModel) -> None:
    engine = make(tiny, max_seq_len=64)
    for call in (engine.generate, engine.stream):
        with pytest.raises(ValueError, match="stop strings need a tokenizer"):
            call([1], stop="x")
        with pytest.raises(ValueError, match="at least one character"):
            call([1], stop=[""])


@pytest.mark.parametrize("position", range(8))
def test_a_stop_in_a_step_already_launched(
    make: Maker, speaker: tuple[LlamaModel, Tokenizer], position: int
) -> None:
    model, _ = speaker
    engine = make(model, max_seq_len=64)
    stop = 261 + position
    ids, stats = engine.generate([60], 40, stop_token_ids=[stop])
    assert ids == list(range(261, stop)) and stats.finish_reason == "stop"
    assert cached(engine) == [1 + position]
    if position:
        assert len(engine.generate([60], position, stop_token_ids=[stop])[0]) == position
        assert cached(engine) == [position]
    ids, _ = engine.generate([60], 40, stop_token_ids=[stop], ignore_eos=True)
    assert ids == list(range(261, stop))


def test_more_stop_ids_than_the_device_knows(
    make: Maker, speaker: tuple[LlamaModel, Tokenizer]
) -> None:
    model, _ = speaker
    engine = make(model, max_seq_len=64)
    many = [*range(100, 200), 268]  # 268 is beyond the first 32
    ids, stats = engine.generate([60], 40, stop_token_ids=many)
    assert ids == list(range(261, 268)) and stats.finish_reason == "stop"
    assert cached(engine) == [1 + len(ids)]


def test_ignore_eos_goes_on_and_finish_reasons(
    make: Maker, speaker: tuple[LlamaModel, Tokenizer]
) -> None:
    model, _ = speaker
    engine = make(model, max_seq_len=32)
    length = len(PIECES)
    ids, stats = engine.generate([60], 25, ignore_eos=True)
    assert ids[length] == 257 and len(ids) == 25 and stats.finish_reason == "length"
    assert engine.generate([60], 40)[1].finish_reason == "stop"
    assert engine.generate([60], length)[1].finish_reason == "length"
    assert engine.generate([60], 0)[1].finish_reason == "length"
    assert engine.generate([60] * 30, 40, ignore_eos=True)[1].finish_reason == "length"
    stream = engine.stream([60], 40)
    next(stream)
    assert stream.stats.finish_reason is None


def test_a06_the_union_of_stop_ids(make: Maker, tmp_path: Path) -> None:
    chain = cycle_table([9, 10, 11, 258, 12, 12], 512)
    cases = [
        ({"eos_token_id": 257}, {"eos_token_id": [257, 258]}, None, [10, 11], "stop"),
        ({"eos_token_id": 257}, None, None, [10, 11, 258, 12], "length"),
        ({"eos_token_id": 257}, {"eos_token_id": [257]}, "<|eot|>", [10, 11], "stop"),
        ({"eos_token_id": None}, None, None, [10, 11, 258, 12], "length"),
    ]
    for number, (config, generation, eos_token, expected, reason) in enumerate(cases):
        directory = tmp_path / str(number)
        write_markov(directory, chain, **config)
        write_byte_tokenizer(directory)
        edit_json(directory / "tokenizer_config.json", eos_token=eos_token or "</s>")
        if config["eos_token_id"] is None:
            edit_json(directory / "tokenizer_config.json", eos_token=None)
        if generation is not None:
            write_json(directory / "generation_config.json", generation)
        ids, stats = make(make.load(directory)).generate([9], 4)
        assert (ids, stats.finish_reason) == (expected, reason)


# ---- text ----------------------------------------------------------------------------------


def test_a15_an_invalid_byte_does_not_stall(make: Maker, tmp_path: Path) -> None:
    chain = [ord("<"), ord("B"), 0xFF, ord("A"), 257]
    write_markov(tmp_path, cycle_table(chain, 512), eos_token_id=257)
    write_byte_tokenizer(tmp_path)
    engine, tokenizer = make(make.load(tmp_path)), Tokenizer(tmp_path)
    events = list(engine.stream([60], 50, tokenizer=tokenizer))
    assert "".join(event.text or "" for event in events) == "B\ufffdA"


def test_a16_a_leading_space_is_kept(make: Maker, tmp_path: Path) -> None:
    hello, world, bang = (SPM_IDS[token] for token in ("\u2581Hello", "\u2581world", "!"))
    table = cycle_table([3 + ord(":"), hello, world, bang, 2], 512)
    write_markov(tmp_path, table, eos_token_id=2, bos_token_id=1)
    write_spm_tokenizer(tmp_path)
    engine, tokenizer = make(make.load(tmp_path)), Tokenizer(tmp_path)
    prompt = tokenizer.encode("Say:")
    pieces = [event.text for event in engine.stream(prompt, 50, tokenizer=tokenizer)]
    assert pieces == [" Hello", " world", "!", ""]


# ---- logprobs ------------------------------------------------------------------------------


def assert_same(found: Logprobs, expected: Logprobs) -> None:
    assert found.logprob == pytest.approx(expected.logprob, abs=1e-3)
    assert found.sampled_logprob == pytest.approx(expected.sampled_logprob, abs=1e-3)
    assert len(found.top) == len(expected.top)
    for mine, other in zip(found.top, expected.top, strict=True):
        assert mine.logprob == pytest.approx(other.logprob, abs=1e-3)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "top_k": 20, "seed": 3}])
def test_logprobs(make: Maker, tiny: LlamaModel, options: dict[str, Any]) -> None:
    engine = make(tiny, max_seq_len=96)
    plain, _ = engine.generate(PROMPT, 8, **options)
    ids, stats = engine.generate(PROMPT, 8, logprobs=3, **options)
    assert ids == plain, "asking changes nothing"
    assert len(stats.logprobs[0]) == 8
    stream = engine.stream(PROMPT, 8, logprobs=3, **options)
    with torch.inference_mode():
        for event, token in zip(stream, ids, strict=True):
            assert event.token_id == token and event.logprobs is not None
            assert event.logprob == event.logprobs.logprob
    with torch.inference_mode():
        logits = engine.prefill(PROMPT)[0].double().cpu()
    expected = logits.log_softmax(0)
    first = stats.logprobs[0][0]
    assert first.logprob == pytest.approx(float(expected[ids[0]]), abs=1e-4)
    best = expected.sort(descending=True)
    assert [top.token_id for top in first.top] == best.indices[:3].tolist()
    assert [top.logprob for top in first.top] == pytest.approx(best.values[:3].tolist(), abs=1e-4)
    if not options:
        assert all(found.sampled_logprob == 0 for found in stats.logprobs[0])
        assert first.top[1].sampled_logprob == -math.inf
    else:
        cut = logits / 0.7
        cut[cut < cut.sort(descending=True).values[19]] = -math.inf
        assert first.sampled_logprob == pytest.approx(float(cut.log_softmax(0)[ids[0]]), abs=1e-4)
    assert engine.generate(PROMPT, 3)[1].logprobs == [[]]
    for event in engine.stream(PROMPT, 2):
        assert event.logprobs is None and event.logprob is None


# ---- penalties, bias, hook -----------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.5},
        {"presence_penalty": 2.0},
        {"frequency_penalty": 0.5, "repetition_penalty": 1.1},
        {"logit_bias": {7: 3.0, 9: -3.0}, "banned_token_ids": [100, 101]},
    ],
)
def test_every_engine_adjusts_alike(
    make: Maker, tiny: LlamaModel, tmp_path: Path, options: dict[str, Any]
) -> None:
    """Greedy with penalties against the CPU's own loop, which `test_sampling.py` has by hand."""
    engine = make(tiny, max_seq_len=96)
    plain, _ = engine.generate(PROMPT, 40)
    ids, _ = engine.generate(PROMPT, 40, **options)
    cpu = Maker("cpu", "host")
    reference = cpu(cpu.load(write_tiny(tmp_path)), max_seq_len=96)
    expected, _ = reference.generate(PROMPT, 40, **options)
    if engine.model.device.type == "cuda" and ids != expected:
        # The devices round apart: they may part where two tokens are as good as the same.
        at = next(i for i in range(40) if ids[i] != expected[i])
        so_far = expected[:at]
        logits = reference.prefill([*PROMPT, *so_far])[0]
        adjusted = adjust(logits, SamplingParams(**options), PROMPT, so_far)
        assert float(adjusted[expected[at]] - adjusted[ids[at]]) < 1e-4
    else:
        assert ids == expected
    if "repetition_penalty" in options:
        assert ids != plain
    assert engine.generate(PROMPT, 40)[0] == plain, "nothing is left of the options"


def test_banned_everything_is_an_error(make: Maker, tiny: LlamaModel) -> None:
    engine = make(tiny, max_seq_len=96)
    for temperature in (0.0, 1.0):
        with pytest.raises(NonFiniteLogitsError, match="step 1:.*every token is banned"):
            engine.generate(PROMPT, 5, temperature=temperature, banned_token_ids=range(512))
    with pytest.raises(ValueError, match="banned_token_ids: token id 512 is outside"):
        engine.generate(PROMPT, 5, banned_token_ids=[512])
    assert len(engine.generate(PROMPT, 5)[0]) == 5


@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "top_p": 0.9, "seed": 5}])
def test_a_hook_that_changes_nothing(
    make: Maker, tiny: LlamaModel, options: dict[str, Any]
) -> None:
    engine = make(tiny, max_seq_len=96)
    expected, _ = engine.generate(PROMPT, 12, **options)
    seen: list[list[int]] = []

    def hook(ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        assert logits.shape == (512,) and logits.dtype == torch.float32
        seen.append(ids)
        return logits

    assert engine.generate(PROMPT, 12, logits_hook=hook, **options)[0] == expected
    assert seen == [PROMPT + expected[:n] for n in range(12)]
    assert cached(engine) == [40 + 11]
    assert engine.generate(PROMPT, 12, **options)[0] == expected


def test_a_hook_decides(make: Maker, tiny: LlamaModel) -> None:
    engine = make(tiny, max_seq_len=96)

    def only(ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        masked = torch.full_like(logits, -math.inf)
        masked[(ids[-1] + 1) % 512] = 0.0
        return masked

    assert engine.generate([5], 4, logits_hook=only)[0] == [6, 7, 8, 9]
    assert engine.generate([5], 4, temperature=1.0, logits_hook=only)[0] == [6, 7, 8, 9]
    with pytest.raises(ValueError, match=r"logits_hook must return logits of shape \[512\]"):
        engine.generate([5], 4, logits_hook=lambda ids, logits: logits[:3])
    with pytest.raises(NonFiniteLogitsError, match="at step 1:"):
        engine.generate([5], 4, logits_hook=lambda ids, logits: logits * math.nan)
    with pytest.raises(ZeroDivisionError):
        engine.generate([5], 4, logits_hook=lambda ids, logits: logits / (1 // 0))
    assert engine.generate([5], 4, logits_hook=only)[0] == [6, 7, 8, 9]


# ---- one engine, many calls ----------------------------------------------------------------


def random_options(generator: torch.Generator) -> tuple[list[int], int, dict[str, Any]]:
    """A prompt, a length and settings."""

    def pick(*choices: Any) -> Any:
        return choices[int(torch.randint(0, len(choices), (1,), generator=generator))]

    prompt = torch.randint(0, 512, (pick(1, 3, 17, 40),), generator=generator).tolist()
    options = {
        "temperature": pick(0.0, 0.0, 0.7, 1.3),
        "top_k": pick(0, 0, 5, 50),
        "top_p": pick(1.0, 0.9, 0.5),
        "min_p": pick(0.0, 0.05),
        "repetition_penalty": pick(1.0, 1.2),
        "presence_penalty": pick(0.0, 0.5),
        "frequency_penalty": pick(0.0, 0.0, 0.3),
        "logit_bias": pick({}, {3: 2.0}),
        "banned_token_ids": pick((), (11, 12)),
        "stop_token_ids": pick((), (), range(40)),
        "logprobs": pick(None, None, None, 2),
        "seed": pick(1, 2, 3),
    }
    return prompt, pick(0, 1, 2, 7, 20), options


def test_many_calls_leave_no_trace(make: Maker, tiny: LlamaModel) -> None:
    """Outputs equal those of a fresh engine; on a GPU with 200 calls, memory too."""
    generator = torch.Generator().manual_seed(7)
    is_cuda = make.device == "cuda"
    engine = make(tiny, max_seq_len=96)
    engine.generate(PROMPT, 5, temperature=1.0, logprobs=1)
    without_graphs = Maker(make.device, "device" if is_cuda else make.loop)
    before = torch.cuda.memory_allocated() if is_cuda else 0
    for number in range(200 if is_cuda else 25):
        prompt, length, options = random_options(generator)
        if number % 5 == 4:  # an abandoned one in between
            stream = engine.stream(prompt, 20, **options)
            next(stream)
            del stream
        ids, stats = engine.generate(prompt, length, **options)
        # A fresh one of the same kind now and then; mostly one that captures nothing, to save time.
        other = make if number % 10 == 0 else without_graphs
        with other(tiny, max_seq_len=96) as fresh:
            expected, fresh_stats = fresh.generate(prompt, length, **options)
        assert ids == expected and stats.finish_reason == fresh_stats.finish_reason
    if is_cuda:
        gc.collect()
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() - before < 16 * 2**20


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_errors_between_events_leave_the_cache_clean(
    make: Maker, tiny: LlamaModel, error: type[BaseException]
) -> None:
    engine = make(tiny, max_seq_len=96)
    expected, _ = engine.generate(PROMPT, 10)
    for count in (1, 2, 5):
        with pytest.raises(error):
            for number, _ in enumerate(engine.stream(PROMPT, 10), 1):
                if number == count:
                    raise error
        assert engine.generate(PROMPT, 10)[0] == expected
    stream = engine.stream(PROMPT, 10)
    for _ in range(4):
        next(stream)
    stream._events.close()  # type: ignore[attr-defined]
    assert cached(engine) == [40 + 3]


def test_stats_of_steps(make: Maker, tiny: LlamaModel) -> None:
    _, stats = make(tiny, max_seq_len=96).generate(PROMPT, 10)
    assert len(stats.steps_ms) == 9 and all(step > 0 for step in stats.steps_ms)
    assert stats.wall_ms_per_token is not None and stats.ttft_s is not None
    if make.device == "cuda":
        assert stats.gpu_ms_per_token is not None
        assert len(stats.device_times_ns) == 10
