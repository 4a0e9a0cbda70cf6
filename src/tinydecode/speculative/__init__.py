"""Speculative decoding: a cheap drafter proposes, the model judges several tokens in one pass.

The text is the model's own: greedy output is the same token for token, sampled output has the same
distribution, with every sampling option inside the accept rule. A seed repeats a text for the same
drafter and k; the text of plain decoding with that seed is another draw of the same distribution.
"""

from tinydecode.speculative.calls import generate, stream
from tinydecode.speculative.drafter import Call, Drafter, ModelDrafter, Proposal, check_tokenizers
from tinydecode.speculative.ngram import NgramDrafter
from tinydecode.speculative.rule import accept
from tinydecode.speculative.stats import SpeculativeStats

__all__ = [
    "Call",
    "Drafter",
    "ModelDrafter",
    "NgramDrafter",
    "Proposal",
    "SpeculativeStats",
    "accept",
    "check_tokenizers",
    "generate",
    "stream",
]
