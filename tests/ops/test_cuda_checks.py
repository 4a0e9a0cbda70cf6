"""Every check in ops/cuda.py, triggered on the CPU: none reaches the compiled module."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tinydecode.ops import cuda


class Untouchable:
    """Stands for tinydecode._C and fails the test when anything is asked of it."""

    def __getattr__(self, name: str) -> None:
        pytest.fail(f"_C.{name} was reached")


@pytest.fixture(autouse=True)
def _no_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_native", Untouchable())


def half(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float16, device="meta")


def floats(*shape: int) -> Tensor:
    return torch.zeros(shape, device="meta")


def int32(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32, device="meta")


E, B, T, H, K, D, S, F = 32, 2, 3, 4, 2, 64, 10, 48


# Each op with arguments that pass every check but the device's.
VALID: dict[str, dict[str, Tensor | float]] = {
    "rms_norm": {"x": half(B, E), "weight": half(E), "eps": 1e-5, "out": half(B, E)},
    "add_rms_norm": {
        "x": half(B, E),
        "residual": half(B, E),
        "weight": half(E),
        "eps": 1e-5,
        "out": half(B, E),
    },
    "rope": {
        "q": half(B, T, H, D),
        "k": half(B, T, K, D),
        "cos": floats(S, D // 2),
        "sin": floats(S, D // 2),
        "seq_lens": int32(B),
    },
    "kv_append": {
        "k": half(B, T, K, D),
        "v": half(B, T, K, D),
        "k_cache": half(B, K, S, D),
        "v_cache": half(B, K, S, D),
        "seq_lens": int32(B),
    },
    "rope_kv_append": {
        "q": half(B, T, H, D),
        "k": half(B, T, K, D),
        "v": half(B, T, K, D),
        "cos": floats(S, D // 2),
        "sin": floats(S, D // 2),
        "k_cache": half(B, K, S, D),
        "v_cache": half(B, K, S, D),
        "seq_lens": int32(B),
    },
    "silu_mul": {"gate_up": half(B, 2 * F), "out": half(B, F)},
    "attention": {
        "q": half(B, T, H, D),
        "k_cache": half(B, K, S, D),
        "v_cache": half(B, K, S, D),
        "seq_lens": int32(B),
        "out": half(B, T, H * D),
    },
    "argmax": {
        "logits": half(B, 100),
        "out": torch.zeros(B, dtype=torch.int64, device="meta"),
        "nonfinite": int32(1),
    },
}

Change = Callable[[Tensor], Tensor]


def wider(x: Tensor) -> Tensor:
    return x.new_zeros(*x.shape[:-1], x.shape[-1] + 2)


def longer(x: Tensor) -> Tensor:
    return x.new_zeros(x.shape[0] + 1, *x.shape[1:])


def as_double(x: Tensor) -> Tensor:
    return x.double()


def as_int64(x: Tensor) -> Tensor:
    return x.long()


def transposed(x: Tensor) -> Tensor:
    """The same shape, with the strides of the transpose."""
    return x.new_empty(x.shape[::-1]).permute(*reversed(range(x.dim())))


def flat(x: Tensor) -> Tensor:
    return x.flatten()


def no_elements(x: Tensor) -> Tensor:
    return x[..., :0]


def odd(x: Tensor) -> Tensor:
    return x[..., :-1]


def more_heads(x: Tensor) -> Tensor:
    return x.new_zeros(*x.shape[:2], x.shape[2] + 1, x.shape[3])


def heads_apart(x: Tensor) -> Tensor:
    """Heads that are not next to one another."""
    return x.new_zeros(*x.shape[:2], x.shape[2], 2 * x.shape[3])[..., : x.shape[3]]


def no_slots(x: Tensor) -> Tensor:
    return x[:, :, :0]


def three_heads(x: Tensor) -> Tensor:
    return x.new_zeros(x.shape[0], 3, *x.shape[2:])


def other_device(x: Tensor) -> Tensor:
    return torch.zeros(x.shape, dtype=x.dtype)


CASES: list[tuple[str, str, Change, str]] = [
    ("rms_norm", "x", as_double, "x must be float32, float16 or bfloat16, found torch.float64"),
    ("rms_norm", "x", no_elements, r"x must have a last dimension, found \[2, 0\]"),
    ("rms_norm", "x", transposed, "x must have dense, evenly spaced rows"),
    ("rms_norm", "weight", wider, r"weight must be \[32\], found \[34\]"),
    ("rms_norm", "weight", as_double, "weight must be torch.float16, found torch.float64"),
    ("rms_norm", "out", wider, r"out must be \[2, 32\], found \[2, 34\]"),
    ("rms_norm", "out", transposed, r"out must be contiguous, found strides \[1, 2\]"),
    ("rms_norm", "out", other_device, "out must be on .* like x, found cpu"),
    ("add_rms_norm", "x", transposed, "x must be contiguous"),
    ("add_rms_norm", "residual", wider, r"residual must be \[2, 32\]"),
    ("add_rms_norm", "residual", transposed, "residual must be contiguous"),
    ("add_rms_norm", "residual", as_double, "residual must be torch.float16"),
    ("add_rms_norm", "residual", other_device, "residual must be on"),
    ("add_rms_norm", "weight", wider, "weight must be"),
    ("add_rms_norm", "out", longer, r"out must be \[2, 32\], found \[3, 32\]"),
    ("rope", "q", flat, r"q must be \[B, T, H, D\], found \[1536\]"),
    ("rope", "q", as_int64, "q must be float32, float16 or bfloat16"),
    ("rope", "q", odd, r"q must have an even head_dim, found 63"),
    ("rope", "q", heads_apart, "heads and head_dim of q must be dense"),
    ("rope", "k", wider, r"k must be \[2, 3, K, 64\], found \[2, 3, 2, 66\]"),
    ("rope", "k", longer, r"k must be \[2, 3, K, 64\], found \[3, 3, 2, 64\]"),
    ("rope", "k", as_double, "k must be torch.float16"),
    ("rope", "cos", wider, r"cos must be \[10, 32\], found \[10, 34\]"),
    ("rope", "cos", flat, r"cos must be \[S, 32\], found \[320\]"),
    ("rope", "cos", as_double, "cos must be torch.float32"),
    ("rope", "sin", longer, r"sin must be \[10, 32\], found \[11, 32\]"),
    ("rope", "sin", transposed, "sin must be contiguous"),
    ("rope", "seq_lens", as_int64, "seq_lens must be torch.int32, found torch.int64"),
    ("rope", "seq_lens", longer, r"seq_lens must be \[2\], found \[3\]"),
    ("rope", "seq_lens", other_device, "seq_lens must be on"),
    ("kv_append", "v", more_heads, r"v must be \[2, 3, 2, 64\], found \[2, 3, 3, 64\]"),
    ("kv_append", "v", heads_apart, "heads and head_dim of v must be dense"),
    ("kv_append", "k_cache", flat, r"k_cache must be \[2, 2, S, 64\], found \[2560\]"),
    ("kv_append", "k_cache", no_slots, "k_cache must be"),
    ("kv_append", "k_cache", three_heads, r"k_cache must be \[2, 2, 10, 64\]"),
    ("kv_append", "v_cache", wider, r"v_cache must be \[2, 2, 10, 64\]"),
    ("kv_append", "v_cache", transposed, "v_cache must be contiguous"),
    ("kv_append", "v_cache", as_double, "v_cache must be torch.float16"),
    ("kv_append", "seq_lens", as_int64, "seq_lens must be torch.int32"),
    ("rope_kv_append", "k", more_heads, r"v must be \[2, 3, 3, 64\]"),
    ("rope_kv_append", "cos", wider, "cos must be"),
    ("rope_kv_append", "k_cache", longer, "k_cache must be"),
    ("rope_kv_append", "v_cache", other_device, "v_cache must be on"),
    ("silu_mul", "gate_up", odd, "gate_up must have an even last dimension, found 95"),
    ("silu_mul", "gate_up", transposed, "gate_up must be contiguous"),
    ("silu_mul", "out", wider, r"out must be \[2, 48\], found \[2, 50\]"),
    ("attention", "q", wider, r"head_dim must be one of \(64, 80, 96, 128, 256\), found 66"),
    ("attention", "k_cache", flat, r"k_cache must be \[B, K, S, D\], found \[2560\]"),
    ("attention", "k_cache", three_heads, "the 4 heads of q must be a multiple of the 3 heads"),
    ("attention", "v_cache", longer, "v_cache must be"),
    ("attention", "seq_lens", longer, "seq_lens must be"),
    ("attention", "out", wider, r"out must be \[2, 3, 256\], found \[2, 3, 258\]"),
    ("argmax", "logits", flat, r"logits must be \[B, V\], found \[200\]"),
    ("argmax", "logits", transposed, "logits must have dense, evenly spaced rows"),
    ("argmax", "out", longer, r"out must be \[2\], found \[3\]"),
    ("argmax", "nonfinite", longer, r"nonfinite must be \[1\], found \[2\]"),
    ("argmax", "nonfinite", other_device, "nonfinite must be on"),
]


@pytest.mark.parametrize(("op", "name", "change", "message"), CASES)
def test_check(
    monkeypatch: pytest.MonkeyPatch, op: str, name: str, change: Change, message: str
) -> None:
    if change is other_device:
        monkeypatch.setattr(cuda, "_DEVICE_TYPE", "meta")  # the first tensor is where it should be
    arguments = dict(VALID[op])
    arguments[name] = change(arguments[name])
    with pytest.raises(ValueError, match=f"^{op}: {message}"):
        getattr(cuda, op)(**arguments)


@pytest.mark.parametrize("op", VALID)
def test_tensors_of_another_device_are_refused_last(op: str) -> None:
    """What CASES changes is all that is wrong with its calls."""
    first = next(iter(VALID[op]))
    with pytest.raises(ValueError, match=f"^{op}: {first} must be on a CUDA device, found meta"):
        getattr(cuda, op)(**VALID[op])


def test_misaligned_cache() -> None:
    arguments = {name: torch.empty_like(x, device="cpu") for name, x in VALID["attention"].items()}
    cache = torch.empty(B * K * S * D + 8, dtype=torch.float16)
    start = next(i for i in range(8) if cache[i:].data_ptr() % 16 == 2)
    arguments["v_cache"] = cache[start : start + B * K * S * D].view(B, K, S, D)
    with pytest.raises(ValueError, match="v_cache must start at a multiple of 16 bytes"):
        cuda.attention(**arguments)


def test_a_workspace_that_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = {name: torch.empty_like(x, device="cpu") for name, x in VALID["attention"].items()}

    class OnlySizes(Untouchable):
        def attention_workspace(self, *sizes: int) -> int:
            assert sizes == (B, T, H, D, S)
            return 1000

    monkeypatch.setattr(cuda, "_native", OnlySizes())
    monkeypatch.setattr(cuda, "_DEVICE_TYPE", "cpu")
    with pytest.raises(ValueError, match="workspace must be 1000 contiguous bytes, found 996"):
        cuda.attention(**arguments, workspace=torch.empty(249))


def test_a_failed_launch_names_op_shapes_and_device(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        def silu_mul(self, *arguments: int) -> None:
            raise RuntimeError("td_silu_mul: no kernel image (cudaError 209)")

    monkeypatch.setattr(cuda, "_native", Failing())
    monkeypatch.setattr(cuda, "_DEVICE_TYPE", "cpu")
    monkeypatch.setattr(cuda, "_current_stream", lambda index: 0)
    message = r"silu_mul of torch.float32 on cuda:0 with gate_up \[2, 8\]: .*no kernel image"
    with pytest.raises(RuntimeError, match=message):
        cuda.silu_mul(torch.zeros(2, 8))
