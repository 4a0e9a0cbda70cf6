"""Loading safetensors: packing, tying (A07), stray and missing files (A10-A12), damage (A13)."""

from __future__ import annotations

import struct
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import (
    ABSENT,
    edit_json,
    tiny_config,
    tiny_tensors,
    write_checkpoint,
    write_json,
    write_tiny,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

from tinydecode.config import ModelConfig
from tinydecode.weights import (
    CheckpointError,
    ModelWeights,
    load_weights,
    named_slices,
    random_weights,
    resolve_dtype,
)

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def load(path: Path, dtype: torch.dtype = torch.float32, **options: Any) -> ModelWeights:
    """Load on the CPU; an unexpected warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return load_weights(path, ModelConfig.from_dir(path), device="cpu", dtype=dtype, **options)


def stored(path: Path) -> dict[str, Tensor]:
    """Every tensor of a one-file directory."""
    return load_file(path / "model.safetensors")


def rewrite(path: Path, changes: dict[str, Any]) -> None:
    """Change tensors of a one-file directory; ABSENT removes one."""
    tensors = {**stored(path), **changes}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not ABSENT}
    save_file(kept, path / "model.safetensors")


# ---- packing -------------------------------------------------------------------------------


def test_packed_layout(tmp_path: Path) -> None:
    config = tiny_config(attention_bias=True, mlp_bias=True, hidden_size=96, intermediate_size=80)
    tensors = stored(write_tiny(tmp_path, config))
    weights = load(tmp_path)
    assert len(weights.layers) == 2
    for index, layer in enumerate(weights.layers):
        prefix = f"model.layers.{index}"

        def packed(*names: str, prefix: str = prefix) -> Tensor:
            return torch.cat([tensors[f"{prefix}.{name}"] for name in names])

        for kind, qkv, gate_up in (
            ("weight", layer.qkv_proj, layer.gate_up_proj),
            ("bias", layer.qkv_bias, layer.gate_up_bias),
        ):
            assert qkv is not None and gate_up is not None
            assert torch.equal(qkv, packed(*(f"self_attn.{n}_proj.{kind}" for n in "qkv")))
            assert torch.equal(gate_up, packed(*(f"mlp.{n}_proj.{kind}" for n in ("gate", "up"))))
        for field, name in {
            "input_layernorm": "input_layernorm.weight",
            "o_proj": "self_attn.o_proj.weight",
            "o_bias": "self_attn.o_proj.bias",
            "post_attention_layernorm": "post_attention_layernorm.weight",
            "down_proj": "mlp.down_proj.weight",
            "down_bias": "mlp.down_proj.bias",
        }.items():
            assert torch.equal(getattr(layer, field), packed(name))
    assert torch.equal(weights.embed_tokens, tensors[EMBEDDING])
    assert torch.equal(weights.norm, tensors["model.norm.weight"])
    assert torch.equal(weights.lm_head, tensors[HEAD])
    assert weights.nbytes == sum(tensor.nbytes for tensor in tensors.values())


def test_every_parameter_has_exactly_one_place() -> None:
    """The slices cover all memory of all parameters, without overlap."""
    for overrides in ({}, {"attention_bias": True, "mlp_bias": True}, {"model_type": "qwen2"}):
        config = ModelConfig.from_dict(tiny_config(**overrides))
        weights = random_weights(config, device="cpu", dtype=torch.float32)
        slices = named_slices(weights, config)
        assert set(slices) == set(tiny_tensors(tiny_config(**overrides)))
        for tensor in weights.tensors():
            tensor.zero_()
        for part in slices.values():
            part.add_(1)
        assert all(tensor.eq(1).all() for tensor in weights.tensors())


@pytest.mark.parametrize("shards", [2, 3, 7])
def test_shards_equal_one_file(tmp_path: Path, shards: int) -> None:
    one = load(write_tiny(tmp_path / "one"))
    many = load(write_tiny(tmp_path / "many", shards=shards))
    pairs = zip(one.tensors(), many.tensors(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("target", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("source", [torch.float64, torch.float32, torch.bfloat16])
def test_dtype_is_converted(tmp_path: Path, source: torch.dtype, target: torch.dtype) -> None:
    write_tiny(tmp_path, tiny_config(torch_dtype="float32"), dtype=source)
    weights = load(tmp_path, dtype=target)
    assert {tensor.dtype for tensor in weights.tensors()} == {target}
    expected = stored(tmp_path)[Q_PROJ].to(target)
    assert torch.equal(weights.layers[0].qkv_proj[:256], expected)


def test_progress_in_bytes(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    write_tiny(tmp_path, dtype=torch.bfloat16, shards=3)
    weights = load(tmp_path, dtype=torch.float32, progress=lambda *call: calls.append(call))
    done = [call[0] for call in calls]
    assert done == sorted(set(done)) and done[0] > 0
    assert {call[1] for call in calls} == {done[-1]} == {weights.nbytes // 2}


# ---- heads ---------------------------------------------------------------------------------


def test_tied_head_is_the_embedding(tmp_path: Path) -> None:
    """A07 (1), and a stored copy of the embeddings changes nothing."""
    write_tiny(tmp_path, tiny_config(tie_word_embeddings=True))
    weights = load(tmp_path)
    assert weights.lm_head is weights.embed_tokens
    size = sum(tensor.nbytes for tensor in stored(tmp_path).values())
    assert weights.nbytes == size
    rewrite(tmp_path, {HEAD: stored(tmp_path)[EMBEDDING].clone()})
    weights = load(tmp_path)
    assert weights.lm_head is weights.embed_tokens and weights.nbytes == size


def test_tied_config_with_another_head(tmp_path: Path) -> None:
    """A07 (2): the stored head is used, as transformers does, and one warning says so."""
    write_tiny(tmp_path, tiny_config(tie_word_embeddings=True))
    head = torch.randn(512, 256)
    rewrite(tmp_path, {HEAD: head})
    config = ModelConfig.from_dir(tmp_path)
    with pytest.warns(UserWarning, match=r"lm_head\.weight differs") as caught:
        weights = load_weights(tmp_path, config, device="cpu", dtype=torch.float32)
    assert len(caught) == 1
    assert torch.equal(weights.lm_head, head)
    assert not torch.equal(weights.embed_tokens, head)


@pytest.mark.parametrize("tie", [False, ABSENT])
def test_untied_head(tmp_path: Path, tie: Any) -> None:
    """A07 (3), (4) and (5)."""
    write_tiny(tmp_path, tiny_config(tie_word_embeddings=tie))
    assert torch.equal(load(tmp_path).lm_head, stored(tmp_path)[HEAD])
    rewrite(tmp_path, {HEAD: ABSENT})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        load(tmp_path)


# ---- tensors that do not fit ---------------------------------------------------------------


def test_shape_mismatch_names_tensor_and_shapes(tmp_path: Path) -> None:
    """A05: a config whose q_proj is wider than the stored one."""
    write_tiny(tmp_path, tiny_config(hidden_size=320))
    edit_json(tmp_path / "config.json", head_dim=80)
    with pytest.raises(CheckpointError) as raised:
        load(tmp_path)
    message = str(raised.value)
    assert Q_PROJ in message and "[256, 320]" in message and "[320, 320]" in message


@pytest.mark.parametrize("name", [Q_PROJ, EMBEDDING, "model.norm.weight"])
def test_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    write_tiny(tmp_path)
    rewrite(tmp_path, {name: ABSENT})
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        load(tmp_path)


@pytest.mark.parametrize("layers", [3, 10**9])
def test_deeper_config_than_files(tmp_path: Path, layers: int) -> None:
    write_tiny(tmp_path)
    edit_json(tmp_path / "config.json", num_hidden_layers=layers)
    with pytest.raises(CheckpointError, match=f"num_hidden_layers is {layers}"):
        load(tmp_path)


def test_nothing_is_allocated_for_a_misfit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny(tmp_path, shards=2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    allocated: list[Any] = []
    real = torch.empty

    def empty(*args: Any, **kwargs: Any) -> Tensor:
        allocated.append(kwargs.get("device"))
        return real(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", empty)
    with pytest.raises(FileNotFoundError):
        load(tmp_path)
    edit_json(tmp_path / "config.json", vocab_size=500)
    write_tiny(tmp_path / "other")
    edit_json(tmp_path / "other" / "config.json", vocab_size=500)
    with pytest.raises(CheckpointError, match="embed_tokens"):
        load(tmp_path / "other")
    assert {str(device) for device in allocated} <= {"meta"}


def test_unknown_tensors_are_named_once(tmp_path: Path) -> None:
    """A10: one warning with the name, an error in strict mode."""
    write_tiny(tmp_path)
    rewrite(tmp_path, {"model.layers.0.foo.weight": torch.ones(3)})
    config = ModelConfig.from_dir(tmp_path)
    with pytest.warns(UserWarning, match=r"model\.layers\.0\.foo\.weight") as caught:
        load_weights(tmp_path, config, device="cpu", dtype=torch.float32)
    assert len(caught) == 1
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.foo\.weight"):
        load(tmp_path, strict=True)


def test_unused_biases_never_load_silently(tmp_path: Path) -> None:
    """A09: the files have biases, the config does not say so; all of them count."""
    write_tiny(tmp_path, tiny_config(attention_bias=True, mlp_bias=True))
    edit_json(tmp_path / "config.json", attention_bias=False)
    config = ModelConfig.from_dir(tmp_path)
    with pytest.warns(UserWarning, match=r"self_attn\.\w_proj\.bias") as caught:
        load_weights(tmp_path, config, device="cpu", dtype=torch.float32)
    assert len(caught) == 1


def test_stored_rotary_buffers_are_ignored(tmp_path: Path) -> None:
    """A10: garbage in them does not matter, and nothing is said about it."""
    write_tiny(tmp_path)
    expected = list(load(tmp_path).tensors())
    garbage = torch.full((32,), float("nan"))
    name = "model.layers.{}.self_attn.rotary_emb.inv_freq"
    rewrite(tmp_path, {name.format(0): garbage, name.format(1): garbage.clone()})
    loaded = list(load(tmp_path, strict=True).tensors())
    assert all(torch.equal(a, b) for a, b in zip(loaded, expected, strict=True))


def test_quantised_tensors_are_refused(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    rewrite(tmp_path, {Q_PROJ: torch.ones(256, 256, dtype=torch.int8)})
    with pytest.raises(NotImplementedError, match=rf"{Q_PROJ}.*I8"):
        load(tmp_path)


# ---- which files count ---------------------------------------------------------------------


def test_only_indexed_files_are_opened(tmp_path: Path) -> None:
    """A11: strays that no safetensors reader could open lie beside the shards."""
    expected = list(load(write_tiny(tmp_path / "good", shards=2)).tensors())
    write_tiny(tmp_path / "dir", shards=2)
    for stray in ("consolidated.safetensors", "model.safetensors", "model-00003.safetensors"):
        (tmp_path / "dir" / stray).write_bytes(b"not safetensors")
    loaded = list(load(tmp_path / "dir", strict=True).tensors())
    assert all(torch.equal(a, b) for a, b in zip(loaded, expected, strict=True))


def test_index_decides_between_two_copies_of_a_tensor(tmp_path: Path) -> None:
    write_tiny(tmp_path, shards=2)
    first, second = (tmp_path / f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    expected = load_file(first)[EMBEDDING]
    save_file({**load_file(second), EMBEDDING: expected + 1}, second)
    assert torch.equal(load(tmp_path, strict=True).embed_tokens, expected)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    """A11."""
    write_tiny(tmp_path, shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="model-00002-of-00003.safetensors"):
        load(tmp_path)


@pytest.mark.parametrize("index", ["{}", "[]", "{", '{"weight_map": 3}'])
def test_damaged_index(tmp_path: Path, index: str) -> None:
    write_tiny(tmp_path, shards=2)
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        load(tmp_path)


def test_no_safetensors(tmp_path: Path) -> None:
    """A12."""
    write_json(tmp_path / "config.json", tiny_config())
    with pytest.raises(FileNotFoundError, match="no safetensors found"):
        load(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(FileNotFoundError, match=r"found pytorch_model\.bin"):
        load(tmp_path)


def test_path_that_is_no_model(tmp_path: Path) -> None:
    config = ModelConfig.from_dict(tiny_config())
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_weights(tmp_path / "nowhere", config, device="cpu", dtype=torch.float32)
    with pytest.raises(ValueError, match=r"notes\.txt"):
        load_weights(tmp_path / "notes.txt", config, device="cpu", dtype=torch.float32)


# ---- damage --------------------------------------------------------------------------------

LFS_POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize(
    ("damage", "text"),
    [
        pytest.param(lambda data: data[:4], "incomplete or corrupt", id="a: 4 bytes"),
        pytest.param(lambda data: b"", "incomplete or corrupt", id="empty"),
        pytest.param(lambda data: data[:100], "incomplete or corrupt", id="b: in the header"),
        pytest.param(lambda data: data[:-1], "incomplete or corrupt", id="c: 1 byte short"),
        pytest.param(lambda data: data + b"\0", "incomplete or corrupt", id="1 byte too long"),
        pytest.param(lambda data: LFS_POINTER, "LFS pointer", id="d: LFS pointer"),
        pytest.param(
            lambda data: struct.pack("<Q", 1 << 62) + data[8:],
            "incomplete or corrupt",
            id="e: header of 2^62 bytes",
        ),
        pytest.param(lambda data: b"PK\3\4" + data[4:], "incomplete or corrupt", id="a zip"),
    ],
)
def test_damaged_file(tmp_path: Path, damage: Any, text: str, shards: int) -> None:
    """A13."""
    write_tiny(tmp_path, shards=shards)
    file = sorted(tmp_path.glob("*.safetensors"))[-1]
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(CheckpointError) as raised:
        load(tmp_path)
    message = str(raised.value)
    assert text in message and file.name in message and "\n" not in message


# ---- dtype names ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "keys", [{"torch_dtype": "bfloat16"}, {"dtype": "bfloat16"}, {"dtype": "torch.bfloat16"}, {}]
)
def test_auto_dtype(tmp_path: Path, keys: dict[str, str]) -> None:
    """A08: the fourth has no key and takes the tensors' own dtype."""
    write_tiny(tmp_path, dtype=torch.bfloat16)
    edit_json(tmp_path / "config.json", **{"torch_dtype": ABSENT, **keys})
    config = ModelConfig.from_dir(tmp_path)
    assert resolve_dtype("auto", tmp_path, config) == torch.bfloat16
    assert resolve_dtype("float16", tmp_path, config) == torch.float16
    assert resolve_dtype("torch.float32", tmp_path, config) == torch.float32
    assert resolve_dtype(torch.float32, tmp_path, config) == torch.float32


def test_auto_dtype_of_mixed_files(tmp_path: Path) -> None:
    """The dtype of most bytes; float64 is no dtype to compute in."""
    tensors = tiny_tensors(tiny_config())
    halves = {name: tensor if "norm" in name else tensor.half() for name, tensor in tensors.items()}
    write_checkpoint(tmp_path / "mixed", tiny_config(), halves)
    config = ModelConfig.from_dict(tiny_config())
    assert resolve_dtype("auto", tmp_path / "mixed", config) == torch.float16
    doubles = {name: tensor.double() for name, tensor in tensors.items()}
    write_checkpoint(tmp_path / "double", tiny_config(), doubles)
    assert resolve_dtype("auto", tmp_path / "double", config) == torch.float32


@pytest.mark.parametrize("dtype", ["float", "int8", "bf16", torch.int32, torch.float64, ""])
def test_dtypes_that_no_model_has(tmp_path: Path, dtype: Any) -> None:
    with pytest.raises(ValueError, match="dtype"):
        resolve_dtype(dtype, tmp_path, ModelConfig.from_dict(tiny_config()))


# ---- random weights ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_weights(dtype: torch.dtype) -> None:
    config = ModelConfig.from_dict(tiny_config(tie_word_embeddings=True))
    state = torch.get_rng_state()
    weights = random_weights(config, device="cpu", dtype=dtype, std=0.05)
    assert torch.equal(torch.get_rng_state(), state)
    assert weights.lm_head is weights.embed_tokens
    assert {tensor.dtype for tensor in weights.tensors()} == {dtype}
    assert weights.norm.eq(1).all() and weights.layers[1].input_layernorm.eq(1).all()
    assert weights.layers[0].post_attention_layernorm.eq(1).all()
    # 131072 draws: the standard error of the deviation is 0.05 / sqrt(2 * 131072) = 1e-4.
    assert weights.embed_tokens.float().std().item() == pytest.approx(0.05, abs=5e-4)
    again = random_weights(config, device="cpu", dtype=dtype, std=0.05)
    assert torch.equal(again.embed_tokens, weights.embed_tokens)
    other = random_weights(config, device="cpu", dtype=dtype, std=0.05, seed=1)
    assert not torch.equal(other.embed_tokens, weights.embed_tokens)
