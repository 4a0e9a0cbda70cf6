"""The plain torch twin of every op: the specification the kernels are tested against.

Nothing here is fast. Every reduction and every transcendental is done in float32, whatever the
storage dtype, and each docstring says where the result is rounded back. Shape letters are those of
the whole project: B batch, T new tokens, S cache slots, H query heads, K kv heads, G = H / K,
D head_dim, E hidden_size, F intermediate_size.

`seq_lens` is int32 [B] and counts the tokens cached *before* this call, so new token t of row b
sits at position (and cache slot) ``seq_lens[b] + t``.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

ATTENTION_CHUNK = 64  # keys per partial result, TD_ATTENTION_CHUNK of the kernels


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """RMS-normalise the last dimension: ``x / sqrt(mean(x^2) + eps) * weight``.

    Float32 inside; the normalised value is rounded to x's dtype *before* the product with the
    weight, which is rounded again.

    Args:
        x: [..., E].
        weight: [E], dtype of x.
        eps: added to the mean square, inside the root.
        out: [..., E] to write into; allocated when None. May be x itself.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization"; rounding order of the
    llama model in transformers.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    result = normed.to(x.dtype) * weight
    return result if out is None else out.copy_(result)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor | None = None
) -> Tensor:
    """Add x to the residual stream in place and return the norm of the sum.

    The sum is rounded to the storage dtype first; the norm is taken of the rounded sum, so that it
    equals ``rms_norm(residual)`` exactly.

    Args:
        x: [..., E], read.
        residual: [..., E], read and written.
        weight: [E].
        eps: as in `rms_norm`.
        out: [..., E] to write into; allocated when None. May be x itself.
    """
    residual.add_(x)
    return rms_norm(residual, weight, eps, out)


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, seq_lens: Tensor) -> None:
    """Rotate q and k in place by their positions.

    Pair i of a head is (i, i + D/2); it turns by the angle in row `position` of the tables. The
    product and sum are float32, rounded once at the end.

    Args:
        q: [B, T, H, D], written. A strided view into packed qkv is fine.
        k: [B, T, K, D], written, likewise.
        cos: float32 [S, D/2], one row a position.
        sin: float32 [S, D/2].
        seq_lens: int32 [B].

    Source: Su et al., "RoFormer", in the half-split layout of transformers.
    """
    new_tokens = q.shape[1]
    positions = seq_lens.long()[:, None] + torch.arange(new_tokens, device=q.device)
    # A padded row of a ragged prefill may point past the table; its result is never read.
    positions = positions.clamp(max=cos.shape[0] - 1)
    c, s = cos[positions][:, :, None, :], sin[positions][:, :, None, :]  # [B, T, 1, D/2]
    for x in (q, k):
        first, second = x.float().chunk(2, dim=-1)
        x.copy_(torch.cat((first * c - second * s, second * c + first * s), dim=-1))


def kv_append(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, seq_lens: Tensor) -> None:
    """Write the new keys and values into their cache slots; a pure copy.

    Args:
        k: [B, T, K, D], read. A strided view is fine.
        v: [B, T, K, D], read.
        k_cache: [B, K, S, D], written at slots ``seq_lens[b] + t``.
        v_cache: [B, K, S, D], written likewise.
        seq_lens: int32 [B]; not advanced here. Slots at S and beyond are not written.
    """
    batch, new_tokens = k.shape[:2]
    slots = seq_lens.long()[:, None] + torch.arange(new_tokens, device=k.device)  # [B, T]
    rows = torch.arange(batch, device=k.device)[:, None].expand_as(slots)
    # Clamped rather than dropped: a host-side bounds check would need a synchronisation, and the
    # engine never lets a real token past the end.
    slots = slots.clamp(max=k_cache.shape[2] - 1)
    k_cache.transpose(1, 2).index_put_((rows, slots), k)
    v_cache.transpose(1, 2).index_put_((rows, slots), v)


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
    """`rope`, then `kv_append` of the rotated keys and the values. Arguments as there."""
    rope(q, k, cos, sin, seq_lens)
    kv_append(k, v, k_cache, v_cache, seq_lens)


def silu_mul(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """``silu(gate) * up`` with gate the first and up the second half of the last dimension.

    Float32 inside; silu is rounded to the storage dtype before the product, as the separate ops of
    the model's definition do.

    Args:
        gate_up: [..., 2F].
        out: [..., F] to write into; allocated when None.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    wide = gate.float()
    result = (wide / (1.0 + torch.exp(-wide))).to(gate_up.dtype) * up
    return result if out is None else out.copy_(result)


def attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seq_lens: Tensor,
    scale: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of T new tokens on top of the cache, split over fixed chunks of keys.

    Query t of row b sees keys ``0 .. seq_lens[b] + t``; the new keys are already appended. T = 1 is
    decoding, T > 1 verifies a draft. Each chunk of `ATTENTION_CHUNK` keys gives a partial
    (maximum, sum of exponentials, weighted values); partials are merged in chunk order by their
    log-sum-exp. All of it is float32, rounded once at the end. Chunks lie at fixed places, so the
    result does not depend on the cache's capacity. The kernels split at the same places, but take
    longer chunks from position 4096 on. Slots past a row's end may hold anything.

    Args:
        q: [B, T, H, D].
        k_cache: [B, K, S, D].
        v_cache: [B, K, S, D].
        seq_lens: int32 [B].
        scale: multiplies the scores; D**-0.5 when None.
        out: [B, T, H * D] to write into; allocated when None.

    Returns:
        [B, T, H * D], dtype of q.

    Source: Dao et al., "Flash-Decoding for long-context inference" (the split and its merge).
    """
    batch, new_tokens, heads, dim = q.shape
    kv_heads, slots = k_cache.shape[1:3]
    group = heads // kv_heads
    scale = dim**-0.5 if scale is None else scale
    # [B, K, T, G, D]: the G query heads of a group share one kv head.
    grouped = q.float().view(batch, new_tokens, kv_heads, group, dim).transpose(1, 2) * scale
    visible = seq_lens.long()[:, None] + torch.arange(1, new_tokens + 1, device=q.device)  # [B, T]

    maximum = grouped.new_full((batch, kv_heads, new_tokens, group, 1), -torch.inf)
    total = torch.zeros_like(maximum)
    weighted = torch.zeros_like(grouped)
    for start in range(0, slots, ATTENTION_CHUNK):
        stop = min(start + ATTENTION_CHUNK, slots)
        keys = torch.arange(start, stop, device=q.device)
        seen = (keys < visible[..., None])[:, None, :, None, :]  # [B, 1, T, 1, C]
        inside = (keys < visible[:, -1:])[:, None, :, None]  # [B, 1, C, 1]: any query sees it
        k = k_cache[:, :, start:stop].float().masked_fill(~inside, 0.0)
        v = v_cache[:, :, start:stop].float().masked_fill(~inside, 0.0)

        # The partial of this chunk.
        scores = torch.einsum("bktgd,bkcd->bktgc", grouped, k).masked_fill(~seen, -torch.inf)
        chunk_maximum = scores.amax(-1, keepdim=True)
        chunk_weights = torch.exp(scores - chunk_maximum).masked_fill(~seen, 0.0)
        chunk_total = chunk_weights.sum(-1, keepdim=True)
        chunk_weighted = torch.einsum("bktgc,bkcd->bktgd", chunk_weights, v)

        # The merge: both sides are rescaled to the larger maximum. A chunk that a query does not
        # see has maximum -inf and weight 0, and leaves the running values bit for bit as they were.
        merged = torch.maximum(maximum, chunk_maximum)
        old = torch.exp(maximum - merged)
        new = torch.exp(chunk_maximum - merged)
        total = total * old + chunk_total * new
        weighted = weighted * old + chunk_weighted * new
        maximum = merged
    result = (weighted / total).transpose(1, 2).reshape(batch, new_tokens, heads * dim).to(q.dtype)
    return result if out is None else out.copy_(result)


def prefill_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """Causal attention of a prompt over itself, nothing cached before it.

    Query t sees keys ``0 .. t`` of its own row, so the padding at the end of a shorter row of a
    right-padded batch is seen by padding alone. Plain softmax, float32, rounded once at the end.

    Args:
        q: [B, T, H, D].
        k: [B, T, K, D].
        v: [B, T, K, D].
        scale: multiplies the scores; D**-0.5 when None.

    Returns:
        [B, T, H * D], dtype of q.
    """
    batch, new_tokens, heads, dim = q.shape
    kv_heads = k.shape[2]
    scale = dim**-0.5 if scale is None else scale
    grouped = q.float().view(batch, new_tokens, kv_heads, heads // kv_heads, dim) * scale
    scores = torch.einsum("btkgd,bskd->bkgts", grouped, k.float())
    causal = torch.ones(new_tokens, new_tokens, dtype=torch.bool, device=q.device).tril()
    weights = torch.softmax(scores.masked_fill(~causal, -torch.inf), dim=-1)
    result = torch.einsum("bkgts,bskd->btkgd", weights, v.float())
    return result.reshape(batch, new_tokens, heads * dim).to(q.dtype)


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
    """Norm, q/k/v projection, rope, and append of k and v to the cache.

    Args:
        x: [B, T, E], the residual stream.
        norm: [E].
        weight: [(H + 2K) * D, E], q then k then v.
        eps: of the norm.
        heads: H.
        cos: see `rope`.
        sin: see `rope`.
        k_cache: [B, K, S, D], written.
        v_cache: [B, K, S, D], written.
        seq_lens: int32 [B].

    Returns:
        The rotated q, [B, T, H, D].
    """
    kv_heads, dim = k_cache.shape[1], k_cache.shape[3]
    qkv = F.linear(rms_norm(x, norm, eps), weight)
    qkv = qkv.view(*x.shape[:2], heads + 2 * kv_heads, dim)
    q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], dim=2)
    rope_kv_append(q, k, v, cos, sin, k_cache, v_cache, seq_lens)
    return q


def linear_add(x: Tensor, weight: Tensor, residual: Tensor) -> None:
    """``residual += x weight^T``: x [B, T, K], weight [N, K], residual [B, T, N] written."""
    residual.add_(F.linear(x, weight))


def linear_gate_up(x: Tensor, norm: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Norm, gate and up projections, ``silu(gate) * up``.

    Args:
        x: [B, T, E], the residual stream.
        norm: [E].
        weight: [2F, E], gate then up.
        eps: of the norm.

    Returns:
        [B, T, F].
    """
    return silu_mul(F.linear(rms_norm(x, norm, eps), weight))


def linear_logits(
    x: Tensor, norm: Tensor, weight: Tensor, eps: float, seq_lens: Tensor | None = None
) -> Tensor:
    """Norm and head: x [B, T, E], norm [E], weight [V, E] -> float32 [B, T, V].

    The last product of a pass also advances seq_lens, int32 [B], by T when they are given.
    """
    if seq_lens is not None:
        seq_lens += x.shape[1]
    return F.linear(rms_norm(x, norm, eps), weight).float()


def embed(token_ids: Tensor, table: Tensor) -> Tensor:
    """Embeddings: token_ids int64 [B, T], table [V, E] -> [B, T, E]."""
    return F.embedding(token_ids, table)


def argmax(logits: Tensor, out: Tensor | None = None, nonfinite: Tensor | None = None) -> Tensor:
    """The index of the largest logit of each row, the lowest one among equals.

    Args:
        logits: [B, V]. NaN counts as smaller than every number.
        out: int64 [B] to write into; allocated when None.
        nonfinite: int32 [1], set to 1 when any logit is NaN or infinite and left alone otherwise,
            so that one look tells about many steps.

    Returns:
        int64 [B].
    """
    if nonfinite is not None:
        nonfinite.bitwise_or_((~torch.isfinite(logits)).any().to(torch.int32))
    result = logits.masked_fill(logits.isnan(), -torch.inf).argmax(-1)
    return result if out is None else out.copy_(result)
