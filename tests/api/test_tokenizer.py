"""Tokenizer: encoding, BOS, chat templates, and vocabularies rebuilt from GGUF metadata."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import fixtures
import pytest

from tinydecode.gguf_vocab import build_tokenizer
from tinydecode.tokenizer import Tokenizer

MESSAGES = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "Hello <b>you</b>"},
    {"role": "user", "content": "né 😀\n"},
]


def byte_tokenizer(path: Path, **config: Any) -> Tokenizer:
    return Tokenizer(fixtures.write_byte_tokenizer(path, **config))


# ---- encoding ------------------------------------------------------------------------------


def test_bytes_are_ids(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path)
    assert tokenizer.encode("hé") == [0x68, 0xC3, 0xA9]
    assert tokenizer.encode("<|eot|>!") == [258, 0x21]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (256, 257)
    assert tokenizer.vocab_size == 261
    assert tokenizer.id_to_token(258) == "<|eot|>"
    assert tokenizer.id_to_token(300) is None


def test_exactly_one_bos(tmp_path: Path) -> None:
    """A14: rendered chats and raw texts start with BOS once; without add_bos with none."""
    template = fixtures.BYTE_CHAT_TEMPLATE
    tokenizer = byte_tokenizer(tmp_path / "a", add_bos=True, chat_template=template)
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert rendered == "<s><|user|>hi<|eot|><|assistant|>"
    expected = [256, 259, 0x68, 0x69, 258, 260]
    assert tokenizer.encode(rendered, add_special_tokens=False) == expected
    assert tokenizer.encode(rendered) == expected
    assert tokenizer.encode("hi") == [256, 0x68, 0x69]
    assert tokenizer.encode("") == [256]
    assert byte_tokenizer(tmp_path / "b", add_bos=False).encode("hi") == [0x68, 0x69]


@pytest.mark.parametrize(
    ("processor", "flag", "expected"),
    [
        (True, fixtures.ABSENT, [256, 0x68]),
        (False, fixtures.ABSENT, [0x68]),
        (True, None, [256, 0x68]),
        (True, False, [0x68]),
        (False, True, [256, 0x68]),
    ],
)
def test_add_bos_token_decides_over_the_post_processor(
    tmp_path: Path, processor: bool, flag: object, expected: list[int]
) -> None:
    fixtures.write_byte_tokenizer(tmp_path, add_bos=processor)
    if flag is fixtures.ABSENT:
        fixtures.edit_json(tmp_path / "tokenizer_config.json", add_bos_token=fixtures.ABSENT)
    else:
        fixtures.edit_json(tmp_path / "tokenizer_config.json", add_bos_token=flag)
    assert Tokenizer(tmp_path).encode("h") == expected


def test_without_tokenizer_config(tmp_path: Path) -> None:
    fixtures.write_byte_tokenizer(tmp_path, add_bos=True)
    (tmp_path / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.encode("h") == [256, 0x68]
    assert tokenizer.eos_token_id is None
    assert not tokenizer.has_chat_template


def test_truncation_and_padding_settings_are_ignored(tmp_path: Path) -> None:
    """tokenizer.json may carry the settings of a training run; a prompt must stay whole."""
    fixtures.write_byte_tokenizer(tmp_path)
    padding = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None}
    fixtures.edit_json(
        tmp_path / "tokenizer.json",
        truncation={"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        padding={**padding, "pad_id": 257, "pad_type_id": 0, "pad_token": "</s>"},
    )
    assert Tokenizer(tmp_path).encode("abcd") == [0x61, 0x62, 0x63, 0x64]


# ---- bad input -----------------------------------------------------------------------------


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        Tokenizer(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(FileNotFoundError, match=r"found tokenizer\.model"):
        Tokenizer(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(ValueError, match="Git LFS pointer"):
        Tokenizer(tmp_path)
    fixtures.write_byte_tokenizer(tmp_path)
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ValueError, match="incomplete or corrupt"):
        Tokenizer(tmp_path)
    fixtures.write_byte_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: not valid JSON"):
        Tokenizer(tmp_path)


def test_unknown_decoder_is_refused_by_name(tmp_path: Path) -> None:
    fixtures.write_byte_tokenizer(tmp_path)
    decoder = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    fixtures.edit_json(tmp_path / "tokenizer.json", decoder=decoder)
    with pytest.raises(NotImplementedError, match="WordPiece"):
        Tokenizer(tmp_path)


# ---- chat templates ------------------------------------------------------------------------


def render(tokenizer: Tokenizer) -> str:
    return tokenizer.apply_chat_template([{"role": "user", "content": "x"}])


def test_where_the_template_comes_from(tmp_path: Path) -> None:
    """A17: its own file wins; in a list, "default" is taken; none is an error that helps."""
    assert not byte_tokenizer(tmp_path / "d").has_chat_template
    with pytest.raises(ValueError, match="no chat template.*plain text"):
        render(byte_tokenizer(tmp_path / "d"))

    only_file = byte_tokenizer(tmp_path / "a")
    (tmp_path / "a" / "chat_template.jinja").write_text("file {{ messages[0].content }}")
    assert not only_file.has_chat_template
    assert render(Tokenizer(tmp_path / "a")) == "file x"

    fixtures.write_byte_tokenizer(tmp_path / "a", chat_template="config")
    assert render(Tokenizer(tmp_path / "a")) == "file x"

    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert render(byte_tokenizer(tmp_path / "c", chat_template=named)) == "d"


def test_template_errors_are_its_own_words(tmp_path: Path) -> None:
    """A17 (e)."""
    refusing = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(ValueError, match="System role not supported"):
        render(byte_tokenizer(tmp_path, chat_template=refusing))
    for broken in ("{% if %}", "{{ 1 + 'a' }}", "{{ nothing.at.all }}"):
        with pytest.raises(ValueError, match="chat template failed"):
            render(byte_tokenizer(tmp_path, chat_template=broken))


def test_template_is_sandboxed(tmp_path: Path) -> None:
    for attack in (
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__.keys() }}",
    ):
        with pytest.raises(ValueError, match="chat template failed.*unsafe"):
            render(byte_tokenizer(tmp_path, chat_template=attack))


TEMPLATES = {
    "plain": fixtures.BYTE_CHAT_TEMPLATE,
    "whitespace": "{% for m in messages %}\n  {% if m.role == 'user' %}\n[{{ m.content | trim }}]\n"
    "  {%- else %}\n<{{ m.content }}>\n  {% endif %}\n{% endfor %}\n{{ eos_token }}",
    "loopcontrols": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
    "{{ m.content }}{% endfor %}",
    "tojson": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% endfor %}{{ ns.n }}{{ tools is none }}{{ unk_token }}|{{ flavour }}",
    "date": "{{ strftime_now('%Y') }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("prompt", [True, False])
def test_templates_render_as_in_transformers(tmp_path: Path, name: str, prompt: bool) -> None:
    transformers = pytest.importorskip("transformers")
    fixtures.write_byte_tokenizer(tmp_path, add_bos=True, chat_template=TEMPLATES[name])
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    expected = theirs.apply_chat_template(
        MESSAGES, tokenize=False, add_generation_prompt=prompt, flavour="mint"
    )
    ours = Tokenizer(tmp_path)
    text = ours.apply_chat_template(MESSAGES, add_generation_prompt=prompt, flavour="mint")
    assert text == expected
    ids = theirs(expected, add_special_tokens=False)["input_ids"]
    assert ours.encode(text, add_special_tokens=False) == ids


# ---- GGUF vocabularies ---------------------------------------------------------------------

ALPHABET = fixtures.byte_alphabet()


def spell(text: str) -> str:
    return "".join(ALPHABET[byte] for byte in text.encode())


def byte_level_metadata(pre: str | None, **changes: Any) -> dict[str, Any]:
    """A small byte-level BPE with merges that show where a text was split."""
    merges = [" 1", "12", "34", "  ", "ab", " ab", "'S", "\n\n"]
    tokens = [*ALPHABET, *map(spell, merges), "<|im_start|>", "<|end of text|>", "<think>"]
    types = [1] * (256 + len(merges)) + [3, 3, 4]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [f"{spell(m[:-1])} {spell(m[-1])}" for m in merges if m != " ab"]
        + [f"{spell(' ')} {spell('ab')}"],
        "tokenizer.ggml.bos_token_id": len(tokens) - 3,
        "tokenizer.ggml.eos_token_id": len(tokens) - 2,
        "tokenizer.chat_template": "{{ bos_token }}{{ eos_token }}",
    }
    if pre is not None:
        metadata["tokenizer.ggml.pre"] = pre
    return {**metadata, **{f"tokenizer.ggml.{key}": value for key, value in changes.items()}}


def pieces(metadata: dict[str, Any], text: str) -> list[str]:
    """The tokens of a text, in readable spelling."""
    backend = build_tokenizer(metadata).backend
    readable = {character: chr(byte) for byte, character in enumerate(ALPHABET)}
    tokens = backend.encode(text, add_special_tokens=False).tokens
    return ["".join(readable.get(c, c) for c in token) for token in tokens]


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        # GPT-2: a space joins the number that follows; digits stay together.
        ("gpt-2", "ab 1234", ["ab", " 1", "2", "34"]),
        ("gpt-2", "ab  12", ["ab", " ", " 1", "2"]),
        # SmolLM: digits are cut off one by one, first; the spaces before them stay together.
        ("smollm", "ab 1234", ["ab", " ", "1", "2", "3", "4"]),
        ("smollm", "ab  12", ["ab", "  ", "1", "2"]),
        ("smollm", " ab'S\n\n", [" ab", "'", "S", "\n\n"]),
        # Llama 3: groups of three digits, no space in front; contractions in any case.
        ("llama-bpe", "1234", ["12", "3", "4"]),
        ("llama-bpe", "ab  12", ["ab", " ", " ", "12"]),
        ("llama-bpe", "ab'S\n\n", ["ab", "'S", "\n\n"]),
        # Qwen 2: single digits; text composed to NFC first.
        ("qwen2", "1234", ["1", "2", "3", "4"]),
        ("qwen2", "e\u0301", ["\u00c3", "\u00a9"]),
        ("gpt-2", "e\u0301", ["e", "\u00cc", "\u0081"]),
    ],
)
def test_pre_tokenizers(pre: str, text: str, expected: list[str]) -> None:
    assert pieces(byte_level_metadata(pre), text) == expected


def test_llama3_takes_whole_words_without_merging() -> None:
    metadata = byte_level_metadata("llama-bpe")
    metadata["tokenizer.ggml.tokens"][0] = spell("zz")  # a token that no merge makes
    assert pieces(metadata, "zz") == ["zz"]
    assert pieces({**metadata, "tokenizer.ggml.pre": "gpt-2"}, "zz") == ["z", "z"]


def test_special_tokens_of_a_gguf() -> None:
    parts = build_tokenizer(byte_level_metadata("smollm"))
    first = 256 + 8
    ids = parts.backend.encode("a<|im_start|>b<|end of text|><think>").ids
    assert ids == [0x61, first, 0x62, first + 1, first + 2]
    assert parts.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|end of text|>"}
    assert parts.chat_template == "{{ bos_token }}{{ eos_token }}"
    added = parts.backend.get_added_tokens_decoder()
    assert [added[first + i].special for i in range(3)] == [True, True, False]


def test_bos_of_a_gguf_by_default_and_by_key() -> None:
    assert build_tokenizer(byte_level_metadata("smollm")).add_bos is False
    assert build_tokenizer(byte_level_metadata("llama-bpe")).add_bos is True
    assert build_tokenizer(byte_level_metadata("smollm", add_bos_token=True)).add_bos is True


def test_gguf_tokenizers_that_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(NotImplementedError, match=r"tokenizer\.ggml\.model: 'bert'"):
        build_tokenizer(byte_level_metadata("smollm", model="bert"))
    with pytest.raises(NotImplementedError, match=r"tokenizer\.ggml\.pre: 'tekken'"):
        build_tokenizer(byte_level_metadata("tekken"))
    with pytest.raises(ValueError, match="no vocabulary"):
        build_tokenizer({"tokenizer.ggml.model": "gpt2"})
    metadata = byte_level_metadata("smollm", merges=["ab"])
    with pytest.raises(ValueError, match="'ab' is not two tokens"):
        build_tokenizer(metadata)
    assert not caplog.records
    build_tokenizer(byte_level_metadata(None))
    assert "does not name its text splitting" in caplog.text


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    words = ["\u2581", "a", "b", "c", "ab", "bc", "abc", "\u2581a", "\u2581ab", "\u2581abc"]
    scores = {"bc": -1.0, "ab": -2.0, "\u2581a": -3.0, "abc": -4.0, "\u2581ab": -5.0}
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    metadata = {
        "model": "llama",
        "tokens": tokens,
        "scores": [scores.get(token, -9.0) for token in tokens],
        "token_type": [2, 3, 3] + [6] * 256 + [1] * len(words),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}


def test_sentencepiece_merges_by_score() -> None:
    """By hand: of the pairs in "_abc", "bc" scores best, then "_a"; nothing joins "_a" + "bc"
    except "_abc" itself, a token."""
    encode = build_tokenizer(sentencepiece_metadata()).backend.encode
    assert encode("abc").tokens == ["\u2581abc"]
    assert encode("cab").tokens == ["\u2581", "c", "ab"]
    assert encode("a b").tokens == ["\u2581a", "\u2581", "b"]
    assert encode("é</s>").tokens == ["\u2581", "<0xC3>", "<0xA9>", "</s>"]
    metadata = sentencepiece_metadata(add_space_prefix=False)
    assert build_tokenizer(metadata).backend.encode("abc").tokens == ["abc"]


def test_sentencepiece_agrees_with_transformers() -> None:
    """Against the merges that transformers derives when it converts such a vocabulary."""
    base = pytest.importorskip("transformers.tokenization_utils_base")
    from tinydecode.gguf_vocab import _merges_by_score

    rng = random.Random(0)
    tokens = sorted({"".join(rng.choices("abc", k=rng.randint(1, 5))) for _ in range(200)})
    rng.shuffle(tokens)
    scores = [float(-rng.randint(0, 60)) for _ in tokens]  # with ties
    vocab = {token: i for i, token in enumerate(tokens)}
    expected = base.generate_merges(vocab, dict(zip(tokens, scores, strict=True)))
    assert _merges_by_score(vocab, scores) == expected
    assert len(expected) > 100
