"""The hand-written kernels: every argument is checked here, then pointers go to `tinydecode._C`.

Signatures and results are those of `tinydecode.ops.ref`. The kernels trust what they are given, so
nothing reaches them that has not passed a check; a check that fails raises ValueError naming the
op, the argument, what was found and what was expected, before the compiled module is touched.
A launch that fails is a RuntimeError with the op, the shapes and the device.

Work goes on torch's current stream of the tensors' device and never synchronises, so every op can
be captured into a CUDA graph. Scratch memory comes from torch's allocator, which gives a captured
graph memory of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tinydecode import _ext

HEAD_DIMS = (64, 80, 96, 128, 256)  # of attention; the other ops take any even head_dim

_DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # TdDtype in td_api.h
_DEVICE_TYPE = "cuda"  # the emulator's tests run these very checks on CPU tensors
_native: Any = None  # the compiled module, once it was needed


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """See `ref.rms_norm`. Rows of x may be strided if they are evenly spaced; out is contiguous."""
    op = "rms_norm"
    dtype = _storage_dtype(op, "x", x)
    hidden = _last_dim(op, "x", x)
    expect(op, "weight", weight, (hidden,), dtype)
    stride = _row_stride(op, "x", x)
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    else:
        expect(op, "out", out, x.shape, dtype)
    index = same_device(op, x=x, weight=weight, out=out)
    rows = x.numel() // hidden
    arguments = (x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, hidden, stride, eps)
    launch(op, arguments, dtype, index, x=x)
    return out


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor | None = None
) -> Tensor:
    """See `ref.add_rms_norm`. All tensors are contiguous."""
    op = "add_rms_norm"
    dtype = _storage_dtype(op, "x", x)
    hidden = _last_dim(op, "x", x)
    expect(op, "x", x, x.shape, dtype)
    expect(op, "residual", residual, x.shape, dtype)
    expect(op, "weight", weight, (hidden,), dtype)
    if out is None:
        out = torch.empty_like(x)
    else:
        expect(op, "out", out, x.shape, dtype)
    index = same_device(op, x=x, residual=residual, weight=weight, out=out)
    pointers = (x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr())
    launch(op, (*pointers, x.numel() // hidden, hidden, eps), dtype, index, x=x)
    return out


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, seq_lens: Tensor) -> None:
    """See `ref.rope`. q and k may be views into packed qkv: heads and head_dim are dense."""
    op = "rope"
    dtype = _storage_dtype(op, "q", q)
    batch, tokens, heads, dim = _heads(op, "q", q, None, dtype)
    _, _, kv_heads, _ = _heads(op, "k", k, (batch, tokens, None, dim), dtype)
    table_rows = tables(op, cos, sin, dim)
    expect(op, "seq_lens", seq_lens, (batch,), torch.int32)
    index = same_device(op, q=q, k=k, cos=cos, sin=sin, seq_lens=seq_lens)
    pointers = (q.data_ptr(), k.data_ptr(), cos.data_ptr(), sin.data_ptr(), seq_lens.data_ptr())
    sizes = (batch, tokens, heads, kv_heads, dim, table_rows)
    launch(op, (*pointers, *sizes, *q.stride()[:2], *k.stride()[:2]), dtype, index, q=q, k=k)


def kv_append(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, seq_lens: Tensor) -> None:
    """See `ref.kv_append`. k and v may be views as in `rope`; tokens past the end are dropped."""
    op = "kv_append"
    dtype = _storage_dtype(op, "k", k)
    batch, tokens, kv_heads, dim = _heads(op, "k", k, None, dtype)
    _heads(op, "v", v, (batch, tokens, kv_heads, dim), dtype)
    slots = caches(op, k_cache, v_cache, (batch, kv_heads, dim), dtype)
    expect(op, "seq_lens", seq_lens, (batch,), torch.int32)
    index = same_device(op, k=k, v=v, k_cache=k_cache, v_cache=v_cache, seq_lens=seq_lens)
    pointers = (k.data_ptr(), v.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr())
    sizes = (batch, tokens, kv_heads, dim, slots)
    strides = (*k.stride()[:2], *v.stride()[:2])
    arguments = (*pointers, seq_lens.data_ptr(), *sizes, *strides)
    launch(op, arguments, dtype, index, k=k, k_cache=k_cache)


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
    """`rope` of q and k, then `kv_append` of k and v, in one launch and with the same bits."""
    op = "rope_kv_append"
    dtype = _storage_dtype(op, "q", q)
    batch, tokens, heads, dim = _heads(op, "q", q, None, dtype)
    _, _, kv_heads, _ = _heads(op, "k", k, (batch, tokens, None, dim), dtype)
    _heads(op, "v", v, (batch, tokens, kv_heads, dim), dtype)
    table_rows = tables(op, cos, sin, dim)
    slots = caches(op, k_cache, v_cache, (batch, kv_heads, dim), dtype)
    expect(op, "seq_lens", seq_lens, (batch,), torch.int32)
    tensors = (q, k, v, cos, sin, k_cache, v_cache, seq_lens)
    names = ("q", "k", "v", "cos", "sin", "k_cache", "v_cache", "seq_lens")
    index = same_device(op, **dict(zip(names, tensors, strict=True)))
    sizes = (batch, tokens, heads, kv_heads, dim, slots, table_rows)
    strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2])
    arguments = (*(t.data_ptr() for t in tensors), *sizes, *strides)
    launch(op, arguments, dtype, index, q=q, k=k, k_cache=k_cache)


def silu_mul(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """See `ref.silu_mul`. Both tensors are contiguous."""
    op = "silu_mul"
    dtype = _storage_dtype(op, "gate_up", gate_up)
    width = _last_dim(op, "gate_up", gate_up)
    if width % 2:
        raise ValueError(f"{op}: gate_up must have an even last dimension, found {width}")
    expect(op, "gate_up", gate_up, gate_up.shape, dtype)
    shape = (*gate_up.shape[:-1], width // 2)
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=gate_up.device)
    else:
        expect(op, "out", out, shape, dtype)
    index = same_device(op, gate_up=gate_up, out=out)
    arguments = (gate_up.data_ptr(), out.data_ptr(), gate_up.numel() // width, width // 2)
    launch(op, arguments, dtype, index, gate_up=gate_up)
    return out


def attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seq_lens: Tensor,
    scale: float | None = None,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
) -> Tensor:
    """See `ref.attention`. q may be a view into packed qkv.

    Args:
        workspace: from `attention_workspace`, to share among calls of one stream; allocated here
            when None.
    """
    op = "attention"
    dtype = _storage_dtype(op, "q", q)
    batch, tokens, heads, dim = _heads(op, "q", q, None, dtype)
    if dim not in HEAD_DIMS:
        raise ValueError(f"{op}: head_dim must be one of {HEAD_DIMS}, found {dim}")
    if k_cache.dim() != 4:
        raise ValueError(f"{op}: k_cache must be [B, K, S, D], found {list(k_cache.shape)}")
    kv_heads = k_cache.shape[1]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(
            f"{op}: the {heads} heads of q must be a multiple of the {kv_heads} heads of k_cache"
        )
    slots = caches(op, k_cache, v_cache, (batch, kv_heads, dim), dtype)
    aligned(op, k_cache=k_cache, v_cache=v_cache)
    expect(op, "seq_lens", seq_lens, (batch,), torch.int32)
    shape = (batch, tokens, heads * dim)
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=q.device)
    else:
        expect(op, "out", out, shape, dtype)
    index = same_device(op, q=q, k_cache=k_cache, v_cache=v_cache, seq_lens=seq_lens, out=out)
    if workspace is None:
        workspace = attention_workspace(batch, tokens, heads, dim, slots, q.device)
    else:
        needed = native().attention_workspace(batch, tokens, heads, dim, slots)
        scratch(op, workspace, needed, index)
    pointers = (q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), seq_lens.data_ptr())
    sizes = (batch, tokens, heads, kv_heads, dim, slots, *q.stride()[:2])
    factor = dim**-0.5 if scale is None else scale
    arguments = (*pointers, out.data_ptr(), workspace.data_ptr(), *sizes, factor)
    launch(op, arguments, dtype, index, q=q, k_cache=k_cache)
    return out


def attention_workspace(
    batch: int, tokens: int, heads: int, head_dim: int, slots: int, device: torch.device
) -> Tensor:
    """Scratch memory for `attention` of up to this many rows, new tokens and cache slots.

    Returns:
        uint8, of no meaning before or after a call.
    """
    size = native().attention_workspace(batch, tokens, heads, head_dim, slots)
    return torch.empty(size, dtype=torch.uint8, device=device)


def argmax(logits: Tensor, out: Tensor | None = None, nonfinite: Tensor | None = None) -> Tensor:
    """The index of the largest logit of each row, the lowest one among equals.

    Args:
        logits: [B, V], rows may be strided if they are evenly spaced.
        out: int64 [B] to write into; allocated when None.
        nonfinite: int32 [1], set to 1 when any logit is NaN or infinite and left alone otherwise,
            so that one look at the end tells about many steps.

    Returns:
        int64 [B]. NaN counts as smaller than every number.
    """
    op = "argmax"
    dtype = _storage_dtype(op, "logits", logits)
    vocab = _last_dim(op, "logits", logits)
    if logits.dim() != 2:
        raise ValueError(f"{op}: logits must be [B, V], found {list(logits.shape)}")
    stride = _row_stride(op, "logits", logits)
    batch = logits.shape[0]
    if out is None:
        out = torch.empty(batch, dtype=torch.int64, device=logits.device)
    else:
        expect(op, "out", out, (batch,), torch.int64)
    tensors = {"logits": logits, "out": out}
    if nonfinite is not None:
        expect(op, "nonfinite", nonfinite, (1,), torch.int32)
        tensors["nonfinite"] = nonfinite
    index = same_device(op, **tensors)
    size = native().argmax_workspace(batch)
    workspace = torch.empty(size, dtype=torch.uint8, device=logits.device)
    flag = 0 if nonfinite is None else nonfinite.data_ptr()
    pointers = (logits.data_ptr(), out.data_ptr(), flag, workspace.data_ptr())
    launch(op, (*pointers, batch, vocab, stride), dtype, index, logits=logits)
    return out


def read(data: Tensor) -> None:
    """Read a contiguous tensor and keep nothing: what benchmarks take the memory's speed from."""
    op = "read"
    index = same_device(op, data=data)
    aligned(op, data=data)
    sink = torch.empty(1, dtype=torch.int32, device=data.device)
    native().read(data.data_ptr(), data.nbytes, sink.data_ptr(), index, _current_stream(index))


# ---- checks --------------------------------------------------------------------------------


def _storage_dtype(op: str, name: str, x: Tensor) -> torch.dtype:
    if x.dtype not in _DTYPE_CODES:
        raise ValueError(f"{op}: {name} must be float32, float16 or bfloat16, found {x.dtype}")
    return x.dtype


def _last_dim(op: str, name: str, x: Tensor) -> int:
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"{op}: {name} must have a last dimension, found {list(x.shape)}")
    return x.shape[-1]


def expect(op: str, name: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Exactly this shape and dtype, contiguous."""
    if x.shape != shape:
        raise ValueError(f"{op}: {name} must be {list(shape)}, found {list(x.shape)}")
    if x.dtype != dtype:
        raise ValueError(f"{op}: {name} must be {dtype}, found {x.dtype}")
    if not x.is_contiguous():
        raise ValueError(f"{op}: {name} must be contiguous, found strides {list(x.stride())}")


def _row_stride(op: str, name: str, x: Tensor) -> int:
    """Elements between rows of the last dimension, which must be evenly spaced."""
    if x.is_contiguous():
        return x.shape[-1]
    outer = [(n, s) for n, s in zip(x.shape[:-1], x.stride()[:-1], strict=True) if n != 1]
    even = all(s == n2 * s2 for (_, s), (n2, s2) in zip(outer, outer[1:], strict=False))
    if x.stride(-1) != 1 or not even:
        raise ValueError(
            f"{op}: {name} must have dense, evenly spaced rows, found shape {list(x.shape)} with "
            f"strides {list(x.stride())}; call .contiguous() first"
        )
    return outer[-1][1] if outer else x.shape[-1]


def _heads(
    op: str, name: str, x: Tensor, expected: tuple[int | None, ...] | None, dtype: torch.dtype
) -> tuple[int, int, int, int]:
    """[B, T, heads, D] whose last two dimensions are dense; None stands for any size."""
    expected = expected or (None,) * 4
    fits = x.dim() == 4 and all(
        want in (None, size) for want, size in zip(expected, x.shape, strict=True)
    )
    if not fits:
        letters = "BT" + ("H" if name == "q" else "K") + "D"
        want = ", ".join(
            letter if size is None else str(size)
            for letter, size in zip(letters, expected, strict=True)
        )
        raise ValueError(f"{op}: {name} must be [{want}], found {list(x.shape)}")
    if x.dtype != dtype:
        raise ValueError(f"{op}: {name} must be {dtype}, found {x.dtype}")
    batch, tokens, heads, dim = x.shape
    if dim == 0 or dim % 2:
        raise ValueError(f"{op}: {name} must have an even head_dim, found {dim}")
    if x.stride(3) != 1 or (heads > 1 and x.stride(2) != dim):
        raise ValueError(
            f"{op}: heads and head_dim of {name} must be dense, found strides {list(x.stride())}"
        )
    return batch, tokens, heads, dim


def tables(op: str, cos: Tensor, sin: Tensor, dim: int) -> int:
    if cos.dim() != 2 or cos.shape[0] == 0:
        raise ValueError(f"{op}: cos must be [S, {dim // 2}], found {list(cos.shape)}")
    rows = cos.shape[0]
    expect(op, "cos", cos, (rows, dim // 2), torch.float32)
    expect(op, "sin", sin, (rows, dim // 2), torch.float32)
    return rows


def caches(
    op: str, k_cache: Tensor, v_cache: Tensor, sizes: tuple[int, int, int], dtype: torch.dtype
) -> int:
    """Both [B, K, S, D] for these B, K, D and one S, contiguous; returns S."""
    batch, kv_heads, dim = sizes
    if k_cache.dim() != 4 or k_cache.shape[2] == 0:
        raise ValueError(
            f"{op}: k_cache must be [{batch}, {kv_heads}, S, {dim}], found {list(k_cache.shape)}"
        )
    slots = k_cache.shape[2]
    expect(op, "k_cache", k_cache, (batch, kv_heads, slots, dim), dtype)
    expect(op, "v_cache", v_cache, (batch, kv_heads, slots, dim), dtype)
    return slots


def aligned(op: str, **tensors: Tensor) -> None:
    for name, x in tensors.items():
        if not x.is_meta and x.data_ptr() % 16:
            raise ValueError(
                f"{op}: {name} must start at a multiple of 16 bytes, found {x.data_ptr():#x}"
            )


def scratch(op: str, workspace: Tensor, needed: int, index: int) -> None:
    found = workspace.numel() * workspace.element_size()
    if found < needed or not workspace.is_contiguous():
        raise ValueError(f"{op}: workspace must be {needed} contiguous bytes, found {found}")
    aligned(op, workspace=workspace)
    if workspace.get_device() != index and _DEVICE_TYPE == "cuda":
        raise ValueError(f"{op}: workspace must be on cuda:{index}, found {workspace.device}")


def same_device(op: str, **tensors: Tensor) -> int:
    """The index of the one CUDA device that all of these are on."""
    (first, x), *others = tensors.items()
    device = x.device
    if device.type != _DEVICE_TYPE:
        raise ValueError(f"{op}: {first} must be on a CUDA device, found {device}")
    for name, other in others:
        if other.device != device:
            raise ValueError(f"{op}: {name} must be on {device} like {first}, found {other.device}")
    return device.index or 0


# ---- launching -----------------------------------------------------------------------------


def native() -> Any:
    global _native
    if _native is None:
        _native = _ext.require()
    return _native


def _current_stream(index: int) -> int:
    # torch's private accessor spares the Stream object; the public way is the fallback.
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return int(raw(index) if raw else torch.cuda.current_stream(index).cuda_stream)


def launch(
    op: str, arguments: tuple[Any, ...], dtype: torch.dtype, index: int, **shown: Tensor
) -> None:
    """Call the entry; `shown` are the tensors that an error message describes."""
    entry = getattr(native(), op)
    try:
        entry(*arguments, _DTYPE_CODES[dtype], index, _current_stream(index))
    except RuntimeError as error:
        shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in shown.items())
        raise RuntimeError(f"{op} of {dtype} on cuda:{index} with {shapes}: {error}") from error
