"""The token loop: one choice a row and step, until the rows have ended.

Two sources of steps with one meaning. `host_steps` decides on the host after each step; it serves
the CPU. `device_steps` decides on the device and launches a few steps ahead of what the host has
read, so that the device never waits for the host. Steps launched past an end leave nothing behind:
the device freezes a row that met one, and the cache is rolled back through its lengths.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tinydecode.device_sampler import Stages
from tinydecode.events import Output, TokenEvent
from tinydecode.sampling import Choice, Sampler, SamplingParams, non_finite_error
from tinydecode.stats import Stats

if TYPE_CHECKING:
    from tinydecode.engine import Engine

LogitsHook = Callable[[list[int], Tensor], Tensor]
"""(prompt and output ids of a row, logits float32 [V]) -> logits [V] to choose from."""

AHEAD = 3  # steps launched beyond the one the host waits for
Step = tuple[float, list[Choice | None]]  # seconds since the call; None: no choice in this row


@dataclass
class Call:
    """One generation, checked and ready to run."""

    rows: list[list[int]]  # prompts
    outputs: list[Output]
    limits: list[int]  # tokens a row, at least 1
    params: SamplingParams
    stop_ids: frozenset[int]
    hook: LogitsHook | None
    stats: Stats
    started: float  # of time.perf_counter

    @property
    def is_over(self) -> bool:
        """Whether every row has ended."""
        return all(output.finish_reason is not None for output in self.outputs)


Source = Callable[["Engine", Call], Generator[Step, None, None]]


def run(
    engine: Engine, call: Call, source: Source | None = None
) -> Generator[tuple[int, TokenEvent], None, None]:
    """(row, event) until every row has ended; `stats` is up to date for each event.

    The tokens come from `source`, or from the steps below that suit the engine.
    """
    stats, outputs = call.stats, call.outputs
    stats.prompt_tokens = sum(len(row) for row in call.rows)
    stats.finish_reasons = [None] * len(call.rows)
    stats.logprobs = [[] for _ in call.rows]
    if min(call.limits) == 0:
        for row, output in enumerate(outputs):
            yield from _let_out(call, row, output.end_at_once())
        return
    if source is None:
        source = device_steps if engine.samples_on_device else host_steps
    steps = source(engine, call)
    try:
        for elapsed, choices in steps:
            stats.step_times.append(elapsed)
            for row, (output, choice) in enumerate(zip(outputs, choices, strict=True)):
                if output.finish_reason is None:
                    assert choice is not None
                    events = output.push(
                        choice.token_id, elapsed, choice.logprobs, choice.from_draft
                    )
                    yield from _let_out(call, row, events)
            if call.is_over:
                return
    finally:
        steps.close()


def _let_out(call: Call, row: int, events: list[TokenEvent]) -> Iterator[tuple[int, TokenEvent]]:
    stats = call.stats
    for event in events:
        if event.token_id is not None:
            stats.new_tokens += 1
            if event.logprobs is not None:
                stats.logprobs[row].append(event.logprobs)
        if event.finish_reason is not None:
            stats.finish_reasons[row] = event.finish_reason
            if None not in stats.finish_reasons:
                every = set(stats.finish_reasons)
                stats.finish_reason = "length" if "length" in every else "stop"
        yield row, event


@torch.inference_mode()
def host_steps(engine: Engine, call: Call) -> Generator[Step, None, None]:
    """Prefill, then choose on the host and decode in turn."""
    sampler = Sampler(call.params)
    call.stats.seed = None if call.params.is_greedy else sampler.seed
    generated: list[list[int]] = [[] for _ in call.rows]
    logits = engine.prefill(call.rows)
    generation = engine.generation
    try:
        while True:
            choices = sampler.sample(_hooked(call, logits, generated), call.rows, generated)
            for row, choice in enumerate(choices):
                generated[row].append(choice.token_id)
            yield time.perf_counter() - call.started, list(choices)
            _check_generation(engine, generation)
            tokens = [choice.token_id for choice in choices]
            logits = engine.step(torch.tensor(tokens, device=engine.model.device))
            ended = [output.finish_reason is not None for output in call.outputs]
            if any(ended):  # rows that ended still run along; they stay where they are
                engine.cache.seq_lens.sub_(torch.tensor(ended, device=engine.model.device).int())
    finally:
        _roll_back(engine, generation, call)


@torch.inference_mode()
def device_steps(engine: Engine, call: Call) -> Generator[Step, None, None]:
    """Prefill, then steps that choose for themselves, a few launched ahead."""
    sampler = engine.sampler
    stages = Stages.of(call.params)
    launch = engine.step_launcher(stages, call.hook is not None)  # may capture: nothing runs yet
    logits = engine.prefill(call.rows)
    generation = engine.generation
    # Behind the prefill, so that the device works while the host does the rest.
    seed = Sampler(call.params).seed
    call.stats.seed = None if call.params.is_greedy else seed
    sampler.begin(call.params, seed, call.rows, call.stop_ids, call.limits)
    generated: list[list[int]] = [[] for _ in call.rows]
    last = sampler.launched + max(call.limits)  # no row needs more steps
    first = sampler.launched
    try:
        sampler.enqueue(_hooked(call, logits, generated), None, stages)
        sampler.launched += 1
        ahead = 0 if call.hook is not None else AHEAD
        read = 0
        while True:
            while sampler.launched < last and sampler.launched - first - read <= ahead:
                if read == 0 and sampler.launched - first > 1 and sampler.is_here():
                    break  # launched one by one, the steps ahead would keep the first token waiting
                if call.hook is None:
                    launch(last - sampler.launched)
                    continue
                logits = engine.chunk(sampler.tokens[:, None])[:, 0]
                hooked = _hooked(call, logits, generated)
                sampler.enqueue(hooked, engine.cache.seq_lens, stages)
                sampler.launched += 1
            choices, clock = sampler.read(is_first=read == 0)
            read += 1
            for row, (output, choice) in enumerate(zip(call.outputs, choices, strict=True)):
                if output.finish_reason is not None:
                    continue
                if choice is None:
                    raise non_finite_error(read)
                generated[row].append(choice.token_id)
            if clock:
                call.stats.device_times_ns.append(clock)
            yield time.perf_counter() - call.started, choices
            _check_generation(engine, generation)
    finally:
        _roll_back(engine, generation, call)


def _hooked(call: Call, logits: Tensor, generated: Sequence[Sequence[int]]) -> Tensor:
    """Logits [B, V] as the caller's hook wants them."""
    if call.hook is None:
        return logits
    rows = []
    for row, prompt, output in zip(logits, call.rows, generated, strict=True):
        found = call.hook([*prompt, *output], row)
        if not isinstance(found, Tensor) or found.shape != row.shape:
            shape = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise ValueError(
                f"logits_hook must return logits of shape {list(row.shape)}, found {shape}"
            )
        rows.append(found.to(row.device, torch.float32))
    return torch.stack(rows)


def _check_generation(engine: Engine, generation: int) -> None:
    if engine.generation != generation:
        raise RuntimeError("another call used this engine while the stream was open")


def _roll_back(engine: Engine, generation: int, call: Call) -> None:
    """Leave in the cache what is kept, whatever was launched after it."""
    if engine.generation != generation:
        return
    lengths = [
        len(row) + output.cached for row, output in zip(call.rows, call.outputs, strict=True)
    ]
    engine.cache.seq_lens.copy_(torch.tensor(lengths, dtype=torch.int32), non_blocking=True)
