"""The GGUF container: metadata, tensor directory, and the model configuration they describe.

Nothing here imports torch or touches tensor data; gguf_tensors.py does. The header is parsed here
because the gguf library takes seconds for a 49k vocabulary.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tinydecode.config import ModelConfig, RopeScaling, token_ids
from tinydecode.errors import CheckpointError, refuse_lfs_pointer

_STRING, _ARRAY = 8, 9
_FORMATS = {  # GGUF value type -> struct format
    **{0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i"},
    **{6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"},
}
_DEFAULT_ALIGNMENT = 32  # bytes
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class GGUFTensor:
    """One entry of the tensor directory."""

    name: str
    shape: tuple[int, ...]  # as torch has it; GGUF lists the innermost dimension first
    ggml_type: int
    offset: int  # bytes from the start of the file


@dataclass(frozen=True)
class GGUFHeader:
    """All of a GGUF file but the tensor data."""

    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


def read_header(path: Path, *, arrays: bool = True) -> GGUFHeader:
    """Parse everything up to the tensor data.

    Args:
        path: a .gguf file.
        arrays: False leaves array values (a vocabulary, merges) out of the metadata; they are
            most of the work.

    Raises:
        CheckpointError: the file is no GGUF file, or is cut off or corrupt.
        NotImplementedError: a version or byte order that is not read here.
    """
    refuse_lfs_pointer(path)
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Parser(data, arrays).header()
    except (ValueError, OverflowError, LookupError, struct.error) as error:
        raise CheckpointError(f"{path}: incomplete or corrupt GGUF file ({error})") from None


def read_metadata(path: str | Path) -> dict[str, Any]:
    """All metadata of a GGUF file: str, int, float, bool, and lists of them. Raises as above."""
    return read_header(Path(path)).metadata


class _Parser:
    """A cursor over the mapped file. Reading past the end raises struct.error."""

    def __init__(self, data: mmap.mmap, arrays: bool) -> None:
        self.data = data
        self.arrays = arrays
        self.position = 0  # bytes

    def header(self) -> GGUFHeader:
        if self.data[:4] != b"GGUF":
            raise ValueError("it does not start with GGUF")
        self.position = 4
        version = self.number("I")
        if version not in (2, 3):
            raise NotImplementedError(f"GGUF version {version} is not implemented; 2 and 3 are")
        tensor_count, value_count = self.number("Q"), self.number("Q")
        metadata = {}
        for _ in range(value_count):
            key = self.string()
            value = self.value(self.number("I"))
            if value is not None:
                metadata[key] = value
        entries = [self.tensor() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment % 8:
            raise ValueError(f"general.alignment is {alignment!r}")
        start = math.ceil(self.position / alignment) * alignment
        tensors = {}
        for name, shape, ggml_type, offset in entries:
            if offset % alignment or start + offset > len(self.data):
                raise ValueError(f"{name} starts at byte {start + offset} of {len(self.data)}")
            tensors[name] = GGUFTensor(name, shape, ggml_type, start + offset)
        return GGUFHeader(metadata, tensors)

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string()
        rank = self.number("I")
        shape = self.numbers("Q", rank)[::-1]
        return name, shape, self.number("I"), self.number("Q")

    def value(self, value_type: int) -> Any:
        """A metadata value; None for an array that is to be left out."""
        if value_type == _STRING:
            return self.string()
        if value_type != _ARRAY:
            return self.number(_FORMATS[value_type])
        item_type, count = self.number("I"), self.number("Q")
        if item_type == _STRING:
            return self.strings(count) if self.arrays else self.skip_strings(count)
        if item_type == _ARRAY:
            return [self.value(_ARRAY) for _ in range(count)]
        values = self.numbers(_FORMATS[item_type], count)
        return list(values) if self.arrays else None

    def number(self, code: str) -> Any:
        return self.numbers(code, 1)[0]

    def numbers(self, code: str, count: int) -> tuple[Any, ...]:
        layout = f"<{count}{code}"
        values = struct.unpack_from(layout, self.data, self.position)
        self.position += struct.calcsize(layout)
        return values

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        # A vocabulary is 100,000 strings, so this loop and the next use locals only.
        data, position, unpack = self.data, self.position, _LENGTH.unpack_from
        values = []
        for _ in range(count):
            end = position + 8 + unpack(data, position)[0]
            values.append(data[position + 8 : end].decode("utf-8", "replace"))
            position = end
        self._move_to(position)
        return values

    def skip_strings(self, count: int) -> None:
        data, position, unpack = self.data, self.position, _LENGTH.unpack_from
        for _ in range(count):
            position += 8 + unpack(data, position)[0]
        self._move_to(position)

    def _move_to(self, position: int) -> None:
        if position > len(self.data):
            raise ValueError(f"a string ends at byte {position} of {len(self.data)}")
        self.position = position


def read_config(path: str | Path) -> ModelConfig:
    """The configuration of a GGUF file of the llama architecture.

    dtype stays None: a quantised file has none.

    Raises:
        CheckpointError: the file is damaged, or a key that every model needs is missing.
        NotImplementedError: another architecture, or a feature that tinydecode lacks.
    """
    path = Path(path)
    header = read_header(path, arrays=False)
    metadata, tensors = header.metadata, header.tensors
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise NotImplementedError(
            f"{path}: general.architecture {architecture!r} is not implemented, only 'llama' is"
        )
    if "token_embd.weight" not in tensors:
        raise CheckpointError(f"{path}: the GGUF file has no tensor token_embd.weight")

    def number(key: str, default: Any = None) -> Any:
        value = metadata.get(key, default)
        if not isinstance(value, (int, float)):
            raise CheckpointError(f"{path}: {key} is {value!r}, expected a number")
        return value

    for key, supported in (("llama.expert_count", 0), ("split.count", 1)):
        if number(key, 0) > supported:
            raise NotImplementedError(f"{path}: {key} {metadata[key]} is not implemented")
    hidden, heads = number("llama.embedding_length"), number("llama.attention.head_count")
    head_dim = number("llama.attention.key_length", hidden // max(heads, 1))
    rotated = number("llama.rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise NotImplementedError(
            f"{path}: llama.rope.dimension_count {rotated} of {head_dim} is not implemented"
        )

    def ids(key: str) -> tuple[int, ...]:
        return token_ids(metadata.get(key), f"{path}: {key}")

    stop_ids = ids("tokenizer.ggml.eos_token_id") + ids("tokenizer.ggml.eot_token_id")
    config = ModelConfig(
        model_type="llama",
        # Not llama.vocab_size, which is optional and may leave padding out.
        vocab_size=tensors["token_embd.weight"].shape[0],
        hidden_size=hidden,
        intermediate_size=number("llama.feed_forward_length"),
        num_hidden_layers=number("llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=number("llama.attention.head_count_kv", heads),
        head_dim=head_dim,
        rms_norm_eps=number("llama.attention.layer_norm_rms_epsilon"),
        max_position_embeddings=number("llama.context_length"),
        rope_theta=number("llama.rope.freq_base", 10000.0),
        rope_scaling=_rope_scaling(path, metadata),
        tie_word_embeddings="output.weight" not in tensors,
        attention_bias="blk.0.attn_q.bias" in tensors,
        attention_out_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
        bos_token_id=next(iter(ids("tokenizer.ggml.bos_token_id")), None),
        eos_token_ids=tuple(dict.fromkeys(stop_ids)),
    )
    if "rope_freqs.weight" in tensors:
        config = _with_llama3_rope(path, tensors["rope_freqs.weight"], config)
    return config


def _rope_scaling(path: Path, metadata: Mapping[str, Any]) -> RopeScaling:
    kind = metadata.get("llama.rope.scaling.type", "none")
    factor = metadata.get("llama.rope.scaling.factor", 1.0)
    if kind == "none":
        return RopeScaling()
    if kind == "linear":
        return RopeScaling("linear", factor=factor)
    raise NotImplementedError(f"{path}: llama.rope.scaling.type {kind!r} is not implemented")


def _with_llama3_rope(path: Path, stored: GGUFTensor, config: ModelConfig) -> ModelConfig:
    """Recover the llama3 scaling that a converter turned into one divisor per frequency.

    The largest divisor is the factor. The other three numbers are the same in every model
    published with this scaling, so they are assumed and the outcome is compared.
    """
    from tinydecode.rope import inv_freq

    pairs = config.head_dim // 2
    with path.open("rb") as file:
        file.seek(stored.offset)
        data = file.read(4 * pairs)
    if stored.ggml_type != 0 or stored.shape != (pairs,) or len(data) != 4 * pairs:
        raise CheckpointError(f"{path}: rope_freqs.weight is not {pairs} float32 values")
    divisors = struct.unpack(f"<{pairs}f", data)
    if not all(math.isfinite(divisor) and divisor > 0 for divisor in divisors):
        raise CheckpointError(f"{path}: incomplete or corrupt, rope_freqs.weight is {divisors}")
    scaling = RopeScaling("llama3", max(divisors), 1.0, 4.0, 8192.0)
    scaled = replace(config, rope_scaling=scaling)
    expected = (inv_freq(config) / inv_freq(scaled)).tolist()
    if config.rope_scaling != RopeScaling() or not all(
        math.isclose(a, b, rel_tol=1e-4) for a, b in zip(divisors, expected, strict=True)
    ):
        raise NotImplementedError(
            f"{path}: rope_freqs.weight holds a rope scaling that is not implemented; "
            "llama3 with low_freq_factor 1, high_freq_factor 4 and 8192 original positions is"
        )
    return scaled
