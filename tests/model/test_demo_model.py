"""The real demo model against transformers, which reads the same GGUF by its own code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tinydecode import Engine, Tokenizer, load_hf
from tinydecode.demo import demo_model

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Why is the sky blue?",
    "1, 2, 4, 8, 16,",
    "Dear Sir or Madam,\n\nI am writing to",
    "El perro y el gato",
    '{"name": "Ada", "born": 1815, "died":',
    "Once upon a time, in a village by the sea, there lived an old fisherman who",
    "\n\n  \t",
    "😀 emoji and naïve café:",
]


@pytest.fixture(scope="module", autouse=True)
def _two_threads() -> Iterator[None]:
    """This model is large enough for a second thread to pay."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def theirs() -> Any:
    from transformers import AutoModelForCausalLM

    path = demo_model()
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(load_hf(demo_model(), device="cpu", dtype="float32"), max_seq_len=512)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(demo_model())


@pytest.mark.parametrize("prompt", PROMPTS)
@torch.inference_mode()
def test_greedy_tokens_and_logits_equal_transformers(
    prompt: str, theirs: Any, engine: Engine, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode(prompt)
    new, _ = engine.generate(ids, 64, ignore_eos=True)
    expected = theirs.generate(
        torch.tensor([ids]),
        max_new_tokens=64,
        min_new_tokens=64,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )[0, len(ids) :]
    assert new == expected.tolist()
    # The logits of prompt and answer, in one pass of each.
    whole = torch.tensor([ids + new])
    engine.cache.reset()
    difference = engine.chunk(whole) - theirs(whole).logits
    assert difference.abs().max() < 2e-4


@torch.inference_mode()
def test_16_bit_logits_are_close(engine: Engine, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PROMPTS[7])
    expected = engine.prefill(ids)
    narrow = Engine(load_hf(demo_model(), device="cpu", dtype="bfloat16"), max_seq_len=64)
    error = (narrow.prefill(ids) - expected).abs().max()
    assert 0 < error < 3e-2 * expected.abs().max()
