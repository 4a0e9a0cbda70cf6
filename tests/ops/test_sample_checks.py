"""Every check in ops/sample.py, triggered on the CPU: none reaches the compiled module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_cuda_checks import Untouchable
from torch import Tensor

from tinydecode.ops import cuda, ref_sample, sample

B, V, SLOTS = 2, 50, 4
STATE = ref_sample.PARAMS.itemsize + B * ref_sample.ROW.itemsize


@pytest.fixture(autouse=True)
def _no_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_native", Untouchable())


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device="meta")


def valid() -> dict[str, Any]:
    """Arguments that pass every check but the device's."""
    return {
        "logits": meta(B, V),
        "state": meta(STATE, dtype=torch.uint8),
        "bias": meta(V),
        "counts": meta(B, V, dtype=torch.int32),
        "tokens": meta(B, dtype=torch.int64),
        "seq_lens": meta(B, dtype=torch.int32),
        "ring": torch.zeros(SLOTS, B, ref_sample.RING_WORDS, dtype=torch.int64),
    }


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("logits", meta(V), r"logits must be \[B, V\] with V from 1 to 1048576, found \[50\]"),
        ("logits", meta(B, 0), "with V from 1"),
        ("logits", meta(1, 2**20 + 1), "found .1, 1048577."),
        ("logits", meta(B, V).half(), "logits must be torch.float32, found torch.float16"),
        ("logits", meta(V, B).T, "logits must be contiguous"),
        ("state", meta(STATE - 1, dtype=torch.uint8), f"state must be .{STATE}., found"),
        ("state", meta(STATE), "state must be torch.uint8"),
        ("bias", meta(V + 1), "bias must be .50., found .51."),
        ("counts", meta(B, V, dtype=torch.int64), "counts must be torch.int32"),
        ("tokens", meta(B, dtype=torch.int32), "tokens must be torch.int64"),
        ("seq_lens", meta(B + 1, dtype=torch.int32), "seq_lens must be .2., found .3."),
        ("ring", torch.zeros(0, B, 64, dtype=torch.int64), "ring must be .slots, 2, 64., found"),
        ("ring", torch.zeros(SLOTS, B, 63, dtype=torch.int64), "ring must be .4, 2, 64., found"),
        ("ring", torch.zeros(SLOTS, B, 64), "ring must be torch.int64"),
        ("bias", torch.zeros(V), "bias must be on meta like logits|must be on a CUDA device"),
    ],
)
def test_each_argument(name: str, value: Tensor, message: str) -> None:
    arguments = {**valid(), name: value}
    with pytest.raises(ValueError, match=f"sample: .*{message}"):
        sample.sample_tokens(**arguments, has_filters=True, has_logprobs=False)


def test_everything_else_fits() -> None:
    with pytest.raises(ValueError, match="sample: logits must be on a CUDA device, found meta"):
        sample.sample_tokens(**valid(), has_filters=True, has_logprobs=False)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("logits", meta(V), "logits must be"),
        ("state", meta(3, dtype=torch.uint8), "state must be 184 bytes or more"),
        ("bias", meta(V - 1), "bias must be"),
        ("counts", meta(B, V), "counts must be torch.int32"),
        ("logits", meta(B, V), "logits must be on a CUDA device, found meta"),
    ],
)
def test_each_argument_of_distribution(name: str, value: Tensor, message: str) -> None:
    names = ("logits", "state", "bias", "counts")
    arguments = {key: value for key, value in valid().items() if key in names}
    with pytest.raises(ValueError, match=f"distribution: {message}"):
        sample.distribution(**{**arguments, name: value})
