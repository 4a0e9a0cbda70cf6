"""The engine: a model, a cache, and the token loop.

One generation at a time. The engine keeps nothing between generations that a new prefill does not
overwrite, so it stays usable after any error or abandoned stream.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tinydecode import prompts
from tinydecode.device_sampler import DeviceSampler, Stages
from tinydecode.events import Output, TokenEvent, TokenStream, check_stops
from tinydecode.kv_cache import KVCache
from tinydecode.model import LlamaModel
from tinydecode.sampling import SamplingParams
from tinydecode.stats import Stats
from tinydecode.token_loop import Call, LogitsHook, run

if TYPE_CHECKING:
    from tinydecode.graphs import Graphs
    from tinydecode.tokenizer import Tokenizer

__all__ = ["DEFAULT_MAX_SEQ_LEN", "Engine", "TokenEvent", "TokenStream"]

DEFAULT_MAX_SEQ_LEN = 4096  # slots allocated when the caller names no size


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
        is_cuda = model.device.type == "cuda"
        self.samples_on_device = is_cuda  # else on the host, in float64
        # Prompts up to so many tokens are padded; on the CPU there is no host to take out.
        self.padded_rows = prompts.most_rows(model.config) if is_cuda else 0
        self._sampler: DeviceSampler | None = None
        self.rounds: dict[object, Any] = {}  # what speculative.device keeps, by drafter

    @property
    def cache(self) -> KVCache:
        """The cache; `cache.seq_lens.fill_(n)` rolls back to n tokens."""
        if self._cache is None:
            raise RuntimeError("this engine is closed; make a new one")
        return self._cache

    @property
    def sampler(self) -> DeviceSampler:
        """The sampler of the device loop, made on first use."""
        if self._sampler is None:
            vocab = self.model.config.vocab_size
            # Made inside inference mode, its tensors could not be written outside of it.
            with torch.inference_mode(False):
                self._sampler = DeviceSampler(self.batch_size, vocab, self.model.device)
        return self._sampler

    def step_launcher(self, stages: Stages, is_hooked: bool = False) -> Callable[[int], None]:
        """What launches decode steps that choose for themselves, by graph or kernel by kernel.

        Args:
            stages: of the sampler.
            is_hooked: the steps go through `chunk` instead; nothing is captured.

        Returns:
            A function of the number of tokens to come; `sampler.launched` tells how many steps a
            call of it added.
        """
        graphs, sampler = self.graphs, self.sampler
        if graphs is not None and not is_hooked:
            graphs.prepare(stages)
            return lambda room: graphs.step(stages, room).replay()

        def launch(room: int) -> None:
            logits = self.model.chunk(sampler.tokens[:, None], self.cache)[:, 0]
            sampler.enqueue(logits, self.cache.seq_lens, stages)
            sampler.launched += 1

        return launch

    def close(self) -> None:
        """Free cache and graphs. The model stays usable by other engines. Safe to call twice."""
        self.generation += 1
        if self.graphs is not None:
            self.graphs.close()
            self.graphs = None
        for rounds in self.rounds.values():
            rounds.close()
        self.rounds.clear()
        self._cache = None
        self._sampler = None

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
        longest = max(len(row) for row in rows)
        length = prompts.padded_length(longest, self.batch_size, self.padded_rows)
        packed = prompts.pack(rows, length or longest, self.model.device)
        if length is not None and self.graphs is not None:
            return self.graphs.prefill(length, packed)
        inputs = packed.to(self.model.device, non_blocking=True)
        return self.model.prefill(*prompts.unpack(inputs, self.batch_size), self.cache)

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
        *,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: Mapping[int, float] | None = None,
        banned_token_ids: Collection[int] = (),
        logprobs: int | None = None,
        stop: str | Collection[str] = (),
        stop_token_ids: Collection[int] = (),
        tokenizer: Tokenizer | None = None,
        logits_hook: LogitsHook | None = None,
    ) -> tuple[list[int], Stats] | tuple[list[list[int]], Stats]:
        """Generate tokens after a prompt.

        Args:
            ids: prompt token ids; for batch_size > 1 a list of them per row.
            max_new_tokens: at most this many tokens are returned.
            temperature: 0 is greedy. The options without a text here are fields of
                `SamplingParams`; `sampling` has the order in which they apply.
            top_k: see there.
            top_p: see there.
            min_p: see there.
            repetition_penalty: see there.
            seed: makes this call repeatable on one kind of device; None draws one, found in
                `stats.seed`.
            eos_token_ids: ids that end a row and are not returned; None takes the model's own set.
            ignore_eos: treat those ids as ordinary tokens.
            presence_penalty: see there.
            frequency_penalty: see there.
            logit_bias: see there.
            banned_token_ids: see there.
            logprobs: report log-probabilities, of so many alternatives too; in `stats.logprobs`.
            stop: strings that end a row. They are not part of the text, and tokens whose text
                begins at or after one are not returned.
            stop_token_ids: further ids that end a row, with ignore_eos too.
            tokenizer: reads the text; stop strings need it.
            logits_hook: called each step as hook(ids so far, logits [V]) for each row, returns the
                logits to choose from (bias, penalties and filters come after it). The step then
                leaves the graph and is not launched ahead, so every token waits for the host.

        Returns:
            The new token ids (a list per row when `ids` was one) and `Stats`. A full cache ends a
            row with reason "length": max_seq_len - prompt + 1 tokens fit.

        Raises:
            ValueError: see `prefill` and `SamplingParams`; nothing has run then.
            NonFiniteLogitsError: the model's logits are NaN or infinite, or every token is banned.
        """
        started = time.perf_counter()
        params = SamplingParams(
            *(temperature, top_k, top_p, min_p, repetition_penalty, seed, presence_penalty),
            *(frequency_penalty, logit_bias or {}, banned_token_ids, logprobs),
        )
        stops = self._stop_ids(eos_token_ids, ignore_eos, stop_token_ids)
        call = self._call(ids, max_new_tokens, params, stops, stop, tokenizer, logits_hook, started)
        outputs: list[list[int]] = [[] for _ in call.rows]
        for row, event in run(self, call):
            if event.token_id is not None:
                outputs[row].append(event.token_id)
        if prompts.is_batch(ids):
            return outputs, call.stats
        return outputs[0], call.stats

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
        *,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: Mapping[int, float] | None = None,
        banned_token_ids: Collection[int] = (),
        logprobs: int | None = None,
        stop: str | Collection[str] = (),
        stop_token_ids: Collection[int] = (),
        logits_hook: LogitsHook | None = None,
    ) -> TokenStream:
        """As `generate`, one `TokenEvent` at a time; batch_size 1 only.

        A plain generator: it may be dropped at any event, and an exception between two (Ctrl-C
        too) leaves the engine ready for the next call. With stop strings an event comes once its
        text can no longer be the beginning of one.

        Args:
            tokenizer: fills the events' `text` with characters as they complete.

        Raises:
            ValueError: as `generate`, at the call, before the first event.
        """
        if self.batch_size != 1:
            raise ValueError(f"stream serves batch_size 1, this engine has {self.batch_size}")
        started = time.perf_counter()
        params = SamplingParams(
            *(temperature, top_k, top_p, min_p, repetition_penalty, seed, presence_penalty),
            *(frequency_penalty, logit_bias or {}, banned_token_ids, logprobs),
        )
        stops = self._stop_ids(eos_token_ids, ignore_eos, stop_token_ids)
        call = self._call(ids, max_new_tokens, params, stops, stop, tokenizer, logits_hook, started)

        def events() -> Iterator[TokenEvent]:
            with closing(run(self, call)) as found:
                for _, event in found:
                    yield event

        return TokenStream(events(), call.stats)

    def _call(
        self,
        ids: Sequence[int] | Sequence[Sequence[int]],
        max_new_tokens: int,
        params: SamplingParams,
        stop_ids: frozenset[int],
        stop: str | Collection[str],
        tokenizer: Tokenizer | None,
        hook: LogitsHook | None,
        started: float,
    ) -> Call:
        """A generation after every check that can fail before a launch."""
        limit = _check_limit(max_new_tokens)
        params.check_vocabulary(self.model.config.vocab_size)
        stops = check_stops(stop)
        rows = self._check_prompts(ids)
        # The last token of a row needs no slot: nothing is computed from it.
        limits = [min(limit, self.max_seq_len - len(row) + 1) for row in rows]
        outputs = [
            Output(most, stop_ids, stops, tokenizer.detokenizer(row) if tokenizer else None)
            for most, row in zip(limits, rows, strict=True)
        ]
        return Call(rows, outputs, limits, params, stop_ids, hook, Stats(), started)

    def _check_prompts(self, ids: Any) -> list[list[int]]:
        vocab = self.model.config.vocab_size
        return prompts.check(ids, self.batch_size, self.max_seq_len, vocab)

    def _stop_ids(
        self,
        eos_token_ids: Collection[int] | None,
        ignore_eos: bool,
        stop_token_ids: Collection[int],
    ) -> frozenset[int]:
        """Every id that ends a row; those of `stop_token_ids` do so with ignore_eos too."""
        ends = self.eos_token_ids if eos_token_ids is None else eos_token_ids
        return frozenset(stop_token_ids).union(() if ignore_eos else ends)


def _check_limit(max_new_tokens: int) -> int:
    is_count = isinstance(max_new_tokens, int) and not isinstance(max_new_tokens, bool)
    if not is_count or max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must be an integer >= 0, found {max_new_tokens!r}")
    return max_new_tokens
