"""CUDA-graph capture of the decode step and of the fixed-size verify pass.

A captured pass has static shapes and reads everything that changes (tokens, lengths) from device
memory, so one graph serves every step of every generation. Greedy decoding never leaves the device:
the graph ends by writing the token it chose where its next replay reads it, and the host reads
tokens one launch behind.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from tinydecode import ops
from tinydecode.engine import Engine
from tinydecode.kv_cache import KVCache
from tinydecode.model import LlamaModel
from tinydecode.sampling import non_finite_error

_WARM_UPS = 2  # before capture: cuBLAS picks its kernels and workspaces, modules load
_RING = 4  # host slots for tokens on their way back; two are in use at a time


def enable(engine: Engine, verify: Sequence[int] = ()) -> Engine:
    """Make an engine replay a captured graph per step instead of launching its kernels one by one.

    Args:
        engine: on a CUDA device; its cache should be empty or hold only finished generations.
        verify: sizes T of `Engine.chunk` to capture now; others are captured when first used.

    Returns:
        The same engine.

    Raises:
        ValueError: the engine is not on a CUDA device.
    """
    device = engine.model.device
    if device.type != "cuda":
        raise ValueError(f"CUDA graphs need a model on a CUDA device, this one is on {device}")
    if engine.graphs is None:
        engine.graphs = Graphs(engine.model, engine.cache)
    for new_tokens in verify:
        engine.graphs.chunk(new_tokens)
    return engine


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Freeing another graph while one is captured would spoil the capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class GraphedStep:
    """One captured pass of T tokens a row: static inputs, a replay, static outputs.

    Attributes:
        token_ids: int64 [B, T], read by the replay. For T = 1 the replay then writes the most
            likely next token there, so that replaying again decodes greedily.
        logits: float32 [B, T, V], overwritten by each replay.
        nonfinite: int32 [1], set to 1 by a replay of T = 1 that met NaN or infinity, never cleared.
        state: int64 [B + 1], T = 1 only: the next tokens, then `nonfinite`, in one piece to copy.
    """

    def __init__(self, model: LlamaModel, cache: KVCache, new_tokens: int = 1) -> None:
        """Warm up on a side stream, then capture.

        The cache's last T slots are scribbled over; they hold tokens only in a full cache, which
        has no room for this pass anyway.
        """
        device = model.device
        if not 1 <= new_tokens <= cache.max_seq_len:
            raise ValueError(
                f"a pass of {new_tokens} tokens does not fit the cache of {cache.max_seq_len}"
            )
        batch = cache.batch_size
        self.state = torch.zeros(batch + 1, device=device, dtype=torch.int64)
        self.nonfinite = self.state[batch:].view(torch.int32)[:1]
        if new_tokens == 1:
            self.token_ids = self.state[:batch, None]
        else:
            self.token_ids = torch.zeros(batch, new_tokens, device=device, dtype=torch.int64)

        def run() -> Tensor:
            logits = model.chunk(self.token_ids, cache)
            if new_tokens == 1:
                ops.argmax(logits[:, 0], self.state[:batch], self.nonfinite)
            return logits

        lengths = cache.seq_lens.clone()
        self._graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.device(device):
            side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side):
                for _ in range(_WARM_UPS):
                    cache.seq_lens.fill_(cache.max_seq_len - new_tokens)
                    run()
            torch.cuda.current_stream(device).wait_stream(side)
            with _no_garbage_collection(), torch.cuda.graph(self._graph):
                self.logits = run()
            cache.seq_lens.copy_(lengths)
            self.state.zero_()

    def replay(self) -> None:
        """Launch the pass on the current stream."""
        self._graph.replay()

    def close(self) -> None:
        """Free the graph and its memory."""
        self._graph.reset()


class Graphs:
    """The captured passes of one engine."""

    def __init__(self, model: LlamaModel, cache: KVCache) -> None:
        self.step = GraphedStep(model, cache)
        self._chunks: dict[int, GraphedStep] = {}
        self._model, self._cache = model, cache

    def chunk(self, new_tokens: int) -> GraphedStep:
        """The pass of T tokens, captured on first use; T = 1 is the decode step itself."""
        if new_tokens == 1:
            return self.step
        if new_tokens not in self._chunks:
            self._chunks[new_tokens] = GraphedStep(self._model, self._cache, new_tokens)
        return self._chunks[new_tokens]

    def close(self) -> None:
        """Free every graph."""
        for step in (self.step, *self._chunks.values()):
            step.close()
        self._chunks.clear()

    def greedy_tokens(self, engine: Engine, prompt: list[int]) -> Iterator[list[int]]:
        """Prefill, then replay the step without end, one launch ahead of the token yielded.

        Ends the launches, not the iteration, at the cache's last slot: the caller stops there. A
        step launched past the caller's stop is forgotten through seq_lens.
        """
        step = self.step
        device = engine.model.device
        logits = engine.prefill([prompt])
        generation = engine.generation
        step.nonfinite.zero_()
        ops.argmax(logits, step.state[:1], step.nonfinite)
        host = torch.empty(_RING, 2, dtype=torch.int64, pin_memory=True)
        arrived = [torch.cuda.Event() for _ in range(_RING)]  # type: ignore[no-untyped-call]
        stream = torch.cuda.current_stream(device)

        def send(index: int) -> None:
            host[index % _RING].copy_(step.state, non_blocking=True)
            arrived[index % _RING].record(stream)

        send(0)
        room = engine.max_seq_len - len(prompt)  # steps that still find a slot
        yielded = 0
        try:
            while True:
                if yielded < room:
                    step.replay()
                    send(yielded + 1)
                arrived[yielded % _RING].synchronize()
                token, bad = host[yielded % _RING].tolist()
                yielded += 1
                if bad:
                    raise non_finite_error(yielded)
                yield [token]
                if engine.generation != generation:
                    raise RuntimeError("another call used this engine while the stream was open")
        finally:
            # The last token yielded was never an input, as in decoding without graphs.
            if engine.generation == generation:
                engine.cache.seq_lens.fill_(len(prompt) + max(yielded - 1, 0))
