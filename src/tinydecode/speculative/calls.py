"""`generate` and `stream`: the options of `Engine.stream`, over rounds instead of steps."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, Literal

from tinydecode.engine import Engine
from tinydecode.events import TokenEvent, TokenStream
from tinydecode.sampling import SamplingParams
from tinydecode.speculative import device
from tinydecode.speculative.drafter import Drafter, ModelDrafter
from tinydecode.speculative.length import MAX_LENGTH, AdaptiveLength, FixedLength
from tinydecode.speculative.ngram import NgramDrafter
from tinydecode.speculative.rounds import Rounds
from tinydecode.speculative.scripted import ScriptedDrafter
from tinydecode.speculative.stats import SpeculativeStats
from tinydecode.token_loop import LogitsHook, run

if TYPE_CHECKING:
    from tinydecode.tokenizer import Tokenizer


def generate(
    engine: Engine,
    drafter: Drafter,
    ids: Sequence[int],
    k: int | Literal["auto"] = 5,
    max_new_tokens: int = 128,
    **options: Any,
) -> tuple[list[int], SpeculativeStats]:
    """Generate tokens after a prompt, as `Engine.generate` does, faster.

    Args:
        engine: the target, batch size 1.
        drafter: `ModelDrafter` or `NgramDrafter`.
        ids: prompt token ids.
        k: tokens drafted a round, 1 to 15; "auto" takes what pays by this call's own measurements,
            down to plain decoding and up again.
        max_new_tokens: at most this many tokens are returned.
        options: all others of `stream`.

    Returns:
        The new token ids and their statistics.

    Raises:
        ValueError: as `Engine.generate`; or batch_size is not 1, k is out of range, the draft's
            engine is the target's.
        NonFiniteLogitsError: logits of either model are NaN or infinite.
    """
    events = stream(engine, drafter, ids, k, max_new_tokens, **options)
    tokens = [event.token_id for event in events if event.token_id is not None]
    assert isinstance(events.stats, SpeculativeStats)
    return tokens, events.stats


def stream(
    engine: Engine,
    drafter: Drafter,
    ids: Sequence[int],
    k: int | Literal["auto"] = 5,
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
    """As `generate`, one `TokenEvent` at a time; `from_draft` says who proposed the token.

    Every option means what it means to `Engine.stream` and works inside the accept rule: a drafted
    token is judged by the distribution that plain decoding would have drawn from. `seed` repeats a
    text for the same drafter and a fixed k.

    Raises:
        ValueError: as `generate`, at the call, before the first event.
    """
    started = time.perf_counter()
    _check(engine, drafter)
    length = _length(k, drafter)
    params = SamplingParams(
        *(temperature, top_k, top_p, min_p, repetition_penalty, seed, presence_penalty),
        *(frequency_penalty, logit_bias or {}, banned_token_ids, logprobs),
    )
    ends = engine._stop_ids(eos_token_ids, ignore_eos, stop_token_ids)
    call = engine._call(ids, max_new_tokens, params, ends, stop, tokenizer, logits_hook, started)
    call.stats = SpeculativeStats()

    def events() -> Iterator[TokenEvent]:
        rounds: Rounds | device.DeviceRounds
        if device.fits(engine, drafter, call):
            assert isinstance(drafter, (ModelDrafter, NgramDrafter, ScriptedDrafter))
            rounds = device.DeviceRounds(engine, call, drafter, length)
        else:
            rounds = Rounds(engine, call, drafter, length)
        source = run(engine, call, lambda *_: rounds.steps())
        with closing(source) as found:
            for _, event in found:
                assert isinstance(call.stats, SpeculativeStats)
                call.stats.draft_tokens += event.from_draft
                yield event

    return TokenStream(events(), call.stats)


def _check(engine: Engine, drafter: Drafter) -> None:
    if engine.batch_size != 1:
        raise ValueError(
            f"speculative decoding serves batch_size 1, this engine has {engine.batch_size}; "
            "use Engine.generate for more rows"
        )
    inner = drafter.inner if isinstance(drafter, ScriptedDrafter) else drafter
    if isinstance(inner, ModelDrafter) and inner.engine is engine:
        raise ValueError("the draft needs an engine of its own, found the target's")


def _length(k: int | str, drafter: Drafter) -> FixedLength | AdaptiveLength:
    if k == "auto":
        return AdaptiveLength(drafter.is_free)
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= MAX_LENGTH:
        raise ValueError(f'k must be an integer from 1 to {MAX_LENGTH} or "auto", found {k!r}')
    return FixedLength(k)
