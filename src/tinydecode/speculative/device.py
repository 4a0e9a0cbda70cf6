"""The rounds on the device: each is one graph, launched ahead; the host only reads tokens.

A round drafts, verifies, accepts, rolls back, appends to the text, and tells the host, without the
host in between: text, lengths, random state and the end are in device memory, in `Buffers`. Without
graphs the same launches go out one by one, and on a CPU the twins run them.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence

import numpy as np
import torch

from tinydecode import ops
from tinydecode.device_sampler import Stages
from tinydecode.engine import Engine
from tinydecode.ops import ref_round
from tinydecode.sampling import Choice, Sampler, non_finite_error
from tinydecode.speculative.buffers import buffers_of
from tinydecode.speculative.drafter import Call as DraftCall
from tinydecode.speculative.drafter import Drafter, ModelDrafter, passes
from tinydecode.speculative.length import AdaptiveLength, FixedLength, Shadow
from tinydecode.speculative.ngram import NgramDrafter
from tinydecode.speculative.scripted import ScriptedDrafter
from tinydecode.speculative.stats import SpeculativeStats
from tinydecode.token_loop import Call, Step, _check_generation, _roll_back

AHEAD = 1  # rounds launched beyond the one the host waits for: each is long


def fits(engine: Engine, drafter: Drafter, call: Call) -> bool:
    """Whether a call's rounds can run on the device; others are driven by the host."""
    if not engine.samples_on_device or ops.round_ops(engine.model.device) is None:
        return False
    if call.params.has_penalties or call.params.logprobs is not None or call.hook is not None:
        return False  # penalties change from row to row of a round; the others need its logits
    if isinstance(drafter, ScriptedDrafter):
        drafter = drafter.inner
    if isinstance(drafter, NgramDrafter):
        return drafter.max_n <= ref_round.MAX_NGRAM
    return isinstance(drafter, ModelDrafter) and drafter.engine.model.device == engine.model.device


class DeviceRounds:
    """One generation whose rounds run on the device; arguments as of `Rounds`."""

    def __init__(
        self,
        engine: Engine,
        call: Call,
        drafter: ModelDrafter | NgramDrafter | ScriptedDrafter,
        length: FixedLength | AdaptiveLength,
    ) -> None:
        assert isinstance(call.stats, SpeculativeStats)
        self._script: Sequence[int] = ()
        self._shadow = Shadow(length, drafter, counts_misses=True)
        if isinstance(drafter, ScriptedDrafter):
            self._script, drafter = drafter.script, drafter.inner
        self._engine, self._call, self._drafter, self._length = engine, call, drafter, length
        self._stats = call.stats
        self._buffers = buffers_of(engine, drafter, bool(self._script))
        self._history = list(call.rows[0])
        self._in_flight: list[int] = []  # k of the rounds launched and not read
        self._draft_cached = 0  # tokens of the text that the draft's cache holds
        self._draft_generation: int | None = None  # of the draft's engine
        self._can_draft = True  # the draft's context has room
        self._is_behind = False  # plain steps were made, which the draft has not seen
        self._is_level = False  # its cache holds the prompt and nothing else
        self._wanted: int | None = None  # chosen for the next round, which cannot start yet

    @torch.inference_mode()
    def steps(self) -> Generator[Step, None, None]:
        """One token a step; those of a round follow each other at once."""
        engine, call, sampler = self._engine, self._call, self._engine.sampler
        stages = Stages(not call.params.is_greedy, False)
        seed = Sampler(call.params).seed
        self._stats.seed = None if call.params.is_greedy else seed
        picks_best = call.params.is_greedy and not call.params.has_bias
        self._buffers.prepare([0, *self._length.lengths], picks_best)
        vocab = engine.model.config.vocab_size
        random = np.random.Generator(np.random.Philox(seed))
        self._drafter.begin(DraftCall(call.params, random, len(call.rows[0]), vocab))
        sampler.begin(call.params, seed, call.rows, call.stop_ids, call.limits)
        logits = engine.prefill(call.rows)
        generation = engine.generation
        try:
            sampler.enqueue(logits, None, stages)
            sampler.launched += 1
            choices, clock = sampler.read(is_first=True)
            if choices[0] is None:
                raise non_finite_error(1)
            yield from self._yield([choices[0]], generation)
            self._begin_draft()
            left = call.limits[0] - 1
            tag = self._buffers.begin(self._history, left, self._script)
            while True:
                self._launch(call.limits[0])
                tag += 1
                k = self._in_flight[0]
                tokens, stands, proposed, is_bad, now = self._buffers.read(tag)
                self._in_flight.pop(0)
                self._learn(k, proposed, stands, (now - clock) / 1e9)
                clock = now
                block = [Choice(t, None, i < stands) for i, t in enumerate(tokens)]
                yield from self._yield(block, generation)
                if is_bad:
                    raise non_finite_error(len(self._history) - len(call.rows[0]) + 1)
                if k == 0 and isinstance(self._length, AdaptiveLength):
                    self._shadow.start(self._history)
        finally:
            _roll_back(engine, generation, call)

    def _yield(self, block: list[Choice], generation: int) -> Generator[Step, None, None]:
        elapsed = time.perf_counter() - self._call.started
        for choice in block:
            self._history.append(choice.token_id)
            self._shadow.decide(choice.token_id)
            yield elapsed, [choice]
            _check_generation(self._engine, generation)
            if isinstance(self._drafter, ModelDrafter) and self._draft_generation is not None:
                _check_generation(self._drafter.engine, self._draft_generation)

    def _begin_draft(self) -> None:
        """The draft's own pass over the prompt, once the first token is out."""
        if not isinstance(self._drafter, ModelDrafter):
            return
        prompt = self._call.rows[0]
        if self._drafter.room(len(prompt) + 1) < 1:
            self._stop_drafting()
            return
        engine = self._drafter.engine
        engine.prefill([[self._drafter._known(token) for token in prompt]])
        self._draft_generation = engine.generation
        self._draft_cached = len(prompt)
        self._is_level = True

    def _stop_drafting(self) -> None:
        self._can_draft = False
        if self._stats.drafting_stopped_at is None:
            self._stats.drafting_stopped_at = len(self._history)

    def _launch(self, limit: int) -> None:
        """Keep rounds in flight, as many as surely find slots and are surely needed."""
        left = limit - (len(self._history) - len(self._call.rows[0]))
        while len(self._in_flight) < min(AHEAD + 1, left):
            longest = len(self._history) + sum(k + 1 for k in self._in_flight)
            if self._wanted is None:
                self._wanted = self._length.choose() if self._can_draft and left > 1 else 0
            k = self._wanted if self._can_draft and left > 1 else 0
            if k and not self._has_room(k, longest):
                if self._in_flight:
                    return  # once the rounds in flight have told what they made, it may fit
                k = 0
            if k and not self._catch_up():
                return
            if k == 0 and longest > self._engine.max_seq_len:
                return
            self._wanted = None
            self._in_flight.append(k)
            self._is_behind = self._is_behind or k == 0
            self._buffers.launch(k, k > 0 and self._is_level)
            self._is_level = False

    def _has_room(self, k: int, length: int) -> bool:
        """Whether a round of k fits both caches when the text has `length` tokens."""
        if isinstance(self._drafter, ModelDrafter) and self._drafter.room(length) < k:
            if not self._in_flight:
                self._stop_drafting()
            return False
        return length + k <= self._engine.max_seq_len

    def _catch_up(self) -> bool:
        """Let the draft see what plain steps made; False while rounds are in flight."""
        if not self._is_behind or not isinstance(self._drafter, ModelDrafter):
            self._is_behind = False
            return True
        if self._in_flight:
            return False
        engine = self._drafter.engine
        engine.cache.seq_lens.fill_(self._draft_cached)
        missing = self._history[self._draft_cached : -1]
        for part in passes([self._drafter._known(token) for token in missing]):
            engine.model.chunk(torch.tensor([part], device=engine.model.device), engine.cache)
        engine.cache.seq_lens.fill_(len(self._history) - 2)
        self._is_behind = False
        return True

    def _learn(self, k: int, proposed: int, stands: int, seconds: float) -> None:
        stats = self._stats
        stats.target_passes += 1
        stats.verify_s += seconds
        self._length.ran(proposed, k + 1, 0.0, seconds)
        if k:  # all of the text but its last token, or the last two where all stood
            self._draft_cached = len(self._history) + min(stands, k - 1)
        if proposed:
            self._shadow.drop()
            stats.rounds += 1
            stats.proposed += proposed
            stats.accepted += stands
            stats.accepted_counts.append(stands)
            self._length.judged(proposed, stands)
        elif k and len(self._history) - len(self._call.rows[0]) + 1 < self._call.limits[0]:
            self._length.judged(1, 0)  # nothing was found: the pass had its k + 1 rows all the same
