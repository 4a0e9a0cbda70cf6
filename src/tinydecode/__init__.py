"""tinydecode: a small llama-style runtime for decoding one stream as fast as the GPU allows.

The public names are resolved on first use, so that importing the package costs nothing: torch is
imported by the module that a name lives in.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tinydecode._version import __version__

if TYPE_CHECKING:
    from tinydecode import graphs, speculative
    from tinydecode.config import ModelConfig
    from tinydecode.engine import Engine, TokenEvent, TokenStream
    from tinydecode.model import LlamaModel, load_hf
    from tinydecode.sampling import NonFiniteLogitsError, SamplingParams
    from tinydecode.stats import Stats
    from tinydecode.tokenizer import Tokenizer
    from tinydecode.weights import CheckpointError

_MODULE_OF = {
    "CheckpointError": "weights",
    "Engine": "engine",
    "LlamaModel": "model",
    "ModelConfig": "config",
    "NonFiniteLogitsError": "sampling",
    "SamplingParams": "sampling",
    "Stats": "stats",
    "TokenEvent": "engine",
    "TokenStream": "engine",
    "Tokenizer": "tokenizer",
    "load_hf": "model",
}

__all__ = [
    "CheckpointError",
    "Engine",
    "LlamaModel",
    "ModelConfig",
    "NonFiniteLogitsError",
    "SamplingParams",
    "Stats",
    "TokenEvent",
    "TokenStream",
    "Tokenizer",
    "__version__",
    "graphs",
    "load_hf",
    "speculative",
]


def __getattr__(name: str) -> Any:
    if name in ("graphs", "speculative"):
        return import_module(f"tinydecode.{name}")
    if name in _MODULE_OF:
        return getattr(import_module(f"tinydecode.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module 'tinydecode' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
