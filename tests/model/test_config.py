"""config.json in all its spellings (A01-A03, A05, A06, A08), and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fixtures import (
    ABSENT,
    edit_json,
    tiny_config,
    write_byte_tokenizer,
    write_json,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from tinydecode.config import ModelConfig, RopeScaling
from tinydecode.weights import CheckpointError

NO_SCALING = RopeScaling()
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def parse(**overrides: Any) -> ModelConfig:
    return ModelConfig.from_dict(tiny_config(**overrides))


def test_published_llama_config() -> None:
    # Llama-3.2-1B's config.json, without the keys that say nothing about the model.
    config = ModelConfig.from_dict(
        {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 128000,
            "eos_token_id": [128001, 128008, 128009],
            "head_dim": 64,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "max_position_embeddings": 131072,
            "mlp_bias": False,
            "model_type": "llama",
            "num_attention_heads": 32,
            "num_hidden_layers": 16,
            "num_key_value_heads": 8,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_scaling": LLAMA3,
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "vocab_size": 128256,
        }
    )
    assert config == ModelConfig(
        model_type="llama",
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        rms_norm_eps=1e-5,
        max_position_embeddings=131072,
        rope_theta=500000.0,
        rope_scaling=RopeScaling("llama3", 32.0, 1.0, 4.0, 8192),
        tie_word_embeddings=True,
        dtype="bfloat16",
        bos_token_id=128000,
        eos_token_ids=(128001, 128008, 128009),
    )


def test_biases_by_family() -> None:
    def biases(**overrides: Any) -> tuple[bool, bool, bool]:
        config = parse(**overrides)
        return config.attention_bias, config.attention_out_bias, config.mlp_bias

    assert biases() == (False, False, False)
    assert biases(attention_bias=True) == (True, True, False)
    assert biases(mlp_bias=True) == (False, False, True)
    assert biases(model_type="qwen2") == (True, False, False)
    assert biases(model_type="mistral", sliding_window=None) == (False, False, False)


# ---- rope ----------------------------------------------------------------------------------


def test_theta_old_and_new_key() -> None:
    """A01."""
    new = {"rope_type": "default", "rope_theta": 500000.0}
    assert parse(rope_theta=500000).rope_theta == 500000.0
    assert parse(rope_theta=ABSENT, rope_parameters=new).rope_theta == 500000.0
    assert parse(rope_theta=ABSENT).rope_theta == 10000.0
    # Both: the new key counts, and without a theta inside it the old one still does.
    assert parse(rope_theta=1e6, rope_parameters=new).rope_theta == 500000.0
    assert parse(rope_theta=1e6, rope_parameters={"rope_type": "default"}).rope_theta == 1e6
    scaled = parse(rope_theta=ABSENT, rope_parameters={**LLAMA3, "rope_theta": 500000.0})
    assert scaled.rope_scaling == RopeScaling("llama3", 32.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_type_and_rope_type(key: str) -> None:
    """A02."""
    spellings: list[dict[str, Any]] = [
        {"type": "linear", "factor": 4},
        {"rope_type": "linear", "factor": 4},
        {"type": "linear", "rope_type": "linear", "factor": 4},
    ]
    for spelling in spellings:
        assert parse(**{key: spelling}).rope_scaling == RopeScaling("linear", 4)
    for nothing in ({"rope_type": "default"}, {"type": "default"}, None, {}):
        assert parse(**{key: nothing}).rope_scaling == NO_SCALING
    with pytest.raises(ValueError, match=r"'yarn'.*'linear'"):
        parse(**{key: {"type": "linear", "rope_type": "yarn", "factor": 4}})


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    ("scaling", "error", "texts"),
    [
        ({"rope_type": "banana", "factor": 2}, NotImplementedError, ["banana"]),
        ({"rope_type": "yarn", "factor": 2.0}, NotImplementedError, ["yarn"]),
        ({"factor": 8.0}, ValueError, ["rope_type", "8.0"]),
        ({"rope_type": "linear"}, ValueError, ["factor"]),
        (
            {"rope_type": "llama3", "factor": 8.0},
            ValueError,
            ["low_freq_factor", "high_freq_factor", "original_max_position_embeddings"],
        ),
        ({**LLAMA3, "high_freq_factor": 1.0}, ValueError, ["low_freq_factor"]),
        ({"rope_type": "linear", "factor": 0}, ValueError, ["factor"]),
        ({"rope_type": "linear", "factor": "4"}, ValueError, ["factor"]),
        ({"rope_type": "linear", "factor": float("nan")}, ValueError, ["factor"]),
        ({"rope_type": ["linear"], "factor": 4}, NotImplementedError, ["linear"]),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, NotImplementedError, ["0.5"]),
        ("linear", ValueError, ["'linear'"]),
    ],
)
def test_rope_that_is_refused(
    key: str, scaling: Any, error: type[Exception], texts: list[str]
) -> None:
    """A03: never a run with default rope."""
    with pytest.raises(error) as raised:
        parse(**{key: scaling})
    for text in texts:
        assert text in str(raised.value)


def test_two_scalings_must_agree() -> None:
    linear = {"rope_type": "linear", "factor": 4.0}
    assert parse(rope_scaling=linear, rope_parameters=linear).rope_scaling.factor == 4.0
    with pytest.raises(ValueError, match="rope_parameters.*rope_scaling"):
        parse(rope_scaling=linear, rope_parameters={"rope_type": "default"})


# ---- sizes ---------------------------------------------------------------------------------


def test_defaults_of_missing_sizes() -> None:
    """A05: head_dim missing or null; the same for num_key_value_heads."""
    for missing in (ABSENT, None):
        assert parse(head_dim=missing).head_dim == 64
        assert parse(num_key_value_heads=missing).num_key_value_heads == 4
    assert parse(hidden_size=320, head_dim=64).head_dim == 64
    with pytest.raises(ValueError, match="hidden_size 258.*num_attention_heads 4"):
        parse(hidden_size=258, head_dim=None)


@pytest.mark.parametrize(
    "key",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
    ],
)
@pytest.mark.parametrize("value", [0, -4, 4.0, "4", True, [4], float("nan")])
def test_sizes_must_be_positive_integers(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=key):
        parse(**{key: value})


@pytest.mark.parametrize(
    "key",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
    ],
)
def test_missing_sizes_are_named(key: str) -> None:
    with pytest.raises(ValueError, match=key):
        parse(**{key: ABSENT})


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"num_key_value_heads": 8}, "num_key_value_heads 8"),
        ({"head_dim": 63}, "head_dim is 63"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings"),
        ({"attention_bias": 1}, "attention_bias"),
        ({"mlp_bias": "yes"}, "mlp_bias"),
        ({"bos_token_id": "<s>"}, "bos_token_id"),
        ({"eos_token_id": -1}, "eos_token_id"),
        ({"eos_token_id": [1, None]}, "eos_token_id"),
    ],
)
def test_impossible_values_are_named(overrides: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        parse(**overrides)


@pytest.mark.parametrize(
    ("overrides", "texts"),
    [
        ({"model_type": "gemma"}, ["model_type", "'gemma'"]),
        ({"model_type": ABSENT}, ["model_type"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "'gelu'"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["quantization_config", "'gptq'"]),
        ({"model_type": "mistral", "sliding_window": 4096}, ["sliding_window", "4096"]),
        # Transformers' default for a missing key is a window of 4096.
        ({"model_type": "mistral"}, ["sliding_window", "4096"]),
        ({"model_type": "qwen2", "use_sliding_window": True}, ["use_sliding_window", "True"]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
    ],
)
def test_missing_features_are_named(overrides: dict[str, Any], texts: list[str]) -> None:
    with pytest.raises(NotImplementedError) as raised:
        parse(**overrides)
    for text in texts:
        assert text in str(raised.value)


def test_switched_off_features_are_accepted() -> None:
    parse(model_type="qwen2", use_sliding_window=False, sliding_window=4096, max_window_layers=1)
    parse(model_type="qwen2", layer_types=["full_attention"] * 2)
    parse(quantization_config=None, partial_rotary_factor=1.0, hidden_act="silu")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=3,
)
ROPE_NAMES = st.sampled_from(["rope_type", "type", "factor", "rope_theta", "low_freq_factor"])


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from([*tiny_config(), "dtype", "torch_dtype", "layer_types", "sliding_window"]),
        JSON,
        max_size=3,
    ),
    st.none() | JSON | st.dictionaries(ROPE_NAMES, JSON | st.just("linear")),
)
def test_garbage_raises_only_named_errors(overrides: dict[str, Any], rope: Any) -> None:
    try:
        parse(**{**overrides, "rope_scaling": rope})
    except (ValueError, NotImplementedError) as error:
        assert "\n" not in str(error)


# ---- dtype ---------------------------------------------------------------------------------


def test_dtype_names() -> None:
    """A08."""
    for overrides in (
        {"torch_dtype": "bfloat16"},
        {"dtype": "bfloat16"},
        {"dtype": "torch.bfloat16"},
        {"dtype": "bfloat16", "torch_dtype": "float32"},
        {"dtype": None, "torch_dtype": "bfloat16"},
    ):
        assert parse(**overrides).dtype == "bfloat16"
    assert parse().dtype is None
    assert parse(torch_dtype="float16").dtype == "float16"
    for unknown in ("bf16", "int8", "float8_e4m3fn", 16):
        with pytest.raises(ValueError, match=str(unknown)):
            parse(dtype=unknown)


# ---- directories ---------------------------------------------------------------------------


def directory(path: Path, generation_eos: Any = ABSENT, **overrides: Any) -> Path:
    write_json(path / "config.json", tiny_config(**overrides))
    if generation_eos is not ABSENT:
        write_json(path / "generation_config.json", {"eos_token_id": generation_eos})
    return path


def eos(path: Path) -> tuple[int, ...]:
    return ModelConfig.from_dir(path).eos_token_ids


def test_stop_set_is_the_union(tmp_path: Path) -> None:
    """A06."""
    directory(tmp_path, generation_eos=[257, 258], eos_token_id=257)
    assert eos(tmp_path) == (257, 258)
    directory(tmp_path, generation_eos=258, eos_token_id=[257, 260])
    assert eos(tmp_path) == (258, 257, 260)
    write_byte_tokenizer(tmp_path)  # eos_token "</s>" is 257
    directory(tmp_path, generation_eos=[258], eos_token_id=None)
    assert eos(tmp_path) == (258, 257)


def test_stop_set_without_generation_config(tmp_path: Path) -> None:
    """A06 (2) and (4)."""
    write_byte_tokenizer(directory(tmp_path, eos_token_id=257))
    assert eos(tmp_path) == (257,)
    directory(tmp_path, eos_token_id=None)
    edit_json(tmp_path / "tokenizer_config.json", eos_token=None)
    assert eos(tmp_path) == ()


def test_tokenizer_eos_is_resolved(tmp_path: Path) -> None:
    """A06 (3), by added_tokens_decoder, by tokenizer.json, and as an object."""
    directory(tmp_path, generation_eos=[257], eos_token_id=257)
    write_byte_tokenizer(tmp_path, eos_token="<|eot|>")
    assert eos(tmp_path) == (257, 258)
    edit_json(tmp_path / "tokenizer_config.json", eos_token={"content": "<|user|>"})
    assert eos(tmp_path) == (257, 259)
    (tmp_path / "tokenizer.json").unlink()
    assert eos(tmp_path) == (257,)
    edit_json(
        tmp_path / "tokenizer_config.json",
        added_tokens_decoder={"7": {"content": "<s>"}, "301": {"content": "<|user|>"}},
    )
    assert eos(tmp_path) == (257, 301)


def test_no_config(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        ModelConfig.from_dir(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        ModelConfig.from_dir(tmp_path / "nowhere")


@pytest.mark.parametrize("text", ["", "{", "[1]", "\xff", '{"a": 1}}'])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_files_that_are_not_json_objects(tmp_path: Path, name: str, text: str) -> None:
    directory(tmp_path)
    (tmp_path / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=name):
        ModelConfig.from_dir(tmp_path)


@pytest.mark.parametrize("decoder", [[1], {"x": {"content": "</s>"}}, {"1": "</s>"}, None])
def test_odd_added_tokens_decoder(tmp_path: Path, decoder: Any) -> None:
    """What it does not say is looked up in tokenizer.json."""
    write_byte_tokenizer(directory(tmp_path), added_tokens_decoder=decoder)
    assert eos(tmp_path) == (257,)
