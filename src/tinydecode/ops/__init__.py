"""One public function per op; each call picks its implementation by the device of its tensors.

`ref` is the specification in plain torch and runs anywhere. `cuda` holds the hand-written kernels.
`cpu` holds faster equivalents of a few twins. `TD_NO_EXT=1` forces the torch implementations.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch
from torch import Tensor

from tinydecode.config import ModelConfig
from tinydecode.ops import cpu, ref

_forced: ModuleType | None = None
_kernels: ModuleType | None | bool = False  # False: not looked for yet


def _load_kernels() -> ModuleType | None:
    """The kernel backend, or None where the compiled extension is absent, unusable or unwanted."""
    global _kernels
    if _kernels is False:
        _kernels = None
        unwanted = [os.environ.get(name, "") for name in ("TD_NO_EXT", "TINYDECODE_NO_EXT")]
        if all(value in ("", "0") for value in unwanted):
            from tinydecode import _ext

            if _ext.load() is not None:
                from tinydecode.ops import cuda

                _kernels = cuda
    assert not isinstance(_kernels, bool)
    return _kernels


def backend_name(is_cuda: bool) -> str:
    """Which implementation a tensor on the CPU or on a GPU gets: "fused" or "torch"."""
    return "fused" if is_cuda and _forced is None and _load_kernels() is not None else "torch"


def fused_step(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> ModuleType | None:
    """The fused products of the decode step (`step`), if they can run this model here."""
    if device.type != "cuda" or backend_name(is_cuda=True) != "fused":
        return None
    from tinydecode.ops import step

    return step if step.fits(config, dtype, device) else None


@contextmanager
def forced(module: ModuleType) -> Iterator[None]:
    """Send every op to one implementation, whatever the device; for tests and benchmarks."""
    global _forced
    before, _forced = _forced, module
    try:
        yield
    finally:
        _forced = before


def _pick(x: Tensor) -> ModuleType:
    if _forced is not None:
        return _forced
    if x.is_cuda:
        return _load_kernels() or ref
    return cpu


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """[..., E] -> [..., E]; see `ref.rms_norm`."""
    result: Tensor = _pick(x).rms_norm(x, weight, eps, out)
    return result


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor | None = None
) -> Tensor:
    """residual += x in place, then the norm of it, [..., E]; see `ref.add_rms_norm`."""
    result: Tensor = _pick(x).add_rms_norm(x, residual, weight, eps, out)
    return result


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, seq_lens: Tensor) -> None:
    """Rotate q [B, T, H, D] and k [B, T, K, D] in place; see `ref.rope`."""
    _pick(q).rope(q, k, cos, sin, seq_lens)


def kv_append(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, seq_lens: Tensor) -> None:
    """Write k and v [B, T, K, D] into the cache [B, K, S, D]; see `ref.kv_append`."""
    _pick(k).kv_append(k, v, k_cache, v_cache, seq_lens)


def rope_kv_append(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seq_lens: Tensor,
) -> None:
    """`rope` and `kv_append` of the new tokens in one go; see `ref.rope_kv_append`."""
    _pick(q).rope_kv_append(q, k, v, cos, sin, k_cache, v_cache, seq_lens)


def silu_mul(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """[..., 2F] -> [..., F]; see `ref.silu_mul`."""
    result: Tensor = _pick(gate_up).silu_mul(gate_up, out)
    return result


def attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seq_lens: Tensor,
    scale: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """T new tokens against the cache, [B, T, H, D] -> [B, T, H * D]; see `ref.attention`."""
    result: Tensor = _pick(q).attention(q, k_cache, v_cache, seq_lens, scale, out)
    return result


def prefill_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """A prompt causally over itself, [B, T, H, D] -> [B, T, H * D]; see `ref.prefill_attention`.

    Prompts have enough rows for torch's own attention to be the fast path on every device.
    """
    backend = cpu if _forced is None else _forced
    result: Tensor = backend.prefill_attention(q, k, v, scale)
    return result


def argmax(logits: Tensor, out: Tensor | None = None, nonfinite: Tensor | None = None) -> Tensor:
    """Most likely token of each row, [B, V] -> int64 [B]; see `ref.argmax`."""
    result: Tensor = _pick(logits).argmax(logits, out, nonfinite)
    return result


def sample_tokens(
    logits: Tensor,
    state: Tensor,
    bias: Tensor,
    counts: Tensor,
    tokens: Tensor,
    seq_lens: Tensor | None,
    ring: Tensor,
    *,
    has_filters: bool,
    has_logprobs: bool,
) -> None:
    """Choose one token a row from [B, V] and advance the rows; see `ref_sample.sample_tokens`."""
    from tinydecode.ops import ref_sample

    backend: ModuleType = ref_sample
    if _pick(logits) not in (ref, cpu):
        from tinydecode.ops import sample as backend  # noqa: F811
    backend.sample_tokens(
        *(logits, state, bias, counts, tokens, seq_lens, ring),
        has_filters=has_filters,
        has_logprobs=has_logprobs,
    )


def round_ops(device: torch.device) -> ModuleType | None:
    """The ends of a speculative round (`ref_round`) for a device; None on CUDA without kernels."""
    from tinydecode.ops import ref_round

    if device.type != "cuda":
        return ref_round
    if backend_name(is_cuda=True) != "fused":
        return None
    from tinydecode.ops import round as kernels

    return kernels
