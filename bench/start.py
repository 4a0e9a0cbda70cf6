"""Process start to first token, with a model of a given shape warm on disk.

    python bench/start.py --shape llama-3.2-1b

Writes random bf16 weights and a byte tokenizer to a temporary folder, runs the console script once
to warm the disk cache, then several times, and takes the time from starting the process to the
first byte on stdout. The record goes to results/<card>.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import common
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tinydecode.model import resolve_device
from tinydecode.weights import named_slices, random_weights


def write_model(directory: Path, shape: str, device: torch.device) -> int:
    """A Hugging Face directory of random weights; returns the bytes of its weights."""
    config = common.shape_config(shape)
    weights = random_weights(config, device=device, dtype=torch.bfloat16)
    tensors = {
        name: part.cpu().contiguous() for name, part in named_slices(weights, config).items()
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(
        json.dumps({**common.SHAPES[shape], "dtype": "bfloat16"})
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    return weights.nbytes


def first_byte_seconds(directory: Path, device: torch.device) -> float:
    """One run of the console script; a random model may say anything, so JSON is asked for."""
    command = [sys.executable, "-m", "tinydecode.cli", str(directory), "-p", "Hello", "-n", "1"]
    begun = time.perf_counter()
    with subprocess.Popen(
        [*command, "--device", str(device), "--json"], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        elapsed = time.perf_counter() - begun
        process.stdout.read()
    if process.returncode != 0 or not first:
        raise RuntimeError(f"the console script exited with {process.returncode}")
    return elapsed


def main() -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--shape", choices=sorted(common.SHAPES), default="llama-3.2-1b")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--results", type=Path, default=common.RESULTS)
    options = parser.parse_args()
    device = resolve_device(options.device)
    facts = common.machine_facts(device)
    with tempfile.TemporaryDirectory() as scratch:
        nbytes = write_model(Path(scratch), options.shape, device)
        first_byte_seconds(Path(scratch), device)
        seconds = [first_byte_seconds(Path(scratch), device) for _ in range(options.runs)]
    median = statistics.median(seconds)
    record = {
        "bench": "start",
        "model": options.shape,
        "dtype": "bfloat16",
        "weights_gb": round(nbytes / 1e9, 3),
        "start_to_first_token_s": round(median, 3),
    }
    print(f"{options.shape}: {median:.2f} s from process start to the first token", seconds)
    print(f"records in {common.append_records([record], facts, options.results)}")


if __name__ == "__main__":
    main()
