"""Time per generated token, end to end: eager and graphs, torch twins and fused kernels.

    python bench/latency.py path/to/model --new 128
    python bench/latency.py --shape llama-3.2-1b --new 128     # random weights of that shape
    python bench/latency.py --tiny                             # runs anywhere

Greedy, batch 1. The wall time per token is that of `Engine.generate`, prompt and first token
excluded; the median of several calls. The read limit is measured in the same run. Records go to
results/<card>.json.
"""

from __future__ import annotations

import argparse
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
from tinydecode.weights import random_weights, resolve_dtype

PATHS = ("eager-torch", "eager-fused", "graphs-torch", "graphs-fused")


@contextmanager
def engine_for(path: str, model: LlamaModel, max_seq_len: int) -> Iterator[Engine]:
    """An engine on one of PATHS."""
    how, what = path.split("-")
    with ops.forced(ref) if what == "torch" and model.device.type == "cuda" else nullcontext():
        with Engine(model, max_seq_len=max_seq_len) as engine:
            yield graphs.enable(engine) if how == "graphs" else engine


def measure(
    path: str, model: LlamaModel, prompt: list[int], new_tokens: int, runs: int
) -> dict[str, float]:
    """Median wall time per token and TTFT of warm calls; with graphs also GPU time a step."""
    max_seq_len = -(-(len(prompt) + new_tokens) // 256) * 256
    with engine_for(path, model, max_seq_len) as engine:
        engine.generate(prompt, 8, ignore_eos=True)
        per_token, first = [], []
        for _ in range(runs):
            _, stats = engine.generate(prompt, new_tokens, ignore_eos=True)
            assert stats.tok_s is not None and stats.ttft_s is not None
            per_token.append(1e3 / stats.tok_s)
            first.append(1e3 * stats.ttft_s)
        figures = {"wall": statistics.median(per_token), "ttft": statistics.median(first)}
        if engine.graphs is not None:
            context = len(prompt) + new_tokens // 2

            def step() -> None:
                engine.cache.seq_lens.fill_(context)
                engine.graphs.step.replay()  # type: ignore[union-attr]

            # fill_ is one more tiny kernel; its cost is part of the figure.
            figures["gpu"] = 1e3 * common.median_gpu_seconds(step, repeats=100)
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
    for path in options.paths:
        if device.type == "cpu" and path != "eager-torch":
            continue
        if path.endswith("fused") and ops.backend_name(is_cuda=True) != "fused":
            print(f"{path}: the compiled kernels are not installed, skipped")
            continue
        figures = measure(path, model, prompt, options.new, options.runs)
        seconds = figures["wall"] / 1e3
        records.append(
            {
                "bench": "latency",
                "model": shape or Path(options.model).name,
                "dtype": str(model.dtype).removeprefix("torch."),
                "context": context,
                "path": path,
                "ms_per_token": round(figures["wall"], 4),
                "gpu_ms_per_token": round(figures["gpu"], 4) if "gpu" in figures else None,
                "ttft_ms": round(figures["ttft"], 3),
                "tok_s": round(1 / seconds, 2),
                "gb_s": round(nbytes / seconds / 1e9, 1),
                "pct_read_limit": round(100 * nbytes / seconds / limit, 1) if limit else None,
                "read_limit_gb_s": round(limit / 1e9, 1) if limit else None,
            }
        )
        gpu = f"{figures['gpu']:.3f}" if "gpu" in figures else ""
        share = f"{100 * nbytes / seconds / limit:.1f}" if limit else ""
        rows.append(
            [path, f"{figures['wall']:.3f}", gpu, f"{1 / seconds:.1f}"]
            + [f"{nbytes / seconds / 1e9:.0f}", share, f"{figures['ttft']:.1f}"]
        )
    header = [
        "path",
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
