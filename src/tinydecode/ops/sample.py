"""The device sampler: checks, then pointers; like `ops.cuda`, for sample*.cu.

Twin: `ref_sample`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tinydecode.ops import cuda
from tinydecode.ops.ref_sample import MAX_VOCAB, PARAMS, RING_WORDS, ROW

FILTERS, LOGPROBS = 1, 2  # TdSampleStage in td_api.h


def workspace(batch: int, vocab_size: int, device: torch.device) -> Tensor:
    """Scratch memory for `sample_tokens`, uint8, of no meaning before or after a call."""
    size = cuda.native().sample_workspace(batch, vocab_size)
    return torch.empty(size, dtype=torch.uint8, device=device)


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
    workspace: Tensor | None = None,
) -> None:
    """See `ref_sample.sample_tokens`.

    Args:
        ring: in pinned host memory, which the kernels write themselves.
        workspace: from `workspace`, to share among calls of one stream; allocated here when None.
    """
    op = "sample"
    batch, vocab = _logits(op, logits)
    cuda.expect(op, "state", state, (PARAMS.itemsize + batch * ROW.itemsize,), torch.uint8)
    cuda.expect(op, "bias", bias, (vocab,), torch.float32)
    cuda.expect(op, "counts", counts, (batch, vocab), torch.int32)
    cuda.expect(op, "tokens", tokens, (batch,), torch.int64)
    tensors = {"logits": logits, "state": state, "bias": bias, "counts": counts, "tokens": tokens}
    if seq_lens is not None:
        cuda.expect(op, "seq_lens", seq_lens, (batch,), torch.int32)
        tensors["seq_lens"] = seq_lens
    if ring.dim() != 3 or ring.shape[0] == 0:
        raise ValueError(
            f"{op}: ring must be [slots, {batch}, {RING_WORDS}], found {list(ring.shape)}"
        )
    cuda.expect(op, "ring", ring, (ring.shape[0], batch, RING_WORDS), torch.int64)
    index = cuda.same_device(op, **tensors)
    # Not while a graph is captured, which asks the driver nothing; the warm-up has been checked.
    if logits.is_cuda and not torch.cuda.is_current_stream_capturing() and not ring.is_pinned():
        raise ValueError(f"{op}: ring must be in pinned memory, or the GPU cannot write it")
    needed = cuda.native().sample_workspace(batch, vocab)
    if workspace is None:
        workspace = torch.empty(needed, dtype=torch.uint8, device=logits.device)
    cuda.scratch(op, workspace, needed, index)
    stages = FILTERS * has_filters + LOGPROBS * has_logprobs
    params = state.data_ptr()
    cuda.launch(
        op,
        (
            *(logits.data_ptr(), params, params + PARAMS.itemsize, bias.data_ptr()),
            *(counts.data_ptr(), tokens.data_ptr()),
            *(0 if seq_lens is None else seq_lens.data_ptr(), ring.data_ptr()),
            *(workspace.data_ptr(), batch, vocab, ring.shape[0], stages),
        ),
        torch.float32,
        index,
        logits=logits,
    )


def distribution(
    logits: Tensor, state: Tensor, bias: Tensor, counts: Tensor, workspace: Tensor | None = None
) -> Tensor:
    """What each row of logits would be drawn from, for kernels that ask for probabilities.

    Args:
        logits: float32 [R, V].
        state: uint8, begins with the parameters, as in `ref_sample.sample_tokens`.
        bias: float32 [V].
        counts: int32 [R, V].
        workspace: as in `sample_tokens`, for R rows.

    Returns:
        The workspace: R Distribution of kernels/sample.cuh, padded to 16 bytes, then the adjusted
        logits, float32 [R, V padded to a multiple of 4].
    """
    op = "distribution"
    rows, vocab = _logits(op, logits)
    if state.dtype != torch.uint8 or state.dim() != 1 or state.numel() < PARAMS.itemsize:
        raise ValueError(
            f"{op}: state must be {PARAMS.itemsize} bytes or more, found {state.shape}"
        )
    cuda.expect(op, "bias", bias, (vocab,), torch.float32)
    cuda.expect(op, "counts", counts, (rows, vocab), torch.int32)
    index = cuda.same_device(op, logits=logits, state=state, bias=bias, counts=counts)
    needed = cuda.native().sample_workspace(rows, vocab)
    if workspace is None:
        workspace = torch.empty(needed, dtype=torch.uint8, device=logits.device)
    cuda.scratch(op, workspace, needed, index)
    pointers = (x.data_ptr() for x in (logits, state, bias, counts, workspace))
    cuda.launch(op, (*pointers, rows, vocab), torch.float32, index, logits=logits)
    return workspace


def _logits(op: str, logits: Tensor) -> tuple[int, int]:
    if logits.dim() != 2 or not 1 <= logits.shape[1] <= MAX_VOCAB:
        raise ValueError(
            f"{op}: logits must be [B, V] with V from 1 to {MAX_VOCAB}, found {list(logits.shape)}"
        )
    batch, vocab = logits.shape
    cuda.expect(op, "logits", logits, (batch, vocab), torch.float32)
    return batch, vocab
