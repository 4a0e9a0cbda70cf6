"""The model against transformers, and its three ways through attention against each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import tiny_config, write_tiny
from torch import Tensor

from tinydecode import Engine, load_hf
from tinydecode.kv_cache import KVCache
from tinydecode.model import LlamaModel

TOLERANCE = 2e-4  # on fp32 logits, CPU

CONFIGS: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha": {"num_key_value_heads": 4},
    "mqa": {"num_key_value_heads": 1},
    "no-kv-heads-key": {"num_key_value_heads": None},
    "tied": {"tie_word_embeddings": True},
    "head_dim-wide": {"hidden_size": 320, "head_dim": 80},
    "head_dim-apart": {"hidden_size": 320, "head_dim": 64},
    "no-head_dim": {"head_dim": None},
    "odd-sizes": {"hidden_size": 120, "head_dim": 40, "intermediate_size": 333, "vocab_size": 501},
    "theta": {"rope_theta": 500000.0},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama3": {
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "biases": {"attention_bias": True, "mlp_bias": True},
    "eps": {"rms_norm_eps": 0.5},
}


def reference_logits(directory: Path, token_ids: Tensor) -> Tensor:
    """transformers' own model in fp32 with eager attention, [B, T] -> [B, T, V]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        logits: Tensor = model.eval()(token_ids).logits
    return logits


def prompt(length: int, vocab: int = 500, rows: int = 1) -> Tensor:
    return torch.randint(0, vocab, (rows, length), generator=torch.Generator().manual_seed(1))


def new_cache(model: LlamaModel, max_seq_len: int, batch_size: int = 1) -> KVCache:
    return KVCache(
        model.config,
        batch_size=batch_size,
        max_seq_len=max_seq_len,
        device=model.device,
        dtype=model.dtype,
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    write_tiny(tmp_path, tiny_config(**CONFIGS[name]))
    model = load_hf(tmp_path, device="cpu")
    tokens = prompt(150)
    expected = reference_logits(tmp_path, tokens)
    cache = new_cache(model, 160)
    with torch.inference_mode():
        chunked = model.chunk(tokens, cache)
        prefilled = model.prefill(tokens, torch.tensor([150], dtype=torch.int32), cache)
    assert (chunked - expected).abs().max() < TOLERANCE
    assert (prefilled - expected[:, -1]).abs().max() < TOLERANCE
    # The comparison means something: the logits are not small.
    assert expected.abs().max() > 1


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LlamaModel:
    return load_hf(write_tiny(tmp_path_factory.mktemp("tiny")), device="cpu")


@pytest.mark.parametrize("sizes", [[1] * 24, [5, 1, 9, 2, 7], [24], [23, 1], [1, 23]])
@torch.inference_mode()
def test_chunks_of_any_size_equal_one_prefill(tiny: LlamaModel, sizes: list[int]) -> None:
    tokens = prompt(24)
    cache = new_cache(tiny, 32)
    expected = tiny.prefill(tokens, torch.tensor([24], dtype=torch.int32), cache)
    keys = cache.k[:, :, :, :24].clone()
    cache.reset()
    done = 0
    for size in sizes:
        logits = tiny.chunk(tokens[:, done : done + size], cache)
        done += size
        assert cache.seq_lens.tolist() == [done]
    assert (logits[:, -1] - expected).abs().max() < TOLERANCE
    assert (cache.k[:, :, :, :24] - keys).abs().max() < TOLERANCE


@torch.inference_mode()
def test_decode_after_prefill_equals_a_longer_prefill(tiny: LlamaModel) -> None:
    tokens = prompt(40)
    cache = new_cache(tiny, 64)
    longer = new_cache(tiny, 64)
    tiny.prefill(tokens[:, :10], torch.tensor([10], dtype=torch.int32), cache)
    for end in range(11, 41):
        logits = tiny.decode(tokens[:, end - 1], cache)
        expected = tiny.prefill(tokens[:, :end], torch.tensor([end], dtype=torch.int32), longer)
        assert (logits - expected).abs().max() < TOLERANCE


@torch.inference_mode()
def test_rollback_forgets_exactly_the_tokens_after_it(tiny: LlamaModel) -> None:
    tokens = prompt(20)
    cache = new_cache(tiny, 32)
    tiny.prefill(tokens[:, :12], torch.tensor([12], dtype=torch.int32), cache)
    first = tiny.decode(tokens[:, 12], cache)
    tiny.chunk(tokens[:, 13:20].flip(1), cache)  # a draft that is rejected
    cache.seq_lens.fill_(12)
    assert torch.equal(tiny.decode(tokens[:, 12], cache), first)


@torch.inference_mode()
def test_a_batch_row_equals_its_single_run(tiny: LlamaModel) -> None:
    lengths = [17, 3, 30]
    tokens = prompt(30, rows=3)
    cache = new_cache(tiny, 48, batch_size=3)
    batched = [tiny.prefill(tokens, torch.tensor(lengths, dtype=torch.int32), cache)]
    following = prompt(6, rows=3)
    batched += [tiny.decode(following[:, i], cache) for i in range(3)]
    batched.append(tiny.chunk(following[:, 3:], cache)[:, -1])
    for row, length in enumerate(lengths):
        alone = new_cache(tiny, 48)
        single = [
            tiny.prefill(
                tokens[row : row + 1, :length], torch.tensor([length], dtype=torch.int32), alone
            )
        ]
        single += [tiny.decode(following[row : row + 1, i], alone) for i in range(3)]
        single.append(tiny.chunk(following[row : row + 1, 3:], alone)[:, -1])
        for together, separate in zip(batched, single, strict=True):
            assert (together[row] - separate[0]).abs().max() < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@torch.inference_mode()
def test_16_bit_models_stay_close_to_fp32(dtype: torch.dtype, tmp_path: Path) -> None:
    write_tiny(tmp_path, dtype=dtype)
    narrow = load_hf(tmp_path, device="cpu")
    assert narrow.dtype == dtype
    wide = load_hf(tmp_path, device="cpu", dtype="float32")
    tokens = prompt(60)
    narrow_logits = narrow.chunk(tokens, new_cache(narrow, 64))
    expected = wide.chunk(tokens, new_cache(wide, 64))
    assert narrow_logits.dtype == torch.float32
    error = (narrow_logits - expected).abs().max()
    assert 0 < error < 3e-2 * expected.abs().max()


def test_tied_head_is_one_tensor(tmp_path: Path) -> None:
    write_tiny(tmp_path, tiny_config(tie_word_embeddings=True))
    weights = load_hf(tmp_path, device="cpu").weights
    assert weights.lm_head.data_ptr() == weights.embed_tokens.data_ptr()


@pytest.mark.parametrize("device", ["tpu", "meta", "cud", "cpu:x"])
def test_an_unknown_device_is_named(device: str, tmp_path: Path) -> None:
    write_tiny(tmp_path)
    with pytest.raises(ValueError, match=f"device must be .* found '{device}'"):
        load_hf(tmp_path, device=device)


def test_engine_uses_default_sizes(tiny: LlamaModel) -> None:
    assert Engine(tiny).max_seq_len == 1024  # the model's context, below the default of 4096
