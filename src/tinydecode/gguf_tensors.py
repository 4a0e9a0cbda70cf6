"""Tensors of a GGUF file: dequantising, and Hugging Face's names and row order.

The common quantised types are expanded here with a few torch operations; the others through the
gguf library (`pip install tinydecode[gguf]`), which takes several times as long.
"""

from __future__ import annotations

import math
import mmap
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tinydecode.checkpoint import StoredTensor
from tinydecode.errors import CheckpointError
from tinydecode.gguf import GGUFTensor, read_header

# Weights expanded at a time. 512 Ki keep the fp32 scratch (2 MiB) in a core's cache and the
# number of torch calls small.
_CHUNK = 1 << 19

_FLOATS = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}

_TOP_LEVEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GGUFCheckpoint:
    """The tensors of one .gguf file under Hugging Face names.

    Args:
        path: the file.
        head_dim: D, needed to restore the row order of q_proj and k_proj.

    Raises:
        CheckpointError: the file is damaged.
        NotImplementedError: a quantised type that nothing here can expand.
        ImportError: a quantised type that needs the gguf library, which is not installed.
    """

    def __init__(self, path: Path, head_dim: int) -> None:
        self._path = path
        self._head_dim = head_dim
        self._entries: dict[str, GGUFTensor] = {}
        self.tensors: dict[str, StoredTensor] = {}
        size = path.stat().st_size
        for entry in read_header(path, arrays=False).tensors.values():
            if entry.name == "rope_freqs.weight":  # read_config turns it into rope_scaling
                continue
            name, nbytes = _hugging_face_name(entry.name), _nbytes(path, entry)
            if entry.offset + nbytes > size:
                raise CheckpointError(
                    f"{path}: incomplete or corrupt, {entry.name} ends at byte "
                    f"{entry.offset + nbytes} of {size}"
                )
            dtype = _FLOATS.get(entry.ggml_type)
            self._entries[name] = entry
            self.tensors[name] = StoredTensor(name, path, entry.shape, dtype, nbytes)

    def copy_into(self, destinations: Mapping[str, Tensor]) -> Iterator[int]:
        with self._path.open("rb") as file:
            # Copy-on-write only because torch warns about read-only memory; nothing writes to it.
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        rows = {name: self._rows(name, tensor) for name, tensor in destinations.items()}
        # One scratch for all: touching fresh memory costs more than the arithmetic.
        scratch = torch.empty(max([_CHUNK, *(row[0].numel() for row in rows.values())]))
        for name, row in rows.items():
            entry, nbytes = self._entries[name], self.tensors[name].nbytes
            raw = torch.frombuffer(data, dtype=torch.uint8, count=nbytes, offset=entry.offset)
            per_chunk = max(1, _CHUNK // row[0].numel())
            chunks = torch.split(row, per_chunk)
            parts = torch.split(raw.view(len(row), -1), per_chunk)
            for chunk, part in zip(chunks, parts, strict=True):
                _copy(entry.ggml_type, part, chunk, scratch)
                yield part.numel()

    def equal(self, name: str, other: str) -> bool:
        return name == other  # a GGUF file has no tied pair to compare

    def _rows(self, name: str, destination: Tensor) -> Tensor:
        """The destination as a view whose elements are in the file's order.

        The converter interleaves the two halves of every head of q and k (row s * D/2 + i of a
        head is written as row 2 * i + s), which turns rotate-half rope into rope over neighbours.
        """
        if not name.endswith(("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias")):
            return destination
        halves = destination.view(-1, 2, self._head_dim // 2, *destination.shape[1:])
        return halves.transpose(1, 2)  # [heads, D/2, 2, ...]


def _hugging_face_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; an unknown one is returned as it is."""
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match and match[2] in _IN_LAYER:
        return f"model.layers.{match[1]}.{_IN_LAYER[match[2]]}.{match[3]}"
    return _TOP_LEVEL.get(name, name)


def _nbytes(path: Path, entry: GGUFTensor) -> int:
    """Bytes of a tensor in the file."""
    count = math.prod(entry.shape)
    dtype = _FLOATS.get(entry.ggml_type)
    if dtype is not None:
        return count * dtype.itemsize
    size = _block_type(path, entry)
    if not entry.shape or entry.shape[-1] % size.weights:
        raise CheckpointError(
            f"{path}: incomplete or corrupt, {entry.name} has rows of {entry.shape[-1:]} weights "
            f"in blocks of {size.weights}"
        )
    return count // size.weights * size.nbytes


def _copy(ggml_type: int, raw: Tensor, destination: Tensor, scratch: Tensor) -> None:
    """Bytes as stored -> the destination's floats, through fp32 scratch unless it can be direct."""
    if ggml_type in _FLOATS:
        destination.copy_(raw.view(_FLOATS[ggml_type]).view(destination.shape))
        return
    block = _BLOCK_TYPES[ggml_type]
    is_direct = (
        destination.dtype == torch.float32
        and destination.device.type == "cpu"
        and destination.is_contiguous()
    )
    out = destination if is_direct else scratch[: destination.numel()]
    block.expand(raw.reshape(-1, block.nbytes), out.view(-1, block.weights))
    if not is_direct:
        destination.copy_(out.view(destination.shape))


# ---- quantised types -----------------------------------------------------------------------
# Each takes blocks, uint8 [n, bytes a block], and writes out, fp32 [n, weights a block]. Layouts:
# ggml's ggml-common.h. Every product below is exact in fp32, so the values equal ggml's own.


def _half(blocks: Tensor, start: int) -> Tensor:
    """The fp16 number at a byte of every block, as fp32 [n, 1]."""
    return blocks[:, start : start + 2].view(torch.float16).float()


def _nibbles(packed: Tensor, out: Tensor) -> None:
    """Low halves of the bytes [n, m], then high halves, into out [n, 2m]."""
    packed = packed.contiguous()
    out[:, : packed.shape[1]] = packed & 15
    out[:, packed.shape[1] :] = packed >> 4


def _q4_0(blocks: Tensor, out: Tensor) -> None:
    """scale fp16, 32 x 4 bits: scale * (q - 8)."""
    _nibbles(blocks[:, 2:], out)
    out.sub_(8).mul_(_half(blocks, 0))


def _q4_1(blocks: Tensor, out: Tensor) -> None:
    """scale fp16, minimum fp16, 32 x 4 bits: scale * q + minimum."""
    _nibbles(blocks[:, 4:], out)
    out.mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q8_0(blocks: Tensor, out: Tensor) -> None:
    """scale fp16, 32 x int8: scale * q."""
    out.copy_(blocks[:, 2:].view(torch.int8)).mul_(_half(blocks, 0))


def _q4_k(blocks: Tensor, out: Tensor) -> None:
    """scale fp16, minimum fp16, 12 bytes of packed scales, 256 x 4 bits.

    Eight groups of 32: (scale * s) * q - minimum * m, with 6-bit s and m for each group.
    """
    low, middle, high = blocks[:, 4:16].reshape(-1, 3, 4).unbind(1)  # [n, 4] each
    s = torch.cat((low & 63, (high & 15) | ((low >> 2) & 48)), 1)  # [n, 8]
    m = torch.cat((middle & 63, (high >> 4) | ((middle >> 2) & 48)), 1)
    groups = out.view(-1, 8, 32)
    _nibbles(blocks[:, 16:].reshape(-1, 32), out.view(-1, 64))
    groups.mul_((_half(blocks, 0) * s)[:, :, None]).sub_((_half(blocks, 2) * m)[:, :, None])


def _q6_k(blocks: Tensor, out: Tensor) -> None:
    """256 x low 4 bits, 256 x high 2 bits, 16 int8 scales, scale fp16.

    Sixteen groups of 16: (scale * s) * (q - 32).
    """
    low = blocks[:, :128].reshape(-1, 2, 64)
    low = torch.stack((low & 15, low >> 4), 2).view(-1, 8, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(4, 1)
    high = ((high >> shifts) & 3).view(-1, 8, 32)
    scales = _half(blocks, 208) * blocks[:, 192:208].view(torch.int8)  # [n, 16]
    out.copy_((low | (high << 4)).view(-1, 256)).sub_(32)
    out.view(-1, 16, 16).mul_(scales[:, :, None])


class _BlockType(NamedTuple):
    weights: int  # a block
    nbytes: int  # a block
    expand: Callable[[Tensor, Tensor], None]


_BLOCK_TYPES = {
    2: _BlockType(32, 18, _q4_0),
    3: _BlockType(32, 20, _q4_1),
    8: _BlockType(32, 34, _q8_0),
    12: _BlockType(256, 144, _q4_k),
    14: _BlockType(256, 210, _q6_k),
}


def _block_type(path: Path, entry: GGUFTensor) -> _BlockType:
    """How to expand a quantised tensor; types not known here are asked of the gguf library."""
    if entry.ggml_type not in _BLOCK_TYPES:
        try:
            import gguf
        except ImportError:
            raise ImportError(
                f"{path}: {entry.name} has GGML type {entry.ggml_type}, which needs the gguf "
                "library: pip install tinydecode[gguf]"
            ) from None
        try:
            kind = gguf.GGMLQuantizationType(entry.ggml_type)
        except ValueError:
            raise NotImplementedError(
                f"{path}: {entry.name} has GGML type {entry.ggml_type}, which is not implemented"
            ) from None

        def expand(blocks: Tensor, out: Tensor) -> None:
            values = gguf.quants.dequantize(blocks.numpy(), kind)
            out.copy_(torch.from_numpy(values))

        _BLOCK_TYPES[entry.ggml_type] = _BlockType(*gguf.GGML_QUANT_SIZES[kind], expand)
    return _BLOCK_TYPES[entry.ggml_type]
