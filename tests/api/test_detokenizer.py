"""Incremental decoding: whole characters only, no space lost, and the same text as at once."""

from __future__ import annotations

import random
import time

import fixtures
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tinydecode.tokenizer import Tokenizer

HELLO, WORLD, BANG = (fixtures.SPM_IDS[token] for token in ("\u2581Hello", "\u2581world", "!"))
SPACE = 262


def spm(data: bytes) -> list[int]:
    """Byte-fallback ids of F-SPM."""
    return [3 + byte for byte in data]


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("byte")
    return Tokenizer(fixtures.write_byte_tokenizer(directory, pieces=[" to", "é😀", "你"]))


@pytest.fixture(scope="module")
def spm_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(fixtures.write_spm_tokenizer(tmp_path_factory.mktemp("spm")))


def stream(tokenizer: Tokenizer, ids: list[int], prompt: list[int] | None = None) -> list[str]:
    """The piece of every token, then the flush."""
    detokenizer = tokenizer.detokenizer(prompt or [])
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


# ---- A15: characters split over tokens -----------------------------------------------------


def test_one_piece_per_completed_character(byte_tokenizer: Tokenizer) -> None:
    pieces = stream(byte_tokenizer, list("😀 你".encode()))
    assert pieces == ["", "", "", "😀", " ", "", "", "你", ""]


def test_cut_inside_a_character(byte_tokenizer: Tokenizer) -> None:
    pieces = stream(byte_tokenizer, [0x41, 0xF0, 0x9F])
    assert pieces == ["A", "", "", "\ufffd"]
    assert byte_tokenizer.decode([0x41, 0xF0, 0x9F]) == "A\ufffd"


def test_invalid_byte_is_one_replacement_and_no_stall(byte_tokenizer: Tokenizer) -> None:
    assert stream(byte_tokenizer, [0x42, 0xFF, 0x41]) == ["B", "\ufffd", "A", ""]
    # A character that is given up when the next token shows that it will never be complete.
    assert stream(byte_tokenizer, [0xF0, 0x9F, 0x41]) == ["", "", "\ufffdA", ""]


def test_character_begun_by_the_prompt(byte_tokenizer: Tokenizer) -> None:
    data = "x😀".encode()
    assert stream(byte_tokenizer, [data[-1]], prompt=list(data[:-1])) == ["😀", ""]


def test_byte_fallback_completes_characters_too(spm_tokenizer: Tokenizer) -> None:
    ids = [HELLO, *spm(" 你".encode() + b"\xff"), BANG]
    assert stream(spm_tokenizer, ids) == ["Hello", " ", "", "", "你", "\ufffd", "!", ""]
    assert spm_tokenizer.decode(ids) == "Hello 你\ufffd!"


# ---- A16: the leading space ----------------------------------------------------------------


def test_leading_space_in_the_context_of_the_prompt(spm_tokenizer: Tokenizer) -> None:
    prompt = spm_tokenizer.encode("Say:")
    ids = [HELLO, WORLD, BANG]
    assert stream(spm_tokenizer, ids, prompt) == [" Hello", " world", "!", ""]
    assert spm_tokenizer.decode(prompt + ids) == "Say: Hello world!"


def test_leading_space_of_a_text_of_its_own(spm_tokenizer: Tokenizer) -> None:
    assert stream(spm_tokenizer, [HELLO, WORLD]) == ["Hello", " world", ""]
    bos = spm_tokenizer.bos_token_id
    assert bos is not None
    assert stream(spm_tokenizer, [HELLO, WORLD], prompt=[bos]) == ["Hello", " world", ""]
    assert spm_tokenizer.encode("Hello world!") == [bos, HELLO, WORLD, BANG]
    assert spm_tokenizer.decode([bos, HELLO, WORLD, BANG]) == "Hello world!"


def test_special_and_unknown_ids(byte_tokenizer: Tokenizer) -> None:
    ids = [0x61, 258, 500, 0x62]
    assert byte_tokenizer.decode(ids) == "ab"
    assert byte_tokenizer.decode(ids, skip_special_tokens=False) == "a<|eot|>b"
    assert stream(byte_tokenizer, ids) == ["a", "", "", "b", ""]


# ---- properties ----------------------------------------------------------------------------

CHARACTERS = st.text(st.sampled_from("aé你😀 \u2581"), max_size=3).map(lambda text: text.encode())
BYTES = st.lists(CHARACTERS | st.binary(max_size=3), max_size=12).map(b"".join)
BYTE_IDS = st.lists(st.integers(0, 270), max_size=12) | BYTES.map(list)
SPM_IDS = st.lists(st.sampled_from([0, 1, 2, HELLO, WORLD, BANG, SPACE]) | st.integers(0, 262))


def check(tokenizer: Tokenizer, prompt: list[int], ids: list[int]) -> None:
    """A character that the prompt begins belongs to the stream that ends it."""
    completed = "".join(stream(tokenizer, prompt)[:-1])
    before = tokenizer.decode(prompt)
    # What the prompt leaves open is a character's beginning, one U+FFFD in a text that ends there;
    # or ED A0 to ED BF, which no byte can complete, yet the decoder waits for the third: two.
    assert before.removeprefix(completed) in ("", "\ufffd", "\ufffd" * 2)
    assert before.startswith(completed)
    whole = tokenizer.decode(prompt + ids)
    assert whole.startswith(completed)
    assert "".join(stream(tokenizer, ids, prompt)) == whole[len(completed) :]


@settings(deadline=None)
@given(prompt=BYTE_IDS, ids=BYTE_IDS)
def test_stream_equals_decoding_at_once(
    byte_tokenizer: Tokenizer, prompt: list[int], ids: list[int]
) -> None:
    check(byte_tokenizer, prompt, ids)


@settings(deadline=None)
@given(prompt=SPM_IDS, ids=SPM_IDS)
@example(prompt=spm(b"\xed\xa0"), ids=[])
@example(prompt=spm(b"\xed\xa0"), ids=spm(b"\x80"))
def test_stream_equals_decoding_at_once_spm(
    spm_tokenizer: Tokenizer, prompt: list[int], ids: list[int]
) -> None:
    check(spm_tokenizer, prompt, ids)


@settings(deadline=None)
@given(ids=BYTE_IDS)
def test_decode_agrees_with_the_tokenizers_library(
    byte_tokenizer: Tokenizer, ids: list[int]
) -> None:
    for skip in (True, False):
        expected = byte_tokenizer._backend.decode(ids, skip_special_tokens=skip)
        assert byte_tokenizer.decode(ids, skip_special_tokens=skip) == expected


@settings(deadline=None)
@given(text=st.text(st.sampled_from("Helowrd! é你\n"), max_size=20))
def test_decode_undoes_encode_spm(spm_tokenizer: Tokenizer, text: str) -> None:
    ids = spm_tokenizer.encode(text)
    assert spm_tokenizer.decode(ids) == spm_tokenizer._backend.decode(ids)
    assert spm_tokenizer.decode(ids) == (text if not text.startswith(" ") else text[1:])


def test_work_per_token_does_not_grow(byte_tokenizer: Tokenizer) -> None:
    """A stream that never completes a character, and one that is all one word."""
    for byte in (0x80, 0xF0, 0x61):
        detokenizer = byte_tokenizer.detokenizer([0x61] * 100_000)
        started = time.perf_counter()
        for _ in range(20_000):
            detokenizer.push(byte)
        # About 2 us a token; re-decoding the text each time would take minutes.
        assert time.perf_counter() - started < 5


def test_random_texts_round_trip(byte_tokenizer: Tokenizer) -> None:
    rng = random.Random(0)
    for _ in range(50):
        text = "".join(chr(rng.choice([rng.randrange(0x20, 0xD800), 0x1F600])) for _ in range(20))
        ids = byte_tokenizer.encode(text)
        assert "".join(stream(byte_tokenizer, ids)) == text
