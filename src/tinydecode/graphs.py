"""CUDA-graph capture of the decode step."""

from __future__ import annotations

from tinydecode.engine import Engine


def enable(engine: Engine) -> Engine:
    """Make an engine replay a captured graph per step.

    Raises:
        NotImplementedError: always, in this version.
    """
    raise NotImplementedError("CUDA graphs are not in this version; use the engine without them")
