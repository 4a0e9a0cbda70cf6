"""Models of the speculation tests: made once a session, on the device asked for."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import torch
from fixtures import MASKED, cycle_table, tiny_config, tiny_tensors, write_checkpoint, write_markov
from torch import Tensor

from tinydecode import Engine, LlamaModel, graphs, load_hf

ROW_TARGET = (2.0, 1.0, 0.0, -1.0)
ROW_DRAFT = (0.0, 1.0, 2.0, -1.0)


def _load(path: Path, device: str) -> LlamaModel:
    """bfloat16 on a GPU: there a row's bits do not depend on how many rows a pass has."""
    return load_hf(path, device=device, dtype="bfloat16" if device == "cuda" else "float32")


def _directory() -> Path:
    return Path(mkdtemp(prefix="tinydecode-spec-"))


@cache
def markov(row: tuple[float, ...], device: str, vocab: int = 8) -> LlamaModel:
    """Every token is drawn from softmax(row), whatever came before; the rest is masked."""
    table = torch.full((vocab, vocab), MASKED)
    table[:, : len(row)] = torch.tensor(row)
    return _load(write_markov(_directory(), table), device)


@cache
def cycle(chain: tuple[int, ...], device: str, vocab: int = 512, **config: object) -> LlamaModel:
    """Greedy output is the chain."""
    return _load(write_markov(_directory(), cycle_table(chain, vocab), **config), device)


@cache
def tiny(
    device: str, noise: float = 0.0, vocab: int = 512, context: int = 1024, seed: int = 0
) -> LlamaModel:
    """F-TINY; with noise, the same model slightly off; with another vocabulary, cut or padded."""
    config = tiny_config(max_position_embeddings=context)
    tensors = tiny_tensors(config, seed)
    generator = torch.Generator().manual_seed(7)

    def resized(name: str, x: Tensor) -> Tensor:
        x = x + noise * torch.randn(x.shape, generator=generator) if x.dim() > 1 else x
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            x = torch.cat((x, torch.zeros(max(0, vocab - len(x)), x.shape[1])))[:vocab]
        return x

    tensors = {name: resized(name, x) for name, x in tensors.items()}
    config["vocab_size"] = vocab
    return _load(write_checkpoint(_directory(), config, tensors), device)


def engine(model: LlamaModel, max_seq_len: int | None = None) -> Engine:
    """An engine, with graphs where there are any."""
    made = Engine(model, max_seq_len=max_seq_len)
    return graphs.enable(made) if model.device.type == "cuda" else made
