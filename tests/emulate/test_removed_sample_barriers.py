"""Every barrier of the sampling kernels, removed one at a time, must be missed by a test."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emulate.harness import KERNELS, EmulationError, Kernels, behind_cuda_ops, build, compiler
from emulate.test_removed_barriers import mutant

sys.path.insert(0, str(Path(__file__).parents[1] / "ops"))

from sampler_setup import Setup

from tinydecode.ops import ref_sample, sample

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a host C++ compiler")
SEEDS = range(1, 25)
COMPILED = ("sample_filter.cu", "sample_choose.cu", "sample_logprobs.cu")
BARRIER = r"__syncthreads\(\);"

HEADERS = ("sample.cuh", "sample_cuts.cuh", "sample_descent.cuh", "sample_list.cuh")
HEADERS += ("sample_rank.cuh",)

# A top-k of few tokens, by one block; lists of a few tokens, of hundreds (sorted, not counted), and
# too long for shared memory: of thousands in a bin, of thousands alike.
CASES = [
    (2600, 3.0, {"top_k": 30, "top_p": 0.95, "log_min_p": math.log(0.01)}, False),
    (2600, 0.5, {"top_k": 40, "log_min_p": math.log(0.4)}, False),
    (300, 3.0, {"top_k": 20, "top_p": 0.95, "log_min_p": math.log(0.01)}, False),
    (2600, 0.05, {"top_k": 900, "top_p": 0.9, "log_min_p": math.log(0.8)}, False),
    (2600, 0.002, {"top_k": 2300, "top_p": 0.9, "log_min_p": -0.003}, False),
    (2600, 0.002, {"top_k": 30, "top_p": 0.9}, False),
    (2600, 1e-5, {"top_p": 0.8}, False),
    (2600, 0.0, {"top_p": 0.7}, False),
    (2600, 0.2, {"log_min_p": math.log(0.6)}, False),
    (2600, 0.2, {"log_min_p": math.log(0.55), "top_p": 0.99}, False),
    (1500, 1.0, {"temperature": 0.0, "num_logprobs": 4}, True),
    (1500, 1.0, {"num_logprobs": 3, "top_k": 30}, True),
]

# A block that says too early that its part is there is caught only if the other one comes last
# while a warp is held back: one schedule in a hundred, so many are tried.
TICKET = "// of every thread"
TICKET_CASES = [(4000, 0.2, {"top_p": 0.7}, False)]
TICKET_SEEDS = range(1, 501)


def differs(kernels: Kernels, seed: int, cases: list[Any] = CASES) -> bool:
    """Whether any case under this schedule goes wrong."""
    bench = SimpleNamespace(device=torch.device("cpu"))
    with behind_cuda_ops(kernels):
        for vocab, spread, params, has_logprobs in cases:
            torch.manual_seed(seed)
            logits = torch.randn(1, vocab) * spread
            found = Setup(bench, 1, vocab, {**params, "seed": seed})
            expected = Setup(bench, 1, vocab, {**params, "seed": seed})
            kernels.schedule(seed, resident=5)
            try:
                found.run(sample, logits, True, has_logprobs)
            except EmulationError:
                return True
            expected.run(ref_sample, logits, True, has_logprobs)
            if found.tokens.tolist() != expected.tokens.tolist():
                return True
            if has_logprobs:
                count = int(params["num_logprobs"])
                mine, other = found.words(0, count), expected.words(0, count)
                if [top[0] for top in mine.top] != [top[0] for top in other.top]:
                    return True
                if not math.isclose(mine.logprob, other.logprob, abs_tol=1e-4):
                    return True
    return False


# What no schedule here can show: a table is cleared by its owners before anybody is held back, the
# merge of logprobs has work for one warp alone unless V is above 32768, and a thread that does not
# know the last bin of a top-k lists more than it needs to.
UNSEEN = ("// the tables are empty", "// scratch is read by everyone", "// the bin is there")


def mutations() -> list[tuple[str, int]]:
    found = []
    for name in (*COMPILED, *HEADERS):
        text = (KERNELS / name).read_text()
        for barrier in re.finditer(BARRIER, text):
            line = text[barrier.start() :].split("\n", 1)[0]
            if not any(remark in line for remark in UNSEEN):
                found.append((name, barrier.start()))
    return found


def test_nothing_is_noticed_when_nothing_is_removed() -> None:
    kernels = Kernels(build())
    assert not any(differs(kernels, seed) for seed in SEEDS)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "offset"), mutations())
def test_barriers_of_sampling(tmp_path: Path, name: str, offset: int) -> None:
    kernels = mutant(tmp_path, name, offset, "__syncthreads();", "", *COMPILED)
    cases, seeds = CASES, SEEDS
    if (KERNELS / name).read_text()[offset:].split("\n", 1)[0].endswith(TICKET):
        cases, seeds = TICKET_CASES, TICKET_SEEDS
    assert any(differs(kernels, seed, cases) for seed in seeds), "no schedule shows what is missing"
