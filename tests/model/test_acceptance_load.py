"""Logits of loaded files against transformers: A01, A02, A05, A07, A09, A10, A11, and GGUF."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import ABSENT, edit_json, tiny_config, tiny_tensors, write_checkpoint, write_tiny
from safetensors.torch import load_file, save_file
from torch import Tensor

from tinydecode import load_hf
from tinydecode.kv_cache import KVCache

TOLERANCE = 2e-4  # on fp32 logits, CPU
PROMPT = torch.randint(0, 512, (1, 64), generator=torch.Generator().manual_seed(1))


def logits(path: Path, prompt: Tensor = PROMPT, **options: Any) -> Tensor:
    """[V] float32: our logits after the last token."""
    model = load_hf(path, device="cpu", **options)
    length = prompt.shape[1]
    cache = KVCache(
        model.config, batch_size=1, max_seq_len=length, device=model.device, dtype=model.dtype
    )
    with torch.inference_mode():
        return model.prefill(prompt, torch.tensor([length], dtype=torch.int32), cache)[0]


def reference(path: Path, prompt: Tensor = PROMPT) -> Tensor:
    """[V] float32: transformers' logits after the last token."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        result: Tensor = model.eval()(prompt).logits[0, -1]
    return result


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    assert (ours - theirs).abs().max().item() <= TOLERANCE


def variants(path: Path, *overrides: dict[str, Any]) -> list[Tensor]:
    """Logits of the same weights under configs that differ in some keys."""
    return [
        logits(write_tiny(path / str(i), tiny_config(**keys))) for i, keys in enumerate(overrides)
    ]


def test_a01_rope_parameters(tmp_path: Path) -> None:
    parameters = {"rope_type": "default", "rope_theta": 500000.0}
    old, new, none, default = variants(
        tmp_path,
        {"rope_theta": 500000},
        {"rope_theta": ABSENT, "rope_parameters": parameters},
        {"rope_theta": ABSENT},
        {"rope_theta": 10000.0},
    )
    assert torch.equal(old, new)
    assert torch.equal(none, default)
    assert (old - none).abs().max().item() > 1e-3
    assert_same(new, reference(tmp_path / "1"))
    assert_same(none, reference(tmp_path / "2"))


def test_a02_type_and_rope_type(tmp_path: Path) -> None:
    a, b, both, default, null, empty, unscaled = variants(
        tmp_path,
        {"rope_scaling": {"type": "linear", "factor": 4}},
        {"rope_scaling": {"rope_type": "linear", "factor": 4}},
        {"rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 4}},
        {"rope_scaling": {"rope_type": "default"}},
        {"rope_scaling": None},
        {"rope_scaling": {}},
        {},
    )
    assert torch.equal(a, b) and torch.equal(a, both)
    assert all(torch.equal(other, unscaled) for other in (default, null, empty))
    assert (a - unscaled).abs().max().item() > 1e-3
    assert_same(b, reference(tmp_path / "1"))


@pytest.mark.parametrize(
    "overrides", [{"hidden_size": 320}, {"head_dim": ABSENT}, {"head_dim": None}]
)
def test_a05_head_dim(tmp_path: Path, overrides: dict[str, Any]) -> None:
    write_tiny(tmp_path, tiny_config(**overrides))
    assert_same(logits(tmp_path), reference(tmp_path))


def test_a07_heads(tmp_path: Path) -> None:
    tied = write_tiny(tmp_path / "tied", tiny_config(tie_word_embeddings=True))
    assert_same(logits(tied), reference(tied))
    untied = write_tiny(tmp_path / "untied", tiny_config(tie_word_embeddings=ABSENT))
    assert_same(logits(untied), reference(untied))
    edit_json(untied / "config.json", tie_word_embeddings=True)  # but the stored head differs
    with pytest.warns(UserWarning, match=r"lm_head\.weight differs"):
        ours = logits(untied)
    assert_same(ours, reference(untied))


@pytest.mark.parametrize(
    "overrides",
    [
        {"attention_bias": True},
        {"mlp_bias": True},
        {"attention_bias": True, "mlp_bias": True},
        {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
    ],
)
def test_a09_biases(tmp_path: Path, overrides: dict[str, Any]) -> None:
    write_tiny(tmp_path, tiny_config(**overrides))
    assert_same(logits(tmp_path, strict=True), reference(tmp_path))


def test_mistral(tmp_path: Path) -> None:
    keys = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    write_tiny(tmp_path, tiny_config(**keys, sliding_window=None))
    assert_same(logits(tmp_path), reference(tmp_path))


def test_a10_stored_rotary_buffers(tmp_path: Path) -> None:
    expected = logits(write_tiny(tmp_path))
    tensors = load_file(tmp_path / "model.safetensors")
    for layer in range(2):
        name = f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"
        tensors[name] = torch.randn(32) * 100
    save_file(tensors, tmp_path / "model.safetensors")
    assert torch.equal(logits(tmp_path, strict=True), expected)


def test_a11_strays_beside_an_index(tmp_path: Path) -> None:
    expected = logits(write_tiny(tmp_path / "one"))
    directory = write_tiny(tmp_path / "many", shards=2)
    wrong = {name: tensor + 1 for name, tensor in tiny_tensors(tiny_config()).items()}
    write_checkpoint(directory, tiny_config(), wrong)  # adds model.safetensors
    save_file(wrong, directory / "consolidated.safetensors")
    assert torch.equal(logits(directory), expected)


def test_gguf_gives_the_same_logits(tmp_path: Path) -> None:
    from gguf_files import write_gguf

    config = tiny_config(attention_bias=True)
    directory = write_tiny(tmp_path / "dir", config)
    path = write_gguf(tmp_path / "model.gguf", config, tiny_tensors(config))
    # The file stores eps as float32: 1e-5 is off by 1e-8 of itself.
    assert_same(logits(path), logits(directory))
