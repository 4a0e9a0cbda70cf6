"""How far logits are from a float64 run of the same weights: the fused step against torch.

The yardstick is the model in torch's own 16-bit arithmetic (the twins): the fused step rounds less
often, so its error must not be larger. Prompts go through `Engine.chunk` a few tokens at a time,
which is the pass that decoding and verifying use.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
import torch.nn.functional as F
from fixtures import tiny_config, write_tiny
from torch import Tensor

from tinydecode import Engine, LlamaModel, Tokenizer, load_hf, ops
from tinydecode.demo import demo_model
from tinydecode.ops import ref

PROSE = Path(__file__).parent.parent / "data" / "prose.txt"
WINDOW, STRIDE = 256, 64  # tokens; the perplexity is that of every window of the text by itself
# In float32 on the CPU: windows_perplexity(model, prose, WINDOW), which takes half a minute, and of
# the first window alone, where a float64 run gives the same digits.
PERPLEXITY, FIRST_PERPLEXITY = 32.98989, 30.21844

SHAPES: dict[str, dict[str, Any]] = {
    "64": {},
    "80": {
        "head_dim": 80,
        "hidden_size": 240,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "num_hidden_layers": 4,
    },
    "96": {"head_dim": 96, "hidden_size": 384, "num_key_value_heads": 4},
    "128-uneven": {
        "head_dim": 128,
        "hidden_size": 328,
        "intermediate_size": 776,
        "num_attention_heads": 6,
        "vocab_size": 515,
    },
    "256": {"head_dim": 256, "hidden_size": 512, "num_hidden_layers": 3},
    "deep": {"num_hidden_layers": 8, "tie_word_embeddings": True},
    "wide": {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32},
}


def in_pieces(model: LlamaModel, token_ids: Tensor, size: int) -> Tensor:
    """The logits after every token of a prompt [T], in passes of `size` tokens, [T, V]."""
    with Engine(model, max_seq_len=len(token_ids)) as engine:
        return torch.cat([engine.chunk(piece[None])[0] for piece in token_ids.split(size)])


def losses(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Negative log-likelihood of each of a prompt's tokens from its second on."""
    return F.cross_entropy(logits[:-1].double(), token_ids[1:], reduction="none")


def windows_perplexity(model: LlamaModel, token_ids: Tensor, size: int) -> float:
    """Over every window of a text, each read by itself in passes of `size` tokens."""
    windows = token_ids.to(model.device).unfold(0, WINDOW, STRIDE)
    every = [losses(in_pieces(model, window, size), window) for window in windows]
    return math.exp(torch.cat(every).mean())


def assert_not_above(logits: list[Tensor], torchs: list[Tensor], exact: list[Tensor]) -> None:
    """The error of `logits`, of some texts [T, V], is at most that of `torchs`.

    By three measures over all tokens: L2 norm, KL divergence, and the mean of every token's largest
    error. The largest of all is that of a first token, one draw of rounding noise.
    """
    right = torch.cat(exact)
    logs = torch.log_softmax(right, -1)

    def measure(found: list[Tensor]) -> tuple[float, float, float]:
        x = torch.cat(found).double()
        assert x.shape == right.shape
        largest = (x - right).abs().amax(-1)
        divergence = (logs.exp() * (logs - torch.log_softmax(x, -1))).sum(-1).mean()
        print(f"largest error of all {float(largest.max()):.4e}")
        return float((x - right).norm()), float(divergence), float(largest.mean())

    ours, theirs = measure(logits), measure(torchs)
    for name, error, allowed in zip(("L2", "KL", "largest"), ours, theirs, strict=True):
        print(f"{name} {error:.4e}, torch's {allowed:.4e}")
        assert error <= allowed, f"{name}: error {error:.4e}, torch's {allowed:.4e}"


@pytest.mark.parametrize("name", SHAPES)
@torch.inference_mode()
def test_the_oracle_agrees_with_the_model_in_float32(name: str, tmp_path: Path) -> None:
    model = load_hf(write_tiny(tmp_path, tiny_config(**SHAPES[name])), device="cpu")
    token_ids = torch.arange(0, 480, 13)
    exact = oracle.llama_logits(model.config, model.weights, token_ids)
    error = (in_pieces(model, token_ids, 8) - exact).abs().max()
    assert error < 2e-5 * exact.abs().max()


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("name", SHAPES)
@torch.inference_mode()
def test_fused_logits_are_no_worse_than_torchs(
    name: str, rows: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    write_tiny(tmp_path, tiny_config(**SHAPES[name]), dtype=dtype)
    fused = load_hf(tmp_path, device="cuda")
    assert ops.fused_step(fused.config, dtype, fused.device) is not None
    generator = torch.Generator().manual_seed(rows)
    token_ids = torch.randint(0, 512, (160,), generator=generator).cuda()
    logits = in_pieces(fused, token_ids, rows)
    with ops.forced(ref):
        plain = load_hf(tmp_path, device="cuda")
        torchs = in_pieces(plain, token_ids, len(token_ids))
        exact = oracle.llama_logits(plain.config, plain.weights, token_ids)
    assert_not_above([logits], [torchs], [exact])


@pytest.fixture(scope="module")
def prose() -> Tensor:
    """The text's token ids."""
    return torch.tensor(Tokenizer(demo_model()).encode(PROSE.read_text(encoding="utf-8")))


@torch.inference_mode()
def test_perplexity_on_the_cpu(prose: Tensor) -> None:
    """The first window of the text that the GPU is held to."""
    model = load_hf(demo_model(), device="cpu", dtype="float32")
    assert (len(prose), int(prose.sum())) == (1863, 5680705), "another text: PERPLEXITY is not its"
    first = prose[:WINDOW]
    found = math.exp(losses(in_pieces(model, first, 64), first).mean())
    assert found == pytest.approx(FIRST_PERPLEXITY, rel=1e-5)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@torch.inference_mode()
def test_perplexity_on_the_gpu(dtype: str, prose: Tensor) -> None:
    model = load_hf(demo_model(), device="cuda", dtype=dtype)
    assert ops.fused_step(model.config, model.dtype, model.device) is not None
    assert windows_perplexity(model, prose, 8) == pytest.approx(PERPLEXITY, rel=1e-3)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@torch.inference_mode()
def test_the_demo_models_logits_are_no_worse_than_torchs(dtype: str, prose: Tensor) -> None:
    texts = [text.cuda() for text in torch.split(prose, 128)]  # each with a first token
    fused = load_hf(demo_model(), device="cuda", dtype=dtype)
    logits = [in_pieces(fused, text, 8) for text in texts]
    with ops.forced(ref):
        plain = load_hf(demo_model(), device="cuda", dtype=dtype)
        torchs = [in_pieces(plain, text, len(text)) for text in texts]
        exact = [oracle.llama_logits(plain.config, plain.weights, text) for text in texts]
    assert_not_above(logits, torchs, exact)
