"""The one rule by which a fast implementation is compared with its twin."""

from __future__ import annotations

import torch
from torch import Tensor


def assert_as_good_as_twin(
    result: Tensor, twin: Tensor, oracle: Tensor, what: str = "result"
) -> None:
    """Pass when the error against a float64 oracle is at most twice the twin's own.

    Both the largest absolute and the relative L2 error are compared. The floor is one rounding
    step of the result's dtype at the oracle's magnitude: a twin that happens to be exact leaves
    that much.

    Args:
        result: what is tested, any dtype.
        twin: the plain torch twin's output, same dtype and shape.
        oracle: float64, same shape.
        what: names the tensor in the message.
    """
    assert result.shape == twin.shape == oracle.shape, f"{what}: {result.shape}, {twin.shape}"
    assert result.dtype == twin.dtype, f"{what}: {result.dtype} against {twin.dtype}"
    assert torch.isfinite(result).all(), f"{what} has non-finite values"
    oracle = oracle.double().to(result.device)
    step = torch.finfo(result.dtype).eps
    largest = float(oracle.abs().max())
    norm = float(oracle.norm())

    def errors(x: Tensor) -> tuple[float, float]:
        difference = x.double() - oracle
        return float(difference.abs().max()), float(difference.norm())

    (worst, l2), (twin_worst, twin_l2) = errors(result), errors(twin)
    assert worst <= 2 * twin_worst + step * largest, (
        f"{what}: largest error {worst:.3e}, the twin's is {twin_worst:.3e}"
    )
    assert l2 <= 2 * twin_l2 + step * norm, (
        f"{what}: L2 error {l2:.3e} of {norm:.3e}, the twin's is {twin_l2:.3e}"
    )
