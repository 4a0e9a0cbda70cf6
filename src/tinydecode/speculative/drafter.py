"""What a drafter is, and the one that drafts with a smaller model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tinydecode.engine import Engine
from tinydecode.sampling import (
    NonFiniteLogitsError,
    SamplingParams,
    adjust,
    draw,
    probabilities,
)
from tinydecode.speculative.length import MAX_LENGTH

if TYPE_CHECKING:
    from tinydecode.tokenizer import Tokenizer


@dataclass(frozen=True)
class Call:
    """What a drafter is told at the start of a generation."""

    params: SamplingParams
    random: np.random.Generator  # for draws; the accept rule takes its numbers from the same one
    prompt_tokens: int
    vocab_size: int  # V of the target


@dataclass(frozen=True)
class Proposal:
    """Drafted tokens, and what each was drawn from."""

    tokens: list[int]
    q: list[Tensor] | None  # per token float64 [V of the target]; None: all mass on the token


class Drafter(Protocol):
    """Proposes tokens. It may propose anything: only the speed depends on it, never the text.

    Attributes:
        is_free: a proposal costs next to nothing, so that proposals may be made to be counted only.
    """

    is_free: bool

    def begin(self, call: Call) -> None:
        """A generation starts; forget the one before."""
        ...

    def room(self, history_length: int) -> int:
        """How many tokens it could draft after that many; below 1 it never will again."""
        ...

    def propose(self, history: Sequence[int], count: int) -> Proposal:
        """Draft after `history`, which extends that of the last proposal by what was accepted.

        Args:
            history: prompt and generated tokens, the last one included.
            count: at most this many tokens, 1 or more and at most `room`.
        """
        ...


def passes(tokens: list[int]) -> list[list[int]]:
    """Tokens in parts that each fit a pass of the fused step, whose bits are those of a step."""
    rows = MAX_LENGTH + 1
    return [tokens[start : start + rows] for start in range(0, len(tokens), rows)]


def distribution(
    logits: Tensor, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> Tensor:
    """Logits after a text, float32 [V], as the float64 [V] that a token is drawn from.

    Raises:
        NonFiniteLogitsError: NaN or +inf among them, or nothing above -inf.
    """
    adjusted = adjust(logits, params, prompt, output)
    if not bool(torch.isfinite(adjusted.max())):
        raise NonFiniteLogitsError("non-finite logits")
    return probabilities(adjusted, params)


class ModelDrafter:
    """Drafts with a smaller model that shares the target's tokenizer.

    Its vocabulary may be padded to another size. It keeps a cache of its own, which follows the
    accepted text: after a fully accepted round it is one token behind, and its next first step
    takes two.

    Args:
        engine: the draft model's, batch size 1, of nobody else's use while a generation runs.
        tokenizers: the target's and the draft's, to be compared; None skips the comparison.
        force: accept tokenizers that disagree. The text stays the target's; few tokens stand.

    Raises:
        ValueError: the engine has batch_size > 1, or the tokenizers differ (the first differing id
            is named).
    """

    is_free = False

    def __init__(
        self,
        engine: Engine,
        tokenizers: tuple[Tokenizer, Tokenizer] | None = None,
        force: bool = False,
    ) -> None:
        if engine.batch_size != 1:
            raise ValueError(
                f"speculative decoding serves batch_size 1, the draft has {engine.batch_size}"
            )
        if tokenizers is not None and not force:
            check_tokenizers(*tokenizers)
        self.engine = engine
        self._call: Call | None = None
        self._cached: list[int] = []  # tokens whose keys and values are in the cache
        self._agreed = 0  # how many of them are known to be the history's
        self._generation = -1

    def begin(self, call: Call) -> None:
        """Forget the last call; the prompt is run with the first proposal."""
        self._call = call
        self._cached = []
        self._agreed = 0

    def room(self, history_length: int) -> int:
        """Tokens it could draft before its own context ends."""
        return self.engine.max_seq_len - history_length + 1

    @torch.inference_mode()
    def propose(self, history: Sequence[int], count: int) -> Proposal:
        """Draft `count` tokens, one pass each; the first also takes in what it has not seen."""
        assert self._call is not None
        params = self._call.params
        logits = self._catch_up(history)
        tokens: list[int] = []
        q: list[Tensor] = []
        prompt = history[: self._call.prompt_tokens]
        output = list(history[self._call.prompt_tokens :])
        while True:
            try:
                row = distribution(self._fit(logits), params, prompt, output)
            except NonFiniteLogitsError as error:
                raise NonFiniteLogitsError(f"{error} from the draft model") from error
            token = draw(row, float(self._call.random.random()))
            tokens.append(token)
            q.append(row)
            if len(tokens) == count:
                return Proposal(tokens, q)
            logits = self._run([token])
            output.append(token)

    def _fit(self, logits: Tensor) -> Tensor:
        """Logits over the target's vocabulary: what only one of the two has is never drafted."""
        assert self._call is not None
        size = self._call.vocab_size
        return F.pad(logits[:size], (0, max(0, size - len(logits))), value=-torch.inf)

    def _catch_up(self, history: Sequence[int]) -> Tensor:
        """Run what the cache lacks of `history`; returns the logits after its last token, [V]."""
        assert self._call is not None
        engine = self.engine
        if not self._cached:
            # The passes are those of the target: the prompt's, then steps. They add in other
            # orders, and with the target's weights the draft must agree to the last bit.
            prompt = history[: self._call.prompt_tokens]
            logits = engine.prefill([self._known(token) for token in prompt])[0]
            self._cached, self._agreed = list(prompt), len(prompt)
            self._generation = engine.generation
            if len(prompt) == len(history):
                return logits
        if engine.generation != self._generation:
            raise RuntimeError("another call used the draft's engine while the stream was open")
        # What was drafted last and then rejected is still in the cache; the last token of the
        # history always runs, for its logits.
        limit = min(len(self._cached), len(history) - 1)
        valid = min(self._agreed, limit)
        while valid < limit and self._cached[valid] == history[valid]:
            valid += 1
        del self._cached[valid:]
        engine.cache.seq_lens.fill_(valid)
        logits = self._run(history[valid:])
        self._agreed = len(history)
        return logits

    def _run(self, tokens: Sequence[int]) -> Tensor:
        """Run tokens on top of the cache; returns the logits after the last, [V]."""
        engine = self.engine
        self._cached.extend(tokens)
        for part in passes([self._known(token) for token in tokens]):
            ids = torch.tensor([part], device=engine.model.device)
            # After steps without a draft: sizes that are not worth a captured graph each.
            is_usual = len(tokens) <= 2
            logits = engine.chunk(ids) if is_usual else engine.model.chunk(ids, engine.cache)
        return logits[0, -1]

    def _known(self, token: int) -> int:
        """The token, or 0 for one beyond the draft's vocabulary: it can only guess there."""
        return token if token < self.engine.model.config.vocab_size else 0


def check_tokenizers(target: Tokenizer, draft: Tokenizer) -> None:
    """See that two tokenizers give every id the same token.

    One may have more ids than the other at its end; a model never drafts those it does not have.

    Raises:
        ValueError: names the first id at which they differ.
    """
    for token_id in range(min(target.vocab_size, draft.vocab_size)):
        ours, theirs = target.id_to_token(token_id), draft.id_to_token(token_id)
        if ours != theirs:
            raise ValueError(
                f"tokenizers differ at id {token_id}: {ours!r} for the target, {theirs!r} for the "
                "draft; take a draft model of the same family, or force it (few tokens will stand)"
            )
