"""Small GGUF files, written with the gguf library; where it is missing, tests are skipped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

gguf = pytest.importorskip("gguf")

TYPES = gguf.GGMLQuantizationType

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{n}_proj": f"attn_{n}" for n in "qkv"},
    "self_attn.o_proj": "attn_output",
    **{f"mlp.{n}_proj": f"ffn_{n}" for n in ("gate", "up", "down")},
}


def gguf_name(name: str) -> str:
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    return name.replace("model.layers.", "blk.")


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k: the halves of a head become neighbours."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    swapped: np.ndarray = halves.swapaxes(1, 2).reshape(weight.shape)
    return swapped


def write_gguf(
    path: Path,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    kind: Any = TYPES.F32,
    metadata: dict[str, Any] | None = None,
    extra: dict[str, tuple[np.ndarray, Any]] | None = None,
) -> Path:
    """Write a model as llama.cpp's converter would; norms and biases stay F32.

    Args:
        path: the file.
        config: the keys of config.json.
        tensors: by Hugging Face name.
        kind: the type of the matrices.
        metadata: more GGUF keys, or other values for those that follow from the config.
        extra: more tensors, as stored, each with its type.
    """
    writer = gguf.GGUFWriter(path, "llama")
    values = {
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.block_count": config["num_hidden_layers"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.key_length": config["head_dim"],
        "llama.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "llama.rope.freq_base": config["rope_theta"],
        "llama.rope.dimension_count": config["head_dim"],
    }
    add = {str: writer.add_string, float: writer.add_float32, list: writer.add_array}
    for key, value in (values | (metadata or {})).items():
        add.get(type(value), writer.add_uint32)(key, value)
    for name, tensor in tensors.items():
        array = tensor.float().numpy()
        for letter, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads")):
            if f"{letter}_proj" in name:
                array = interleave(array, config[heads])
        stored_as = kind if array.ndim == 2 else TYPES.F32
        data = gguf.quants.quantize(array, stored_as)
        writer.add_tensor(gguf_name(name), data, raw_dtype=stored_as)
    for name, (array, stored_as) in (extra or {}).items():
        writer.add_tensor(name, array, raw_dtype=stored_as)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
