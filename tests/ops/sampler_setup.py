"""What the tests of the sampler share: its state on a device, filters, and awkward rows."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tinydecode.ops import ref_sample, sample
from tinydecode.sampling import SamplingParams

SLOTS = 4
OFF = {"top_p": 1.0, "log_min_p": -math.inf, "repetition": 1.0}


@dataclass
class Words:
    """What one step told the host about one row."""

    token: int
    logprob: float
    sampled_logprob: float
    top: list[tuple[int, float, float]]


@dataclass
class Setup:
    """Everything a sampling call reads and writes, on one device."""

    bench: Any
    batch: int
    vocab: int
    params: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        device = self.bench.device
        stops = self.params.pop("stops", [])
        header = np.zeros(1, ref_sample.PARAMS)
        values = {**OFF, "temperature": 1.0, "seed": 1, **self.params, "num_stops": len(stops)}
        for name, value in values.items():
            header[name] = value
        header["stops"][0, : len(stops)] = stops
        rows = np.zeros(self.batch, ref_sample.ROW)
        raw = np.frombuffer(header.tobytes() + rows.tobytes(), np.uint8).copy()
        self.state = torch.from_numpy(raw).to(device)
        self.bias = torch.zeros(self.vocab, device=device)
        self.counts = torch.zeros(self.batch, self.vocab, dtype=torch.int32, device=device)
        self.tokens = torch.full((self.batch,), -5, dtype=torch.int64, device=device)
        self.seq_lens = torch.full((self.batch,), 7, dtype=torch.int32, device=device)
        self.ring = torch.zeros(
            SLOTS,
            self.batch,
            ref_sample.RING_WORDS,
            dtype=torch.int64,
            pin_memory=device.type == "cuda",
        )

    @property
    def rows(self) -> np.ndarray:
        raw = self.state.cpu().numpy()[ref_sample.PARAMS.itemsize :]
        return raw.view(ref_sample.ROW)

    def run(
        self,
        module: ModuleType,
        logits: Tensor,
        has_filters: bool = True,
        has_logprobs: bool = False,
    ) -> list[int]:
        """One step; the tokens of all rows."""
        device = self.bench.device
        ring = self.ring.to(device) if module is ref_sample else self.ring
        module.sample_tokens(
            *(logits.to(device), self.state, self.bias, self.counts, self.tokens, self.seq_lens),
            ring,
            has_filters=has_filters,
            has_logprobs=has_logprobs,
        )
        if device.type == "cuda":
            torch.cuda.synchronize()
        self.ring.copy_(ring)
        return self.tokens.tolist()

    def token(self, row: int = 0) -> int:
        word = int(self.ring[int(self.rows["sequence"][row]) % SLOTS, row, 0])
        assert word >> 32 == self.rows["sequence"][row]
        return word - (1 << 32 if word & 0x80000000 else 0) - (word >> 32 << 32)

    def words(self, row: int = 0, count: int = 0) -> Words:
        sequence = int(self.rows["sequence"][row])
        words = self.ring[sequence % SLOTS, row].numpy()
        used = words[[0, 2, 3, *range(4, 4 + 3 * count)]]
        assert (used >> 32 == sequence).all()
        assert int(words[1]) >> 48 & 0xFFFF == sequence & 0xFFFF
        values = (used & 0xFFFFFFFF).astype(np.uint32)
        token, floats = int(values[:1].view(np.int32)[0]), values.view(np.float32)
        top = [
            (int(values[3 + 3 * i]), float(floats[4 + 3 * i]), float(floats[5 + 3 * i]))
            for i in range(count)
        ]
        return Words(token, float(floats[1]), float(floats[2]), top)


def both(bench: Any, logits: Tensor, **params: Any) -> tuple[Setup, Setup]:
    """A setup for the kernel and an equal one for the twin."""
    batch, vocab = logits.shape
    return Setup(bench, batch, vocab, dict(params)), Setup(bench, batch, vocab, dict(params))


def assert_equal(kernel: Setup, twin: Setup) -> None:
    assert torch.equal(kernel.state, twin.state)
    assert torch.equal(kernel.tokens, twin.tokens)
    assert torch.equal(kernel.counts, twin.counts)
    assert torch.equal(kernel.seq_lens, twin.seq_lens)
    assert torch.equal(kernel.ring[:, :, 0], twin.ring[:, :, 0])


FILTERS = [
    {},
    {"top_k": 50},
    {"top_k": 3},
    {"top_p": 0.9},
    {"top_p": 0.0},
    {"log_min_p": math.log(0.1)},
    {"log_min_p": 0.0},
    {"top_k": 40, "top_p": 0.95, "log_min_p": math.log(0.02), "temperature": 0.8},
    {"top_k": 1},
    {"temperature": 0.0},
    {"temperature": 1e-30},
    {"temperature": 50.0},
]


def is_greedy(params: dict[str, Any]) -> bool:
    return params.get("temperature") == 0 or params.get("top_k") == 1


def filters_of(params: dict[str, Any]) -> SamplingParams:
    """The same filters for `probabilities`."""
    min_p = math.exp(params.get("log_min_p", -math.inf))
    return SamplingParams(
        params.get("temperature", 1.0), params.get("top_k", 0), params.get("top_p", 1.0), min_p
    )


def distribution(bench: Any, logits: Tensor, **params: Any) -> tuple[Tensor, Tensor]:
    """(p, z) of each row as a kernel would evaluate them: float64 [R, V], float32 [R, V]."""
    rows, vocab = logits.shape
    setup = Setup(bench, rows, vocab, params)
    found = sample.distribution(logits.to(bench.device), setup.state, setup.bias, setup.counts)
    raw = found.cpu().numpy()
    layout = [("max", "<f4"), ("temperature", "<f4"), ("cut_bin", "<i4"), ("is_valid", "<i4")]
    layout += [("cut_key", "<u8"), ("total", "<u8")]
    d = raw[: rows * 32].view(np.dtype(layout))
    padded = -(-vocab // 4) * 4
    z = raw[rows * 32 : rows * 32 + rows * padded * 4].view(np.float32).reshape(rows, padded)
    z = torch.from_numpy(z[:, :vocab].copy())
    p = torch.zeros(rows, vocab, dtype=torch.float64)
    for row in range(rows):
        assert d["is_valid"][row] == 1
        bits = z[row].view(torch.int32).long() & 0xFFFFFFFF
        ordered = torch.where(bits >> 31 == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)
        ids = torch.arange(vocab) ^ 0xFFFFFFFF
        cut_high, cut_low = int(d["cut_key"][row]) >> 32, int(d["cut_key"][row]) & 0xFFFFFFFF
        if d["temperature"][row] == 0:
            p[row, (ordered == cut_high) & (ids == cut_low)] = 1.0
            continue
        x = (z[row] - float(d["max"][row])) / float(d["temperature"][row])
        w = torch.round(x.exp().double() * 2.0**42)
        bins = (x.clamp(min=-31.9) * -32.0).int().clamp(max=1023)
        in_cut = (ordered > cut_high) | ((ordered == cut_high) & (ids >= cut_low))
        kept = (bins < int(d["cut_bin"][row])) | ((bins == int(d["cut_bin"][row])) & in_cut)
        p[row] = torch.where(kept, w, 0.0) / float(d["total"][row])
    return p, z


# Rows on which more tokens decide than the kernel's list holds, and rows full of ties.
def flat(vocab: int) -> Tensor:
    return torch.zeros(vocab)


def stairs(vocab: int) -> Tensor:
    """Thousands of tokens on each of a few steps of 1/128: several to a bin."""
    return (torch.arange(vocab) % 7).flip(0) / 128.0


def narrow(vocab: int) -> Tensor:
    return torch.randn(vocab) / 100
