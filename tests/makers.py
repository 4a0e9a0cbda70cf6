"""Engines of every kind, for tests that must hold for all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tinydecode import Engine, graphs, load_hf
from tinydecode.model import LlamaModel


class Maker:
    """Makes engines of one kind and loads models for them.

    Attributes:
        device: "cpu" or "cuda".
        loop: "host" (the CPU's own), "device" (steps launched ahead; on the CPU by the twin of the
            sampler) or "graphs".
    """

    def __init__(self, device: str, loop: str) -> None:
        self.device = device
        self.loop = loop

    def __call__(self, model: LlamaModel, *args: Any, **options: Any) -> Engine:
        engine = Engine(model, *args, **options)
        engine.samples_on_device = self.loop != "host"
        return graphs.enable(engine) if self.loop == "graphs" else engine

    def load(self, directory: Path) -> LlamaModel:
        return load_hf(directory, device=self.device)

    def tokens(self, *ids: Any) -> torch.Tensor:
        return torch.tensor(ids, device=self.device)


MAKERS = [
    pytest.param(("cpu", "host"), id="cpu"),
    pytest.param(("cpu", "device"), id="cpu-device"),
    pytest.param(("cuda", "device"), id="cuda", marks=pytest.mark.cuda),
    pytest.param(("cuda", "graphs"), id="graphs", marks=pytest.mark.cuda),
]
