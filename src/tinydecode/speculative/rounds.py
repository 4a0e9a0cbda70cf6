"""The rounds, driven by the host: draft, verify, accept, roll back.

A round starts with a target cache that holds all of the text but its last token. The target runs
that token and the drafted ones in one pass, the accept rule says how many stand and what follows,
and the cache's lengths are set to what the text now is. Slots of rejected tokens are overwritten
before anything reads them.
"""

from __future__ import annotations

import time
from collections.abc import Generator

import numpy as np
import torch
from torch import Tensor

from tinydecode.engine import Engine
from tinydecode.sampling import (
    Choice,
    NonFiniteLogitsError,
    Sampler,
    draw,
    logprobs_of,
    non_finite_error,
)
from tinydecode.speculative import rule
from tinydecode.speculative.drafter import Call as DraftCall
from tinydecode.speculative.drafter import Drafter, Proposal, distribution
from tinydecode.speculative.length import AdaptiveLength, FixedLength, Shadow
from tinydecode.speculative.stats import SpeculativeStats
from tinydecode.token_loop import Call, Step, _check_generation, _hooked, _roll_back


class _TargetRows:
    """The target's distributions after a text and each token of a draft, computed when asked for.

    Args:
        call: parameters, prompt and hook. A row's penalties know the drafted tokens before it.
        logits: float32 [k + 1, V].
        output: tokens generated so far.
        draft: k tokens.
    """

    def __init__(self, call: Call, logits: Tensor, output: list[int], draft: list[int]) -> None:
        self._call, self._output, self._draft = call, output, draft
        self._logits = logits
        self._computed: list[tuple[Tensor, Tensor]] = []  # (logits after the hook, p) by row

    def __getitem__(self, row: int) -> Tensor:
        while len(self._computed) <= row:
            self._computed.append(self._compute(len(self._computed)))
        return self._computed[row][1]

    def _compute(self, row: int) -> tuple[Tensor, Tensor]:
        call = self._call
        output = [*self._output, *self._draft[:row]]
        logits = _hooked(call, self._logits[row : row + 1], [output])[0]
        try:
            return logits, distribution(logits, call.params, call.rows[0], output)
        except NonFiniteLogitsError:
            raise non_finite_error(len(output) + 1) from None

    def choice(self, row: int, token: int, from_draft: bool) -> Choice:
        """A token chosen from a row, with the logprobs that were asked for."""
        asked = self._call.params.logprobs
        if asked is None:
            return Choice(token, from_draft=from_draft)
        p = self[row]
        found = logprobs_of(token, self._computed[row][0], p, asked)
        return Choice(token, found, from_draft)


class Rounds:
    """One generation's tokens, round by round.

    Args:
        engine: the target, batch size 1.
        call: checked; its stats are `SpeculativeStats`.
        drafter: proposes.
        length: how many tokens to draft.
    """

    def __init__(
        self, engine: Engine, call: Call, drafter: Drafter, length: FixedLength | AdaptiveLength
    ) -> None:
        assert isinstance(call.stats, SpeculativeStats)
        self._engine, self._call, self._drafter, self._length = engine, call, drafter, length
        self._stats = call.stats
        seed = Sampler(call.params).seed
        call.stats.seed = None if call.params.is_greedy else seed
        self._random = np.random.Generator(np.random.Philox(seed))
        self._history = list(call.rows[0])
        self._shadow = Shadow(length, drafter)

    @torch.inference_mode()
    def steps(self) -> Generator[Step, None, None]:
        """One token a step; those of a round follow each other at once."""
        engine, call = self._engine, self._call
        prompt = call.rows[0]
        logits = engine.prefill([prompt])
        generation = engine.generation
        try:
            rows = _TargetRows(call, logits, [], [])
            token = draw(rows[0], float(self._random.random()))
            block = [rows.choice(0, token, False)]
            vocab = engine.model.config.vocab_size
            self._drafter.begin(DraftCall(call.params, self._random, len(prompt), vocab))
            while True:
                elapsed = time.perf_counter() - call.started
                for choice in block:
                    self._history.append(choice.token_id)
                    yield elapsed, [choice]
                    _check_generation(engine, generation)
                block = self._round(call.limits[0] - (len(self._history) - len(prompt)))
        finally:
            _roll_back(engine, generation, call)

    def _round(self, left: int) -> list[Choice]:
        """The tokens of one pass, 1 to `left`."""
        engine, stats, history = self._engine, self._stats, self._history
        started = time.perf_counter()
        proposal = self._draft(left)
        draft = proposal.tokens
        drafted = time.perf_counter()

        size = self._rows(len(draft))
        padded = [history[-1], *draft] + [0] * (size - 1 - len(draft))
        logits = engine.chunk(torch.tensor([padded], device=engine.model.device))[0]
        rows = _TargetRows(self._call, logits, history[len(self._call.rows[0]) :], draft)
        uniforms = self._random.random(len(draft) + 1).tolist()
        accepted, token = rule.accept(rows, proposal.q, draft, uniforms)
        engine.cache.seq_lens.fill_(len(history) + accepted)
        block = [rows.choice(row, draft[row], True) for row in range(accepted)]
        block.append(rows.choice(accepted, token, False))
        done = time.perf_counter()

        stats.target_passes += 1
        stats.draft_s += drafted - started
        stats.verify_s += done - drafted
        self._length.ran(len(draft), size, drafted - started, done - drafted)
        if draft:
            stats.rounds += 1
            stats.proposed += len(draft)
            stats.accepted += accepted
            stats.accepted_counts.append(accepted)
            self._length.judged(len(draft), accepted)
        self._shadow.decide(token)
        return block

    def _draft(self, left: int) -> Proposal:
        """What to verify: nothing when one token is wanted, or when plain decoding is faster."""
        length = len(self._history)
        room = self._drafter.room(length)
        if room < 1 and self._stats.drafting_stopped_at is None:
            self._stats.drafting_stopped_at = length
        wanted = self._length.choose()
        count = min(wanted, left - 1, room)
        if count < 1:
            if wanted == 0:
                self._shadow.start(self._history)
            return Proposal([], None)
        self._shadow.drop()
        proposal = self._drafter.propose(self._history, count)
        for index, token in enumerate(proposal.tokens[:-1]):
            if token in self._call.stop_ids:  # the text ends here, or this token does not stand
                q = proposal.q and proposal.q[: index + 1]
                return Proposal(proposal.tokens[: index + 1], q)
        return proposal

    def _rows(self, drafted: int) -> int:
        """Rows of the verify pass: captured passes come in the sizes of full drafts only."""
        if not drafted or self._engine.graphs is None:
            return drafted + 1
        rows = self._length.choice + 1
        fits = len(self._history) - 1 + rows <= self._engine.max_seq_len
        return rows if fits else drafted + 1
