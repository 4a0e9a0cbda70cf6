"""tinydecode-generate --selfcheck: is speculation exact on this machine?

Small models whose distributions are known are run through the very loops, kernels and graphs that
serve real ones. What was drawn is compared with what should have been by a chi-square statistic,
and greedy text with speculation is compared with greedy text without.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch

from tinydecode import graphs, ops, speculative
from tinydecode.config import ModelConfig
from tinydecode.engine import Engine
from tinydecode.model import LlamaModel, resolve_device
from tinydecode.speculative import Drafter, ModelDrafter, NgramDrafter
from tinydecode.weights import random_weights

TARGET, DRAFT = (2.0, 1.0, 0.0, -1.0), (0.0, 1.0, 2.0, -1.0)  # logits of the live tokens
CASES: tuple[tuple[str, dict[str, Any], tuple[float, ...]], ...] = (
    ("temperature 1", {"temperature": 1.0}, (0.64391, 0.23688, 0.08714, 0.03206)),
    ("temperature 0.7, top-k 2", {"temperature": 0.7, "top_k": 2}, (0.80668, 0.19332, 0.0, 0.0)),
    ("temperature 1, top-p 0.9", {"temperature": 1, "top_p": 0.9}, (0.66524, 0.24473, 0.09003, 0)),
)
_SECONDS = 3.5  # a case: less is drawn where that takes longer, and the whole keeps below a minute
_TOKENS = 2000  # a case
_LEAST = 300


def selfcheck(device: str, write: Callable[[str], None]) -> bool:
    """Run every check and write a line for each; whether all of them passed.

    Args:
        device: as `load_hf` takes it.
        write: called with one line at a time.
    """
    where = resolve_device(device)
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    kind = f"{ops.backend_name(where.type == 'cuda')}, {str(dtype).removeprefix('torch.')}"
    name = torch.cuda.get_device_name(where) if where.type == "cuda" else "cpu"
    write(f"speculative decoding on {name} ({kind})")
    checks = [_greedy(where, dtype, write)]
    target = _engine(_known(TARGET, where, dtype), 1024)
    draft = _engine(_known(DRAFT, where, dtype), 1024)
    drafters: tuple[tuple[str, Callable[[], Drafter]], ...] = (
        ("a wrong draft model", lambda: ModelDrafter(draft)),
        ("n-gram lookup", NgramDrafter),
    )
    for (case, options, p), (drafter, make), k in product(CASES, drafters, (1, 4)):
        found: list[int] = []
        deadline = time.perf_counter() + _SECONDS
        while len(found) < _LEAST or (len(found) < _TOKENS and time.perf_counter() < deadline):
            found += speculative.generate(
                *(target, make(), [0, 1, 2, 3], k, 100), seed=len(found), ignore_eos=True, **options
            )[0]
        checks.append(_report(f"{case}, {drafter}, k {k}", found, p, write))
    target.close()
    draft.close()
    write("all exact" if all(checks) else "NOT exact: please report this, with --info")
    return all(checks)


def _greedy(where: torch.device, dtype: torch.dtype, write: Callable[[str], None]) -> bool:
    """Greedy text of a random model, with a draft of the same weights and with lookup."""
    config = _config(512)
    model = LlamaModel(config, random_weights(config, device=where, dtype=dtype, std=0.08))
    passed = True
    with _engine(model, 256) as target, _engine(model, 256) as draft:
        expected, _ = target.generate(list(range(20)), 200)
        for name, drafter in (("itself", ModelDrafter(draft)), ("n-gram lookup", NgramDrafter())):
            found, stats = speculative.generate(target, drafter, list(range(20)), 4, 200)
            same = found == expected
            if name == "itself":
                same = same and stats.acceptance_rate == 1.0
            rate = stats.acceptance_rate
            accepted = "nothing" if rate is None else f"{100 * rate:.0f}%"
            verdict = "ok" if same else "FAILED"
            write(
                f"{verdict:6} greedy, drafted by {name}: 200 tokens compared, {accepted} accepted"
            )
            passed = passed and same
    return passed


def _report(
    name: str, found: Sequence[int], p: Sequence[float], write: Callable[[str], None]
) -> bool:
    """Single tokens and pairs of neighbours, observed against expected."""
    counts = [found.count(token) for token in range(len(p))]
    pairs = list(zip(found[::2], found[1::2], strict=False))
    of_pairs = {(a, b): p[a] * p[b] for a in range(len(p)) for b in range(len(p))}
    first, first_limit = _chi_square([float(n) for n in counts], p, len(found))
    second, second_limit = _chi_square(
        [float(pairs.count(pair)) for pair in of_pairs], list(of_pairs.values()), len(pairs)
    )
    passed = first < first_limit and second < second_limit
    shares = " ".join(f"{n / len(found):.3f}/{q:.3f}" for n, q in zip(counts, p, strict=True))
    write(
        f"{'ok' if passed else 'FAILED':6} {name}: {len(found)} tokens, "
        f"observed/expected {shares}, chi-square {first:.1f} (limit {first_limit:.1f}), "
        f"of pairs {second:.1f} (limit {second_limit:.1f})"
    )
    return passed


def _chi_square(counts: Sequence[float], p: Sequence[float], total: int) -> tuple[float, float]:
    """(statistic, its limit at about p = 1e-5); infinite if something impossible was drawn.

    Outcomes expected less than five times are counted together, as the statistic wants it.
    """
    if any(n and not q for n, q in zip(counts, p, strict=True)) or sum(counts) != total:
        return math.inf, 0.0
    cells, rare = [], [0.0, 0.0]
    for n, q in zip(counts, p, strict=True):
        if q * total >= 5:
            cells.append((n, q * total))
        else:
            rare = [rare[0] + n, rare[1] + q * total]
    if rare[1] >= 1:
        cells.append((rare[0], rare[1]))
    freedom = max(1, len(cells) - 1)
    statistic = sum((n - expected) ** 2 / expected for n, expected in cells)
    # Wilson and Hilferty's approximation of the quantile.
    spread = 2 / (9 * freedom)
    return statistic, freedom * (1 - spread + 4.265 * math.sqrt(spread)) ** 3


def _config(vocab_size: int) -> ModelConfig:
    return ModelConfig.from_dict(
        {
            "model_type": "llama",
            "vocab_size": vocab_size,
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 1024,
        }
    )


def _known(row: Sequence[float], where: torch.device, dtype: torch.dtype) -> LlamaModel:
    """A model whose next token has the logits `row`, whatever came before."""
    config = _config(64)
    weights = random_weights(config, device=where, dtype=dtype)
    for layer in weights.layers:
        layer.o_proj.zero_()
        layer.down_proj.zero_()
    scale = math.sqrt(
        config.hidden_size
    )  # a norm leaves one-hot vectors of this height as they are
    weights.embed_tokens.copy_(torch.eye(config.vocab_size, config.hidden_size) * scale)
    logits = torch.full((config.vocab_size,), -1e4)
    logits[: len(row)] = torch.tensor(row)
    weights.lm_head.zero_()
    weights.lm_head[:, : config.vocab_size] = logits[:, None] / scale
    return LlamaModel(config, weights)


def _engine(model: LlamaModel, max_seq_len: int) -> Engine:
    engine = Engine(model, max_seq_len=max_seq_len)
    return graphs.enable(engine) if model.device.type == "cuda" else engine
