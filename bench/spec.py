"""Speculative decoding beside plain decoding, in the same run.

    python bench/spec.py MODEL --draft SMALL -k 3 5 8 auto
    python bench/spec.py MODEL --ngram -k 5 8 auto              # MODEL is a path or "demo"
    python bench/spec.py --shape llama-3.1-8b --draft-shape llama-3.2-1b --accept 0.8 -k 4
    python bench/spec.py --shape llama-3.1-8b --ngram --accept 0.8 -k 8
    python bench/spec.py --tiny --ngram -k 3 5 auto             # runs anywhere

Greedy, batch 1. With a real model the prompts are the texts of tests/data that lookup is meant for
(code edit, JSON transform, quoted summary), and free prose. With `--accept P` a share P of the
drafted tokens is right, whatever was drafted: the drafter works as ever, and its tokens are then
replaced by the ones that plain decoding gave, or by others. Plain and speculative calls take turns;
figures are of the median call. On CUDA, "draft" and "verify" are the k draft steps and the verify
pass measured alone, as one graph each, so "rest" is what the round adds to them: what makes tokens
of logits, and the start of its graph (with --accept, in rounds of the drafter as it is). The
kernels of this are measured alone too. Records go to results/<card>.json.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch

from tinydecode import Engine, LlamaModel, Tokenizer, graphs, load_hf, ops, speculative
from tinydecode.model import resolve_device
from tinydecode.ops.ref_round import RING_WORDS
from tinydecode.ops.ref_sample import PARAMS
from tinydecode.speculative import Drafter, ModelDrafter, NgramDrafter
from tinydecode.speculative.scripted import ScriptedDrafter
from tinydecode.speculative.stats import SpeculativeStats
from tinydecode.weights import random_weights, resolve_dtype

TEXTS = Path(__file__).parents[1] / "tests" / "data"
FILE_SET = ("code_edit", "json_transform", "quoted_summary")
PROSE = "The old lighthouse keeper climbed the stairs one last time, and when he reached the top he"


def gpu_parts(engine: Engine, drafter: Any, k: int, context: int) -> tuple[float, float]:
    """Milliseconds of k draft steps, and of a verify pass: bare passes, each kind one graph."""

    def passes(which: Engine, rows: list[int]) -> float:
        ids = torch.zeros(1, max(rows), dtype=torch.int64, device=which.model.device)

        def run() -> None:
            which.cache.seq_lens.fill_(context)
            for count in rows:
                which.model.chunk(ids[:, :count], which.cache)

        return 1e3 * common.median_gpu_seconds(common.graphed(run))

    with torch.inference_mode():
        inner = drafter.inner if isinstance(drafter, ScriptedDrafter) else drafter
        draft = 0.0
        if isinstance(inner, ModelDrafter):
            draft = passes(inner.engine, [2] + [1] * (k - 1))
        return draft, passes(engine, [k + 1])


REPEATS = 20  # of a small kernel in one graph, whose own launch takes longer than the kernel


def each_us(run: Callable[[], object]) -> float:
    """Microseconds of a call among others like it, in a graph."""

    def several() -> None:
        for _ in range(REPEATS):
            run()

    return 1e6 * common.median_gpu_seconds(common.graphed(several)) / REPEATS


def lookup_us(device: torch.device, length: int) -> float:
    """Microseconds of an n-gram lookup over a text."""
    found = ops.round_ops(device)
    assert found is not None
    state = torch.tensor([0, 0, 0, length, 1 << 40, 0], device=device)
    text = torch.randint(0, 1000, (length,), dtype=torch.int32, device=device)
    draft = torch.zeros(8, dtype=torch.int64, device=device)
    return each_us(lambda: found.ngram(text, state, draft, 3, 1))


def accept_us(device: torch.device, k: int, vocab: int, is_greedy: bool) -> float:
    """Microseconds of a round's end, from logits to the host's ring."""
    found = ops.round_ops(device)
    assert found is not None
    state = torch.tensor([0, 0, 0, 10, 1 << 40, 0], device=device)
    values = np.zeros(1, PARAMS)
    values["temperature"] = 0.0 if is_greedy else 0.8
    values["top_p"], values["log_min_p"], values["repetition"] = 0.95, -np.inf, 1.0
    params = torch.from_numpy(np.frombuffer(values.tobytes(), np.uint8).copy()).to(device)
    logits = torch.randn(k + 1, vocab, device=device)
    bias = torch.zeros(vocab, device=device)
    counts = torch.zeros(k + 1, vocab, dtype=torch.int32, device=device)
    p = found.workspace(k + 1, vocab, device)
    draft = torch.zeros(k, dtype=torch.int64, device=device)
    history = torch.zeros(1 << 20, dtype=torch.int32, device=device)  # the text grows
    token = torch.zeros(1, dtype=torch.int64, device=device)
    lens = torch.zeros(1, dtype=torch.int32, device=device)
    ring = torch.zeros(16, RING_WORDS, dtype=torch.int64).pin_memory()
    ends = (draft, history, token, lens, None, None, ring)
    how = {"draft_rows": vocab, "has_proposed": False}
    sizes = {"vocab_size": vocab, "draft_vocab_size": vocab}

    def run() -> None:
        if is_greedy:
            found.accept_best(params, state, logits, *ends, **how)
            return
        found.distribution(logits, params, bias, counts, p)
        found.accept(params, state, p, None, *ends, **sizes, **how)

    return each_us(run)


def kernel_times(device: torch.device, vocab: int, results: Path, facts: dict[str, str]) -> None:
    """The kernels of a round alone."""
    records: list[dict[str, Any]] = []
    for length in (1024, 16 * 1024, 128 * 1024):
        records.append({"op": "ngram", "size": f"{length} tokens", "us": lookup_us(device, length)})
    for k, is_greedy in itertools.product((4, 8), (True, False)):
        op = "accept, greedy" if is_greedy else "distribution + accept, top-p"
        us = accept_us(device, k, vocab, is_greedy)
        records.append({"op": op, "size": f"k {k}, V {vocab}", "us": us})
    logits = torch.randn(1, vocab, device=device)
    token = torch.zeros(1, dtype=torch.int64, device=device)
    us = each_us(lambda: ops.argmax(logits, token))
    records.append({"op": "argmax", "size": f"V {vocab}", "us": us})
    rows = [[record["op"], record["size"], f"{record['us']:.1f}"] for record in records]
    print(common.markdown_table(["op", "size", "us"], rows))
    for record in records:
        record["us"] = round(record["us"], 2)
    common.append_records([{"bench": "spec", **record} for record in records], facts, results)


def model_of(
    path: str | None, shape: str | None, device: torch.device, dtype: str, seed: int = 0
) -> LlamaModel:
    """From files, or random weights of a shape."""
    if path is not None:
        return load_hf(path, device=device, dtype=dtype)
    assert shape is not None
    config = common.shape_config(shape)
    name = "bfloat16" if device.type == "cuda" else "float32"
    found = resolve_dtype(name if dtype == "auto" else dtype, ".", config)
    return LlamaModel(config, random_weights(config, device=device, dtype=found, seed=seed))


def engine_of(model: LlamaModel, max_seq_len: int) -> Engine:
    engine = Engine(model, max_seq_len=min(max_seq_len, model.config.max_position_embeddings))
    return graphs.enable(engine) if model.device.type == "cuda" else engine


def round_ms(stats: SpeculativeStats) -> float:
    """Median milliseconds of a round: the first after a prompt is launched kernel by kernel."""
    times = sorted(set(stats.step_times))  # the tokens of a round come at the same time
    return 1e3 * statistics.median(b - a for a, b in zip(times, times[1:], strict=False))


def measure(
    engine: Engine, drafters: dict[str, Drafter], prompt: list[int], k: Any, new: int, runs: int
) -> dict[str, dict[str, Any]]:
    """Plain and speculative calls in turn; per drafter the figures of its median call."""
    found: dict[str, list[SpeculativeStats]] = {name: [] for name in drafters}
    plain: list[float] = []
    expected, _ = engine.generate(prompt, new, ignore_eos=True)
    for drafter in drafters.values():  # graphs are captured, libraries loaded
        speculative.generate(engine, drafter, prompt, k, new, ignore_eos=True)
    for _ in range(runs):
        _, stats = engine.generate(prompt, new, ignore_eos=True)
        assert stats.tok_s is not None
        plain.append(stats.tok_s)
        for name, drafter in drafters.items():
            ids, spec = speculative.generate(engine, drafter, prompt, k, new, ignore_eos=True)
            assert ids == expected, "speculation changed the text"
            found[name].append(spec)
    base = statistics.median(plain)
    result = {}
    for name, calls in found.items():
        calls.sort(key=lambda stats: stats.tok_s or 0.0)
        median = stats = calls[len(calls) // 2]
        assert median.tok_s is not None
        passes = max(1, stats.target_passes)
        total = 1e3 * (stats.step_times[-1] - stats.step_times[0]) / passes
        draft, verify = 1e3 * stats.draft_s / passes, 1e3 * stats.verify_s / passes
        rest = total - draft - verify
        if engine.graphs is not None and k != "auto":
            drafter = drafters[name]
            if isinstance(drafter, ScriptedDrafter):  # the script is a kernel that rounds lack
                drafter = drafter.inner
                for _ in range(2):  # the first captures
                    _, stats = speculative.generate(
                        engine, drafter, prompt, k, new, ignore_eos=True
                    )
            draft, verify = gpu_parts(engine, drafter, k, len(prompt) + new // 2)
            rest = round_ms(stats) - draft - verify
        result[name] = {
            "acceptance": median.acceptance_rate,
            "tokens_per_pass": median.tokens_per_pass,
            "ms_per_round": total,
            "draft_ms": draft,
            "verify_ms": verify,
            "rest_ms": rest,
            "tok_s": median.tok_s,
            "plain_tok_s": base,
            "speedup": median.tok_s / base,
        }
    return result


def main() -> None:
    """Measure, print a table, append the records."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("model", nargs="?", help='a model directory, a .gguf file, or "demo"')
    parser.add_argument("--shape", choices=sorted(common.SHAPES), help="random weights instead")
    parser.add_argument("--tiny", action="store_true", help="the same as --shape tiny")
    parser.add_argument("--draft", help="a draft model")
    parser.add_argument("--draft-shape", choices=sorted(common.SHAPES), help="random weights")
    parser.add_argument("--ngram", action="store_true")
    parser.add_argument("--accept", type=float, metavar="P", help="share of right tokens")
    parser.add_argument("-k", nargs="+", default=["3", "5", "8", "auto"])
    parser.add_argument("--prompt", type=int, default=128, help="of random weights: prompt tokens")
    parser.add_argument("--new", type=int, default=128, help="new tokens (default 128)")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--results", type=Path, default=common.RESULTS)
    options = parser.parse_args()
    shape = "tiny" if options.tiny else options.shape
    if (options.model is None) == (shape is None):
        parser.error("give a model or --shape, one of the two")
    if not (options.draft or options.draft_shape or options.ngram):
        parser.error("give --draft, --draft-shape or --ngram")

    path = options.model
    if path == "demo":
        from tinydecode.demo import demo_model

        path = str(demo_model())
    device = resolve_device(options.device)
    facts = common.machine_facts(device)
    started = time.perf_counter()
    model = model_of(path, shape, device, options.dtype)
    if path is not None:
        tokenizer = Tokenizer(path)
        texts = {name: (TEXTS / f"{name}.txt").read_text() for name in FILE_SET}
        texts["free prose"] = PROSE
        prompts = {name: tokenizer.encode(text) for name, text in texts.items()}
    else:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, model.config.vocab_size, (options.prompt,), generator=generator)
        prompts = {"random": ids.tolist()}
    slots = max(map(len, prompts.values())) + options.new
    engine = engine_of(model, slots)
    drafters: dict[str, Any] = {}
    if options.ngram:
        drafters["n-gram"] = NgramDrafter()
    if options.draft or options.draft_shape:
        draft = model_of(options.draft, options.draft_shape, device, options.dtype, seed=1)
        drafters["model"] = ModelDrafter(engine_of(draft, slots))
    print(f"loaded in {time.perf_counter() - started:.1f} s")
    if device.type == "cuda":
        kernel_times(device, model.config.vocab_size, options.results, facts)

    records: list[dict[str, Any]] = []
    rows: list[list[str]] = []
    for name, prompt in prompts.items():
        used = drafters
        if options.accept is not None:
            text = prompt + engine.generate(prompt, options.new, ignore_eos=True)[0]
            vocab = model.config.vocab_size
            used = {
                which: ScriptedDrafter(inner, text, options.accept, vocab)
                for which, inner in drafters.items()
            }
        for word in options.k:
            k = word if word == "auto" else int(word)
            figures = measure(engine, used, prompt, k, options.new, options.runs)
            for which, row in figures.items():
                record = {"bench": "spec", "model": shape or Path(options.model).name}
                record |= {"dtype": str(model.dtype).removeprefix("torch."), "prompt": name}
                record |= {"drafter": which, "draft_model": options.draft or options.draft_shape}
                record |= {"k": k, "accept": options.accept}
                record |= {key: value and round(value, 4) for key, value in row.items()}
                records.append(record)
                rate = row["acceptance"]
                rows.append(
                    [name, which, word, "" if rate is None else f"{100 * rate:.0f}"]
                    + [f"{row['tokens_per_pass']:.2f}", f"{row['ms_per_round']:.3f}"]
                    + [f"{row['draft_ms']:.3f}", f"{row['verify_ms']:.3f}"]
                    + [f"{row['rest_ms']:.3f}", f"{row['tok_s']:.1f}", f"{row['speedup']:.2f}"]
                )
                print(" | ".join(rows[-1]), flush=True)
    header = ["prompt", "drafter", "k", "accepted %", "tokens/pass", "ms/round", "draft", "verify"]
    print(f"\n{shape or options.model}, {facts['card']}, {facts['when']}")
    print(common.markdown_table([*header, "rest", "tok/s", "x plain"], rows))
    for which in drafters:
        chosen = [r for r in records if r["drafter"] == which and r["prompt"] in FILE_SET]
        if chosen:
            by_k = {r["k"]: [x["speedup"] for x in chosen if x["k"] == r["k"]] for r in chosen}
            for k, speedups in by_k.items():
                mean = statistics.geometric_mean(speedups)
                print(f"{which}, k {k}: {mean:.2f} times plain on the file set (geometric mean)")
    print(f"records in {common.append_records(records, facts, options.results)}")


if __name__ == "__main__":
    main()
