"""The torch twin of a speculative round's ends (kernels/ngram.cu, kernels/accept*.cu).

The specification, with the kernels' own integers and random numbers, so that both decide alike. It
reads the state on the host and is for the CPU. `speculative.rule` is the same rule in real numbers.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from tinydecode.ops.ref_sample import Ranked, _adjusted, _Params, scale_uniform, uniform62

# RoundState of kernels/round.cuh: int64 each.
ROUND, DRAWS, IS_DONE, LENGTH, REMAINING, PROPOSED = range(6)
STATE_WORDS = 6
RING_WORDS = 32  # per round; publish_round() in kernels/round.cuh says what they are
MAX_DRAFT, MAX_NGRAM = 15, 16
_ONE = 2.0**60
_ACCEPT, _RESIDUAL, _DRAFT = 1, 2, 3  # UniformUse in kernels/sample.cuh


def workspace(rows: int, vocab_size: int, device: torch.device) -> Tensor:
    """Memory for `distribution`."""
    return torch.zeros(rows, vocab_size + 2, dtype=torch.int64, device=device)


def distribution(logits: Tensor, params: Tensor, bias: Tensor, counts: Tensor, out: Tensor) -> None:
    """What each row of logits is drawn from, after all filters.

    Args:
        logits: float32 [R, V].
        params: uint8, as in `ref_sample.sample_tokens`.
        bias: float32 [V].
        counts: int32 [R, V], read if the parameters say so.
        out: from `workspace`, written: integer weights by id, their total, whether it is valid.
    """
    p = _Params(params)
    for row in range(logits.shape[0]):
        z = _adjusted(logits[row], p, bias, counts[row])
        ranked = Ranked(z, p, torch.zeros_like(p.seed))
        is_bad = (logits[row].isnan() | (logits[row] == torch.inf)).any()
        out[row, :-2] = torch.zeros_like(ranked.weights).index_copy_(
            0, ranked.order, ranked.weights
        )
        out[row, -2] = ranked.total
        out[row, -1] = (~is_bad & torch.isfinite(ranked.max[0])).long()


def ngram(history: Tensor, state: Tensor, draft: Tensor, max_n: int, min_n: int) -> None:
    """Draft by lookup.

    The longest suffix of the text, max_n to min_n tokens, that occurred before; of its occurrences
    the last one; the tokens after it. The copy may run into itself.

    Args:
        history: int32 [capacity], the text in its first `state[LENGTH]`.
        state: int64 [6]; PROPOSED is written: k, or 0 when nothing matched.
        draft: int64 [k], written.
        max_n: 1 to 16.
        min_n: 1 to max_n.
    """
    length = int(state[LENGTH])
    text = history[:length].tolist()
    for size in range(min(max_n, length - 1), min_n - 1, -1):
        for end in range(length - 1, size - 1, -1):
            if text[end - size : end] == text[length - size :]:
                period = length - end
                copied = [text[end + i % period] for i in range(draft.numel())]
                draft.copy_(torch.tensor(copied))
                state[PROPOSED] = draft.numel()
                return
    draft.zero_()
    state[PROPOSED] = 0


def draft_token(
    params: Tensor, state: Tensor, q: Tensor, token: Tensor, index: int, vocab_size: int
) -> None:
    """Draw the index-th drafted token of a round from q, one row of `distribution` over V ids."""
    q = q.view(1, vocab_size + 2)
    if not q[0, -1]:
        token.zero_()
        return
    uniform = uniform62(_Params(params).seed, state[DRAWS : DRAWS + 1], index, _DRAFT)
    token.fill_(_draw(q[0, :-2], uniform))


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
    """Accept a prefix of the draft, draw the token after it, append both to the text.

    A draft ends with its first stop token and one token before the last of those that remain; a
    row of it whose logits were not finite counts as one without a q. Nothing changes in a round
    after the end but the lengths, which the passes have advanced.

    Args:
        params: as in `distribution`.
        state: int64 [6], read and written.
        p: k + 1 rows of `distribution`.
        q: k rows likewise, over the first draft_vocab_size ids; None: all mass on the token.
        draft: int64 [k].
        history: int32 [capacity], written behind the text.
        following: int64 [1], written: the text's last token, input of the next pass.
        seq_lens: int32 [1], the target's: the text less its last token.
        draft_lens: int32 [1] or None: one less, since a draft's first step takes two tokens.
        draft_input: int64 [2] or None, written: these two, 0 for an id from draft_rows on.
        ring: int64 [slots, 32], written for the host.
        vocab_size: V.
        draft_vocab_size: at most V.
        draft_rows: ids that the draft has.
        has_proposed: whether `state[PROPOSED]` says how many tokens there are; else k.
    """
    if not state[IS_DONE]:
        before = int(state[LENGTH])
        _accept(params, state, p, q, draft, history, following, ring, has_proposed)
        if draft_input is not None and int(state[LENGTH]) > before:
            last = history[int(state[LENGTH]) - 2 : int(state[LENGTH])].long()
            draft_input.copy_(last.masked_fill(last >= draft_rows, 0))
    length = int(state[LENGTH])
    seq_lens.fill_(length - 1)
    if draft_lens is not None:
        draft_lens.fill_(length - 2)


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
    """`accept` where each distribution is all on the best token of its row, and there is no q.

    The same rule: with p(x) one or zero, a token stands if it is the row's best one, whatever the
    uniform, and what follows is the best token of the next row. So the kernel needs no more than
    these tokens, while the twin says what it must come to.

    Args:
        params: as in `accept`, which has the other arguments too.
        logits: float32 [k + 1, V]. The lowest id wins among equals; a row with NaN or +inf, or with
            nothing above -inf, counts as one that no token can be chosen from.
    """
    vocab = logits.shape[1]
    p = workspace(len(logits), vocab, logits.device)
    is_good = torch.isfinite(logits.amax(-1))  # NaN is the maximum of its row
    best = logits.nan_to_num(0.0).argmax(-1)
    p[torch.arange(len(p)), best] = 1
    p[:, -2] = 1
    p[:, -1] = is_good.long()
    accept(
        *(params, state, p, None, draft, history, following, seq_lens, draft_lens, draft_input),
        ring,
        vocab_size=vocab,
        draft_vocab_size=vocab,
        draft_rows=draft_rows,
        has_proposed=has_proposed,
    )


def _accept(
    params: Tensor,
    state: Tensor,
    p: Tensor,
    q: Tensor | None,
    draft: Tensor,
    history: Tensor,
    following: Tensor,
    ring: Tensor,
    has_proposed: bool,
) -> None:
    fields = _Params(params)
    stops = set(fields.stops[fields.in_use].tolist())
    draws = state[DRAWS : DRAWS + 1]
    tokens = draft.tolist()
    proposed = int(state[PROPOSED]) if has_proposed else len(tokens)
    proposed = min(proposed, int(state[REMAINING]) - 1)
    for index in range(proposed):
        if tokens[index] in stops:
            proposed = index + 1
            break
    stands = 0
    while stands < proposed:
        token = tokens[stands]
        uniform = int(uniform62(fields.seed, draws, stands, _ACCEPT)) >> 9
        mine = _share(p[stands], token) if p[stands, -1] else 0.0
        theirs = 1.0 if q is None or not q[stands, -1] else _share(q[stands], token)
        if not uniform * 2.0**-53 * theirs < mine:
            break
        stands += 1

    row = p[stands]
    is_valid = bool(row[-1])
    token = 0
    if is_valid:
        weights = row[:-2]
        if stands < proposed and (q is None or not q[stands, -1]):
            weights = weights.clone()
            weights[tokens[stands]] = 0
        elif stands < proposed:
            assert q is not None
            weights = _sixtieths(row)
            theirs_all = _sixtieths(q[stands])
            weights[: len(theirs_all)] -= theirs_all
            weights.clamp_(min=0)
        if not weights.sum():
            weights = row[:-2]  # q > p by less than a rounding
        token = _draw(weights, uniform62(fields.seed, draws, 0, _RESIDUAL))

    block = tokens[:stands] + [token] * is_valid
    made: list[int] = []
    is_end = False
    for found in block:
        made.append(found)
        is_end = found in stops or len(made) == int(state[REMAINING])
        if is_end:
            break
    is_bad = not is_valid and not is_end
    length = int(state[LENGTH])
    history[length : length + len(made)] = torch.tensor(made, dtype=torch.int32)
    if made:
        following.fill_(made[-1])

    tag = (int(state[ROUND]) + 1) & 0xFFFFFFFF
    head = len(made) | stands << 8 | proposed << 16 | is_bad << 24
    now = time.perf_counter_ns() & (2**48 - 1)
    words = [_signed(tag << 32 | head), _signed((tag & 0xFFFF) << 48 | now)]
    words += [_signed(tag << 32 | found) for found in made]
    ring[tag % ring.shape[0], : len(words)] = torch.tensor(words)
    state[ROUND] += 1
    state[DRAWS] += 1
    state[LENGTH] += len(made)
    state[REMAINING] -= len(made)
    state[IS_DONE] = int(is_end or is_bad)


def _share(row: Tensor, token: int) -> float:
    """The probability of a token, float64; 0 beyond the vocabulary of the row."""
    return float(row[token].double() / row[-2].double()) if token < len(row) - 2 else 0.0


def _sixtieths(row: Tensor) -> Tensor:
    """A row's probabilities in units of 2^-60, int64 [V]."""
    return (row[:-2].double() * (_ONE / row[-2].double())).long()


def _draw(weights: Tensor, uniform: Tensor) -> int:
    """The token whose weight covers the uniform's point, in the order of ids."""
    ends = weights.cumsum(0)
    return int(torch.searchsorted(ends, scale_uniform(uniform, ends[-1:]), right=True))


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word
