"""The model's configuration, read from a Hugging Face directory.

Field names are Hugging Face's. What a config asks for and tinydecode does not implement is
refused here by key and value, before any weight is read. Nothing here imports torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tinydecode.errors import CheckpointError

_FAMILIES = ("llama", "mistral", "qwen2")
_DTYPES = ("float32", "float16", "bfloat16")
_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched; see rope.inv_freq for the formulas.

    `linear` reads factor alone, `llama3` all four numbers, `default` none.
    """

    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position_embeddings: float = 0.0  # tokens

    def __post_init__(self) -> None:
        if self.rope_type not in _ROPE_KEYS:
            raise NotImplementedError(
                f"rope_type {self.rope_type!r} is not implemented; {', '.join(_ROPE_KEYS)} are"
            )
        for key in _ROPE_KEYS[self.rope_type]:
            value = getattr(self, key)
            if not _is_number(value) or value <= 0:
                raise ValueError(f"rope scaling: {key} is {value!r}, expected a number above 0")
        if self.rope_type == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"rope scaling: low_freq_factor {self.low_freq_factor} must be below "
                f"high_freq_factor {self.high_freq_factor}"
            )


@dataclass(frozen=True)
class ModelConfig:
    """Everything about a llama-family model that is not a weight.

    Raises:
        ValueError: a value that is impossible in itself (named by its key).
        NotImplementedError: a model feature that tinydecode lacks (named by key and value).
    """

    model_type: str
    vocab_size: int  # V
    hidden_size: int  # E
    intermediate_size: int  # F
    num_hidden_layers: int  # L
    num_attention_heads: int  # H
    num_key_value_heads: int  # K
    head_dim: int  # D
    rms_norm_eps: float
    max_position_embeddings: int  # tokens
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    tie_word_embeddings: bool = False
    attention_bias: bool = False  # q_proj, k_proj and v_proj have a bias
    attention_out_bias: bool = False  # o_proj has one
    mlp_bias: bool = False  # gate_proj, up_proj and down_proj have one
    dtype: str | None = None  # "float32", "float16", "bfloat16"; None: the config does not say
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()  # generation stops at any of these

    def __post_init__(self) -> None:
        _refuse_other_families(self.model_type)
        for key in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            value = getattr(self, key)
            if not _is_int(value) or value <= 0:
                raise ValueError(f"{key} is {value!r}, expected an integer above 0")
        for key in ("rms_norm_eps", "rope_theta"):
            value = getattr(self, key)
            if not _is_number(value) or value <= 0:
                raise ValueError(f"{key} is {value!r}, expected a number above 0")
        for key in ("tie_word_embeddings", "attention_bias", "attention_out_bias", "mlp_bias"):
            if not isinstance(getattr(self, key), bool):
                raise ValueError(f"{key} is {getattr(self, key)!r}, expected true or false")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}, rotary embedding needs an even one")
        if self.dtype is not None and self.dtype not in _DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}, expected one of {', '.join(_DTYPES)}")

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> ModelConfig:
        """The configuration that the keys of a config.json describe, old or new spelling."""
        model_type = d.get("model_type")
        _refuse_unsupported(d)
        required = (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
        )
        missing = [key for key in required if d.get(key) is None]
        if missing:
            raise ValueError(f"the config has no {', '.join(missing)}")
        heads, hidden = d["num_attention_heads"], d["hidden_size"]
        head_dim = d.get("head_dim")
        if head_dim is None:
            if not (_is_int(heads) and _is_int(hidden) and heads > 0) or hidden % heads:
                raise ValueError(
                    f"hidden_size {hidden!r} is not a multiple of num_attention_heads {heads!r}, "
                    "and the config has no head_dim"
                )
            head_dim = hidden // heads
        # Transformers gives qwen2 its q, k, v biases without a flag, mistral none whatever the
        # flag says, and llama four or none.
        has_bias = model_type == "llama" and _or_default(d, "attention_bias", False)
        rope_theta, rope_scaling = _rope(d)
        return cls(
            model_type=str(model_type),
            vocab_size=d["vocab_size"],
            hidden_size=hidden,
            intermediate_size=d["intermediate_size"],
            num_hidden_layers=d["num_hidden_layers"],
            num_attention_heads=heads,
            num_key_value_heads=_or_default(d, "num_key_value_heads", heads),
            head_dim=head_dim,
            rms_norm_eps=_or_default(d, "rms_norm_eps", 1e-6),
            max_position_embeddings=_or_default(d, "max_position_embeddings", 2048),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            tie_word_embeddings=_or_default(d, "tie_word_embeddings", False),
            attention_bias=model_type == "qwen2" or has_bias,
            attention_out_bias=has_bias,
            mlp_bias=model_type == "llama" and _or_default(d, "mlp_bias", False),
            dtype=_dtype_name(d),
            bos_token_id=next(iter(token_ids(d.get("bos_token_id"), "bos_token_id")), None),
            eos_token_ids=token_ids(d.get("eos_token_id"), "eos_token_id"),
        )

    @classmethod
    def from_dir(cls, path: str | Path) -> ModelConfig:
        """The configuration of a Hugging Face directory.

        The stop set is the union of what generation_config.json, config.json and the tokenizer's
        eos_token say, in this order: each of them alone is wrong for some published model.

        Raises:
            FileNotFoundError: no config.json in the directory.
            CheckpointError: a file that is not JSON.
        """
        directory = Path(path)
        if not (directory / "config.json").is_file():
            raise FileNotFoundError(
                f"{directory}: no config.json; expected a Hugging Face model directory"
            )
        config = cls.from_dict(read_json(directory / "config.json"))
        generation = read_json(directory / "generation_config.json", optional=True)
        eos = [
            *token_ids(generation.get("eos_token_id"), "generation_config.json: eos_token_id"),
            *config.eos_token_ids,
            *_tokenizer_eos(directory),
        ]
        return replace(config, eos_token_ids=tuple(dict.fromkeys(eos)))


def read_json(path: Path, optional: bool = False) -> dict[str, Any]:
    """The JSON object in a file; {} for a missing optional file.

    Raises:
        CheckpointError: the file does not hold a JSON object.
    """
    if optional and not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # covers JSONDecodeError and UnicodeDecodeError
        raise CheckpointError(f"{path}: incomplete or corrupt, not JSON ({error})") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def token_ids(value: Any, key: str) -> tuple[int, ...]:
    """Token ids from a config value: null, one id or a list of ids."""
    ids = () if value is None else tuple(value) if isinstance(value, list) else (value,)
    if not all(_is_int(i) and i >= 0 for i in ids):
        raise ValueError(f"{key} is {value!r}, expected a token id, a list of them or null")
    return ids


def _refuse_other_families(model_type: Any) -> None:
    if model_type not in _FAMILIES:
        raise NotImplementedError(
            f"model_type {model_type!r} is not implemented; {', '.join(_FAMILIES)} are"
        )


def _refuse_unsupported(d: Mapping[str, Any]) -> None:
    """Raise for features that would change the model's output if they were ignored."""
    _refuse_other_families(d.get("model_type"))
    quantization = d.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise NotImplementedError(
            f"quantization_config (quant_method {method!r}) is not implemented; "
            "use the unquantised checkpoint or a GGUF file"
        )
    # Mistral's window is 4096 tokens in transformers when the key is missing.
    window = d.get("sliding_window", 4096) if d["model_type"] == "mistral" else None
    layer_types = _or_default(d, "layer_types", [])
    unsupported: dict[str, bool] = {
        "hidden_act": _or_default(d, "hidden_act", "silu") not in ("silu", "swish"),
        "use_sliding_window": bool(d.get("use_sliding_window")),
        "layer_types": not isinstance(layer_types, list)
        or any(kind != "full_attention" for kind in layer_types),
        "partial_rotary_factor": _or_default(d, "partial_rotary_factor", 1.0) != 1.0,
    }
    for key, is_set in unsupported.items():
        if is_set:
            raise NotImplementedError(f"{key} {d[key]!r} is not implemented")
    if window is not None:
        raise NotImplementedError(f"sliding_window {window!r} is not implemented, only null is")


def _rope(d: Mapping[str, Any]) -> tuple[float, RopeScaling]:
    """Theta and scaling: from rope_parameters if it is there, else from the older keys."""
    key = "rope_parameters" if d.get("rope_parameters") else "rope_scaling"
    values = d.get(key) or {}
    if not isinstance(values, dict):
        raise ValueError(f"{key} is {values!r}, expected an object")
    if key == "rope_parameters" and d.get("rope_scaling") not in (None, {}, values):
        raise ValueError(
            f"rope_parameters {values!r} and rope_scaling {d['rope_scaling']!r} disagree; "
            "keep one of them"
        )
    theta = values.get("rope_theta", _or_default(d, "rope_theta", 10000.0))
    names = {name: values[name] for name in ("rope_type", "type") if values.get(name) is not None}
    if len(set(map(repr, names.values()))) > 1:
        raise ValueError(f"{key}: rope_type {names['rope_type']!r} but type {names['type']!r}")
    if not names and set(values) - {"rope_theta"}:
        raise ValueError(f"{key} {values!r} has no rope_type")
    rope_type = str(next(iter(names.values()), "default"))
    if _or_default(values, "partial_rotary_factor", 1.0) != 1.0:
        factor = values["partial_rotary_factor"]
        raise NotImplementedError(f"{key}: partial_rotary_factor {factor!r} is not implemented")
    needed = _ROPE_KEYS.get(rope_type, ())  # an unknown type is refused by RopeScaling
    missing = [name for name in needed if values.get(name) is None]
    if missing:
        raise ValueError(f"{key}: rope_type {rope_type!r} needs {', '.join(missing)}")
    return theta, RopeScaling(rope_type, **{name: values[name] for name in needed})


def _dtype_name(d: Mapping[str, Any]) -> str | None:
    """The config's dtype ("dtype", formerly "torch_dtype") without a "torch." prefix."""
    key = "dtype" if d.get("dtype") is not None else "torch_dtype"
    name = d.get(key)
    if name is None:
        return None
    short = str(name).removeprefix("torch.")
    if short not in _DTYPES:
        raise ValueError(f"{key} is {name!r}, expected one of {', '.join(_DTYPES)}")
    return short


def _tokenizer_eos(directory: Path) -> tuple[int, ...]:
    """The id of tokenizer_config.json's eos_token, if the tokenizer's files give it one."""
    tokenizer = read_json(directory / "tokenizer_config.json", optional=True)
    token = tokenizer.get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    if token is None:
        return ()
    decoder = tokenizer.get("added_tokens_decoder")
    entries = decoder.items() if isinstance(decoder, dict) else ()
    ids = [int(i) for i, entry in entries if i.isdecimal() and _content(entry) == token]
    if not ids:
        # Parsing tokenizer.json costs 0.1 s for a 128k vocabulary, so it is the second choice.
        added = read_json(directory / "tokenizer.json", optional=True).get("added_tokens") or []
        ids = [entry.get("id") for entry in added if _content(entry) == token]
    return token_ids(ids, f"{directory / 'tokenizer.json'}: the id of {token!r}")


def _content(added_token: Any) -> Any:
    return added_token.get("content") if isinstance(added_token, dict) else None


def _or_default(d: Mapping[str, Any], key: str, default: Any) -> Any:
    """d[key], or the default where the key is missing or null."""
    value = d.get(key)
    return default if value is None else value


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_int(value) or (isinstance(value, float) and math.isfinite(value))
