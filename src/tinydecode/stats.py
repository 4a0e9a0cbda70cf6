"""What one generation cost: times, counts, and why it ended."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tinydecode.sampling import Logprobs


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Nearest-rank percentile; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


@dataclass
class Stats:
    """Times are seconds by a monotonic clock, measured on the host from the call's first line.

    With batch > 1, token counts are sums over the rows and times are those of the whole batch.
    """

    prompt_tokens: int = 0
    new_tokens: int = 0  # tokens returned; an end-of-sequence token is not one of them
    finish_reason: str | None = None  # "stop", "length", or None while running or abandoned
    finish_reasons: list[str | None] = field(default_factory=list)  # the same, per row
    seed: int | None = None  # passing it again repeats the text; None when nothing was drawn
    step_times: list[float] = field(default_factory=list, repr=False)  # when each step's token came
    # The GPU's own clock at the end of each step; empty where steps ran on the CPU.
    device_times_ns: list[int] = field(default_factory=list, repr=False)
    # Per row, of each token returned; empty unless asked for.
    logprobs: list[list[Logprobs]] = field(default_factory=list, repr=False)

    @property
    def ttft_s(self) -> float | None:
        """Time to first token: prompt in, first token in host memory."""
        return self.step_times[0] if self.step_times else None

    @property
    def inter_token_latencies(self) -> list[float]:
        """Seconds between consecutive steps."""
        return [b - a for a, b in zip(self.step_times, self.step_times[1:], strict=False)]

    @property
    def itl_p50_s(self) -> float | None:
        """Median inter-token latency."""
        return percentile(self.inter_token_latencies, 50)

    @property
    def itl_p99_s(self) -> float | None:
        """99th percentile of the inter-token latency."""
        return percentile(self.inter_token_latencies, 99)

    @property
    def steps_ms(self) -> list[float]:
        """Milliseconds of each step after the first, by the GPU's clock where there is one.

        Every step leaves a time stamp with its token, so that this costs nothing.
        """
        if len(self.device_times_ns) == len(self.step_times):
            times = self.device_times_ns  # 48 bits: they wrap every three days
            return [(b - a) % 2**48 / 1e6 for a, b in zip(times, times[1:], strict=False)]
        return [1e3 * seconds for seconds in self.inter_token_latencies]

    @property
    def wall_ms_per_token(self) -> float | None:
        """Mean time between tokens on the host, in milliseconds."""
        return None if self.tok_s is None else 1e3 / self.tok_s

    @property
    def gpu_ms_per_token(self) -> float | None:
        """Mean of `steps_ms` where they are a GPU's; includes any wait for the host."""
        if not self.device_times_ns or not self.steps_ms:
            return None
        return sum(self.steps_ms) / len(self.steps_ms)

    @property
    def tok_s(self) -> float | None:
        """Steps per second after the first token; None with fewer than two tokens."""
        if len(self.step_times) < 2:
            return None
        elapsed = self.step_times[-1] - self.step_times[0]
        return (len(self.step_times) - 1) / elapsed if elapsed > 0 else None

    def summary(self) -> str:
        """One line for people."""
        parts = [f"{self.prompt_tokens} prompt + {self.new_tokens} new tokens"]
        if self.ttft_s is not None:
            parts.append(f"TTFT {self.ttft_s * 1e3:.1f} ms")
        if self.itl_p50_s is not None and self.itl_p99_s is not None:
            parts.append(f"ITL p50 {self.itl_p50_s * 1e3:.2f} ms p99 {self.itl_p99_s * 1e3:.2f} ms")
        if self.tok_s is not None:
            parts.append(f"{self.tok_s:.1f} tok/s")
        if self.finish_reason is not None:
            parts.append(f"finish: {self.finish_reason}")
        return ", ".join(parts)

    def to_dict(self) -> dict[str, object]:
        """The numbers for machines: only strings, finite numbers, lists and None."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": self.new_tokens,
            "ttft_s": self.ttft_s,
            "itl_p50_s": self.itl_p50_s,
            "itl_p99_s": self.itl_p99_s,
            "tok_s": self.tok_s,
            "wall_ms_per_token": self.wall_ms_per_token,
            "gpu_ms_per_token": self.gpu_ms_per_token,
            "finish_reason": self.finish_reason,
            "finish_reasons": list(self.finish_reasons),
            "seed": self.seed,
        }
