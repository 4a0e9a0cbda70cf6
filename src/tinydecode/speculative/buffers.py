"""What the rounds on the device work with: memory, launches, and the captured graphs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from tinydecode import graphs, ops
from tinydecode.engine import Engine
from tinydecode.ops import ref_round
from tinydecode.speculative.drafter import ModelDrafter
from tinydecode.speculative.length import MAX_LENGTH
from tinydecode.speculative.ngram import NgramDrafter

SLOTS = 16  # rounds in the ring
_MASK = 0xFFFFFFFF
_SPINS, _NAP_S, _CHECK_S = 2000, 2e-5, 0.05


class Buffers:
    """Device memory and captured rounds of a target with one drafter.

    Attributes:
        history: int32 [capacity], the text.
        state: int64 [6], see `ops.ref_round`.
        block: int64 [16]: the text's last token, then the drafted ones.
    """

    def __init__(
        self, engine: Engine, drafter: ModelDrafter | NgramDrafter, is_scripted: bool
    ) -> None:
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
        self._draft_rows = vocab
        self._draft_input: Tensor | None = None  # int64 [2], the text's last tokens
        if isinstance(drafter, ModelDrafter):
            self._draft_rows = drafter.engine.model.config.vocab_size
            self._draft_input = torch.zeros(2, dtype=torch.int64, device=device)
        # By the length of the text: what follows it.
        lengths = capacity if is_scripted else 1
        self._script = torch.zeros(lengths, MAX_LENGTH, dtype=torch.int64, device=device)
        self._is_scripted = is_scripted
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._picks_best = True
        self._last_tag = 0  # of all rounds launched so far

    def prepare(self, lengths: list[int], picks_best: bool) -> None:
        """Allocate, and capture where the engine has graphs; no generation may be under way.

        Args:
            lengths: tokens to draft, of the rounds to come.
            picks_best: every token is its row's most likely one, which needs no distributions.
        """
        self._picks_best = picks_best
        for k in lengths:
            if k not in self._p:
                device = self._engine.model.device
                self._p[k] = self._ops.workspace(k + 1, self._vocab, device)
            fits_cache = k + 1 <= self._engine.max_seq_len
            if (
                self._engine.graphs is not None
                and (k, picks_best) not in self._graphs
                and fits_cache
            ):
                # A round after an end changes nothing but lengths: that is what is warmed up.
                self.state.zero_()
                self.state[ref_round.IS_DONE] = 1
                self.state[ref_round.LENGTH] = 2
                if isinstance(self._drafter, ModelDrafter):
                    self._drafter.engine.cache.seq_lens.zero_()

                def run(k: int = k) -> Tensor:
                    self._run(k)
                    return self.block

                self._graphs[k, picks_best], _ = graphs._capture(self._engine.cache, k + 1, run)

    def begin(self, text: list[int], remaining: int, script: Sequence[int] = ()) -> int:
        """Set text and state for a generation; returns the tag before the first round's.

        Args:
            text: prompt and first token.
            remaining: tokens to come after it, at most.
            script: see `ScriptedDrafter`.
        """
        device = self._engine.model.device
        if self._is_scripted:
            used = torch.zeros(len(self._script) + MAX_LENGTH - 1, dtype=torch.int64)
            given = torch.tensor(script[: len(used)], dtype=torch.int64)
            used[: len(given)] = given
            self._script.copy_(used.unfold(0, MAX_LENGTH, 1))
        tokens = torch.tensor(text, dtype=torch.int32).to(device, non_blocking=True)
        self.history[: len(text)].copy_(tokens)
        state = [0] * ref_round.STATE_WORDS
        state[ref_round.ROUND] = self._last_tag
        state[ref_round.LENGTH], state[ref_round.REMAINING] = len(text), remaining
        self.state.copy_(torch.tensor(state), non_blocking=True)
        self.block[:1].fill_(text[-1])
        if self._draft_input is not None:
            for place, token in enumerate(text[-2:]):
                self._draft_input[place].fill_(token if token < self._draft_rows else 0)
        self._engine.cache.seq_lens.fill_(len(text) - 1)
        return self._last_tag

    def launch(self, k: int, is_draft_level: bool = False) -> None:
        """One round that drafts k tokens, 0 for a plain step.

        Args:
            k: tokens to draft.
            is_draft_level: the draft's cache holds as much as the target's, as after the prompt:
                the round is launched kernel by kernel, since it happens once a generation.
        """
        self._last_tag += 1
        graph = None if is_draft_level else self._graphs.get((k, self._picks_best))
        if graph is not None:
            graph.replay()
        else:
            self._run(k, 1 if is_draft_level else 2)

    def _run(self, k: int, first_rows: int = 2) -> None:
        engine, ops_, drafter = self._engine, self._ops, self._drafter
        params, bias = engine.sampler._state, engine.sampler._bias
        draft = self.block[1 : k + 1]
        q = draft_lens = None
        if k and isinstance(drafter, NgramDrafter):
            ops_.ngram(self.history, self.state, draft, drafter.max_n, drafter.min_n)
        elif k and isinstance(drafter, ModelDrafter):
            self._draft(drafter.engine, draft, first_rows, params, bias)
            assert self._q is not None
            q, draft_lens = self._q[:k], drafter.engine.cache.seq_lens
            if self._picks_best:
                q = None
        if k and self._is_scripted:
            length = self.state[ref_round.LENGTH : ref_round.LENGTH + 1]
            torch.index_select(self._script[:, :k], 0, length, out=draft[None])
            q = None
        logits = engine.model.chunk(self.block[None, : k + 1], engine.cache)[0]
        has_proposed = isinstance(drafter, NgramDrafter) and k > 0 and not self._is_scripted
        ends = (draft, self.history, self.block[:1], engine.cache.seq_lens, draft_lens)
        if self._picks_best and q is None:
            ops_.accept_best(
                *(params, self.state, logits, *ends, self._draft_input, self._ring),
                draft_rows=self._draft_rows,
                has_proposed=has_proposed,
            )
            return
        ops_.distribution(logits, params, bias, self._counts[: k + 1], self._p[k])
        ops_.accept(
            *(params, self.state, self._p[k], q, *ends, self._draft_input, self._ring),
            vocab_size=self._vocab,
            draft_vocab_size=self._draft_vocab,
            draft_rows=self._draft_rows,
            has_proposed=has_proposed,
        )

    def _draft(
        self, engine: Engine, draft: Tensor, first_rows: int, params: Tensor, bias: Tensor
    ) -> None:
        """k passes of the draft model; the first takes the text's last tokens, one or two.

        Two, because after a fully accepted round its cache lacks one; where it does not, the slot
        is written again with the same values. Not so for a slot of the prompt, whose pass adds in
        another order: behind it the first step takes one.
        """
        assert self._q is not None and self._draft_input is not None
        model, vocab = engine.model, self._draft_vocab
        ids = self._draft_input[2 - first_rows :]
        for index in range(draft.numel()):
            logits = model.chunk(ids[None], engine.cache)[0, -1:, :vocab]
            ids = draft[index : index + 1]
            if self._picks_best:
                ops.argmax(logits, ids)
                continue
            q = self._q[index]
            out = q if q.dtype == torch.uint8 else q[None]
            self._ops.distribution(logits, params, bias[:vocab], self._counts[:1, :vocab], out)
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


def buffers_of(
    engine: Engine, drafter: ModelDrafter | NgramDrafter, is_scripted: bool = False
) -> Buffers:
    """The buffers of a pair, kept with the engine until it is closed."""
    key: tuple[object, ...] = (
        (is_scripted, drafter.engine)
        if isinstance(drafter, ModelDrafter)
        else (is_scripted, drafter.max_n, drafter.min_n)
    )
    if key not in engine.rounds:
        engine.rounds[key] = Buffers(engine, drafter, is_scripted)
    found = engine.rounds[key]
    assert isinstance(found, Buffers)
    return found
