"""Time per generated token, end to end: eager and graphs, torch twins and fused kernels.

    python bench/latency.py path/to/model --new 128
    python bench/latency.py --shape llama-3.2-1b --new 128     # random weights of that shape
    python bench/latency.py --tiny                             # runs anywhere

Greedy and sampled (--sampling), batch 1, streaming. The wall time per token is that of
`Engine.stream`, prompt and first token excluded; the median of several calls. The GPU time is that
of the same captured step replayed back to back, by events. The read limit is measured in the same
run. Records go to results/<card>.json.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import common
import torch

from tinydecode import Engine, LlamaModel, graphs, load_hf, ops
from tinydecode.model import resolve_device
from tinydecode.ops import ref
from tinydecode.sampling import SamplingParams
from tinydecode.weights import random_weights, resolve_dtype

PATHS = ("eager-torch", "eager-fused", "graphs-torch", "graphs-fused")
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.05, "seed": 1},
}


@contextmanager
def engine_for(path: str, model: LlamaModel, max_seq_len: int, burst: int = 1) -> Iterator[Engine]:
    """An engine on one of PATHS."""
    how, what = path.split("-")
    with ops.forced(ref) if what == "torch" and model.device.type == "cuda" else nullcontext():
        with Engine(model, max_seq_len=max_seq_len) as engine:
            yield graphs.enable(engine, (), burst) if how == "graphs" else engine


def measure(
    path: str,
    model: LlamaModel,
    prompt: list[int],
    new_tokens: int,
    runs: int,
    sampling: dict[str, Any],
    burst: int,
) -> dict[str, float]:
    """Median wall time per token and TTFT of warm calls; with graphs also GPU time a step."""
    max_seq_len = -(-(len(prompt) + new_tokens) // 256) * 256
    with engine_for(path, model, max_seq_len, burst) as engine:
        for _ in range(3):  # the second prompt of a length captures its pass
            engine.generate(prompt, 8, ignore_eos=True, **sampling)
        per_token, first = [], []
        for _ in range(runs):
            stream = engine.stream(prompt, new_tokens, ignore_eos=True, **sampling)
            assert sum(event.token_id is not None for event in stream) == new_tokens
            stats = stream.stats
            assert stats.tok_s is not None and stats.ttft_s is not None
            per_token.append(1e3 / stats.tok_s)
            first.append(1e3 * stats.ttft_s)
        figures = {"wall": statistics.median(per_token), "ttft": statistics.median(first)}
        if engine.graphs is not None:
            context = len(prompt) + new_tokens // 2
            graphed = engine.graphs.step(graphs.SAMPLED if sampling else graphs.GREEDY, burst)
            engine.sampler.begin(SamplingParams(**sampling), 1)

            def step() -> None:
                engine.cache.seq_lens.fill_(context)
                graphed.replay()

            # fill_ is one more tiny kernel; its cost is part of the figure.
            seconds = common.median_gpu_seconds(step, repeats=100)
            figures["gpu"] = 1e3 * seconds / graphed.count
        return figures


def main() -> None:
    """Measure the paths asked for, print a table, append the records."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("model", nargs="?", help="a model directory or .gguf file")
    parser.add_argument("--shape", choices=sorted(common.SHAPES), help="random weights instead")
    parser.add_argument("--tiny", action="store_true", help="the same as --shape tiny")
    parser.add_argument("--prompt", type=int, default=128, help="prompt tokens (default 128)")
    parser.add_argument("--new", type=int, default=128, help="new tokens (default 128)")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--dtype", default="auto", help="auto, bfloat16, float16 or float32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=list(PATHS))
    samplings = list(SAMPLINGS)
    parser.add_argument("--sampling", nargs="+", choices=samplings, default=samplings)
    parser.add_argument("--burst", type=int, default=1, help="steps a graph launch (default 1)")
    parser.add_argument("--results", type=Path, default=common.RESULTS)
    options = parser.parse_args()
    shape = "tiny" if options.tiny else options.shape
    if (options.model is None) == (shape is None):
        parser.error("give a model or --shape, one of the two")

    device = resolve_device(options.device)
    facts = common.machine_facts(device)
    limit = common.read_limit(device) if device.type == "cuda" else None
    started = time.perf_counter()
    if shape is not None:
        config = common.shape_config(shape)
        name = "bfloat16" if device.type == "cuda" else "float32"
        dtype = resolve_dtype(name if options.dtype == "auto" else options.dtype, ".", config)
        model = LlamaModel(config, random_weights(config, device=device, dtype=dtype))
    else:
        model = load_hf(options.model, device=device, dtype=options.dtype)
        config = model.config
    load_seconds = time.perf_counter() - started

    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(0, config.vocab_size, (options.prompt,), generator=generator).tolist()
    context = options.prompt + options.new // 2
    itemsize = model.weights.norm.element_size()
    nbytes = common.bytes_per_token(config, itemsize, context)
    records: list[dict[str, Any]] = []
    rows: list[list[str]] = []
    for path, sampling in itertools.product(options.paths, options.sampling):
        if device.type == "cpu" and path != "eager-torch":
            continue
        if path.endswith("fused") and ops.backend_name(is_cuda=True) != "fused":
            print(f"{path}: the compiled kernels are not installed, skipped")
            continue
        how = SAMPLINGS[sampling]
        figures = measure(path, model, prompt, options.new, options.runs, how, options.burst)
        seconds = figures["wall"] / 1e3
        gpu = round(figures["gpu"], 4) if "gpu" in figures else None
        records.append(
            {
                "bench": "latency",
                "model": shape or Path(options.model).name,
                "dtype": str(model.dtype).removeprefix("torch."),
                "prompt_tokens": options.prompt,
                "context": context,
                "path": path,
                "sampling": sampling,
                "burst": options.burst,
                "ms_per_token": round(figures["wall"], 4),
                "wall_ms_per_token": round(figures["wall"], 4),
                "gpu_ms_per_token": gpu,
                "ttft_ms": round(figures["ttft"], 3),
                "tok_s": round(1 / seconds, 2),
                "gb_s": round(nbytes / seconds / 1e9, 1),
                "pct_read_limit": round(100 * nbytes / seconds / limit, 1) if limit else None,
                "read_limit_gb_s": round(limit / 1e9, 1) if limit else None,
            }
        )
        share = f"{100 * nbytes / seconds / limit:.1f}" if limit else ""
        rows.append(
            [path, sampling, f"{figures['wall']:.4f}", "" if gpu is None else f"{gpu:.4f}"]
            + [f"{1 / seconds:.1f}", f"{nbytes / seconds / 1e9:.0f}", share]
            + [f"{figures['ttft']:.2f}"]
        )
    header = [
        "path",
        "sampling",
        "ms/token wall",
        "ms/token GPU",
        "tok/s",
        "GB/s",
        "% of read limit",
        "TTFT ms",
    ]
    print(f"\n{shape or options.model}, {facts['card']}, {facts['when']}")
    print(f"loaded in {load_seconds:.1f} s")
    print(common.markdown_table(header, rows))
    print(f"records in {common.append_records(records, facts, options.results)}")


if __name__ == "__main__":
    main()
