"""Text to token ids and back: tokenizer.json or a GGUF's vocabulary, chat template, streaming.

The tokenizers library encodes. Decoding is done here, token by token to bytes and bytes to text,
because that is the one form that a stream and a whole text can share exactly.
"""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers

from tinydecode.errors import CheckpointError, refuse_lfs_pointer
from tinydecode.token_bytes import TokenBytes


@dataclass(frozen=True)
class TokenizerParts:
    """What a tokenizer is made of, wherever it was read from."""

    backend: tokenizers.Tokenizer
    special_tokens: dict[str, str] = field(default_factory=dict)  # "bos_token" -> "<s>"
    add_bos: bool | None = None  # None: do what the backend's post-processor does
    chat_template: str | None = None  # jinja source


class Tokenizer:
    """Encodes text, decodes token ids, renders chats.

    Args:
        path: a directory with tokenizer.json, or a .gguf file.

    Raises:
        FileNotFoundError: no such path, or no tokenizer.json in the directory.
        CheckpointError: a file is damaged.
        ValueError: the path is neither of the two.
        NotImplementedError: a kind of tokenizer that this runtime does not decode.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        parts = _read_parts(Path(path))
        self._backend = parts.backend
        self._backend.no_truncation()
        self._backend.no_padding()
        self._special_tokens = parts.special_tokens
        self._chat_template = parts.chat_template
        self._bytes = TokenBytes(self._backend)
        self._prefix = self._find_prefix(parts.add_bos)

    def _find_prefix(self, add_bos: bool | None) -> list[int]:
        """The ids that encoding puts in front of a text: [BOS] or nothing."""
        if add_bos is not None and self.bos_token_id is not None:
            return [self.bos_token_id] if add_bos else []
        probe = self._backend.encode("a")
        is_special = [*probe.special_tokens_mask, 0]
        return probe.ids[: is_special.index(0)]

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; a model's vocab_size may be padded beyond it."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def bos_token_id(self) -> int | None:
        """The token that starts every text, if the tokenizer names one."""
        return self._special_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """The end-of-sequence token, if named; a model's config files may name more."""
        return self._special_id("eos_token")

    def _special_id(self, name: str) -> int | None:
        token = self._special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it; None for an id without one."""
        return self._backend.id_to_token(token_id)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; special tokens spelled out in it are recognised.

        Args:
            text: any string.
            add_special_tokens: put BOS in front where this tokenizer does so, unless the text
                already starts with it. An end-of-sequence token is never appended: the text is
                there to be continued.
        """
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        if not add_special_tokens or ids[: len(self._prefix)] == self._prefix:
            return ids
        return self._prefix + ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids. Ids without a token give nothing; invalid UTF-8 gives U+FFFD."""
        data = bytearray()
        is_first = True
        for token_id in ids:
            piece = self._bytes.of(token_id, is_first, skip_special_tokens)
            if piece is not None:
                data += piece
                is_first = False
        return data.decode("utf-8", errors="replace")

    def detokenizer(
        self, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> IncrementalDetokenizer:
        """Start decoding a stream of tokens that follows `prompt_ids`."""
        return IncrementalDetokenizer(self._bytes, prompt_ids, skip_special_tokens)

    @property
    def has_chat_template(self) -> bool:
        """Whether apply_chat_template can work."""
        return self._chat_template is not None

    def apply_chat_template(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Render a conversation as the text that the model was trained on.

        Encode the result with add_special_tokens=False: a template writes its own BOS.

        Args:
            messages: [{"role": "user", "content": "..."}, ...].
            add_generation_prompt: end with the header of the assistant's turn.
            variables: handed to the template as they are (tools, enable_thinking, ...).

        Raises:
            ValueError: there is no template, or it refuses the messages (its own words).
        """
        if self._chat_template is None:
            raise ValueError(
                "this tokenizer has no chat template; use the prompt as plain text instead: "
                "encode(prompt), or tinydecode-generate without --chat"
            )
        from tinydecode.chat_template import render_chat  # jinja2 takes 0.1 s to import

        context = {**self._special_tokens, "tools": None, "documents": None, **variables}
        context |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        return render_chat(self._chat_template, context)


class IncrementalDetokenizer:
    """Turns a stream of token ids into text, complete characters only.

    The pieces, joined with the flush, are what decoding prompt and stream together adds to the
    characters that the prompt completed. Work per token is constant: no text is decoded twice.
    """

    def __init__(
        self, token_bytes: TokenBytes, prompt_ids: Sequence[int], skip_special_tokens: bool
    ) -> None:
        self._bytes = token_bytes
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        # A character has four bytes at most, so its first three are all that can be pending.
        tail = b""
        self._is_first = True
        for token_id in reversed(prompt_ids):
            piece = self._bytes.of(token_id, False, skip_special_tokens)
            if piece is not None:
                tail = piece + tail
                self._is_first = False
            if len(tail) >= 3:
                break
        self._utf8.decode(tail)

    def push(self, token_id: int) -> str:
        """Text that this token completes; "" while it ends inside a character."""
        piece = self._bytes.of(token_id, self._is_first, self._skip_special_tokens)
        if piece is None:
            return ""
        self._is_first = False
        return self._utf8.decode(piece)

    def flush(self) -> str:
        """End of the stream: U+FFFD if it stopped inside a character, else nothing."""
        return self._utf8.decode(b"", final=True)


def _read_parts(path: Path) -> TokenizerParts:
    if path.is_dir():
        return _read_directory(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; expected a directory or a .gguf file")
    if path.suffix == ".gguf":
        from tinydecode.gguf_vocab import read_tokenizer  # only such files need it

        return read_tokenizer(path)
    raise ValueError(f"{path} is neither a directory nor a .gguf file")


def _read_directory(path: Path) -> TokenizerParts:
    """tokenizer.json with what tokenizer_config.json and chat_template.jinja add to it."""
    file = path / "tokenizer.json"
    if not file.exists():
        hint = ""
        if (path / "tokenizer.model").exists():
            hint = (
                "; found tokenizer.model, which the transformers library turns into one: "
                "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
            )
        raise FileNotFoundError(f"no tokenizer.json in {path}{hint}")
    refuse_lfs_pointer(file)
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more specific
        raise CheckpointError(f"{file}: incomplete or corrupt ({error})") from error
    config = _read_config(path / "tokenizer_config.json")
    special_tokens = {
        name: value["content"] if isinstance(value, dict) else value
        for name, value in config.items()
        if name.endswith("_token") and isinstance(value, str | dict)
    }
    return TokenizerParts(
        backend=backend,
        special_tokens=special_tokens,
        add_bos=config.get("add_bos_token"),
        chat_template=_find_chat_template(path, config),
    )


def _read_config(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file}: not valid JSON ({error})") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{file}: not a JSON object but a {type(config).__name__}")
    return config


def _find_chat_template(path: Path, config: dict[str, Any]) -> str | None:
    """The template in a file of its own wins, as it does in transformers."""
    file = path / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template
