"""The sampler of the device loop: its state on the device, and the ring the host reads.

Nothing here waits for the device between `begin` and the end of a generation but `read`, which
polls memory: each step writes its token under its own number, so no event and no stream is waited
for. On a CPU device the twin runs at once, with the same state and the same ring.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tinydecode import ops
from tinydecode.ops.ref_sample import IN_PROMPT, MAX_STOPS, PARAMS, RING_WORDS, ROW
from tinydecode.sampling import Choice, Logprobs, SamplingParams, TopLogprob, bias_row

SLOTS = 64  # steps in the ring; launching ahead stays far below
_MASK = 0xFFFFFFFF
_COLDEST = 1e-30  # lower temperatures are this one: already 1e-28 apart in logits is certain
_SPINS = 2000  # looks at memory in a row, about 0.2 ms, before the thread sleeps between two
_NAP_S = 2e-5
_CHECK_S = 0.02  # how long without a token until the stream is asked whether it is alive


@dataclass(frozen=True)
class Stages:
    """Which kernels a step launches; the values they work with are on the device."""

    has_filters: bool  # False: greedy
    has_logprobs: bool

    @classmethod
    def of(cls, params: SamplingParams) -> Stages:
        """The stages that these parameters need."""
        return cls(not params.is_greedy, params.logprobs is not None)


class DeviceSampler:
    """Chooses tokens on the device, step after step, for one engine.

    Attributes:
        tokens: int64 [B], the next input of every row.
        launched: steps enqueued, over all generations.
    """

    def __init__(self, batch_size: int, vocab_size: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        size = PARAMS.itemsize + batch_size * ROW.itemsize
        self._state = torch.zeros(size, dtype=torch.uint8, device=device)
        self._bias = torch.zeros(vocab_size, device=device)
        self._counts = torch.zeros(batch_size, vocab_size, dtype=torch.int32, device=device)
        self.tokens = torch.zeros(batch_size, dtype=torch.int64, device=device)
        ring = torch.zeros(SLOTS, batch_size, RING_WORDS, dtype=torch.int64)
        self._ring = ring.pin_memory() if is_cuda else ring
        # Kernels write the pinned ring; torch cannot, so the twin writes a copy that follows.
        self._mirror: Tensor | None = None
        if is_cuda and ops.backend_name(is_cuda=True) != "fused":
            self._mirror = torch.zeros_like(ring, device=device)
        self._words = memoryview(self._ring.numpy().data).cast("B").cast("Q")
        self._batch, self._vocab, self._device = batch_size, vocab_size, device
        self._params = SamplingParams()
        self.launched = 0
        self._read = 0

    def begin(
        self,
        params: SamplingParams,
        seed: int,
        prompts: Sequence[Sequence[int]] = (),
        stop_ids: Collection[int] = (),
        limits: Sequence[int] = (),
    ) -> None:
        """Set everything for a new generation; enqueued behind whatever still runs.

        Args:
            params: how tokens are chosen; their seed is not looked at.
            seed: of the random numbers, below 2^63.
            prompts: token ids a row, for the repetition penalty.
            stop_ids: end a row on the device. Only the first 32 do so: the host, which knows them
                all, takes back what was computed after the others.
            limits: tokens a row; none means no limit.
        """
        header = np.zeros(1, PARAMS)
        on_device = sorted(stop_ids)[:MAX_STOPS]
        min_p = params.min_p or 0.0
        values = {
            "seed": seed,
            "top_p": 1.0 if params.top_p is None else params.top_p,
            "temperature": max(params.temperature, _COLDEST) if params.temperature else 0.0,
            "log_min_p": math.log(min_p) if min_p > 0 else -math.inf,
            "repetition": params.repetition_penalty,
            "presence": params.presence_penalty,
            "frequency": params.frequency_penalty,
            "top_k": min(params.top_k or 0, self._vocab),
            "has_bias": params.has_bias,
            "has_counts": params.has_penalties,
            "num_stops": len(on_device),
            "num_logprobs": params.logprobs or 0,
        }
        for name, value in values.items():
            header[name] = value
        header["stops"][0, : len(on_device)] = on_device
        rows = np.zeros(self._batch, ROW)
        rows["sequence"] = self.launched & _MASK
        if limits:
            rows["remaining"] = np.minimum(limits, 2**31 - 1)
        raw = np.frombuffer(header.tobytes() + rows.tobytes(), np.uint8)
        self._state.copy_(self._pinned(torch.from_numpy(raw.copy())), non_blocking=True)
        if params.has_bias:
            bias = bias_row(params, self._vocab, "cpu")
            self._bias.copy_(self._pinned(bias), non_blocking=True)
        if params.has_penalties:
            self._counts.zero_()
            for row, prompt in enumerate(prompts):
                seen = self._pinned(torch.tensor(sorted(set(prompt)), dtype=torch.int64))
                self._counts[row].index_fill_(
                    0, seen.to(self._device, non_blocking=True), IN_PROMPT
                )
        self._params = params
        self._read = self.launched

    def _pinned(self, values: Tensor) -> Tensor:
        """What a copy to the device may read at any time later.

        A large copy from pageable memory waits for the work enqueued before it, which is the
        prompt's; for the pinned block see `prompts.pack`.
        """
        return values.pin_memory() if self._device.type == "cuda" else values

    def enqueue(self, logits: Tensor, seq_lens: Tensor | None, stages: Stages) -> None:
        """Sample from float32 [B, V] without waiting; does not count: see `launched`.

        Args:
            logits: of the step.
            seq_lens: int32 [B] that a pass has just advanced; None after a prefill.
            stages: what the parameters given to `begin` need, or more.
        """
        ring = self._ring if self._mirror is None else self._mirror
        ops.sample_tokens(
            *(logits, self._state, self._bias, self._counts, self.tokens, seq_lens, ring),
            has_filters=stages.has_filters,
            has_logprobs=stages.has_logprobs,
        )
        if self._mirror is not None:
            self._ring.copy_(self._mirror, non_blocking=True)

    def is_here(self) -> bool:
        """Whether the next step's first word has arrived; a look at memory."""
        tag = self._read + 1 & _MASK
        return self._words[tag % SLOTS * self._batch * RING_WORDS] >> 32 == tag

    def read(self, is_first: bool = False) -> tuple[list[Choice | None], int]:
        """Wait for the next step's words.

        Args:
            is_first: nothing else is to be done meanwhile, so look without sleeping.

        Returns:
            A choice a row, None for a row that has ended or cannot go on (`is_done` without a
            token: non-finite logits), and the GPU's clock in nanoseconds, 0 if it gave none.

        Raises:
            RuntimeError: the device failed, or finished without this step.
        """
        self._read += 1
        tag = self._read & _MASK
        base = (tag % SLOTS) * self._batch * RING_WORDS
        choices: list[Choice | None] = []
        for row in range(self._batch):
            start = base + row * RING_WORDS
            token = self._wait(start, tag, is_first)
            if token == _MASK:
                choices.append(None)
            elif self._params.logprobs is None:
                choices.append(Choice(token))
            else:
                choices.append(Choice(token, self._logprobs(start, tag)))
        words = self._words
        while words[base + 1] >> 48 != tag & 0xFFFF:
            time.sleep(_NAP_S)
        return choices, words[base + 1] & (2**48 - 1)

    def _logprobs(self, start: int, tag: int) -> Logprobs:
        def number(index: int) -> float:
            bits = self._wait(start + index, tag, True)
            return float(np.uint32(bits).view(np.float32))

        asked = min(self._params.logprobs or 0, self._vocab)
        places = range(4, 4 + 3 * asked, 3)
        return Logprobs(
            number(2),
            number(3),
            tuple(
                TopLogprob(self._wait(start + i, tag, True), number(i + 1), number(i + 2))
                for i in places
            ),
        )

    def _wait(self, index: int, tag: int, is_urgent: bool) -> int:
        """The lower half of a word, once the upper half says that it is this step's."""
        words = self._words
        for _ in range(_SPINS):
            if words[index] >> 32 == tag:
                return words[index] & _MASK
        checked = time.perf_counter()
        while words[index] >> 32 != tag:
            if not is_urgent:
                time.sleep(_NAP_S)
            if time.perf_counter() - checked > _CHECK_S:
                self._check_alive(index, tag)
                checked = time.perf_counter()
        return words[index] & _MASK

    def _check_alive(self, index: int, tag: int) -> None:
        """Raise if nothing will come any more; a query, which does not wait."""
        is_idle = self._device.type != "cuda" or torch.cuda.current_stream(self._device).query()
        if is_idle and self._words[index] >> 32 != tag:
            raise RuntimeError(
                f"the device finished without step {tag} of the token loop; was its stream changed "
                "during a generation?"
            )
