"""The bytes that each token stands for, read off the decoder that tokenizer.json declares."""

from __future__ import annotations

import json
import re
from typing import Any

import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """Maps a token id to bytes; the bytes of a text's tokens, joined, are its UTF-8.

    Covers the two ways in which llama-like models spell text: byte-level BPE (every byte a
    printable character) and SentencePiece ("\u2581" for a space, `<0x0A>` for single bytes).

    Raises:
        NotImplementedError: the tokenizer declares a decoder of another kind.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._added = backend.get_added_tokens_decoder()
        self._is_byte_level = False
        self._has_byte_tokens = False
        self._replacements: list[tuple[str, str]] = []
        self._leading = ""  # removed once from the front of the first token
        for step in _decoder_steps(backend):
            self._add_step(step)

    def _add_step(self, step: dict[str, Any]) -> None:
        match step:
            case {"type": "ByteLevel"}:
                self._is_byte_level = True
            case {"type": "ByteFallback"}:
                self._has_byte_tokens = True
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                self._replacements.append((old, new))
            case {"type": "Metaspace", "replacement": str(old)}:
                self._replacements.append((old, " "))
                self._leading = "" if step.get("prepend_scheme") == "never" else " "
            case {"type": "Strip", "content": str(leading), "start": 0 | 1 as start, "stop": 0}:
                self._leading = leading * start
            case {"type": "Fuse"}:
                pass  # bytes are joined anyway
            case _:
                raise NotImplementedError(f"tokenizer.json: decoder {json.dumps(step)}")

    def of(self, token_id: int, is_first: bool, skip_special_tokens: bool) -> bytes | None:
        """The bytes of one token.

        Args:
            token_id: ids that no token has are allowed.
            is_first: no token came before it in this text, so it loses the space that encoding
                put in front.
            skip_special_tokens: leave special tokens out.

        Returns:
            None when the token is no part of the text: special and skipped, or no token at all.
        """
        added = self._added.get(token_id)
        if added is not None and added.special and skip_special_tokens:
            return None
        token = self._backend.id_to_token(token_id)
        if token is None:
            return None
        if self._is_byte_level:
            return token.encode() if added is not None else _from_byte_level(token)
        if self._has_byte_tokens and (byte := _BYTE_TOKEN.fullmatch(token)):
            data = bytes.fromhex(byte[1])
        else:
            for old, new in self._replacements:
                token = token.replace(old, new)
            data = token.encode()
        return data.removeprefix(self._leading.encode()) if is_first else data


def _decoder_steps(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    if backend.decoder is None:
        raise NotImplementedError("tokenizer.json: no decoder, expected ByteLevel or a Sequence")
    # Pickling state is the decoder's part of tokenizer.json, without the vocabulary.
    spec: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    steps: list[dict[str, Any]] = spec["decoders"] if spec["type"] == "Sequence" else [spec]
    return steps


def byte_alphabet() -> list[str]:
    """The character that byte-level BPE writes for each byte, GPT-2's choice.

    Bytes that print stand for themselves; the rest take the characters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    substitutes = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(substitutes)) for byte in range(256)]


_BYTE_OF = {character: byte for byte, character in enumerate(byte_alphabet())}


def _from_byte_level(token: str) -> bytes:
    try:
        return bytes(_BYTE_OF[character] for character in token)
    except KeyError:  # spelled outside the alphabet: it stands for itself
        return token.encode()
