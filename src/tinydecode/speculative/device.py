"""The rounds on the device: each is one graph, launched ahead; the host only reads tokens.

A round drafts, verifies, accepts, rolls back, appends to the text, and tells the host, without the
host in between: text, lengths, random state and the end are in device memory. What a graph holds is
`_run`; without graphs the same launches go out one by one, and on a CPU the twins run them.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from tinydecode import graphs, ops
from tinydecode.device_sampler import Stages
from tinydecode.engine import Engine
from tinydecode.ops import ref_round
from tinydecode.sampling import Choice, Sampler, non_finite_error
from tinydecode.speculative.drafter import Call as DraftCall
from tinydecode.speculative.drafter import Drafter, ModelDrafter
from tinydecode.speculative.length import MAX_LENGTH, AdaptiveLength, FixedLength, Shadow
from tinydecode.speculative.ngram import NgramDrafter
from tinydecode.speculative.stats import SpeculativeStats
from tinydecode.token_loop import Call, Step, _check_generation, _roll_back

AHEAD = 2  # rounds launched beyond the one the host waits for
SLOTS = 16  # rounds in the ring
_MASK = 0xFFFFFFFF
_SPINS, _NAP_S, _CHECK_S = 2000, 2e-5, 0.05


def fits(engine: Engine, drafter: Drafter, call: Call) -> bool:
    """Whether a call's rounds can run on the device; others are driven by the host."""
    if not engine.samples_on_device or ops.round_ops(engine.model.device) is None:
        return False
    if call.params.has_penalties or call.params.logprobs is not None or call.hook is not None:
        return False  # penalties change from row to row of a round; the others need its logits
    if isinstance(drafter, NgramDrafter):
        return drafter.max_n <= ref_round.MAX_NGRAM
    return isinstance(drafter, ModelDrafter) and drafter.engine.model.device == engine.model.device


class Buffers:
    """Device memory and captured rounds of a target with one drafter.

    Attributes:
        history: int32 [capacity], the text.
        state: int64 [6], see `ops.ref_round`.
        block: int64 [16]: the text's last token, then the drafted ones.
    """

    def __init__(self, engine: Engine, drafter: ModelDrafter | NgramDrafter) -> None:
        self._engine, self._drafter = engine, drafter
        device = engine.model.device
        found = ops.round_ops(device)
        assert found is not None
        self._ops: ModuleType = found
        rows, vocab = MAX_LENGTH + 1, engine.model.config.vocab_size
        self._vocab = self._draft_vocab = vocab
        capacity = engine.max_seq_len + rows + 1
        self.history = torch.zeros(capacity, dtype=torch.int32, device=device)
        self.state = torch.zeros(ref_round.STATE_WORDS, dtype=torch.int64, device=device)
        self.block = torch.zeros(rows, dtype=torch.int64, device=device)
        ring = torch.zeros(SLOTS, ref_round.RING_WORDS, dtype=torch.int64)
        self._ring = ring.pin_memory() if device.type == "cuda" else ring
        self._words = memoryview(self._ring.numpy().data).cast("B").cast("Q")
        self._counts = torch.zeros(rows, vocab, dtype=torch.int32, device=device)  # never read
        self._p: dict[int, Tensor] = {}
        self._q: Tensor | None = None
        if isinstance(drafter, ModelDrafter):
            self._draft_vocab = min(vocab, drafter.engine.model.config.vocab_size)
            one = self._ops.workspace(1, self._draft_vocab, device)
            self._q = torch.zeros(MAX_LENGTH, one.numel(), dtype=one.dtype, device=device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._last_tag = 0  # of all rounds launched so far

    def prepare(self, lengths: list[int]) -> None:
        """Allocate, and capture where the engine has graphs; no generation may be under way."""
        for k in lengths:
            if k not in self._p:
                device = self._engine.model.device
                self._p[k] = self._ops.workspace(k + 1, self._vocab, device)
            fits_cache = k + 1 <= self._engine.max_seq_len
            if self._engine.graphs is not None and k not in self._graphs and fits_cache:
                # A round after an end changes nothing but lengths: that is what is warmed up.
                self.state.zero_()
                self.state[ref_round.IS_DONE] = 1
                self.state[ref_round.LENGTH] = 2
                if isinstance(self._drafter, ModelDrafter):
                    self._drafter.engine.cache.seq_lens.zero_()

                def run(k: int = k) -> Tensor:
                    self._run(k)
                    return self.block

                self._graphs[k], _ = graphs._capture(self._engine.cache, k + 1, run)

    def begin(self, text: list[int], remaining: int) -> int:
        """Set text and state for a generation; returns the tag before the first round's."""
        device = self._engine.model.device
        tokens = torch.tensor(text, dtype=torch.int32).to(device, non_blocking=True)
        self.history[: len(text)].copy_(tokens)
        state = [0] * ref_round.STATE_WORDS
        state[ref_round.ROUND] = self._last_tag
        state[ref_round.LENGTH], state[ref_round.REMAINING] = len(text), remaining
        self.state.copy_(torch.tensor(state), non_blocking=True)
        self.block[:1].fill_(text[-1])
        self._engine.cache.seq_lens.fill_(len(text) - 1)
        return self._last_tag

    def launch(self, k: int) -> None:
        """One round that drafts k tokens, 0 for a plain step."""
        self._last_tag += 1
        if k in self._graphs:
            self._graphs[k].replay()
        else:
            self._run(k)

    def _run(self, k: int) -> None:
        engine, ops_, drafter = self._engine, self._ops, self._drafter
        params, bias = engine.sampler._state, engine.sampler._bias
        draft = self.block[1 : k + 1]
        q = draft_lens = None
        if k and isinstance(drafter, NgramDrafter):
            ops_.ngram(self.history, self.state, draft, drafter.max_n, drafter.min_n)
        elif k and isinstance(drafter, ModelDrafter):
            self._draft(drafter.engine, draft, params, bias)
            assert self._q is not None
            q, draft_lens = self._q[:k], drafter.engine.cache.seq_lens
        logits = engine.model.chunk(self.block[None, : k + 1], engine.cache)[0]
        ops_.distribution(logits, params, bias, self._counts[: k + 1], self._p[k])
        ops_.accept(
            *(params, self.state, self._p[k], q, draft, self.history, self.block[:1]),
            *(engine.cache.seq_lens, draft_lens, self._ring),
            vocab_size=self._vocab,
            draft_vocab_size=self._draft_vocab,
            has_proposed=isinstance(drafter, NgramDrafter) and k > 0,
        )

    def _draft(self, engine: Engine, draft: Tensor, params: Tensor, bias: Tensor) -> None:
        """k passes of the draft model; the first takes the text's last two tokens.

        Two, because after a fully accepted round its cache lacks one; where it does not, the slot
        is written again with the same values.
        """
        assert self._q is not None
        model, vocab = engine.model, self._draft_vocab
        last_two = torch.arange(-2, 0, device=draft.device) + self.state[ref_round.LENGTH]
        ids = self.history.index_select(0, last_two).long()
        # A token that the draft does not have: it can only guess.
        ids = ids.masked_fill(ids >= model.config.vocab_size, 0)
        for index in range(draft.numel()):
            logits = model.chunk(ids[None], engine.cache)[0, -1:, :vocab]
            q = self._q[index]
            out = q if q.dtype == torch.uint8 else q[None]
            self._ops.distribution(logits, params, bias[:vocab], self._counts[:1, :vocab], out)
            ids = draft[index : index + 1]
            self._ops.draft_token(params, self.state, q, ids, index, vocab)

    def read(self, tag: int) -> tuple[list[int], int, int, bool, int]:
        """Wait for a round: (tokens, drafted that stand, proposed, no token possible, GPU ns)."""
        tag &= _MASK
        base = (tag % SLOTS) * ref_round.RING_WORDS
        head = self._wait(base, tag)
        tokens = [self._wait(base + 2 + index, tag) for index in range(head & 0xFF)]
        while self._words[base + 1] >> 48 != tag & 0xFFFF:
            time.sleep(_NAP_S)
        clock = self._words[base + 1] & (2**48 - 1)
        return tokens, head >> 8 & 0xFF, head >> 16 & 0xFF, bool(head >> 24), clock

    def _wait(self, index: int, tag: int) -> int:
        words = self._words
        for _ in range(_SPINS):
            if words[index] >> 32 == tag:
                return words[index] & _MASK
        checked = time.perf_counter()
        while words[index] >> 32 != tag:
            time.sleep(_NAP_S)
            if time.perf_counter() - checked > _CHECK_S:
                device = self._engine.model.device
                is_idle = device.type != "cuda" or torch.cuda.current_stream(device).query()
                if is_idle and words[index] >> 32 != tag:
                    raise RuntimeError(f"the device finished without round {tag}")
                checked = time.perf_counter()
        return words[index] & _MASK

    def close(self) -> None:
        """Free the graphs and their memory."""
        for graph in self._graphs.values():
            graph.reset()
        self._graphs.clear()


class DeviceRounds:
    """One generation whose rounds run on the device; arguments as of `Rounds`."""

    def __init__(
        self,
        engine: Engine,
        call: Call,
        drafter: ModelDrafter | NgramDrafter,
        length: FixedLength | AdaptiveLength,
    ) -> None:
        assert isinstance(call.stats, SpeculativeStats)
        self._engine, self._call, self._drafter, self._length = engine, call, drafter, length
        self._stats = call.stats
        self._buffers = buffers_of(engine, drafter)
        self._history = list(call.rows[0])
        self._shadow = Shadow(length, drafter)
        self._in_flight: list[int] = []  # k of the rounds launched and not read
        self._draft_cached = 0  # tokens of the text that the draft's cache holds
        self._draft_generation: int | None = None  # of the draft's engine
        self._can_draft = True  # the draft's context has room
        self._is_behind = False  # plain steps were made, which the draft has not seen
        self._wanted: int | None = None  # chosen for the next round, which cannot start yet

    @torch.inference_mode()
    def steps(self) -> Generator[Step, None, None]:
        """One token a step; those of a round follow each other at once."""
        engine, call, sampler = self._engine, self._call, self._engine.sampler
        stages = Stages(not call.params.is_greedy, False)
        seed = Sampler(call.params).seed
        self._stats.seed = None if call.params.is_greedy else seed
        self._buffers.prepare([0, *self._length.lengths])
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
            tag = self._buffers.begin(self._history, left)
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
        engine.cache.seq_lens.fill_(len(prompt) - 1)

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
            self._buffers.launch(k)

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
        for start in range(0, len(missing), 16):
            part = [self._drafter._known(token) for token in missing[start : start + 16]]
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


def buffers_of(engine: Engine, drafter: ModelDrafter | NgramDrafter) -> Buffers:
    """The buffers of a pair, kept with the engine until it is closed."""
    key: object = (
        ("ngram", drafter.max_n, drafter.min_n)
        if isinstance(drafter, NgramDrafter)
        else drafter.engine
    )
    if key not in engine.rounds:
        engine.rounds[key] = Buffers(engine, drafter)
    found = engine.rounds[key]
    assert isinstance(found, Buffers)
    return found
