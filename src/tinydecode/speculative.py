"""Speculative decoding with a draft model or n-gram lookup."""

from __future__ import annotations

from collections.abc import Sequence

from tinydecode.engine import Engine
from tinydecode.stats import Stats


class ModelDrafter:
    """Drafts with a smaller model that shares the target's tokenizer.

    Raises:
        NotImplementedError: always, in this version.
    """

    def __init__(self, engine: Engine) -> None:
        raise NotImplementedError("speculative decoding is not in this version")


class NgramDrafter:
    """Drafts by looking the last tokens up in the history.

    Raises:
        NotImplementedError: always, in this version.
    """

    def __init__(self, max_n: int = 3, min_n: int = 1) -> None:
        raise NotImplementedError("speculative decoding is not in this version")


def generate(
    engine: Engine, drafter: ModelDrafter | NgramDrafter, ids: Sequence[int], k: int = 5
) -> tuple[list[int], Stats]:
    """Generate with draft, verify, accept.

    Raises:
        NotImplementedError: always, in this version.
    """
    raise NotImplementedError("speculative decoding is not in this version")
