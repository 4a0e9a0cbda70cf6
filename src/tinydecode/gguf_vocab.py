"""A tokenizers.Tokenizer rebuilt from the vocabulary inside a GGUF file.

GGUF keeps tokens, merges and scores but names the text splitting only by a label
(`tokenizer.ggml.pre`); what each label means is written out here.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)

from tinydecode.errors import CheckpointError
from tinydecode.gguf import read_metadata
from tinydecode.tokenizer import TokenizerParts

_logger = logging.getLogger("tinydecode")


class _TokenType(IntEnum):
    """`tokenizer.ggml.token_type`, as far as it matters here."""

    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4


class _Split(NamedTuple):
    """How the models under one label cut text before merging."""

    pattern: str | None  # None: GPT-2's own, which ByteLevel has built in
    digits_first: bool = False  # every digit is cut off before the pattern applies
    nfc: bool = False
    whole_words: bool = False  # a word that is a token is taken without merging
    add_bos: bool = False  # when the file does not say


_GPT2 = _Split(pattern=None)
_SMOLLM = _Split(pattern=None, digits_first=True)
_LLAMA3 = _Split(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    whole_words=True,
    add_bos=True,
)
_QWEN2 = _Split(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    nfc=True,
)
_SPLITS = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}


def read_tokenizer(path: Path) -> TokenizerParts:
    """The tokenizer of a GGUF file.

    Raises:
        CheckpointError: the file is damaged, has no vocabulary, or one that contradicts itself.
        NotImplementedError: a tokenizer model or text splitting that is not built here.
    """
    metadata = read_metadata(path)
    try:
        return build_tokenizer(metadata)
    except NotImplementedError as error:
        raise NotImplementedError(f"{path}: {error}") from None
    except Exception as error:  # tokenizers raises nothing more specific
        raise CheckpointError(f"{path}: its vocabulary is unusable ({error!r})") from error


def build_tokenizer(metadata: Mapping[str, Any]) -> TokenizerParts:
    """Rebuild a tokenizer from GGUF metadata.

    Args:
        metadata: GGUF keys to values; those under "tokenizer." are read.

    Raises:
        ValueError, LookupError: the vocabulary is missing or contradicts itself.
        NotImplementedError: a tokenizer model or text splitting that is not built here.
    """
    model = metadata.get("tokenizer.ggml.model")
    if "tokenizer.ggml.tokens" not in metadata:
        raise ValueError("no tokenizer.ggml.tokens: the file carries no vocabulary")
    if model == "gpt2":
        backend, add_bos = _byte_level_bpe(metadata)
    elif model == "llama":
        backend, add_bos = _sentencepiece_bpe(metadata), True
    else:
        raise NotImplementedError(f"tokenizer.ggml.model: {model!r}; implemented: gpt2, llama")
    _add_special_tokens(backend, metadata)
    return TokenizerParts(
        backend=backend,
        special_tokens=_named_special_tokens(metadata),
        add_bos=metadata.get("tokenizer.ggml.add_bos_token", add_bos),
        chat_template=metadata.get("tokenizer.chat_template"),
    )


def _byte_level_bpe(metadata: Mapping[str, Any]) -> tuple[Tokenizer, bool]:
    """GPT-2's scheme: bytes written as characters, merges in order of rank."""
    label = metadata.get("tokenizer.ggml.pre", "default")
    if label not in _SPLITS:
        known = ", ".join(_SPLITS)
        raise NotImplementedError(f"tokenizer.ggml.pre: {label!r}; implemented: {known}")
    if label == "default":
        _logger.warning("the GGUF file does not name its text splitting; GPT-2's is used")
    split = _SPLITS[label]
    tokenizer = Tokenizer(
        models.BPE(
            vocab=_vocabulary(metadata),
            merges=_merges(metadata),
            ignore_merges=split.whole_words,
        )
    )
    if split.nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = []
    if split.digits_first:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if split.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(split.pattern), behavior="isolated"))
    use_regex = split.pattern is None
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, split.add_bos


def _sentencepiece_bpe(metadata: Mapping[str, Any]) -> Tokenizer:
    """Llama-2's scheme: spaces as U+2581, bytes as a fallback, merges by score."""
    vocab = _vocabulary(metadata)
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges_by_score(vocab, metadata["tokenizer.ggml.scores"]),
            unk_token=metadata["tokenizer.ggml.tokens"][unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    space = normalizers.Replace(" ", "\u2581")
    add_space = metadata.get("tokenizer.ggml.add_space_prefix", True)
    steps: list[Any] = [normalizers.Prepend("\u2581"), space] if add_space else [space]
    tokenizer.normalizer = normalizers.Sequence(steps)
    decoding: list[Any] = [decoders.Replace("\u2581", " "), decoders.ByteFallback()]
    decoding.append(decoders.Fuse())
    if add_space:
        decoding.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(decoding)
    return tokenizer


def _vocabulary(metadata: Mapping[str, Any]) -> dict[str, int]:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise ValueError("tokenizer.ggml.tokens lists a token twice")
    return vocab


def _merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    merges: list[tuple[str, str]] = []
    for merge in metadata.get("tokenizer.ggml.merges", ()):
        left, separator, right = merge.partition(" ")
        if not separator:
            raise ValueError(f"tokenizer.ggml.merges: {merge!r} is not two tokens")
        merges.append((left, right))
    return merges


def _merges_by_score(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to make a token out of two others; the best-scored result merges first.

    SentencePiece joins, at each step, the pair whose result scores best; listing the pairs in
    that order gives a rank-based BPE the same choices. Equal scores are ordered as transformers
    orders them when it converts such a vocabulary: longer left parts first, then token ids.
    """
    ranked: list[tuple[float, int, int, int, str, str]] = []
    for token, token_id in vocab.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                ranked.append((-scores[token_id], -len(left), -len(right), token_id, left, right))
    return [(left, right) for *_, left, right in sorted(ranked)]


def _add_special_tokens(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> None:
    """Have control and user-defined tokens recognised whole; only the former are "special"."""
    special: list[AddedToken] = []
    plain: list[AddedToken] = []
    tokens = metadata["tokenizer.ggml.tokens"]
    for token, kind in zip(tokens, metadata.get("tokenizer.ggml.token_type", ()), strict=False):
        if kind in (_TokenType.CONTROL, _TokenType.UNKNOWN):
            special.append(AddedToken(token, normalized=False, special=True))
        elif kind == _TokenType.USER_DEFINED:
            plain.append(AddedToken(token, normalized=False, special=False))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)


def _named_special_tokens(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The names that chat templates use, "bos_token" and so on, with their tokens."""
    tokens = metadata["tokenizer.ggml.tokens"]
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    return {
        f"{name}_token": tokens[token_id]
        for key, name in names.items()
        if (token_id := metadata.get(f"tokenizer.ggml.{key}_token_id")) is not None
    }
