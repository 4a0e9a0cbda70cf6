"""What speculation adds to the statistics of a generation."""

from __future__ import annotations

from dataclasses import dataclass, field

from tinydecode.stats import Stats


@dataclass
class SpeculativeStats(Stats):
    """`Stats`, and how the drafts fared. The prompt's pass counts nowhere here.

    A drafted token is *proposed* when a verify pass judged it or would have, had none before it
    been rejected; what follows an end-of-sequence token in a draft is not proposed.
    """

    rounds: int = 0  # target passes that verified a draft
    target_passes: int = 0  # all passes: rounds and plain steps
    proposed: int = 0  # drafted tokens
    accepted: int = 0  # of these, the ones that stood
    draft_tokens: int = 0  # tokens returned that a draft proposed
    drafting_stopped_at: int | None = None  # tokens of text at which the draft's context was full
    draft_s: float = 0.0  # seconds in the drafter
    verify_s: float = 0.0  # seconds in the target's passes, plain ones included
    accepted_counts: list[int] = field(default_factory=list, repr=False)  # per round, in order

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over proposed; None when nothing was proposed."""
        return self.accepted / self.proposed if self.proposed else None

    @property
    def accepted_per_round(self) -> float | None:
        """Drafted tokens that stood, per round; None without rounds."""
        return self.accepted / self.rounds if self.rounds else None

    @property
    def tokens_per_pass(self) -> float | None:
        """Tokens returned per target pass, the prompt's pass and its token left out."""
        return (self.new_tokens - 1) / self.target_passes if self.target_passes else None

    def summary(self) -> str:
        """One line for people."""
        if self.acceptance_rate is None or self.tokens_per_pass is None:
            return f"{super().summary()}, nothing drafted"
        return (
            f"{super().summary()}, accepted {100 * self.acceptance_rate:.0f}% of "
            f"{self.proposed} drafted, {self.tokens_per_pass:.2f} tokens/pass"
        )

    def to_dict(self) -> dict[str, object]:
        """The numbers for machines: only strings, finite numbers, lists and None."""
        return super().to_dict() | {
            "acceptance_rate": self.acceptance_rate,
            "accepted_per_round": self.accepted_per_round,
            "tokens_per_pass": self.tokens_per_pass,
            "rounds": self.rounds,
            "target_passes": self.target_passes,
            "proposed": self.proposed,
            "accepted": self.accepted,
            "draft_tokens": self.draft_tokens,
            "drafting_stopped_at": self.drafting_stopped_at,
        }
