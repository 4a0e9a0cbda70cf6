"""Sampling options, stop strings, statistics and refusals under speculation. A25, A32, A39."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from fixtures import cycle_table, write_byte_tokenizer, write_markov
from spec.models import cycle, engine, tiny

from tinydecode import Engine, NonFiniteLogitsError, Tokenizer, load_hf, speculative
from tinydecode.cli import main
from tinydecode.speculative import ModelDrafter, NgramDrafter, check_tokenizers
from tinydecode.speculative.length import AdaptiveLength


def without(logits: torch.Tensor, token_id: int) -> torch.Tensor:
    """Logits under which a token cannot be chosen."""
    return logits.index_fill(0, torch.tensor([token_id], device=logits.device), -torch.inf)


OPTIONS = [
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"logit_bias": {7: 3.0, 300: -2.0}, "banned_token_ids": [5, 6, 7, 8]},
    {"logits_hook": lambda ids, logits: without(logits, ids[-1])},
]


@pytest.mark.parametrize("options", OPTIONS, ids=["repetition", "counts", "bias", "hook"])
def test_greedy_with_options_is_plain_greedy_with_them(where: str, options: dict) -> None:
    target = engine(tiny(where), 256)
    expected, _ = target.generate(list(range(30)), 60, **options)
    for drafter in (ModelDrafter(engine(tiny(where, 0.002), 256)), NgramDrafter()):
        found, _ = speculative.generate(target, drafter, list(range(30)), 4, 60, **options)
        assert found == expected


def test_logprobs_are_those_of_plain_decoding(where: str) -> None:
    target, drafter = engine(tiny(where), 128), ModelDrafter(engine(tiny(where, 0.002), 128))
    _, plain = target.generate([1, 2, 3], 20, logprobs=2)
    _, stats = speculative.generate(target, drafter, [1, 2, 3], 4, 20, logprobs=2)
    assert len(stats.logprobs[0]) == 20
    for ours, theirs in zip(stats.logprobs[0], plain.logprobs[0], strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-3)
        assert [top.token_id for top in ours.top] == [top.token_id for top in theirs.top]


def test_a_seed_repeats_a_text(where: str) -> None:
    target, drafter = engine(tiny(where), 128), ModelDrafter(engine(tiny(where, 0.01), 128))

    def text(seed: int | None) -> list[int]:
        return speculative.generate(target, drafter, [1, 2], 3, 30, temperature=1.0, seed=seed)[0]

    before = torch.random.get_rng_state()
    assert text(1) == text(1) and text(1) != text(2) and text(None) != text(None)
    assert torch.equal(torch.random.get_rng_state(), before)
    _, stats = speculative.generate(target, drafter, [1, 2], 3, 30, temperature=1.0)
    assert text(stats.seed) == text(stats.seed)


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (["own fox"], "The quick br"),
        (["own cat"], "The quick brown fox"),
        (["k b", "k brown"], "The quic"),
    ],
)
def test_stop_strings(tmp_path: Path, stop: list[str], expected: str) -> None:
    """A39: the text with a draft is the text without one, and no half of a stop leaks."""
    pieces = ["The", " qu", "ick", " br", "ow", "n f", "ox"]
    write_byte_tokenizer(tmp_path, pieces=pieces)
    chain = [10, *range(261, 261 + len(pieces)), 257, 257]
    write_markov(tmp_path, cycle_table(chain, 512), eos_token_id=257)
    model, tokenizer = load_hf(tmp_path, device="cpu"), Tokenizer(tmp_path)
    target = Engine(model, 64)
    for drafter in (ModelDrafter(Engine(model, 64)), NgramDrafter()):
        options = {"max_new_tokens": 20, "tokenizer": tokenizer, "stop": stop}
        plain = list(target.stream([10], **options))
        cached = target.cache.seq_lens.item()
        events = list(speculative.stream(target, drafter, [10], 8, **options))
        assert "".join(event.text or "" for event in events) == expected
        assert [(e.token_id, e.text, e.finish_reason) for e in events] == [
            (e.token_id, e.text, e.finish_reason) for e in plain
        ]
        assert target.cache.seq_lens.item() == cached


def test_non_finite_logits_are_an_error(where: str) -> None:
    """A25."""
    broken = tiny(where, seed=9)
    broken.weights.lm_head[3] = float("nan")
    target = engine(broken, 64)
    with pytest.raises(NonFiniteLogitsError, match="step 1"):
        speculative.generate(target, NgramDrafter(), [1, 2, 1, 2])
    fine = engine(tiny(where), 64)
    expected, _ = fine.generate([1, 2, 1, 2], 5)
    try:  # on the device nobody looks: such a draft is a bad one, no more
        assert speculative.generate(fine, ModelDrafter(target), [1, 2, 1, 2], 3, 5)[0] == expected
    except NonFiniteLogitsError as error:
        assert "draft model" in str(error)
    assert fine.generate([1, 2, 1, 2], 5)[0] == expected


def test_statistics(where: str) -> None:
    chain = (1, 2, 3, 4, 5, 6, 7)
    target, draft = engine(cycle(chain, where)), engine(cycle(chain, where))
    stream = speculative.stream(target, ModelDrafter(draft), [1], 4, 16)
    events = list(stream)
    # One token of the prompt's pass, then three rounds of 4 + 1.
    assert [event.from_draft for event in events] == [False] + ([True] * 4 + [False]) * 3
    stats = stream.stats
    assert (stats.rounds, stats.target_passes, stats.proposed, stats.accepted) == (3, 3, 12, 12)
    assert stats.draft_tokens == 12 and stats.tokens_per_pass == 5.0
    assert stats.accepted_per_round == 4.0 and stats.acceptance_rate == 1.0
    assert json.loads(json.dumps(stats.to_dict()))["rounds"] == 3
    assert "accepted 100% of 12 drafted" in stats.summary()
    nothing = speculative.generate(target, NgramDrafter(), [1], 4, 3)[1]
    assert nothing.acceptance_rate is None and nothing.accepted_per_round is None


def test_refusals() -> None:
    target, two = engine(tiny("cpu"), 64), Engine(tiny("cpu"), 64, batch_size=2)
    with pytest.raises(ValueError, match="batch_size 1, this engine has 2"):
        speculative.generate(two, NgramDrafter(), [[1], [2]])
    with pytest.raises(ValueError, match="batch_size 1, the draft has 2"):
        ModelDrafter(two)
    with pytest.raises(ValueError, match="an engine of its own"):
        speculative.generate(target, ModelDrafter(target), [1])
    for k in (0, 16, -1, 2.0, True, "fast"):
        with pytest.raises(ValueError, match='k must be an integer from 1 to 15 or "auto"'):
            speculative.generate(target, NgramDrafter(), [1], k)  # type: ignore[arg-type]
    for ids in ([], [512], list(range(65))):
        with pytest.raises(ValueError):
            speculative.generate(target, NgramDrafter(), ids)


def test_tokenizers_are_compared(tmp_path: Path) -> None:
    """A32: the first id at which they differ is named; more ids at the end do not matter."""
    ours = Tokenizer(write_byte_tokenizer(tmp_path / "a"))
    longer = Tokenizer(write_byte_tokenizer(tmp_path / "b", pieces=["abc"]))
    check_tokenizers(ours, longer)
    check_tokenizers(longer, ours)
    file = write_byte_tokenizer(tmp_path / "c") / "tokenizer.json"
    content = json.loads(file.read_text())
    vocab = content["model"]["vocab"]
    token = next(token for token, i in vocab.items() if i == 100)
    other = next(token for token, i in vocab.items() if i == 101)
    vocab[token], vocab[other] = 101, 100
    file.write_text(json.dumps(content))
    other_tokenizer = Tokenizer(tmp_path / "c")
    draft = Engine(tiny("cpu"), 64)
    with pytest.raises(ValueError, match="tokenizers differ at id 100"):
        ModelDrafter(draft, (ours, other_tokenizer))
    ModelDrafter(draft, (ours, other_tokenizer), force=True)


def test_adaptive_length_follows_what_pays() -> None:
    def settle(rate: int, verify: float, draft: float) -> int:
        """After some rounds in which `rate` drafted tokens stand, and passes cost 1 + verify."""
        length = AdaptiveLength(is_free=False)
        taken = []
        for _ in range(200):
            count = length.choose()
            taken.append(count)
            length.ran(count, count + 1, draft * count, 1.0 + verify * count)
            if count:
                length.judged(count, min(count, rate))
        return sorted(taken[-60:])[30]

    assert settle(rate=0, verify=0.05, draft=0.2) == 0, "nothing stands: plain decoding"
    assert settle(rate=15, verify=0.02, draft=0.05) == 15
    assert settle(rate=3, verify=0.05, draft=0.1) in (2, 3)
    assert settle(rate=15, verify=1.0, draft=0.5) == 0, "a verify pass as slow as its tokens"


def test_adaptive_length_comes_back() -> None:
    length = AdaptiveLength(is_free=False)
    for index in range(600):
        count = length.choose()
        length.ran(count, count + 1, 0.05 * count, 1.0)
        if count:
            length.judged(count, count if index > 200 else 0)
        if index == 200:
            assert count == 0
    assert count > 2


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_byte_tokenizer(tmp_path)
    write_markov(tmp_path, cycle_table([97, 98, 99, 100], 512), eos_token_id=257)
    model = str(tmp_path)
    run = [model, "-p", "ab", "-n", "20", "--device", "cpu", "--json"]
    assert main(run) == 0
    plain = json.loads(capsys.readouterr().out)
    for extra in (["--draft", model, "-k", "4"], ["--ngram"], ["--ngram", "-k", "auto"]):
        assert main([*run, *extra]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["text"] == plain["text"] and found["token_ids"] == plain["token_ids"]
        assert "acceptance_rate" in found["stats"]
    for wrong in (["-k", "4"], ["--force-draft"]):
        assert main([*run, *wrong]) == 2
        assert "need --draft or --ngram" in capsys.readouterr().err
    for wrong in (["--ngram", "-k", "0"], ["--ngram", "--draft", model]):
        with pytest.raises(SystemExit) as stopped:
            main([*run, *wrong])
        assert stopped.value.code == 2


def test_selfcheck(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """It passes, and a broken rule makes it fail."""
    from tinydecode import selfcheck
    from tinydecode.ops import ref_round
    from tinydecode.sampling import draw
    from tinydecode.speculative import rule

    monkeypatch.setattr(selfcheck, "_TOKENS", 300)
    lines: list[str] = []
    assert selfcheck.selfcheck(where, lines.append), lines
    assert len(lines) == 1 + 2 + 12 + 1 and lines[-1] == "all exact"
    if where == "cpu":  # elsewhere the rule is a kernel
        broken = lambda p, q, tokens, u: (len(tokens), draw(p[len(tokens)], u[-1]))  # noqa: E731
        monkeypatch.setattr(rule, "accept", broken)
        monkeypatch.setattr(ref_round, "_share", lambda row, token: 1.0)  # of the device's loop
        assert not selfcheck.selfcheck(where, lines.append)
