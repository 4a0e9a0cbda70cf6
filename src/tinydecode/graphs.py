"""CUDA-graph capture of the decode step, the fixed-size verify pass, and passes over short prompts.

A captured pass has static shapes and reads everything that changes (tokens, lengths, sampling
parameters, random state) from device memory, so one graph serves every step of every generation.
The decode step ends with the sampler: it writes the token where its next replay reads it, and a few
words to the host's memory. See `token_loop` for the steps launched ahead.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tinydecode import prompts
from tinydecode.device_sampler import SLOTS, DeviceSampler, Stages
from tinydecode.kv_cache import KVCache
from tinydecode.model import LlamaModel
from tinydecode.sampling import SamplingParams

if TYPE_CHECKING:
    from tinydecode.engine import Engine

_WARM_UPS = 2  # before capture: cuBLAS picks its kernels and workspaces, modules load
_ROOM = 2**30  # bytes that should be free before a capture
MAX_STEPS = SLOTS // 2  # of one launch: those ahead of the host stay within the ring
GREEDY = Stages(has_filters=False, has_logprobs=False)
SAMPLED = Stages(has_filters=True, has_logprobs=False)


def enable(
    engine: Engine,
    verify: Sequence[int] = (),
    steps_per_launch: int = 1,
    prompt_lengths: Sequence[int] = (),
) -> Engine:
    """Make an engine replay a captured graph per step instead of launching its kernels one by one.

    The greedy and the sampled step are captured now, whatever parameters will be used; the step
    that also gives logprobs when a call first asks for them.

    Args:
        engine: on a CUDA device; its cache should be empty or hold only finished generations.
        verify: sizes T of `Engine.chunk` to capture now; others are captured when first used.
        steps_per_launch: decode steps that one graph holds, where that many are left to do.
        prompt_lengths: capture the passes that prompts of these lengths take now; those of other
            lengths are captured when one comes for the second time, since a capture takes longer
            than it saves a single prompt. Prompts too long for a graph to bring anything
            (`prompts.padded_length`) have none.

    Returns:
        The same engine.

    Raises:
        ValueError: the engine is not on a CUDA device, or steps_per_launch is out of range.
    """
    device = engine.model.device
    if device.type != "cuda":
        raise ValueError(f"CUDA graphs need a model on a CUDA device, this one is on {device}")
    is_count = isinstance(steps_per_launch, int) and not isinstance(steps_per_launch, bool)
    if not is_count or not 1 <= steps_per_launch <= MAX_STEPS:
        raise ValueError(
            f"steps_per_launch must be an integer from 1 to {MAX_STEPS}, found {steps_per_launch!r}"
        )
    if engine.graphs is None:
        graphs = Graphs(
            *(engine.model, engine.cache, engine.sampler),
            *(steps_per_launch, engine.padded_rows),
        )
        for stages in (GREEDY, SAMPLED):
            graphs.prepare(stages)
        engine.graphs = graphs
    for new_tokens in verify:
        engine.graphs.chunk(new_tokens)
    for longest in prompt_lengths:
        length = prompts.padded_length(longest, engine.batch_size, engine.padded_rows)
        if length is not None:
            engine.graphs.prefill.capture(length)
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


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Where every capture on a device happens: cuBLAS keeps 32 MiB for each stream it ever saw."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _capture(
    cache: KVCache,
    new_tokens: int,
    run: Callable[[], Tensor],
    pool: Any = None,
    warm_ups: int = _WARM_UPS,
) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Warm up on a side stream, then capture there; the cache's lengths are put back.

    The cache's last `new_tokens` slots are scribbled over; they hold tokens only in a full cache,
    which has no room for this pass anyway.
    """
    if not 1 <= new_tokens <= cache.max_seq_len:
        raise ValueError(
            f"a pass of {new_tokens} tokens does not fit the cache of {cache.max_seq_len}"
        )
    device = cache.seq_lens.device
    lengths = cache.seq_lens.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.device(device):
        side = _side_stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(warm_ups):
                cache.seq_lens.fill_(cache.max_seq_len - new_tokens)
                run()
        torch.cuda.current_stream(device).wait_stream(side)
        if torch.cuda.mem_get_info(device)[0] < _ROOM:
            torch.cuda.empty_cache()  # a capture cannot take what is cached for others
        # Not through torch.cuda.graph, which does so always, empties the cache of pinned memory
        # too, waits for the device, and in older versions collects garbage: tens of milliseconds.
        with _no_garbage_collection(), torch.cuda.stream(side):
            # "thread_local": what other threads allocate meanwhile neither fails nor spoils this.
            graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                out = run()
            finally:
                graph.capture_end()
        cache.seq_lens.copy_(lengths)
    return graph, out


class GraphedPrefill:
    """Captured passes over prompts, one for each padded length, on second use.

    The first is launched kernel by kernel, with the same bits.

    They are replayed one after the other, so they share their inputs, their output and one pool
    of memory, as large as the largest pass needs.
    """

    def __init__(self, model: LlamaModel, cache: KVCache, most: int) -> None:
        """Allocate what the passes share.

        Args:
            model: runs the passes.
            cache: is written.
            most: tokens of a pass, padding included.
        """
        self._model, self._cache = model, cache
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._seen: set[int] = set()  # lengths that came once
        self._pool: Any = None
        batch, vocab = cache.batch_size, model.config.vocab_size
        with torch.inference_mode(False):  # written inside of inference mode and outside
            self._inputs = torch.ones(batch + most, dtype=torch.int64, device=model.device)
            self._logits = torch.empty(batch, vocab, device=model.device)

    def capture(self, length: int) -> None:
        """Capture the pass of `length` tokens a row, unless it is there; forgets the cache."""
        if length in self._graphs:
            return

        def run() -> Tensor:
            return self._logits.copy_(self._pass(length))

        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        # Padding beyond the cache is dropped.
        new_tokens = min(length, self._cache.max_seq_len)
        self._graphs[length], _ = _capture(self._cache, new_tokens, run, self._pool, 1)

    def _pass(self, length: int) -> Tensor:
        batch = self._cache.batch_size
        inputs = prompts.unpack(self._inputs[: batch * (1 + length)], batch)
        return self._model.prefill(*inputs, self._cache)

    def __call__(self, length: int, packed: Tensor) -> Tensor:
        """The pass over prompts that `prompts.pack` padded to `length`.

        Returns:
            float32 [B, V]: the logits after each.
        """
        self._inputs[: packed.numel()].copy_(packed, non_blocking=True)
        if length not in self._graphs and length not in self._seen:
            self._seen.add(length)
            return self._pass(length)
        self.capture(length)
        self._graphs[length].replay()
        return self._logits.clone()  # the next prompt overwrites its own

    def close(self) -> None:
        """Free the graphs and their memory."""
        for graph in self._graphs.values():
            graph.reset()
        self._graphs.clear()


class GraphedChunk:
    """One captured pass of T tokens a row: static inputs, a replay, static outputs.

    Attributes:
        token_ids: int64 [B, T], read by the replay.
        logits: float32 [B, T, V], overwritten by each replay.
    """

    def __init__(self, model: LlamaModel, cache: KVCache, new_tokens: int) -> None:
        shape = (cache.batch_size, new_tokens)
        self.token_ids = torch.zeros(shape, device=model.device, dtype=torch.int64)
        self._graph, self.logits = _capture(
            cache, new_tokens, lambda: model.chunk(self.token_ids, cache)
        )

    def replay(self) -> None:
        """Launch the pass on the current stream."""
        self._graph.replay()

    def close(self) -> None:
        """Free the graph and its memory."""
        self._graph.reset()


class GraphedSteps:
    """Some decode steps in one graph: pass and sampler, each step feeding the next.

    Attributes:
        count: steps of one replay.
    """

    def __init__(
        self,
        model: LlamaModel,
        cache: KVCache,
        sampler: DeviceSampler,
        stages: Stages,
        count: int = 1,
    ) -> None:
        self.count = count
        self._sampler = sampler
        # The warm-up's steps are steps like others, of a generation that nobody reads.
        sampler.begin(SamplingParams(), 0)

        def run() -> Tensor:
            for _ in range(count):
                logits = model.chunk(sampler.tokens[:, None], cache)[:, 0]
                sampler.enqueue(logits, cache.seq_lens, stages)
            return logits

        self._graph, self.logits = _capture(cache, count, run)
        sampler.launched += _WARM_UPS * count

    def replay(self) -> None:
        """Launch the steps on the current stream."""
        self._graph.replay()
        self._sampler.launched += self.count

    def close(self) -> None:
        """Free the graph and its memory."""
        self._graph.reset()


class Graphs:
    """The captured passes of one engine.

    Attributes:
        prefill: those over prompts.
    """

    def __init__(
        self,
        model: LlamaModel,
        cache: KVCache,
        sampler: DeviceSampler,
        steps_per_launch: int = 1,
        padded_rows: int = 0,
    ) -> None:
        self.prefill = GraphedPrefill(model, cache, padded_rows)
        self._chunks: dict[int, GraphedChunk] = {}
        self._steps: dict[tuple[Stages, int], GraphedSteps] = {}
        self._model, self._cache, self._sampler = model, cache, sampler
        self._most = min(steps_per_launch, cache.max_seq_len)

    def chunk(self, new_tokens: int) -> GraphedChunk:
        """The pass of T tokens, captured on first use."""
        if new_tokens not in self._chunks:
            self._chunks[new_tokens] = GraphedChunk(self._model, self._cache, new_tokens)
        return self._chunks[new_tokens]

    def step(self, stages: Stages, room: int = 1) -> GraphedSteps:
        """The decode step, or several of them where `room` tokens are to come; see `enable`."""
        count = self._most if room >= self._most else 1
        key = (stages, count)
        if key not in self._steps:
            self._steps[key] = GraphedSteps(self._model, self._cache, self._sampler, stages, count)
        return self._steps[key]

    def prepare(self, stages: Stages) -> None:
        """Capture what `step` may be asked for, before anything is under way."""
        for room in (1, self._most):
            self.step(stages, room)

    def close(self) -> None:
        """Free every graph."""
        for chunk in self._chunks.values():
            chunk.close()
        for step in self._steps.values():
            step.close()
        self.prefill.close()
        self._chunks.clear()
        self._steps.clear()
