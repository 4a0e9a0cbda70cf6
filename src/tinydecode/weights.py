"""Parameters: the packed tensors a model computes with, and filling them from files.

`named_slices` is the only place that knows which Hugging Face tensor goes where.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tinydecode.checkpoint import Checkpoint, SafetensorsCheckpoint
from tinydecode.config import ModelConfig
from tinydecode.errors import CheckpointError

__all__ = [
    "CheckpointError",
    "LayerWeights",
    "ModelWeights",
    "load_weights",
    "named_slices",
    "random_weights",
    "resolve_dtype",
]

_logger = logging.getLogger("tinydecode")
_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_NAMED_AT_MOST = 8  # unknown tensors listed in a warning


@dataclass
class LayerWeights:
    """One decoder layer; q, k, v are one matrix and gate, up are another."""

    input_layernorm: Tensor  # [E]
    qkv_proj: Tensor  # [(H + 2K) * D, E]
    qkv_bias: Tensor | None  # [(H + 2K) * D]
    o_proj: Tensor  # [E, H * D]
    o_bias: Tensor | None  # [E]
    post_attention_layernorm: Tensor  # [E]
    gate_up_proj: Tensor  # [2F, E]
    gate_up_bias: Tensor | None  # [2F]
    down_proj: Tensor  # [E, F]
    down_bias: Tensor | None  # [E]


@dataclass
class ModelWeights:
    """All parameters of a model, of one dtype on one device."""

    embed_tokens: Tensor  # [V, E]
    layers: list[LayerWeights]
    norm: Tensor  # [E]
    lm_head: Tensor  # [V, E]; embed_tokens itself when tied

    def tensors(self) -> Iterator[Tensor]:
        """Every parameter once."""
        yield self.embed_tokens
        for layer in self.layers:
            yield from (tensor for tensor in vars(layer).values() if tensor is not None)
        yield self.norm
        if self.lm_head is not self.embed_tokens:
            yield self.lm_head

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters; a tied head is counted once."""
        return sum(tensor.nbytes for tensor in self.tensors())


def empty_weights(
    config: ModelConfig, *, device: torch.device | str, dtype: torch.dtype, tied: bool
) -> ModelWeights:
    """Uninitialised parameters in the model's shapes.

    On the CPU, wide fp32 matrices [N, E], N > E, have the memory order of [E, N]: one row is
    multiplied by such a matrix 1.7 times as fast (2 cores of an EPYC, E = 576, 14 against 8 GB/s:
    MKL's vector-matrix product streams, its matrix-vector product does not).
    """
    is_columns_first = torch.device(device).type == "cpu" and dtype == torch.float32
    hidden, ffn, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
    q_rows = config.num_attention_heads * config.head_dim
    qkv_rows = q_rows + 2 * config.num_key_value_heads * config.head_dim

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, device=device, dtype=dtype)

    def matrix(rows: int, columns: int) -> Tensor:
        if is_columns_first and rows > columns:
            return empty(columns, rows).t()
        return empty(rows, columns)

    def layer() -> LayerWeights:
        return LayerWeights(
            input_layernorm=empty(hidden),
            qkv_proj=matrix(qkv_rows, hidden),
            qkv_bias=empty(qkv_rows) if config.attention_bias else None,
            o_proj=matrix(hidden, q_rows),
            o_bias=empty(hidden) if config.attention_out_bias else None,
            post_attention_layernorm=empty(hidden),
            gate_up_proj=matrix(2 * ffn, hidden),
            gate_up_bias=empty(2 * ffn) if config.mlp_bias else None,
            down_proj=matrix(hidden, ffn),
            down_bias=empty(hidden) if config.mlp_bias else None,
        )

    # Embeddings are looked up by rows, so only the head profits.
    embed_tokens = matrix(vocab, hidden) if tied else empty(vocab, hidden)
    return ModelWeights(
        embed_tokens=embed_tokens,
        layers=[layer() for _ in range(config.num_hidden_layers)],
        norm=empty(hidden),
        lm_head=embed_tokens if tied else matrix(vocab, hidden),
    )


def named_slices(weights: ModelWeights, config: ModelConfig) -> dict[str, Tensor]:
    """Hugging Face's name of every parameter -> the tensor, or rows of a packed one, it fills."""
    q_rows = config.num_attention_heads * config.head_dim
    kv_rows = config.num_key_value_heads * config.head_dim
    slices = {_EMBEDDING: weights.embed_tokens}
    for index, layer in enumerate(weights.layers):
        named: dict[str, Tensor | None] = {}
        for kind, qkv, gate_up in (
            ("weight", layer.qkv_proj, layer.gate_up_proj),
            ("bias", layer.qkv_bias, layer.gate_up_bias),
        ):
            if qkv is not None:
                parts = torch.split(qkv, [q_rows, kv_rows, kv_rows])
                for name, part in zip("qkv", parts, strict=True):
                    named[f"self_attn.{name}_proj.{kind}"] = part
            if gate_up is not None:
                gate, up = gate_up.chunk(2)
                named[f"mlp.gate_proj.{kind}"], named[f"mlp.up_proj.{kind}"] = gate, up
        named |= {
            "self_attn.o_proj.weight": layer.o_proj,
            "self_attn.o_proj.bias": layer.o_bias,
            "mlp.down_proj.weight": layer.down_proj,
            "mlp.down_proj.bias": layer.down_bias,
            "input_layernorm.weight": layer.input_layernorm,
            "post_attention_layernorm.weight": layer.post_attention_layernorm,
        }
        for name, tensor in named.items():
            if tensor is not None:
                slices[f"model.layers.{index}.{name}"] = tensor
    slices["model.norm.weight"] = weights.norm
    if weights.lm_head is not weights.embed_tokens:
        slices[_HEAD] = weights.lm_head
    return slices


def load_weights(
    path: str | os.PathLike[str],
    config: ModelConfig,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    strict: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> ModelWeights:
    """Load a Hugging Face directory or a .gguf file into packed parameters.

    Names, shapes and the existence of every file are checked before anything is allocated. Each
    parameter is then allocated once, and the files' tensors are copied into it one by one.

    A head stored beside a config that ties it counts only when it differs from the embeddings:
    then the config is taken to be wrong, as transformers 5 does, with a warning.

    Args:
        path: a directory with safetensors, or a .gguf file.
        config: the model's configuration; it decides which tensors there must be.
        device: where the parameters go.
        dtype: of the parameters; float32, float16 or bfloat16.
        strict: raise for a stored tensor that nothing uses, instead of one warning.
        progress: called with (bytes read, bytes in all) after each piece.

    Raises:
        FileNotFoundError: there are no weights, or a file of the index is missing.
        CheckpointError: a file is damaged, or a tensor is missing, unknown (strict) or misshapen.
        NotImplementedError: a stored dtype that is not implemented.
        ImportError: a GGUF type that needs the gguf library, which is not installed.
    """
    checkpoint = _open_checkpoint(Path(path), config)
    _check_depth(Path(path), checkpoint, config)
    tied = config.tie_word_embeddings and not _has_own_head(checkpoint)
    planned = named_slices(empty_weights(config, device="meta", dtype=dtype, tied=tied), config)
    _check_tensors(Path(path), checkpoint, planned, strict=strict)

    weights = empty_weights(config, device=device, dtype=dtype, tied=tied)
    slices = named_slices(weights, config)
    total = sum(checkpoint.tensors[name].nbytes for name in slices)
    done = 0
    for nbytes in checkpoint.copy_into(slices):
        done += nbytes
        if progress is not None:
            progress(done, total)
    return weights


def random_weights(
    config: ModelConfig,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    seed: int = 0,
    std: float = 0.02,
) -> ModelWeights:
    """Normally distributed parameters made on the device, norms 1, for benchmarks.

    torch's global random state is not touched.
    """
    generator = torch.Generator(device).manual_seed(seed)
    tied = config.tie_word_embeddings
    weights = empty_weights(config, device=device, dtype=dtype, tied=tied)
    for tensor in weights.tensors():
        tensor.normal_(0.0, std, generator=generator)
    weights.norm.fill_(1.0)
    for layer in weights.layers:
        layer.input_layernorm.fill_(1.0)
        layer.post_attention_layernorm.fill_(1.0)
    return weights


def resolve_dtype(
    dtype: str | torch.dtype,
    path: str | os.PathLike[str],
    config: ModelConfig,
    device: torch.device | str = "cpu",
) -> torch.dtype:
    """The dtype to load parameters in.

    Args:
        dtype: a torch dtype or its name, which is taken, or "auto": the config's dtype, else that
            of most bytes in the files. Quantised files have none; they become float32 on the CPU,
            which is fastest there, and bfloat16 elsewhere.
        path: of the files.
        config: the model's configuration.
        device: where the parameters will be.

    Raises:
        ValueError: not a dtype that a model can have.
    """
    if dtype != "auto":
        name = str(dtype).removeprefix("torch.")
        if name not in _DTYPES:
            raise ValueError(f"dtype is {dtype!r}, expected auto or one of {', '.join(_DTYPES)}")
        return _DTYPES[name]
    if config.dtype is not None:
        return _DTYPES[config.dtype]
    nbytes: dict[torch.dtype | None, int] = {}
    for tensor in _open_checkpoint(Path(path), config).tensors.values():
        nbytes[tensor.dtype] = nbytes.get(tensor.dtype, 0) + tensor.nbytes
    most = max(nbytes, key=lambda stored: nbytes[stored], default=None)
    if most is None:
        return torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16
    return most if most in _DTYPES.values() else torch.float32


def _open_checkpoint(path: Path, config: ModelConfig) -> Checkpoint:
    if path.is_dir():
        return SafetensorsCheckpoint(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or directory")
    if path.suffix == ".gguf":
        from tinydecode.gguf_tensors import GGUFCheckpoint  # only such files need it

        return GGUFCheckpoint(path, config.head_dim)
    raise ValueError(f"{path}: expected a model directory or a .gguf file")


def _has_own_head(checkpoint: Checkpoint) -> bool:
    """Whether a head is stored that differs from the embeddings."""
    stored = checkpoint.tensors
    if _HEAD not in stored or _EMBEDDING not in stored or checkpoint.equal(_HEAD, _EMBEDDING):
        return False
    warnings.warn(
        f"{stored[_HEAD].file}: tie_word_embeddings is true, but {_HEAD} differs from "
        f"{_EMBEDDING}; the stored {_HEAD} is used",
        stacklevel=4,
    )
    return True


def _check_depth(path: Path, checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Look for the last layer before planning any: a plan for 10^9 layers would fill memory."""
    name = f"model.layers.{config.num_hidden_layers - 1}.input_layernorm.weight"
    if name not in checkpoint.tensors:
        raise CheckpointError(
            f"{path}: the files hold no tensor {name}, "
            f"but num_hidden_layers is {config.num_hidden_layers}"
        )


def _check_tensors(
    path: Path, checkpoint: Checkpoint, planned: Mapping[str, Tensor], *, strict: bool
) -> None:
    """Compare names and shapes of what is stored with what the model needs."""
    for name, tensor in planned.items():
        if name not in checkpoint.tensors:
            hint = " (and tie_word_embeddings is false)" if name == _HEAD else ""
            raise CheckpointError(f"{path}: the files hold no tensor {name}{hint}")
        stored = checkpoint.tensors[name]
        if stored.shape != tuple(tensor.shape):
            raise CheckpointError(
                f"{stored.file}: {name} has shape {list(stored.shape)}, "
                f"the configuration asks for {list(tensor.shape)}"
            )
    unused = [name for name in checkpoint.tensors if name not in planned and name != _HEAD]
    # Old checkpoints store the rotary frequencies; they follow from the config.
    unknown = [name for name in unused if not name.endswith("rotary_emb.inv_freq")]
    if len(unknown) < len(unused):
        _logger.debug("%s: stored rotary_emb.inv_freq tensors are ignored", path)
    if unknown:
        listed = ", ".join(unknown[:_NAMED_AT_MOST])
        more = f" and {len(unknown) - _NAMED_AT_MOST} more" if unknown[_NAMED_AT_MOST:] else ""
        message = f"{path}: nothing uses these tensors: {listed}{more}"
        if strict:
            raise CheckpointError(message)
        warnings.warn(message, stacklevel=4)
