"""GGUF: header, configuration, row order, quantised types, damage.

Files are written by the gguf library; its GGUFReader and dequantize are the independent reference.
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixtures import tiny_config, tiny_tensors, write_checkpoint
from gguf_files import TYPES, gguf, write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st

from tinydecode.config import ModelConfig, RopeScaling
from tinydecode.gguf import read_config, read_metadata
from tinydecode.weights import CheckpointError, ModelWeights, load_weights, resolve_dtype


def write_tiny_gguf(path: Path, kind: Any = TYPES.F32, **overrides: Any) -> Path:
    config = tiny_config(**overrides)
    return write_gguf(path / "tiny.gguf", config, tiny_tensors(config), kind)


def load(path: Path, dtype: torch.dtype = torch.float32) -> ModelWeights:
    return load_weights(path, read_config(path), device="cpu", dtype=dtype, strict=True)


# ---- values --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True},
        {"hidden_size": 96, "head_dim": 32, "num_key_value_heads": 1},
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_f32_equals_safetensors(
    tmp_path: Path, overrides: dict[str, Any], dtype: torch.dtype
) -> None:
    config = tiny_config(**overrides)
    directory = write_checkpoint(tmp_path / "dir", config, tiny_tensors(config))
    expected = load_weights(directory, ModelConfig.from_dir(directory), device="cpu", dtype=dtype)
    weights = load(write_tiny_gguf(tmp_path, **overrides), dtype)
    assert (weights.lm_head is weights.embed_tokens) == config["tie_word_embeddings"]
    for ours, theirs in zip(weights.tensors(), expected.tensors(), strict=True):
        assert torch.equal(ours, theirs)


def test_row_order_by_hand(tmp_path: Path) -> None:
    """One head of q with D = 4: rows 0 2 1 3 in the file are rows 0 1 2 3.

    In the file pairs are neighbours (0 with 1, 2 with 3); in memory dimension i pairs with
    i + D/2. The file's pairs (row 0, row 1) and (row 2, row 3) are therefore (0, 2) and (1, 3).
    """
    config = tiny_config(
        hidden_size=32, num_attention_heads=1, num_key_value_heads=1, head_dim=4, vocab_size=8
    )
    tensors = tiny_tensors(config)
    in_file = torch.arange(4.0).repeat_interleave(32).view(4, 32)  # row r holds r
    # write_gguf interleaves: undo that by hand, so that the file has the rows in order.
    tensors["model.layers.0.self_attn.q_proj.weight"] = in_file[[0, 2, 1, 3]]
    path = write_gguf(tmp_path / "hand.gguf", config, tensors)
    stored = {t.name: t for t in gguf.GGUFReader(path).tensors}
    assert stored["blk.0.attn_q.weight"].data[:, 0].tolist() == [0, 1, 2, 3]
    assert load(path).layers[0].qkv_proj[:4, 0].tolist() == [0, 2, 1, 3]


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q5_0", "Q5_1"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantised_types(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    """Every matrix equals what gguf's own dequantize says, after its rows are put in order."""
    path = write_tiny_gguf(tmp_path, TYPES[kind])
    weights = load(path, dtype)
    stored = {
        tensor.name: torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        for tensor in gguf.GGUFReader(path).tensors
    }
    assert torch.equal(weights.embed_tokens, stored["token_embd.weight"].to(dtype))
    assert torch.equal(weights.lm_head, stored["output.weight"].to(dtype))
    # Row 2i + s of a head in the file is row s * 32 + i of that head.
    in_head = torch.tensor([2 * (row % 32) + row // 32 for row in range(64)])
    for index, layer in enumerate(weights.layers):
        q, k, v = (stored[f"blk.{index}.attn_{name}.weight"] for name in "qkv")
        q = torch.cat([q[64 * head + in_head] for head in range(4)])
        k = torch.cat([k[64 * head + in_head] for head in range(2)])
        assert torch.equal(layer.qkv_proj, torch.cat((q, k, v)).to(dtype))
        gate_up = [stored[f"blk.{index}.ffn_{name}.weight"] for name in ("gate", "up")]
        assert torch.equal(layer.gate_up_proj, torch.cat(gate_up).to(dtype))
        assert torch.equal(layer.down_proj, stored[f"blk.{index}.ffn_down.weight"].to(dtype))
        assert torch.equal(layer.o_proj, stored[f"blk.{index}.attn_output.weight"].to(dtype))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K", "Q5_K", "Q2_K"])
def test_blocks_of_any_bytes(tmp_path: Path, kind: str) -> None:
    """All bit patterns, through one wide matrix of random bytes with finite scales.

    The width is chosen so that the matrix takes several chunks with a ragged end.
    """
    config = tiny_config(hidden_size=512, vocab_size=1201, num_hidden_layers=1)
    tensors = tiny_tensors(config)
    block, nbytes = gguf.GGML_QUANT_SIZES[TYPES[kind]]
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (1201 * 512 // block, nbytes), dtype=np.uint8)
    scales = {"Q6_K": [208], "Q2_K": [80, 82], "Q8_0": [0], "Q4_0": [0]}.get(kind, [0, 2])
    for start in scales:
        values = rng.uniform(-2, 2, len(blocks)).astype(np.float16)
        blocks[:, start : start + 2] = values.view(np.uint8).reshape(-1, 2)
    data = blocks.reshape(1201, -1)
    del tensors["model.embed_tokens.weight"]
    extra = {"token_embd.weight": (data, TYPES[kind])}
    path = write_gguf(tmp_path / "any.gguf", config, tensors, extra=extra)
    expected = torch.from_numpy(gguf.quants.dequantize(data, TYPES[kind]))
    assert torch.isfinite(expected).all()
    assert torch.equal(load(path).embed_tokens, expected)
    assert torch.equal(load(path, torch.float16).embed_tokens, expected.half())


def test_auto_dtype(tmp_path: Path) -> None:
    for kind, expected in (("F32", torch.float32), ("F16", torch.float16)):
        path = write_tiny_gguf(tmp_path, TYPES[kind])
        assert resolve_dtype("auto", path, read_config(path)) == expected
    path = write_tiny_gguf(tmp_path, TYPES.Q4_0)
    assert resolve_dtype("auto", path, read_config(path)) == torch.float32
    assert resolve_dtype("auto", path, read_config(path), "cuda") == torch.bfloat16


def test_progress_in_bytes(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    path = write_tiny_gguf(tmp_path, TYPES.Q4_0)
    load_weights(
        path,
        read_config(path),
        device="cpu",
        dtype=torch.float32,
        progress=lambda *call: calls.append(call),
    )
    stored = sum(tensor.n_bytes for tensor in gguf.GGUFReader(path).tensors)
    assert calls[-1] == (stored, stored)
    assert [call[0] for call in calls] == sorted({call[0] for call in calls})


def test_library_is_asked_for_when_it_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tiny_gguf(tmp_path, TYPES.Q4_1)
    other = write_gguf(
        tmp_path / "other.gguf", tiny_config(), tiny_tensors(tiny_config()), TYPES.TQ1_0
    )
    monkeypatch.setitem(sys.modules, "gguf", None)
    load(path)
    with pytest.raises(ImportError, match=r"pip install tinydecode\[gguf\]"):
        load(other)


# ---- configuration -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "overrides",
    [{}, {"tie_word_embeddings": True}, {"attention_bias": True}, {"mlp_bias": True}],
)
def test_config_equals_hugging_faces(tmp_path: Path, overrides: dict[str, Any]) -> None:
    keys = tiny_config(**overrides, rope_theta=500000.0, rms_norm_eps=2.0**-17)
    path = write_gguf(tmp_path / "a.gguf", keys, tiny_tensors(keys))
    assert read_config(path) == ModelConfig.from_dict(keys)


def test_token_ids(tmp_path: Path) -> None:
    ids = {"bos": 1, "eos": 2, "eot": 7}
    metadata = {f"tokenizer.ggml.{name}_token_id": value for name, value in ids.items()}
    keys = tiny_config()
    path = write_gguf(tmp_path / "a.gguf", keys, tiny_tensors(keys), metadata=metadata)
    config = read_config(path)
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2, 7))


def rope_divisors(head_dim: int, theta: float, factor: float, original: int = 8192) -> np.ndarray:
    """llama.cpp's rope_freqs.weight for llama3 scaling with low 1 and high 4."""
    divisors = []
    for pair in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * pair / head_dim)
        if wavelength < original / 4:
            divisors.append(1.0)
        elif wavelength > original:
            divisors.append(factor)
        else:
            smooth = (original / wavelength - 1) / (4 - 1)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, dtype=np.float32)


def write_with_rope_freqs(path: Path, divisors: np.ndarray) -> Path:
    keys = tiny_config(rope_theta=500000.0)
    extra = {"rope_freqs.weight": (divisors, TYPES.F32)}
    return write_gguf(path / "rope.gguf", keys, tiny_tensors(keys), extra=extra)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_recovered(tmp_path: Path, factor: float) -> None:
    path = write_with_rope_freqs(tmp_path, rope_divisors(64, 500000.0, factor))
    assert read_config(path).rope_scaling == RopeScaling("llama3", factor, 1.0, 4.0, 8192.0)
    load(path)  # strict: rope_freqs.weight counts as used


@pytest.mark.parametrize(
    "divisors",
    [
        rope_divisors(64, 500000.0, 8.0, original=4096),
        np.linspace(1, 8, 32, dtype=np.float32),
        np.full(32, np.nan, dtype=np.float32),
        np.zeros(32, dtype=np.float32),
        np.ones(16, dtype=np.float32),
    ],
    ids=["another context", "longrope-like", "nan", "zero", "too short"],
)
def test_other_divisors_are_refused(tmp_path: Path, divisors: np.ndarray) -> None:
    path = write_with_rope_freqs(tmp_path, divisors)
    with pytest.raises((NotImplementedError, ValueError), match=r"rope_freqs\.weight"):
        read_config(path)


def test_rope_scaling_by_metadata(tmp_path: Path) -> None:
    def scaling(**metadata: Any) -> RopeScaling:
        keys = tiny_config()
        named = {f"llama.rope.scaling.{key}": value for key, value in metadata.items()}
        path = write_gguf(tmp_path / "a.gguf", keys, tiny_tensors(keys), metadata=named)
        return read_config(path).rope_scaling

    assert scaling(type="none") == RopeScaling()
    assert scaling(type="linear", factor=4.0) == RopeScaling("linear", 4.0)
    with pytest.raises(NotImplementedError, match="yarn"):
        scaling(type="yarn", factor=4.0)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("general.architecture", "qwen3"),
        ("llama.expert_count", 8),
        ("split.count", 2),
        ("llama.rope.dimension_count", 32),
    ],
)
def test_what_is_not_implemented_is_named(tmp_path: Path, key: str, value: Any) -> None:
    keys = tiny_config()
    # The writer puts general.architecture first; the later value of a key counts.
    path = write_gguf(tmp_path / "a.gguf", keys, tiny_tensors(keys), metadata={key: value})
    with pytest.raises(NotImplementedError, match=f"{key} {value!r}"):
        read_config(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.block_count", 2**32 - 1),
        ("llama.block_count", "two"),
        ("llama.embedding_length", 0),
        ("llama.attention.head_count", [4, 4]),
        ("llama.attention.head_count", 0),
        ("llama.rope.freq_base", float("nan")),
        ("tokenizer.ggml.eos_token_id", "</s>"),
        ("tokenizer.ggml.bos_token_id", -1.0),
    ],
)
def test_impossible_metadata(tmp_path: Path, key: str, value: Any) -> None:
    keys = tiny_config()
    path = write_gguf(tmp_path / "a.gguf", keys, tiny_tensors(keys), metadata={key: value})
    with pytest.raises(ValueError):
        load(path)


# ---- metadata ------------------------------------------------------------------------------


def test_metadata_equals_the_librarys(tmp_path: Path) -> None:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["a", "\u2581caf\u00e9", "", "<|x|>"],
        "tokenizer.ggml.scores": [-1.5, 0.0, 2.25, -1e10],
        "tokenizer.ggml.token_type": [1, 1, -1, 3],
        "tokenizer.ggml.merges": ["a b", "\u0120 c"],
        "tokenizer.chat_template": "{{ messages }}\n" * 50,
    }
    keys = tiny_config()
    path = write_gguf(tmp_path / "a.gguf", keys, tiny_tensors(keys), metadata=metadata)
    ours = read_metadata(path)
    for key, value in metadata.items():
        assert ours[key] == value
    fields = gguf.GGUFReader(path).fields
    assert set(ours) == {key for key in fields if not key.startswith("GGUF.")}
    assert all(ours[key] == fields[key].contents() for key in ours)


# ---- damage --------------------------------------------------------------------------------


def load_all(path: Path) -> None:
    read_metadata(path)
    load(path)


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    keys = tiny_config(
        hidden_size=32,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=32,
        intermediate_size=32,
        vocab_size=4,
        num_hidden_layers=1,
    )
    metadata = {"tokenizer.ggml.tokens": ["a", "bc"], "tokenizer.ggml.model": "gpt2"}
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    write_gguf(path, keys, tiny_tensors(keys), TYPES.Q4_0, metadata=metadata)
    load_all(path)
    return path.read_bytes()


def test_every_cut_is_noticed(tmp_path: Path, small_file: bytes) -> None:
    path = tmp_path / "cut.gguf"
    end = len(small_file)
    # The last tensor may be followed by padding, which nobody misses.
    cuts = [*range(0, min(end, 2200), 7), *range(2200, end - 32, 61)]
    for cut in cuts:
        path.write_bytes(small_file[:cut])
        with pytest.raises(CheckpointError) as raised:
            load_all(path)
        assert "incomplete or corrupt" in str(raised.value) and "cut.gguf" in str(raised.value)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        pytest.param(lambda d: b"GGML" + d[4:], "does not start with GGUF", id="magic"),
        pytest.param(
            lambda d: d[:8] + struct.pack("<Q", 1 << 62) + d[16:], "corrupt", id="tensors"
        ),
        pytest.param(lambda d: d[:16] + struct.pack("<Q", 1 << 62) + d[24:], "corrupt", id="keys"),
        pytest.param(
            lambda d: d[:24] + struct.pack("<Q", 1 << 62) + d[32:], "corrupt", id="string"
        ),
        pytest.param(lambda d: b"version https://git-lfs.github.com/spec/v1\n", "LFS", id="lfs"),
    ],
)
def test_damaged_header(
    tmp_path: Path, small_file: bytes, damage: Callable[[bytes], bytes], text: str
) -> None:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(damage(small_file))
    with pytest.raises(CheckpointError, match=text):
        load_all(path)


@pytest.mark.parametrize("version", [1, 4, 3 << 24])
def test_other_versions_are_refused(tmp_path: Path, small_file: bytes, version: int) -> None:
    """3 << 24 is version 3 of the other byte order."""
    path = tmp_path / "version.gguf"
    path.write_bytes(small_file[:4] + struct.pack("<I", version) + small_file[8:])
    with pytest.raises(NotImplementedError, match=f"GGUF version {version} "):
        load_all(path)


@settings(max_examples=300, deadline=None)
@given(
    position=st.integers(4, 2200),
    data=st.binary(min_size=1, max_size=8) | st.just(b"\xff" * 8) | st.just(b"\0" * 8),
)
def test_flipped_bytes_raise_only_named_errors(
    tmp_path_factory: pytest.TempPathFactory, small_file: bytes, position: int, data: bytes
) -> None:
    path = tmp_path_factory.mktemp("flip") / "flipped.gguf"
    path.write_bytes(small_file[:position] + data + small_file[position + len(data) :])
    try:
        load_all(path)
    except (ValueError, NotImplementedError) as error:
        assert "\n" not in str(error)
