"""What the benchmarks share: model shapes, timing, the machine's facts, and result records."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tinydecode import ModelConfig

RESULTS = Path(__file__).parent / "results"

_LLAMA = {
    "model_type": "llama",
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": {
        **_LLAMA,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "tie_word_embeddings": True,
        "rope_scaling": {**_LLAMA3_ROPE, "factor": 32.0},
    },
    "llama-3.1-8b": {
        **_LLAMA,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": False,
        "rope_scaling": {**_LLAMA3_ROPE, "factor": 8.0},
    },
    "tiny": {
        "model_type": "llama",
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
}


def shape_config(name: str) -> ModelConfig:
    """The configuration of a named shape."""
    return ModelConfig.from_dict(SHAPES[name])


def bytes_per_token(config: ModelConfig, itemsize: int, context: int) -> int:
    """Bytes one decode step must read: every weight once, and the keys and values in context.

    The input embedding is one row and not counted; a tied head is the embedding read as a head.
    """
    heads, kv_heads, dim = (
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
    )
    hidden = config.hidden_size
    layer = hidden * dim * (2 * heads + 2 * kv_heads) + 3 * hidden * config.intermediate_size
    weights = config.num_hidden_layers * layer + config.vocab_size * hidden
    cache = 2 * config.num_hidden_layers * kv_heads * dim * context
    return (weights + cache) * itemsize


def median_gpu_seconds(run: Callable[[], object], repeats: int = 50, warm_up: int = 5) -> float:
    """Median time of one call by CUDA events; calls follow each other on the current stream."""
    for _ in range(warm_up):
        run()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    pairs = zip(marks, marks[1:], strict=False)
    return statistics.median(a.elapsed_time(b) for a, b in pairs) / 1e3


def graphed(run: Callable[[], object]) -> Callable[[], None]:
    """Capture a call, so that launch overhead on the host stays out of its time."""
    run()
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def read_limit(device: torch.device, gib: float = 4.0) -> float:
    """Bytes a second that this GPU reads from its memory: the best of several plain reads.

    Our own read kernel when the extension is loaded, and torch reductions of several kinds.
    """
    data = torch.empty(int(gib * 2**30) // 4, device=device, dtype=torch.float32).normal_()
    candidates: list[Callable[[], object]] = [data.sum, data.amax, lambda: torch.dot(data, data)]
    from tinydecode import ops

    if ops.backend_name(is_cuda=True) == "fused":
        from tinydecode.ops import cuda

        candidates.append(lambda: cuda.read(data))
    best = min(median_gpu_seconds(run, repeats=15, warm_up=3) for run in candidates)
    return data.nbytes / best


def machine_facts(device: torch.device) -> dict[str, str]:
    """Card, driver, clocks as found, torch and commit."""
    if device.type == "cpu":
        card, driver, clocks = "cpu", "", ""
    else:
        card = torch.cuda.get_device_name(device)
        query = "driver_version,clocks.sm,clocks.mem"
        found = subprocess.run(
            [
                "nvidia-smi",
                f"--id={device.index or 0}",
                f"--query-gpu={query}",
                "--format=csv,noheader",
            ],
            capture_output=True,
            text=True,
            check=False,
        ).stdout.split(", ")
        driver, clocks = (found[0], "/".join(found[1:]).strip()) if len(found) == 3 else ("", "")
    commit = os.environ.get("TD_COMMIT", "")
    if not commit:
        git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "card": card,
        "driver": driver,
        "clocks": clocks,
        "torch": torch.__version__,
        "commit": commit,
        "when": time.strftime("%Y-%m-%d"),
    }


def append_records(
    records: list[dict[str, Any]], facts: dict[str, str], directory: Path = RESULTS
) -> Path:
    """Append records, each with the machine's facts, to results/<card>.json; returns the path."""
    name = re.sub(r"[^a-z0-9]+", "-", facts["card"].lower()).strip("-")
    path = directory / f"{name}.json"
    known = json.loads(path.read_text()) if path.exists() else []
    known += [{**record, **facts} for record in records]
    directory.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(record) for record in known)
    path.write_text(f"[\n{lines}\n]\n")
    return path


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    """A table to read and to paste into README.md."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
