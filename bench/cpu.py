"""Side by side with transformers on the CPU: decode speed, and time from process start to a token.

    python bench/cpu.py                # the demo model, fp32, 2 threads
    python bench/cpu.py --model DIR    # any Hugging Face llama directory

Both programs read the same directory. Runs alternate, and medians are printed, so that a machine
whose speed drifts is fair to both. Needs the extras `demo` and `dev`. Appends nothing; `--json
FILE` writes the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

PROMPT = "The history of the printing press begins with"

# What a user of each would run. Both print the first token's text at once and then stop.
START_OURS = """
import sys
from tinydecode.cli import main
sys.exit(main([{model!r}, "-p", {prompt!r}, "-n", "1", "--dtype", "float32", "--device", "cpu"]))
"""
START_THEIRS = """
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained({model!r}, dtype=torch.float32)
tokenizer = AutoTokenizer.from_pretrained({model!r})
inputs = tokenizer({prompt!r}, return_tensors="pt")
out = model.generate(**inputs, max_new_tokens=1, do_sample=False, pad_token_id=0)
print(tokenizer.decode(out[0, inputs.input_ids.shape[1]:]), flush=True)
"""


def demo_directory(target: Path) -> Path:
    """The demo model as a Hugging Face directory in fp32, converted by transformers itself."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tinydecode.demo import demo_model

    gguf = demo_model()
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    # Saved piece by piece: transformers refuses to save a model that it read from a GGUF file.
    tensors = {name: x.contiguous() for name, x in model.state_dict().items()}
    tensors.pop("lm_head.weight")  # tied
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    del model.config.quantization_config
    model.config.dtype = torch.float32
    model.config.save_pretrained(target)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(target)
    return target


def decode_rates(directory: Path, threads: int, new_tokens: int, runs: int) -> dict[str, float]:
    """Median decode tok/s of both, alternating, first token excluded."""
    import torch
    from transformers import AutoModelForCausalLM

    from tinydecode import Engine, Tokenizer, load_hf

    torch.set_num_threads(threads)
    ids = Tokenizer(directory).encode(PROMPT)
    engine = Engine(load_hf(directory, device="cpu", dtype="float32"), max_seq_len=1024)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)

    class Clock:
        """A streamer that only notes when tokens arrive; the first call is the prompt."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def put(self, _: object) -> None:
            self.times.append(time.perf_counter())

        def end(self) -> None:
            pass

    def ours() -> float:
        _, stats = engine.generate(ids, new_tokens, ignore_eos=True)
        assert stats.tok_s is not None and stats.new_tokens == new_tokens
        return stats.tok_s

    def theirs() -> float:
        clock = Clock()
        model.generate(
            torch.tensor([ids]),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
            streamer=clock,
        )
        times = clock.times[1:]
        assert len(times) == new_tokens
        return (new_tokens - 1) / (times[-1] - times[0])

    return alternate({"tinydecode": ours, "transformers": theirs}, runs)


def start_times(directory: Path, threads: int, runs: int) -> dict[str, float]:
    """Median seconds from process start to the first byte on stdout."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}

    def start(script: str) -> Callable[[], float]:
        code = script.format(model=str(directory), prompt=PROMPT)

        def run() -> float:
            begun = time.perf_counter()
            with subprocess.Popen(
                [sys.executable, "-c", code],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
            ) as process:
                assert process.stdout is not None
                first = process.stdout.read(1)
                elapsed = time.perf_counter() - begun
                process.stdout.read()
            if process.returncode != 0 or not first:
                raise RuntimeError(f"the program exited with {process.returncode}")
            return elapsed

        return run

    return alternate({"tinydecode": start(START_OURS), "transformers": start(START_THEIRS)}, runs)


def alternate(programs: dict[str, Callable[[], float]], runs: int) -> dict[str, float]:
    """One warm-up each, then `runs` in turn; the medians."""
    figures: dict[str, list[float]] = {name: [] for name in programs}
    for turn in range(runs + 1):
        for name, program in programs.items():
            figure = program()
            if turn:
                figures[name].append(figure)
    return {name: statistics.median(values) for name, values in figures.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--model", type=Path, help="a Hugging Face directory; default: the demo")
    parser.add_argument("--new", type=int, default=128, help="new tokens (default 128)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as scratch:
        directory = options.model or demo_directory(Path(scratch))
        starts = start_times(directory, options.threads, options.runs)
        rates = decode_rates(directory, options.threads, options.new, options.runs)
    rate_ratio = rates["tinydecode"] / rates["transformers"]
    start_ratio = starts["tinydecode"] / starts["transformers"]
    print("| | tinydecode | transformers | ratio |")
    print("|---|---|---|---|")
    print(
        f"| decode tok/s | {rates['tinydecode']:.1f} | {rates['transformers']:.1f} "
        f"| {rate_ratio:.2f} |"
    )
    print(
        f"| process start to first token, s | {starts['tinydecode']:.2f} "
        f"| {starts['transformers']:.2f} | {start_ratio:.2f} |"
    )
    if options.json:
        import torch
        import transformers

        record = {
            "bench": "cpu",
            "model": str(options.model.name if options.model else "SmolLM2-135M-Instruct (demo)"),
            "dtype": "float32",
            "threads": options.threads,
            "new_tokens": options.new,
            "decode_tok_s": rates,
            "start_to_first_token_s": starts,
            "machine": platform.machine(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "when": time.strftime("%Y-%m-%d"),
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
