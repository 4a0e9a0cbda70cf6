"""The accept rule: which drafted tokens stand, and which token follows them.

The text that results has exactly the target's distribution, whatever the draft proposes, provided
that q is the distribution the draft really drew from. A draft that did not draw (n-gram lookup, a
greedy model) has all its mass on its token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from tinydecode.sampling import draw


class Rows(Protocol):
    """Distributions by row: a tensor [rows, V], or rows computed when they are asked for."""

    def __getitem__(self, row: int, /) -> Tensor: ...


def accept(
    p: Rows, q: Rows | None, draft: Sequence[int], uniforms: Sequence[float]
) -> tuple[int, int]:
    """How many drafted tokens stand, and the token after them.

    Drafted token x of row i stands with probability ``min(1, p[i](x) / q[i](x))``. At the first
    that does not, the next token is drawn from ``(p[i] - q[i])+``; when all stand, from the bonus
    row p[k]. With greedy distributions (all mass on one token) this is "accept while the most
    likely token matches, then take the most likely one": no code path of its own.

    Args:
        p: k + 1 rows, float64 [V]: the target's distributions after all filters. Rows past the
            first rejection are not read.
        q: k rows, float64 [V]: what each drafted token was drawn from, after all filters. None:
            all mass on the drafted token.
        draft: k token ids.
        uniforms: k + 1 numbers in [0, 1), independent of each other and of the draft's; the last
            one draws the next token.

    Returns:
        (drafted tokens that stand, 0 to k; the token that follows them).

    Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", section
    2.3; Chen et al., "Accelerating Large Language Model Decoding with Speculative Sampling".
    """
    for row, token in enumerate(draft):
        target = p[row]
        proposed = 1.0 if q is None else float(q[row][token])
        # u in [0, 1), so p = q > 0 always stands and p = 0 never does.
        if uniforms[row] * proposed < float(target[token]):
            continue
        if q is None:
            residual = target.clone()
            residual[token] = 0.0
        else:
            residual = (target - q[row]).clamp_(min=0.0)
        if not float(residual.sum()) > 0.0:
            # A rejection says q > p here, so p > q elsewhere; unless by less than a rounding.
            residual = target
        return row, draw(residual, uniforms[-1])
    return len(draft), draw(p[len(draft)], uniforms[-1])
