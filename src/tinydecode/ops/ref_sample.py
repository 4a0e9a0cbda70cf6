"""The torch twin of the device sampler (kernels/sample*.cu): the specification, by sorting.

The integers are the kernels' own: weights of 42 bits, ranked tokens, exact cuts, the same random
bits; so twin and kernel choose the same token for the same logits unless their exponentials differ
in the last bit right at an edge. Nothing here waits for the device, so a CUDA graph can hold it.
"""

from __future__ import annotations

import math
import time

import numpy as np
import torch
from torch import Tensor

# One SampleParams, then one SampleRow for each row; kernels/sample.cuh has the same.
MAX_STOPS = 32
PARAMS = np.dtype(
    [
        ("seed", "<u8"),
        ("top_p", "<f8"),  # 1: off
        ("temperature", "<f4"),  # 0: greedy
        ("log_min_p", "<f4"),  # -inf: off
        ("repetition", "<f4"),  # 1: off
        ("presence", "<f4"),
        ("frequency", "<f4"),
        ("top_k", "<i4"),  # 0: off
        ("has_bias", "<i4"),
        ("has_counts", "<i4"),
        ("num_stops", "<i4"),
        ("num_logprobs", "<i4"),
        ("stops", "<i4", (MAX_STOPS,)),
    ]
)
ROW = np.dtype(
    [
        ("draws", "<u8"),  # uniforms used
        ("sequence", "<u4"),  # steps, over all generations
        ("is_done", "<i4"),
        ("remaining", "<i4"),  # tokens until the row is done; 0: no limit
        ("unused", "<i4"),
    ]
)
IN_PROMPT = 1 << 30  # in a token's count: the prompt has it
MAX_VOCAB = 1 << 20
MAX_LOGPROBS = 20
RING_WORDS = 64  # per step and row
WEIGHT_BITS = 42


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
    """Choose one token a row and leave everything ready for the next step.

    Bias and bans, penalties, temperature, top-k, top-p, min-p, in this order; see `sampling`. A
    row that is done changes nothing: its token stays and its seq_lens, which the pass before has
    advanced, goes back by one. A stop id, the last of the remaining tokens, or logits that nothing
    can be chosen from (NaN, +inf, all -inf), make a row done.

    Args:
        logits: float32 [B, V], read.
        state: uint8 [PARAMS + B * ROW bytes]; the rows are read and written.
        bias: float32 [V], added if the parameters say so; -inf bans.
        counts: int32 [B, V], used and kept if the parameters say so: how often a token was
            generated, plus IN_PROMPT.
        tokens: int64 [B], written: the next input.
        seq_lens: int32 [B] or None, written for rows that are done.
        ring: int64 [slots, B, RING_WORDS], written at `sequence % slots`. Every word carries the
            step's sequence number in its upper half: token (all ones: none); the time in
            nanoseconds, 48 bits under 16 of the sequence; logprob and sampled logprob of the
            token; then id, logprob and sampled logprob of each favourite of the model.
        has_filters: False promises greedy parameters.
        has_logprobs: whether words 2 and up are written.
    """
    p = _Params(state)
    batch, vocab = logits.shape
    rows = state[PARAMS.itemsize :].view(batch, ROW.itemsize)
    for row in range(batch):
        draws = rows[row, 0:8].view(torch.int64)
        sequence = rows[row, 8:12].view(torch.int32)
        is_done = rows[row, 12:16].view(torch.int32)
        remaining = rows[row, 16:20].view(torch.int32)
        was_done = is_done != 0  # [1], like everything below without a vocabulary dimension
        z = _adjusted(logits[row], p, bias, counts[row])
        is_bad = (logits[row].isnan() | (logits[row] == math.inf)).any()
        uniform = uniform62(p.seed, draws, row) if has_filters else None
        ranked = Ranked(z, p, uniform)
        is_valid = ~is_bad & torch.isfinite(ranked.max)
        token = torch.where(is_valid, ranked.token, -1)

        sequence.add_(1)
        if seq_lens is not None:
            seq_lens[row : row + 1].sub_(was_done.int())
        goes_on = ~was_done
        draws.add_((goes_on & ~p.is_greedy).long())
        is_stop = ((p.stops == token) & p.in_use).any()
        is_end = is_stop | ~is_valid | (remaining == 1)
        is_done.copy_(torch.where(goes_on, is_end.int(), is_done))
        remaining.sub_((goes_on & (remaining > 0)).int())
        chosen = goes_on & is_valid
        tokens[row : row + 1] = torch.where(chosen, token, tokens[row : row + 1])
        counts[row].index_add_(
            0, token.clamp(min=0), (chosen & (p.has_counts != 0)).to(torch.int32)
        )
        words = [torch.where(was_done, -1, token), None]
        if has_logprobs:
            words += _logprob_words(logits[row], ranked, token.clamp(min=0))
        _write(ring, row, sequence, words)


class _Params:
    """Views of the parameters, each [1]; nothing here is read on the host."""

    def __init__(self, state: Tensor) -> None:
        types = {"u8": torch.int64, "f8": torch.float64, "f4": torch.float32, "i4": torch.int32}

        def field(name: str) -> Tensor:
            dtype, offset = PARAMS.fields[name][:2]  # type: ignore[index]
            scalar = dtype.base.str[1:]
            return state[offset : offset + dtype.itemsize].view(types[scalar])

        self.seed, self.top_p = field("seed"), field("top_p")
        self.temperature, self.log_min_p = field("temperature"), field("log_min_p")
        self.repetition, self.presence = field("repetition"), field("presence")
        self.frequency, self.top_k = field("frequency"), field("top_k").long()
        self.has_bias, self.has_counts = field("has_bias"), field("has_counts")
        self.stops = field("stops")
        self.in_use = torch.arange(MAX_STOPS, device=state.device) < field("num_stops")
        self.is_greedy = (self.temperature == 0) | (self.top_k == 1)


def _adjusted(logits: Tensor, p: _Params, bias: Tensor, counts: Tensor) -> Tensor:
    """Stages 1 and 2: [V] -> [V]."""
    z = torch.where(p.has_bias != 0, logits + bias, logits)
    penalised = torch.where(z > 0, z / p.repetition, z * p.repetition)
    is_seen = (p.has_counts != 0) & (counts != 0) & (p.repetition != 1)
    z = torch.where(is_seen, penalised, z)
    generated = counts & (IN_PROMPT - 1)
    lowered = (z - p.presence) - p.frequency * generated.float()
    return torch.where((p.has_counts != 0) & (generated != 0), lowered, z)


class Ranked:
    """The tokens of one row in the order of (z descending, id ascending), and what is kept of them.

    Attributes:
        order: int64 [V], token ids.
        weights: int64 [V], by rank; 0 where a filter removed the token.
        total: int64 [], their sum.
        max: float32 [1], the best token's z.
        token: int64 [1], the one drawn, or the best one.
    """

    def __init__(self, z: Tensor, p: _Params, uniform: Tensor | None) -> None:
        vocab = z.shape[0]
        values, self.order = (z + 0.0).sort(descending=True, stable=True)
        self.max = values[:1]
        best = self.order[:1]
        if uniform is None:
            self.weights = torch.zeros_like(self.order).index_fill_(0, best.new_zeros(1), 1)
            self.total = self.weights.sum()
            self.token = best
            return
        is_greedy = p.is_greedy
        x = (values - self.max) / torch.where(is_greedy, 1.0, p.temperature)
        w = torch.round(x.exp().double() * 2.0**WEIGHT_BITS).long()
        rank = torch.arange(vocab, device=z.device)
        kept = (p.top_k == 0) | (rank < p.top_k)
        before = w.cumsum(0) - w
        total = torch.where(kept, w, 0).sum()
        needed = (p.top_p * total.double()).ceil().long()
        needed = torch.minimum(needed, total).clamp(min=1)
        kept = kept & ((p.top_p >= 1) | (before < needed)) & (x >= p.log_min_p)
        kept = torch.where(is_greedy, rank == 0, kept)
        self.weights = torch.where(kept, w, 0)
        self.total = self.weights.sum()
        point = scale_uniform(uniform, self.total)
        place = torch.searchsorted(self.weights.cumsum(0), point.view(1), right=True)
        drawn = self.order[place.clamp(max=vocab - 1)]
        self.token = torch.where(is_greedy, best, drawn)


def _logprob_words(logits: Tensor, ranked: Ranked, token: Tensor) -> list[Tensor]:
    """Words 2 and up, as 32 bits: two of the token, then three of each favourite."""
    count = min(MAX_LOGPROBS, logits.shape[0])
    favourites = logits.sort(descending=True, stable=True).indices[:count]
    ids = torch.cat((token, favourites))
    plain = logits.double().log_softmax(0)[ids]
    weights = torch.zeros_like(ranked.weights).index_copy(0, ranked.order, ranked.weights)[ids]
    sampled = weights.double().log() - ranked.total.double().log()
    bits = [x.float().view(torch.int32).long() for x in (plain, sampled)]
    words = [bits[0][:1], bits[1][:1]]
    for i in range(count):
        words += [favourites[i : i + 1], bits[0][i + 1 : i + 2], bits[1][i + 1 : i + 2]]
    return words


def _write(ring: Tensor, row: int, sequence: Tensor, words: list[Tensor | None]) -> None:
    """Put words under their sequence number into the ring; None stands for the time."""
    tag = sequence.long() & 0xFFFFFFFF
    # Only a host that runs this step by step has a time to give; see `Stats.steps_ms`.
    now = 0 if ring.is_cuda else time.perf_counter_ns() & (2**48 - 1)
    tagged = [
        ((tag & 0xFFFF) << 48) | now if word is None else (tag << 32) | (word.long() & 0xFFFFFFFF)
        for word in words
    ]
    slot = tag % ring.shape[0]
    ring[:, row, : len(words)].index_copy_(0, slot, torch.cat(tagged)[None])


# ---- random numbers ------------------------------------------------------------------------

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: Tensor) -> list[Tensor]:
    """Philox4x32-10 on int64 tensors that hold 32 bits each.

    Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", section 5.
    """
    c = list(counter)
    k0, k1 = key & _LOW, (key >> 32) & _LOW
    for _ in range(10):
        # A product of 32 bits each wraps into the sign, which the masks below take off.
        a, b = c[0] * _MULTIPLIERS[0], c[2] * _MULTIPLIERS[1]
        c = [
            ((b >> 32) & _LOW) ^ c[1] ^ k0,
            b & _LOW,
            ((a >> 32) & _LOW) ^ c[3] ^ k1,
            a & _LOW,
        ]
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c


def uniform62(seed: Tensor, draws: Tensor, row: int, use: int = 0) -> Tensor:
    """62 random bits as int64 [1]; UniformUse in kernels/sample.cuh says what `use` is."""
    zero = torch.zeros_like(draws)
    r = philox((draws & _LOW, (draws >> 32) & _LOW, zero + row, zero + use), seed)
    return ((r[0] >> 1) << 31) | (r[1] >> 1)


def scale_uniform(uniform: Tensor, total: Tensor) -> Tensor:
    """floor(uniform * total / 2^62) for total below 2^62."""
    mask = 2**31 - 1
    u1, u0 = uniform >> 31, uniform & mask
    t1, t0 = total >> 31, total & mask
    middle = u1 * t0 + ((u0 * t0) >> 31)
    return u1 * t1 + (middle >> 31) + ((u0 * t1 + (middle & mask)) >> 31)
