"""Small checkpoints and tokenizers, written on the fly: F-TINY, F-MARKOV, CYCLE, F-BYTE, F-SPM.

Every writer fills a directory in the Hugging Face layout and returns its path. Nothing is
downloaded, and the same arguments always give the same bytes.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

Config = dict[str, Any]

ABSENT: Any = object()
"""Marks a JSON key to leave out (None is written as null)."""

MASKED = -1e4
"""The logit that stands for minus infinity in an F-MARKOV table."""

_TINY: Config = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    # Null, not missing: a random model would otherwise stop at transformers' default id 2.
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False), encoding="utf-8")


def edit_json(path: Path, **changes: Any) -> None:
    """Change keys of a JSON object file in place; ABSENT removes a key."""
    merged = {**json.loads(path.read_text(encoding="utf-8")), **changes}
    write_json(path, {key: value for key, value in merged.items() if value is not ABSENT})


# ---- checkpoints ---------------------------------------------------------------------------


def tiny_config(**overrides: Any) -> Config:
    """config.json of F-TINY with some keys changed, or left out with ABSENT."""
    merged = {**_TINY, **overrides}
    return {key: value for key, value in merged.items() if value is not ABSENT}


def tiny_tensors(config: Mapping[str, Any], seed: int = 0, std: float = 0.08) -> dict[str, Tensor]:
    """Random fp32 tensors under Hugging Face names for any llama, mistral or qwen2 config.

    Weights are drawn before biases and the head comes last, so configs that differ only in
    biases, tying or rope share every other weight.

    Args:
        config: the keys of config.json.
        seed: seed of the generator; torch's global generator is not touched.
        std: standard deviation of everything but the norms, which are 1.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * std

    hidden, ffn, vocab = (config[key] for key in ("hidden_size", "intermediate_size", "vocab_size"))
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    out_features = {
        "self_attn.q_proj": (heads * head_dim, hidden),
        "self_attn.k_proj": (kv_heads * head_dim, hidden),
        "self_attn.v_proj": (kv_heads * head_dim, hidden),
        "self_attn.o_proj": (hidden, heads * head_dim),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }
    tensors = {"model.embed_tokens.weight": normal(vocab, hidden)}
    layers = [f"model.layers.{i}" for i in range(config["num_hidden_layers"])]
    for layer in layers:
        for name, shape in out_features.items():
            tensors[f"{layer}.{name}.weight"] = normal(*shape)
        tensors[f"{layer}.input_layernorm.weight"] = torch.ones(hidden)
        tensors[f"{layer}.post_attention_layernorm.weight"] = torch.ones(hidden)
    tensors["model.norm.weight"] = torch.ones(hidden)
    if not config.get("tie_word_embeddings", False):
        tensors["lm_head.weight"] = normal(vocab, hidden)
    for layer in layers:
        for name in _biased(config):
            tensors[f"{layer}.{name}.bias"] = normal(out_features[name][0])
    return tensors


def _biased(config: Mapping[str, Any]) -> list[str]:
    """The linear modules of one layer that have a bias."""
    attention = [f"self_attn.{name}_proj" for name in "qkvo"]
    if config["model_type"] == "qwen2":
        return attention[:3]
    return (attention if config.get("attention_bias") else []) + (
        [f"mlp.{name}_proj" for name in ("gate", "up", "down")] if config.get("mlp_bias") else []
    )


def write_checkpoint(
    directory: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], shards: int = 1
) -> Path:
    """Write config.json and the tensors: one model.safetensors, or numbered shards and an index."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "config.json", dict(config))
    dense = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if shards == 1:
        save_file(dense, directory / "model.safetensors", metadata={"format": "pt"})
        return directory
    names = list(dense)
    weight_map: dict[str, str] = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        shard = names[i * len(names) // shards : (i + 1) * len(names) // shards]
        save_file(
            {name: dense[name] for name in shard}, directory / file, metadata={"format": "pt"}
        )
        weight_map.update(dict.fromkeys(shard, file))
    total = sum(tensor.nbytes for tensor in dense.values())
    write_json(
        directory / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": weight_map},
    )
    return directory


def write_tiny(
    directory: Path,
    config: Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
    seed: int = 0,
) -> Path:
    """F-TINY: a random model. `config` comes from tiny_config(); its torch_dtype is filled in."""
    config = dict(tiny_config() if config is None else config)
    if "dtype" not in config:
        config.setdefault("torch_dtype", str(dtype).removeprefix("torch."))
    tensors = {name: tensor.to(dtype) for name, tensor in tiny_tensors(config, seed).items()}
    return write_checkpoint(directory, config, tensors, shards)


def write_markov(
    directory: Path,
    table: Tensor,
    layers: int = 1,
    hidden: int | None = None,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
    **config_overrides: Any,
) -> Path:
    """F-MARKOV: the logits after token t are table[t], whatever came before.

    The embedding of t is sqrt(E) at position t. Attention and MLP add zero (o_proj and down_proj
    are 0), and RMSNorm leaves a vector of mean square 1 as it is, up to a relative eps / 2 = 5e-6,
    so the head reads column t alone. Attention still writes its KV cache.

    Args:
        directory: where to write.
        table: [V, V] logits, multiples of 1/8 for exact bf16; MASKED for minus infinity.
        layers: number of layers.
        hidden: E, at least V; by default 256, or 1024 for a larger vocabulary.
        dtype: dtype of the files.
        shards: number of files.
        config_overrides: keys of config.json.
    """
    vocab = table.shape[0]
    hidden = hidden or (256 if vocab <= 256 else 1024)
    if table.shape != (vocab, vocab) or vocab > hidden:
        raise ValueError(f"table must be [V, V] with V <= {hidden}, got {tuple(table.shape)}")
    heads = hidden // 64
    sizes = {"hidden_size": hidden, "num_attention_heads": heads, "num_hidden_layers": layers}
    config = tiny_config(
        **{**sizes, "num_key_value_heads": heads // 2, "vocab_size": vocab, **config_overrides}
    )
    config.setdefault("torch_dtype", str(dtype).removeprefix("torch."))

    tensors = tiny_tensors(config)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    scale = math.sqrt(hidden)
    tensors["model.embed_tokens.weight"] = torch.eye(vocab, hidden) * scale
    head = torch.zeros(vocab, hidden)
    head[:, :vocab] = table.float().T / scale
    tensors["lm_head.weight"] = head
    return write_checkpoint(
        directory, config, {name: tensor.to(dtype) for name, tensor in tensors.items()}, shards
    )


def cycle_table(chain: Sequence[int], vocab: int) -> Tensor:
    """CYCLE: a table [V, V] whose greedy output is the chain; logit 20 for the next token, else 0.

    A last token without a successor leads back to the first: [1, 2, 3] is 1, 2, 3, 1, ...;
    [9, 10, 12, 12] stays at 12.
    """
    successor: dict[int, int] = {}
    for token, following in zip(chain, chain[1:], strict=False):
        if successor.setdefault(token, following) != following:
            raise ValueError(f"token {token} has two successors in {list(chain)}")
    successor.setdefault(chain[-1], chain[0])
    table = torch.zeros(vocab, vocab)
    for token, following in successor.items():
        table[token, following] = 20.0
    return table


# ---- tokenizers ----------------------------------------------------------------------------

BYTE_SPECIALS = {"<s>": 256, "</s>": 257, "<|eot|>": 258, "<|user|>": 259, "<|assistant|>": 260}

BYTE_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "<|eot|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""A chat template for F-BYTE that starts with `<s>`; pass it as chat_template= to write it."""


def byte_alphabet() -> list[str]:
    """GPT-2's printable stand-in for each of the 256 byte values, indexed by the byte."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def write_byte_tokenizer(
    directory: Path, add_bos: bool = False, pieces: Sequence[str] = (), **tokenizer_config: Any
) -> Path:
    """F-BYTE: byte-level BPE without merges; the id of a byte is its value, specials from 256.

    Args:
        directory: where tokenizer.json and tokenizer_config.json go.
        add_bos: encoding puts `<s>` in front.
        pieces: longer tokens, ids 261 and up. Encoding never makes them (there are no merges);
            they let a CYCLE spell a text in which a letter occurs twice.
        tokenizer_config: keys of tokenizer_config.json; ABSENT leaves one out.
    """
    alphabet = byte_alphabet()
    spelled = ["".join(alphabet[byte] for byte in piece.encode()) for piece in pieces]
    vocab = {token: i for i, token in enumerate(alphabet)}
    vocab |= BYTE_SPECIALS | {token: 261 + i for i, token in enumerate(spelled)}
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    tokenizer = _tokenizer_json(
        specials=BYTE_SPECIALS,
        pre_tokenizer=byte_level,
        decoder=byte_level,
        post_processor=_bos_processor("<s>", 256) if add_bos else None,
        model={
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [],
        },
    )
    defaults = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": add_bos}
    return _write_tokenizer(directory, tokenizer, {**defaults, **tokenizer_config})


SPM_IDS = {"<unk>": 0, "<s>": 1, "</s>": 2, "\u2581Hello": 259, "\u2581world": 260, "!": 261}
"""The tokens of F-SPM that are no byte fallback; byte b is id 3 + b, a lone space 262."""


def write_spm_tokenizer(directory: Path, add_bos: bool = True, **tokenizer_config: Any) -> Path:
    """F-SPM: Metaspace pieces with byte fallback and llama-2's decoder; 263 ids, see SPM_IDS."""
    specials = {token: i for token, i in SPM_IDS.items() if i < 3}
    pieces = [*specials, *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["\u2581Hello", "\u2581world", "!", "\u2581"]
    metaspace = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first"}
    tokenizer = _tokenizer_json(
        specials=specials,
        pre_tokenizer={**metaspace, "split": False},
        decoder={
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        post_processor=_bos_processor("<s>", 1) if add_bos else None,
        model={
            "type": "Unigram",
            "unk_id": 0,
            "byte_fallback": True,
            # Byte tokens score far below any piece, so they are used for nothing else.
            "vocab": [[piece, -20.0 if piece.startswith("<") else -1.0] for piece in pieces],
        },
    )
    defaults = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    defaults["add_bos_token"] = add_bos
    return _write_tokenizer(directory, tokenizer, {**defaults, **tokenizer_config})


def _tokenizer_json(*, specials: Mapping[str, int], **parts: Any) -> Config:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [{"id": i, "content": t, **flags, "special": True} for t, i in specials.items()]
    header = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added}
    return {**header, "normalizer": None, **parts}


def _bos_processor(token: str, token_id: int) -> Config:
    bos = {"SpecialToken": {"id": token, "type_id": 0}}
    text = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    return {
        "type": "TemplateProcessing",
        "single": [bos, text[0]],
        "pair": [bos, text[0], bos, text[1]],
        "special_tokens": {token: {"id": token, "ids": [token_id], "tokens": [token]}},
    }


def _write_tokenizer(directory: Path, tokenizer: Config, config: Config) -> Path:
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "tokenizer.json", tokenizer)
    write_json(directory / "tokenizer_config.json", {})
    edit_json(
        directory / "tokenizer_config.json",
        tokenizer_class="PreTrainedTokenizerFast",
        model_max_length=1024,
        **config,
    )
    return directory
