"""The fused products of the decode step: checks, then pointers; like `ops.cuda`, for linear.cu.

Twins: the functions of the same names in `ops.ref`. Rows are the R = B * T tokens of a pass, at
most `MAX_ROWS`; a row's bits do not depend on how many there are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tinydecode.config import ModelConfig
from tinydecode.ops import cuda

MAX_ROWS = 16
MAX_HIDDEN = 8192  # of the products that norm their input
DTYPES = (torch.float16, torch.bfloat16)
OLDEST = (8, 0)  # compute capability with the tensor-core products of these types


def fits(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether these kernels can run the decode step of a model."""
    return (
        device.type == "cuda"
        and dtype in DTYPES
        and torch.cuda.get_device_capability(device) >= OLDEST
        and not (config.attention_bias or config.attention_out_bias or config.mlp_bias)
        and config.hidden_size % 8 == 0
        and config.hidden_size <= MAX_HIDDEN
        and config.intermediate_size % 8 == 0
        and config.head_dim in cuda.HEAD_DIMS
    )


def linear_qkv(
    x: Tensor,
    norm: Tensor,
    weight: Tensor,
    eps: float,
    heads: int,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seq_lens: Tensor,
) -> Tensor:
    """See `ref.linear_qkv`."""
    op = "linear_qkv"
    batch, tokens, hidden = _activations(op, x)
    kv_heads, dim = k_cache.shape[1], k_cache.shape[3]
    _weight(op, weight, (heads + 2 * kv_heads) * dim, hidden, x.dtype)
    _norm(op, norm, hidden, x.dtype)
    if dim % 8:
        raise ValueError(f"{op}: head_dim must be a multiple of 8, found {dim}")
    table_rows = cuda.tables(op, cos, sin, dim)
    slots = cuda.caches(op, k_cache, v_cache, (batch, kv_heads, dim), x.dtype)
    cuda.expect(op, "seq_lens", seq_lens, (batch,), torch.int32)
    q = torch.empty(batch, tokens, heads, dim, dtype=x.dtype, device=x.device)
    tensors = {"x": x, "norm": norm, "weight": weight, "cos": cos, "sin": sin, "q": q}
    tensors |= {"k_cache": k_cache, "v_cache": v_cache, "seq_lens": seq_lens}
    index = cuda.same_device(op, **tensors)
    cuda.aligned(op, x=x, norm=norm, weight=weight)
    sizes = (batch, tokens, hidden, heads, kv_heads, dim, slots, table_rows)
    pointers = (tensor.data_ptr() for tensor in tensors.values())
    cuda.launch(op, (*pointers, *sizes, eps), x.dtype, index, x=x, weight=weight, k_cache=k_cache)
    return q


def linear_add(x: Tensor, weight: Tensor, residual: Tensor) -> None:
    """See `ref.linear_add`."""
    op = "linear_add"
    batch, tokens, inputs = _activations(op, x)
    outputs = residual.shape[-1]
    _weight(op, weight, outputs, inputs, x.dtype)
    cuda.expect(op, "residual", residual, (batch, tokens, outputs), x.dtype)
    index = cuda.same_device(op, x=x, weight=weight, residual=residual)
    cuda.aligned(op, x=x, weight=weight)
    pointers = (x.data_ptr(), weight.data_ptr(), residual.data_ptr())
    arguments = (*pointers, batch * tokens, inputs, outputs)
    cuda.launch(op, arguments, x.dtype, index, x=x, weight=weight)


def linear_gate_up(x: Tensor, norm: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `ref.linear_gate_up`."""
    op = "linear_gate_up"
    batch, tokens, hidden = _activations(op, x)
    width = weight.shape[0] // 2
    _weight(op, weight, 2 * width, hidden, x.dtype)
    if width % 4:
        raise ValueError(f"{op}: intermediate_size must be a multiple of 4, found {width}")
    _norm(op, norm, hidden, x.dtype)
    out = torch.empty(batch, tokens, width, dtype=x.dtype, device=x.device)
    index = cuda.same_device(op, x=x, norm=norm, weight=weight, out=out)
    cuda.aligned(op, x=x, norm=norm, weight=weight)
    pointers = (x.data_ptr(), norm.data_ptr(), weight.data_ptr(), out.data_ptr())
    arguments = (*pointers, batch * tokens, hidden, width, eps)
    cuda.launch(op, arguments, x.dtype, index, x=x, weight=weight)
    return out


def embed(token_ids: Tensor, table: Tensor) -> Tensor:
    """See `ref.embed`."""
    op = "embed"
    if table.dtype not in DTYPES or table.dim() != 2 or 0 in table.shape:
        raise ValueError(
            f"{op}: table must be [V, E] of float16 or bfloat16, found {list(table.shape)} of "
            f"{table.dtype}"
        )
    vocab, hidden = table.shape
    cuda.expect(op, "token_ids", token_ids, token_ids.shape, torch.int64)
    cuda.expect(op, "table", table, (vocab, hidden), table.dtype)
    out = torch.empty(*token_ids.shape, hidden, dtype=table.dtype, device=table.device)
    index = cuda.same_device(op, token_ids=token_ids, table=table, out=out)
    pointers = (token_ids.data_ptr(), table.data_ptr(), out.data_ptr())
    arguments = (*pointers, token_ids.numel(), hidden, vocab)
    cuda.launch(op, arguments, table.dtype, index, token_ids=token_ids, table=table)
    return out


def linear_logits(
    x: Tensor, norm: Tensor, weight: Tensor, eps: float, seq_lens: Tensor | None = None
) -> Tensor:
    """See `ref.linear_logits`."""
    op = "linear_logits"
    batch, tokens, hidden = _activations(op, x)
    vocab = weight.shape[0]
    _weight(op, weight, vocab, hidden, x.dtype)
    _norm(op, norm, hidden, x.dtype)
    logits = torch.empty(batch, tokens, vocab, dtype=torch.float32, device=x.device)
    tensors = {"x": x, "norm": norm, "weight": weight, "logits": logits}
    if seq_lens is not None:
        cuda.expect(op, "seq_lens", seq_lens, (batch,), torch.int32)
        tensors["seq_lens"] = seq_lens
    index = cuda.same_device(op, **tensors)
    cuda.aligned(op, x=x, norm=norm, weight=weight)
    pointers = (x.data_ptr(), norm.data_ptr(), weight.data_ptr(), logits.data_ptr())
    lengths = 0 if seq_lens is None else seq_lens.data_ptr()
    arguments = (*pointers, lengths, batch, tokens, hidden, vocab, eps)
    cuda.launch(op, arguments, x.dtype, index, x=x, weight=weight)
    return logits


def _activations(op: str, x: Tensor) -> tuple[int, int, int]:
    """[B, T, K], contiguous, B * T at most MAX_ROWS, K a multiple of 8."""
    if x.dtype not in DTYPES:
        raise ValueError(f"{op}: x must be float16 or bfloat16, found {x.dtype}")
    if x.dim() != 3 or not 1 <= x.shape[0] * x.shape[1] <= MAX_ROWS or x.shape[2] % 8:
        raise ValueError(
            f"{op}: x must be [B, T, K] with B * T from 1 to {MAX_ROWS} and K a multiple of 8, "
            f"found {list(x.shape)}"
        )
    batch, tokens, width = x.shape
    cuda.expect(op, "x", x, (batch, tokens, width), x.dtype)
    return batch, tokens, width


def _norm(op: str, norm: Tensor, hidden: int, dtype: torch.dtype) -> None:
    cuda.expect(op, "norm", norm, (hidden,), dtype)
    if hidden > MAX_HIDDEN:
        raise ValueError(f"{op}: hidden_size must be at most {MAX_HIDDEN}, found {hidden}")


def _weight(op: str, weight: Tensor, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    cuda.expect(op, "weight", weight, (outputs, inputs), dtype)
