"""The engine: a model, a cache, and the token loop.

One generation at a time. The engine keeps nothing between generations that a new prefill does not
overwrite, so it stays usable after any error or abandoned stream.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tinydecode.kv_cache import KVCache
from tinydecode.model import LlamaModel
from tinydecode.sampling import Sampler, SamplingParams
from tinydecode.stats import Stats

if TYPE_CHECKING:
    from tinydecode.graphs import Graphs
    from tinydecode.tokenizer import IncrementalDetokenizer, Tokenizer

DEFAULT_MAX_SEQ_LEN = 4096  # slots allocated when the caller names no size


@dataclass(frozen=True)
class TokenEvent:
    """One step of a stream."""

    token_id: int | None  # None: no new token, only the text or the reason that closes the stream
    text: str | None  # completed text, "" while a character is held back; None without a tokenizer
    time: float  # seconds since the call
    from_draft: bool = False  # proposed by a draft and accepted
    finish_reason: str | None = None  # set on the last event: "stop" or "length"


class TokenStream:
    """An iterator of `TokenEvent` over one generation, with its `stats`.

    Dropping it half-way is fine; nothing runs between two events.
    """

    def __init__(self, events: Iterator[TokenEvent], stats: Stats) -> None:
        self._events = events
        self.stats = stats

    def __iter__(self) -> TokenStream:
        return self

    def __next__(self) -> TokenEvent:
        return next(self._events)


class Engine:
    """Runs one model with one preallocated cache.

    Args:
        model: from `load_hf`.
        max_seq_len: cache slots a row: prompt plus new tokens, less one (the last token generated
            needs no slot). None takes the model's context length, at most 4096.
        batch_size: rows B that run side by side. Decoding is tuned for 1.

    Raises:
        ValueError: a size is not positive, or max_seq_len exceeds the model's context.
    """

    def __init__(
        self, model: LlamaModel, max_seq_len: int | None = None, batch_size: int = 1
    ) -> None:
        limit = model.config.max_position_embeddings
        if max_seq_len is None:
            max_seq_len = min(limit, DEFAULT_MAX_SEQ_LEN)
        for name, value in (("max_seq_len", max_seq_len), ("batch_size", batch_size)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be an integer >= 1, found {value!r}")
        if max_seq_len > limit:
            raise ValueError(
                f"max_seq_len {max_seq_len} exceeds the model's context of {limit} tokens "
                "(max_position_embeddings); ask for less"
            )
        self.model = model
        self.max_seq_len = max_seq_len
        self.batch_size = batch_size
        self.eos_token_ids = frozenset(model.config.eos_token_ids)
        self._cache: KVCache | None = KVCache(
            model.config,
            batch_size=batch_size,
            max_seq_len=max_seq_len,
            device=model.device,
            dtype=model.dtype,
        )
        self.generation = 0  # tells an abandoned stream that another call took the cache
        self.graphs: Graphs | None = None  # see graphs.enable

    @property
    def cache(self) -> KVCache:
        """The cache; `cache.seq_lens.fill_(n)` rolls back to n tokens."""
        if self._cache is None:
            raise RuntimeError("this engine is closed; make a new one")
        return self._cache

    def close(self) -> None:
        """Free cache and graphs. The model stays usable by other engines. Safe to call twice."""
        self.generation += 1
        if self.graphs is not None:
            self.graphs.close()
            self.graphs = None
        self._cache = None

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @torch.inference_mode()
    def prefill(self, ids: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        """Forget the cache, then run one prompt per row.

        Args:
            ids: token ids, or one list of them per row. Rows may differ in length.

        Returns:
            float32 [B, V]: the logits after each prompt.

        Raises:
            ValueError: a prompt is empty, too long for the cache, or holds an id outside the
                vocabulary; or their number is not batch_size.
        """
        rows = self._check_prompts(ids)
        self.generation += 1
        lengths = [len(row) for row in rows]
        padded = [row + [0] * (max(lengths) - len(row)) for row in rows]
        device = self.model.device
        return self.model.prefill(
            torch.tensor(padded, device=device),
            torch.tensor(lengths, device=device, dtype=torch.int32),
            self.cache,
        )

    @torch.inference_mode()
    def step(self, token_ids: Tensor) -> Tensor:
        """Decode one token a row; the caller keeps within max_seq_len.

        Args:
            token_ids: int64 [B] on the model's device.

        Returns:
            float32 [B, V]: the logits after it.
        """
        return self.chunk(token_ids[:, None])[:, 0]

    @torch.inference_mode()
    def chunk(self, token_ids: Tensor) -> Tensor:
        """Run T tokens a row on top of the cache, as a verify pass does.

        Args:
            token_ids: int64 [B, T] on the model's device.

        Returns:
            float32 [B, T, V]: the logits after each.
        """
        if self.graphs is None:
            return self.model.chunk(token_ids, self.cache)
        graphed = self.graphs.chunk(token_ids.shape[1])
        graphed.token_ids.copy_(token_ids)
        graphed.replay()
        return graphed.logits.clone()  # the next replay overwrites its own

    def generate(
        self,
        ids: Sequence[int] | Sequence[Sequence[int]],
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int | None = 0,
        top_p: float | None = 1.0,
        min_p: float | None = 0.0,
        repetition_penalty: float = 1.0,
        seed: int | None = None,
        eos_token_ids: Collection[int] | None = None,
        ignore_eos: bool = False,
    ) -> tuple[list[int], Stats] | tuple[list[list[int]], Stats]:
        """Generate tokens after a prompt.

        Args:
            ids: prompt token ids; for batch_size > 1 a list of them per row.
            max_new_tokens: at most this many tokens are returned.
            temperature: 0 is greedy. Others as in `SamplingParams`.
            top_k: see `SamplingParams`.
            top_p: see `SamplingParams`.
            min_p: see `SamplingParams`.
            repetition_penalty: see `SamplingParams`.
            seed: makes this call repeatable; None draws one, found in `stats.seed`.
            eos_token_ids: ids that end a row and are not returned; None takes the model's own set.
            ignore_eos: treat those ids as ordinary tokens.

        Returns:
            The new token ids (a list per row when `ids` was one) and `Stats`. A full cache ends a
            row with reason "length": max_seq_len - prompt + 1 tokens fit.

        Raises:
            ValueError: see `prefill` and `SamplingParams`; nothing has run then.
            NonFiniteLogitsError: the model's logits are NaN or infinite.
        """
        started = time.perf_counter()
        limit = _check_limit(max_new_tokens)
        params = SamplingParams(temperature, top_k, top_p, min_p, repetition_penalty, seed)
        stops = self._stop_ids(eos_token_ids, ignore_eos)
        rows = self._check_prompts(ids)
        stats = Stats()
        outputs: list[list[int]] = [[] for _ in rows]
        for _, tokens in self._steps(rows, limit, params, stops, stats, started):
            for row, token in enumerate(tokens):
                if token is not None:
                    outputs[row].append(token)
        if _is_batch(ids):
            return outputs, stats
        return outputs[0], stats

    def stream(
        self,
        ids: Sequence[int],
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int | None = 0,
        top_p: float | None = 1.0,
        min_p: float | None = 0.0,
        repetition_penalty: float = 1.0,
        seed: int | None = None,
        eos_token_ids: Collection[int] | None = None,
        ignore_eos: bool = False,
        tokenizer: Tokenizer | None = None,
    ) -> TokenStream:
        """As `generate`, one `TokenEvent` at a time; batch_size 1 only.

        Args:
            tokenizer: fills the events' `text` with characters as they complete.

        Raises:
            ValueError: as `generate`, at the call, before the first event.
        """
        if self.batch_size != 1:
            raise ValueError(f"stream serves batch_size 1, this engine has {self.batch_size}")
        started = time.perf_counter()
        limit = _check_limit(max_new_tokens)
        params = SamplingParams(temperature, top_k, top_p, min_p, repetition_penalty, seed)
        stops = self._stop_ids(eos_token_ids, ignore_eos)
        rows = self._check_prompts(ids)
        stats = Stats()
        steps = self._steps(rows, limit, params, stops, stats, started)
        detokenizer = tokenizer.detokenizer(rows[0]) if tokenizer is not None else None
        return TokenStream(_events(steps, stats, detokenizer), stats)

    @torch.inference_mode()
    def _steps(
        self,
        rows: list[list[int]],
        limit: int,
        params: SamplingParams,
        stops: frozenset[int],
        stats: Stats,
        started: float,
    ) -> Iterator[tuple[float, list[int | None]]]:
        """The token loop: yields (seconds since the call, one token or None per row).

        None means that the row has ended. `stats` is up to date for a step when it is yielded.
        """
        sampler = Sampler(params)
        stats.prompt_tokens = sum(len(row) for row in rows)
        stats.seed = None if params.is_greedy else sampler.seed
        stats.finish_reasons = [None] * len(rows)
        # The last token of a row needs no slot: nothing is computed from it.
        remaining = [min(limit, self.max_seq_len - len(row) + 1) for row in rows]
        if limit == 0:
            stats.finish_reasons = ["length"] * len(rows)
            stats.finish_reason = "length"
            return
        histories = [list(row) for row in rows]
        for tokens in self._tokens(rows, histories, sampler, stats):
            elapsed = time.perf_counter() - started
            stats.step_times.append(elapsed)
            step: list[int | None] = []
            for row, token in enumerate(tokens):
                if stats.finish_reasons[row] is not None:
                    step.append(None)
                elif token in stops:
                    stats.finish_reasons[row] = "stop"
                    step.append(None)
                else:
                    histories[row].append(token)
                    stats.new_tokens += 1
                    remaining[row] -= 1
                    if remaining[row] == 0:
                        stats.finish_reasons[row] = "length"
                    step.append(token)
            if None not in stats.finish_reasons:
                every = set(stats.finish_reasons)
                stats.finish_reason = "length" if "length" in every else "stop"
            yield elapsed, step
            if stats.finish_reason is not None:
                return

    def _tokens(
        self, rows: list[list[int]], histories: list[list[int]], sampler: Sampler, stats: Stats
    ) -> Iterator[list[int]]:
        """One token a row and step, without end: prefill, then choose and decode in turn.

        The caller appends what it accepts to `histories` and notes in `stats` which rows ended.
        """
        params = sampler.params
        if self.graphs and len(rows) == 1 and params.is_greedy and params.repetition_penalty == 1:
            yield from self.graphs.greedy_tokens(self, rows[0])
        logits = self.prefill(rows)
        generation = self.generation
        while True:
            tokens = sampler(logits, histories)
            yield tokens
            if self.generation != generation:
                raise RuntimeError("another call used this engine while the stream was open")
            logits = self.step(torch.tensor(tokens, device=self.model.device))
            if any(stats.finish_reasons):
                # Rows that ended still run along; they stay where they are.
                ended = [reason is not None for reason in stats.finish_reasons]
                self.cache.seq_lens.sub_(torch.tensor(ended, device=self.model.device).int())

    def _check_prompts(self, ids: Any) -> list[list[int]]:
        """Prompts as lists, one per row, after every check that can fail before a launch."""
        prompts: list[Any] = ids.tolist() if isinstance(ids, Tensor) else list(ids)
        rows = [list(row) for row in prompts] if _is_batch(prompts) else [prompts]
        if len(rows) != self.batch_size:
            raise ValueError(
                f"expected {self.batch_size} prompt(s) (batch_size), found {len(rows)}"
            )
        vocab = self.model.config.vocab_size
        for row in rows:
            if not row:
                raise ValueError("empty prompt: give at least one token id")
            if len(row) > self.max_seq_len:
                raise ValueError(
                    f"the prompt has {len(row)} tokens, the cache holds {self.max_seq_len} "
                    "(max_seq_len); shorten the prompt or make a larger engine"
                )
            for token in row:
                if isinstance(token, bool) or not isinstance(token, (int, np.integer)):
                    raise ValueError(f"token ids must be integers, found {token!r}")
                if not 0 <= token < vocab:
                    raise ValueError(f"token id {token} is outside the vocabulary of {vocab}")
        return [[int(token) for token in row] for row in rows]

    def _stop_ids(self, eos_token_ids: Collection[int] | None, ignore_eos: bool) -> frozenset[int]:
        if ignore_eos:
            return frozenset()
        return self.eos_token_ids if eos_token_ids is None else frozenset(eos_token_ids)


def _events(
    steps: Iterator[tuple[float, list[int | None]]],
    stats: Stats,
    detokenizer: IncrementalDetokenizer | None,
) -> Iterator[TokenEvent]:
    """Turn the steps of one row into events; an event's text is what its token completed."""
    elapsed = 0.0
    for elapsed, (token,) in steps:
        if token is None:  # end of sequence: the closing event below carries no token
            break
        text = detokenizer.push(token) if detokenizer else None
        if stats.finish_reason is not None:
            text = text + detokenizer.flush() if detokenizer and text is not None else None
            yield TokenEvent(token, text, elapsed, finish_reason=stats.finish_reason)
            return
        yield TokenEvent(token, text, elapsed)
    text = detokenizer.flush() if detokenizer else None
    yield TokenEvent(None, text, elapsed, finish_reason=stats.finish_reason)


def _is_batch(ids: Sequence[int] | Sequence[Sequence[int]]) -> bool:
    return len(ids) > 0 and isinstance(ids[0], (Sequence, Tensor))


def _check_limit(max_new_tokens: int) -> int:
    is_count = isinstance(max_new_tokens, int) and not isinstance(max_new_tokens, bool)
    if not is_count or max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must be an integer >= 0, found {max_new_tokens!r}")
    return max_new_tokens
