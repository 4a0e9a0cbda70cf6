"""The ends of a speculative round: checks, then pointers; like `ops.cuda`.

For accept*.cu and ngram.cu.

Twin: `ref_round`, whose docstrings say what everything means.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tinydecode.ops import cuda, sample
from tinydecode.ops.ref_round import MAX_DRAFT, MAX_NGRAM, RING_WORDS, STATE_WORDS
from tinydecode.ops.ref_sample import MAX_VOCAB, PARAMS


def workspace(rows: int, vocab_size: int, device: torch.device) -> Tensor:
    """Memory for `distribution`, uint8."""
    return sample.workspace(rows, vocab_size, device)


def distribution(logits: Tensor, params: Tensor, bias: Tensor, counts: Tensor, out: Tensor) -> None:
    """See `ref_round.distribution`; `out` is opaque."""
    sample.distribution(logits, params, bias, counts, out)


def ngram(history: Tensor, state: Tensor, draft: Tensor, max_n: int, min_n: int) -> None:
    """See `ref_round.ngram`."""
    op = "ngram"
    capacity = _history(op, history)
    count = _tokens(op, "draft", draft, 1)
    cuda.expect(op, "state", state, (STATE_WORDS,), torch.int64)
    if not 1 <= min_n <= max_n <= MAX_NGRAM:
        raise ValueError(
            f"{op}: 1 <= min_n <= max_n <= {MAX_NGRAM} expected, found {min_n}, {max_n}"
        )
    index = cuda.same_device(op, history=history, state=state, draft=draft)
    scratch = torch.empty(
        cuda.native().ngram_workspace(capacity), dtype=torch.uint8, device=history.device
    )
    pointers = (history.data_ptr(), state.data_ptr(), draft.data_ptr(), scratch.data_ptr())
    sizes = (capacity, count, max_n, min_n)
    cuda.launch(op, (*pointers, *sizes), torch.float32, index, history=history)


def draft_token(
    params: Tensor, state: Tensor, q: Tensor, token: Tensor, index: int, vocab_size: int
) -> None:
    """See `ref_round.draft_token`."""
    op = "draft_token"
    cuda.expect(op, "q", q, (cuda.native().sample_workspace(1, vocab_size),), torch.uint8)
    _params(op, params)
    cuda.expect(op, "state", state, (STATE_WORDS,), torch.int64)
    cuda.expect(op, "token", token, (1,), torch.int64)
    device = cuda.same_device(op, params=params, state=state, q=q, token=token)
    scratch = torch.empty(
        cuda.native().accept_workspace(vocab_size), dtype=torch.uint8, device=token.device
    )
    pointers = (x.data_ptr() for x in (params, state, q, token, scratch))
    cuda.launch(op, (*pointers, vocab_size, index), torch.float32, device, q=q)


def accept(
    params: Tensor,
    state: Tensor,
    p: Tensor,
    q: Tensor | None,
    draft: Tensor,
    history: Tensor,
    following: Tensor,
    seq_lens: Tensor,
    draft_lens: Tensor | None,
    draft_input: Tensor | None,
    ring: Tensor,
    *,
    vocab_size: int,
    draft_vocab_size: int,
    draft_rows: int,
    has_proposed: bool,
) -> None:
    """See `ref_round.accept`; `q` is uint8 [k, bytes of `workspace(1, draft_vocab_size)`]."""
    op = "accept"
    tensors = _ends(
        *(op, params, state, draft, history, following, seq_lens, draft_lens, draft_input, ring)
    )
    count = draft.numel()
    cuda.expect(op, "p", p, (cuda.native().sample_workspace(count + 1, vocab_size),), torch.uint8)
    tensors["p"] = p
    stride = 0
    if q is not None:
        stride = cuda.native().sample_workspace(1, draft_vocab_size)
        cuda.expect(op, "q", q, (count, stride), torch.uint8)
        if draft_vocab_size > vocab_size:
            raise ValueError(
                f"{op}: draft_vocab_size must be at most {vocab_size}, found {draft_vocab_size}"
            )
        tensors["q"] = q
    index = cuda.same_device(op, **tensors)
    scratch = torch.empty(
        cuda.native().accept_workspace(vocab_size), dtype=torch.uint8, device=p.device
    )
    arguments = (
        *(params.data_ptr(), state.data_ptr(), p.data_ptr(), _pointer(q), draft.data_ptr()),
        *(history.data_ptr(), following.data_ptr(), seq_lens.data_ptr(), _pointer(draft_lens)),
        *(_pointer(draft_input), ring.data_ptr(), scratch.data_ptr(), count, vocab_size),
        *(draft_vocab_size, stride, draft_rows, int(has_proposed), ring.shape[0]),
    )
    cuda.launch(op, arguments, torch.float32, index, p=p)


def accept_best(
    params: Tensor,
    state: Tensor,
    logits: Tensor,
    draft: Tensor,
    history: Tensor,
    following: Tensor,
    seq_lens: Tensor,
    draft_lens: Tensor | None,
    draft_input: Tensor | None,
    ring: Tensor,
    *,
    draft_rows: int,
    has_proposed: bool,
) -> None:
    """See `ref_round.accept_best`."""
    op = "accept_best"
    tensors = _ends(
        *(op, params, state, draft, history, following, seq_lens, draft_lens, draft_input, ring)
    )
    count = draft.numel()
    if logits.dim() != 2 or not 1 <= logits.shape[1] <= MAX_VOCAB:
        raise ValueError(
            f"{op}: logits must be [k + 1, V] with V from 1 to {MAX_VOCAB}, "
            f"found {list(logits.shape)}"
        )
    vocab = logits.shape[1]
    cuda.expect(op, "logits", logits, (count + 1, vocab), torch.float32)
    index = cuda.same_device(op, logits=logits, **tensors)
    scratch = torch.empty(
        cuda.native().accept_best_workspace(count + 1), dtype=torch.uint8, device=logits.device
    )
    arguments = (
        *(params.data_ptr(), state.data_ptr(), logits.data_ptr(), draft.data_ptr()),
        *(history.data_ptr(), following.data_ptr(), seq_lens.data_ptr(), _pointer(draft_lens)),
        *(_pointer(draft_input), ring.data_ptr(), scratch.data_ptr(), count, vocab),
        *(draft_rows, int(has_proposed), ring.shape[0]),
    )
    cuda.launch(op, arguments, torch.float32, index, logits=logits)


def _ends(
    op: str,
    params: Tensor,
    state: Tensor,
    draft: Tensor,
    history: Tensor,
    following: Tensor,
    seq_lens: Tensor,
    draft_lens: Tensor | None,
    draft_input: Tensor | None,
    ring: Tensor,
) -> dict[str, Tensor]:
    """Check what both accepts take; returns the tensors that must be on one device."""
    _tokens(op, "draft", draft, 0)
    _params(op, params)
    _history(op, history)
    cuda.expect(op, "state", state, (STATE_WORDS,), torch.int64)
    cuda.expect(op, "following", following, (1,), torch.int64)
    cuda.expect(op, "seq_lens", seq_lens, (1,), torch.int32)
    cuda.expect(op, "ring", ring, (ring.shape[0], RING_WORDS), torch.int64)
    tensors = {"params": params, "state": state, "draft": draft, "history": history}
    tensors |= {"following": following, "seq_lens": seq_lens}
    if draft_lens is not None:
        cuda.expect(op, "draft_lens", draft_lens, (1,), torch.int32)
        tensors["draft_lens"] = draft_lens
    if draft_input is not None:
        cuda.expect(op, "draft_input", draft_input, (2,), torch.int64)
        tensors["draft_input"] = draft_input
    return tensors


def _pointer(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _history(op: str, history: Tensor) -> int:
    if history.dim() != 1 or history.numel() == 0:
        raise ValueError(f"{op}: history must be [capacity], found {list(history.shape)}")
    cuda.expect(op, "history", history, (history.numel(),), torch.int32)
    return history.numel()


def _tokens(op: str, name: str, tokens: Tensor, least: int) -> int:
    if tokens.dim() != 1 or not least <= tokens.numel() <= MAX_DRAFT:
        raise ValueError(
            f"{op}: {name} must be [k], k from {least} to {MAX_DRAFT}, found {list(tokens.shape)}"
        )
    cuda.expect(op, name, tokens, (tokens.numel(),), torch.int64)
    return tokens.numel()


def _params(op: str, params: Tensor) -> None:
    if params.dtype != torch.uint8 or params.dim() != 1 or params.numel() < PARAMS.itemsize:
        raise ValueError(
            f"{op}: params must be {PARAMS.itemsize} bytes or more, found {params.shape}"
        )
