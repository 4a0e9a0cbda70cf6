"""Greedy speculation gives the tokens of plain greedy decoding. A27-A29, A31-A33."""

from __future__ import annotations

import pytest
import torch
from spec.models import cycle, engine, tiny

from tinydecode import Engine, speculative
from tinydecode.demo import cache_directory
from tinydecode.speculative import Drafter, ModelDrafter, NgramDrafter

KS = (1, 2, 3, 4, 5, 8, 15, "auto")


def prompts(count: int, vocab: int = 512, longest: int = 60) -> list[list[int]]:
    """Random prompts; every other one repeats itself, so that n-grams are found."""
    generator = torch.Generator().manual_seed(4)
    made = []
    for index in range(count):
        length = int(torch.randint(2, longest, (1,), generator=generator))
        ids = torch.randint(0, vocab, (length,), generator=generator).tolist()
        made.append(ids * 2 if index % 2 else ids)
    return made


def drafters(where: str) -> dict[str, Drafter]:
    return {
        "same": ModelDrafter(engine(tiny(where))),
        "noisy": ModelDrafter(engine(tiny(where, 0.01))),
        "unrelated": ModelDrafter(engine(tiny(where, seed=5))),
        "ngram": NgramDrafter(),
        "ngram one": NgramDrafter(1, 1),
    }


def assert_equal(target: Engine, drafter: Drafter, ids: list[int], k: object, **options) -> None:
    expected, plain = target.generate(ids, **options)
    found, stats = speculative.generate(target, drafter, ids, k=k, **options)
    assert found == expected
    assert stats.finish_reason == plain.finish_reason
    assert stats.new_tokens == len(found)
    assert target.cache.seq_lens.tolist() == [
        len(ids) + len(found) - (plain.finish_reason == "length")
    ]


@pytest.mark.parametrize("k", KS)
def test_greedy_is_plain_greedy(where: str, k: object) -> None:
    target = engine(tiny(where))
    for drafter in drafters(where).values():
        for ids in prompts(2):
            assert_equal(target, drafter, ids, k, max_new_tokens=30)


@pytest.mark.long
@pytest.mark.parametrize("name", ["same", "noisy", "unrelated", "ngram", "ngram one"])
def test_greedy_is_plain_greedy_on_fifty_prompts(where: str, name: str) -> None:
    target = engine(tiny(where))
    drafter = drafters(where)[name]
    for index, ids in enumerate(prompts(50)):
        assert_equal(target, drafter, ids, KS[index % len(KS)], max_new_tokens=256)


def test_same_weights_are_accepted_always(where: str) -> None:
    """Any error in following the text shows as a drop. A31."""
    target, drafter = engine(tiny(where)), ModelDrafter(engine(tiny(where)))
    for k in (1, 4, 5):
        ids, stats = speculative.generate(target, drafter, list(range(9)), k=k, max_new_tokens=500)
        assert stats.acceptance_rate == 1.0 and len(ids) == 500
        assert set(stats.accepted_counts[:-1]) == {k}
        assert stats.target_passes == -(-499 // (k + 1))


@pytest.mark.parametrize("noise", [0.01, 0.002])
def test_a_noisy_draft_keeps_its_acceptance(
    where: str, noise: float, request: pytest.FixtureRequest
) -> None:
    """A31: after 200 tokens it does as well as in the beginning, and lengths follow the text."""
    target, drafter = engine(tiny(where)), ModelDrafter(engine(tiny(where, noise)))
    prompt = list(range(20))
    expected = target.generate(prompt, 200)[0]
    stream = speculative.stream(target, drafter, prompt, k=4, max_new_tokens=200)
    found: list[int] = []
    halves: list[list[int]] = [[], []]
    for event in stream:
        assert event.token_id is not None
        found.append(event.token_id)
        if event.from_draft is False and stream.stats.accepted_counts:
            halves[len(found) > 100].append(stream.stats.accepted_counts[-1])
            if "cpu-" not in request.node.name:
                continue  # rounds launched ahead have changed the lengths already
            # The round's last token: what is cached is all of the text but this one.
            assert target.cache.seq_lens.item() == len(prompt) + len(found) - 1
            # Drafted tokens but the last one are cached, whether they stood or not.
            drafted = drafter.engine.cache.seq_lens.item()
            assert len(prompt) + len(found) - 2 - 4 <= drafted <= len(prompt) + len(found) + 3
    assert found == expected
    early, late = (sum(half) / len(half) / 4 for half in halves)
    assert 0 < late and abs(early - late) < (0.1 if noise == 0.01 else 0.2), (early, late)


@pytest.mark.parametrize("k", range(1, 9))
def test_end_inside_an_accepted_block(where: str, k: int) -> None:
    """A27: nothing after the end is streamed, counted, or left in the cache."""
    chain = (1, 2, 3, 257, 5, 6, 7)
    target, draft = engine(cycle(chain, where)), engine(cycle(chain, where))
    for drafter, ids in ((ModelDrafter(draft), [1]), (NgramDrafter(), [1, 2, 3, 257, 5, 6, 1, 2])):
        options = {"max_new_tokens": 20, "eos_token_ids": [257]}
        found, stats = speculative.generate(target, drafter, ids, k=k, **options)
        assert found == ([2, 3] if ids == [1] else [3])
        assert stats.finish_reason == "stop" and stats.new_tokens == len(found)
        assert target.cache.seq_lens.item() == len(ids) + len(found)
        assert_equal(target, drafter, ids, k, ignore_eos=True, max_new_tokens=20)
        events = list(speculative.stream(target, drafter, ids, k=k, **options))
        assert [event.token_id for event in events] == [*found, None]


def test_exactly_as_many_tokens_as_asked(where: str) -> None:
    """A28."""
    chain = (1, 2, 3, 4, 5, 6, 7)
    target, draft = engine(cycle(chain, where)), engine(cycle(chain, where))
    for drafter in (ModelDrafter(draft), NgramDrafter()):
        for count in range(21):
            options = {"k": 8, "max_new_tokens": count}
            stream = speculative.stream(target, drafter, [*chain, *chain], **options)
            ids = [event.token_id for event in stream if event.token_id is not None]
            assert len(ids) == stream.stats.new_tokens == count
            assert stream.stats.finish_reason == "length"


def test_lookup_without_an_end_of_sequence(where: str) -> None:
    """A29."""
    ids = [5, 6, 7, 8, 9, 10, 11, 7, 8]
    assert_equal(engine(tiny(where)), NgramDrafter(3), ids, 5, max_new_tokens=15)


@pytest.mark.parametrize("sizes", [(512, 448), (448, 512)])
def test_vocabularies_of_different_size(where: str, sizes: tuple[int, int]) -> None:
    """A32: ids that one of the two lacks are never drafted, and may be in the text."""
    target = engine(tiny(where, vocab=sizes[0]))
    drafter = ModelDrafter(engine(tiny(where, vocab=sizes[1])))
    for ids in [*prompts(2, min(sizes)), [sizes[0] - 1, 3, 4]]:
        assert_equal(target, drafter, ids, 4, max_new_tokens=60)
        found, _ = speculative.generate(target, drafter, ids, k=3, temperature=1.5, seed=2)
        assert max(found) < sizes[0]


def test_up_to_the_last_slot(where: str) -> None:
    """A33: the target's end, and a draft whose context is shorter."""
    same = tiny(where)
    for k in (1, 5, 15):
        target, drafter = engine(same, 64), ModelDrafter(engine(same, 64))
        ids = list(range(58))
        assert_equal(target, drafter, ids, k, max_new_tokens=100)
        assert len(speculative.generate(target, drafter, ids, k=k)[0]) == 64 - 58 + 1
        assert_equal(target, NgramDrafter(), [1, 2] * 31, k, max_new_tokens=100)
        assert_equal(target, NgramDrafter(), [1, 2] * 32, k, max_new_tokens=100)

        short = ModelDrafter(engine(tiny(where, context=32)))
        assert_equal(target, short, list(range(20)), k, max_new_tokens=100)
        _, stats = speculative.generate(target, short, list(range(20)), k=k)
        assert stats.drafting_stopped_at is not None and stats.drafting_stopped_at <= 34
        assert stats.rounds < stats.target_passes
        _, stats = speculative.generate(target, short, list(range(40)), k=k)
        assert stats.rounds == 0 and stats.acceptance_rate is None
        assert stats.drafting_stopped_at == 41
        assert stats.to_dict()["acceptance_rate"] is None and "nothing drafted" in stats.summary()


def test_garbage_in_unused_slots_does_not_matter(where: str) -> None:
    """A20 with speculation on."""
    target, drafter = engine(tiny(where), 256), ModelDrafter(engine(tiny(where, 0.01), 256))
    expected = target.generate(list(range(31)), 60)[0]
    for garbage in (float("nan"), float("inf")):
        for cache in (target.cache, drafter.engine.cache):
            cache.k.fill_(garbage)
            cache.v.fill_(garbage)
        assert speculative.generate(target, drafter, list(range(31)), 4, 60)[0] == expected


@pytest.mark.long
@pytest.mark.skipif(not any(cache_directory().glob("*.gguf")), reason="the demo model is not here")
def test_greedy_is_plain_greedy_on_the_demo_model(where: str) -> None:
    from tinydecode import Tokenizer, load_hf
    from tinydecode.demo import demo_model

    path = demo_model()
    dtype = "float32" if where == "cpu" else "bfloat16"
    model = load_hf(path, device=where, dtype=dtype)
    target, tokenizer = engine(model, 1024), Tokenizer(path)
    texts = [f"Question {i}: what is {i} times {i + 3}? Repeat it twice.\n" for i in range(50)]
    for index, text in enumerate(texts):
        k = KS[index % len(KS)]
        assert_equal(target, NgramDrafter(), tokenizer.encode(text), k, max_new_tokens=256)
