"""Where the time of the decode step goes: the read limit, the graphed step, its parts, prefill.

    python bench/step.py                                  # both llama shapes, all of it
    python bench/step.py --shape llama-3.2-1b --rows 1 --measure step parts
    python bench/step.py --tiny                           # any CUDA device

Random weights of the named shapes, batch 1. Four measurements:

step     GPU time of one replay of the captured pass of R tokens on top of a context, up to its
         logits, as a share of the limit: every weight and the keys and values of the context, over
         the read bandwidth measured in this run. Beside it the same pass through cuBLAS and SDPA,
         captured as well (torch_model.py).
parts    every call that the step makes, noted while it runs and grouped by the matrix it reads:
         a chain of one group's calls alone, and the chain of all calls with that group left out.
         What leaving it out saves is what it costs in the step. At short contexts the keys of
         attention alone stay in L2; they do not in the step.
prefill  a prompt through `LlamaModel.prefill` and through cuBLAS and SDPA alone, launched eagerly.

Records go to results/<card>.json.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import common
import torch
from torch import Tensor
from torch_model import TorchModel

from tinydecode import Engine, LlamaModel, graphs, ops
from tinydecode.weights import random_weights

MEASUREMENTS = ("step", "parts", "prefill")
CONTEXTS = {"llama-3.2-1b": (256, 4096), "llama-3.1-8b": (256, 4096, 32768), "tiny": (256, 1024)}
Record = dict[str, Any]


def median_ms(run: Callable[[], object], before: Callable[[], object], repeats: int) -> float:
    """Median GPU time of one call; what `before` launches ahead of each is not part of it."""
    times = []
    for _ in range(repeats + 3):
        before()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        times.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in times[3:])


def random_tokens(config: Any, count: int, device: torch.device) -> Tensor:
    """[1, count], the same ones each time."""
    generator = torch.Generator().manual_seed(count)
    return torch.randint(0, config.vocab_size, (1, count), generator=generator).to(device)


# ---- the parts of a step -----------------------------------------------------------------------


@dataclass
class Call:
    """One call that the model makes in a step."""

    part: str  # function, and the parameter it reads
    run: Callable[[], object]
    nbytes: int  # of parameters, or of keys and values


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Every tensor in an argument, a container or an object with fields."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item)
    elif hasattr(value, "__dict__") and not callable(value):
        yield from tensors_of(list(vars(value).values()))


def record_calls(engine: Engine, token_ids: Tensor, context: int) -> list[Call]:
    """Run a step and note its calls, to be repeated one by one on the same tensors."""
    model, config = engine.model, engine.model.config
    step = ops.fused_step(config, model.dtype, model.device)
    assert step is not None
    names = {tensor.data_ptr(): "lm_head" for tensor in tensors_of(model.weights.lm_head)}
    for layer in model.weights.layers:
        for field, value in vars(layer).items():
            names |= {tensor.data_ptr(): field for tensor in tensors_of(value)}
    kv_bytes = 2 * context * config.num_key_value_heads * config.head_dim * model.dtype.itemsize
    calls: list[Call] = []

    def noting(name: str, function: Callable[..., object]) -> Callable[..., object]:
        def noted(*args: Any, **kwargs: Any) -> object:
            given = tensors_of([*args, *kwargs.values()])
            read = {names[t.data_ptr()]: t.nbytes for t in given if t.data_ptr() in names}
            matrices = [field for field in read if not field.endswith("norm")]
            nbytes = sum(read.values()) + (kv_bytes if "attention" in name else 0)
            label = " ".join([name, *matrices])
            calls.append(Call(label, lambda: function(*args, **kwargs), nbytes))
            return function(*args, **kwargs)

        return noted

    class Noting:
        """`ops.step`, every function of it noted."""

        def __getattr__(self, name: str) -> Any:
            found = getattr(step, name)
            return noting(name, found) if callable(found) else found

    with (
        mock.patch.object(ops, "fused_step", lambda *_: Noting()),
        mock.patch.object(ops, "attention", noting("attention", ops.attention)),
    ):
        engine.cache.seq_lens.fill_(context)
        model.chunk(token_ids, engine.cache)
    engine.cache.seq_lens.fill_(context)
    return calls


@dataclass
class Part:
    """The calls of a step that share a name."""

    calls: int
    nbytes: int  # that they must read
    alone: float  # ms of a chain of them
    saved: float  # ms that leaving them out of the chain of all calls saves


def measure_parts(
    engine: Engine, rows: int, context: int, repeats: int
) -> tuple[float, dict[str, Part]]:
    """Milliseconds of the chain of all calls of a step, and its parts by name."""
    calls = record_calls(
        engine, random_tokens(engine.model.config, rows, engine.model.device), context
    )

    def time_chain(chosen: list[Call]) -> float:
        def chain() -> None:
            for call in chosen:
                call.run()

        return median_ms(common.graphed(chain), lambda: None, repeats)

    whole = time_chain(calls)
    parts = {}
    for part in dict.fromkeys(call.part for call in calls):
        group = [call for call in calls if call.part == part]
        rest = [call for call in calls if call.part != part]
        saved = whole - time_chain(rest)
        parts[part] = Part(len(group), sum(c.nbytes for c in group), time_chain(group), saved)
    return whole, parts


# ---- the whole step and prefill ----------------------------------------------------------------


def measure_step(engine: Engine, rows: int, context: int, repeats: int) -> float:
    """Milliseconds of one replay of the pass of `rows` tokens."""
    assert engine.graphs is not None
    graphed = engine.graphs.chunk(rows)
    graphed.token_ids.copy_(random_tokens(engine.model.config, rows, engine.model.device))
    return median_ms(graphed.replay, lambda: engine.cache.seq_lens.fill_(context), repeats)


def measure_torch_step(beside: TorchModel, rows: int, context: int, repeats: int) -> float:
    """The same through cuBLAS and SDPA."""
    tokens = random_tokens(beside.config, rows, beside.cache.device)
    tables = beside.tables(context, rows)
    replay = common.graphed(lambda: beside.step(tokens, context, tables))
    return median_ms(replay, lambda: None, repeats)


def measure_prefill(
    engine: Engine, beside: TorchModel, tokens: int, repeats: int
) -> tuple[float, float]:
    """Milliseconds of a prompt, ours and torch's."""
    prompt = random_tokens(engine.model.config, tokens, engine.model.device)
    lengths = torch.full((1,), tokens, device=prompt.device, dtype=torch.int32)
    ours = lambda: engine.model.prefill(prompt, lengths, engine.cache)  # noqa: E731
    theirs = lambda: beside.prefill(prompt)  # noqa: E731
    pairs = [
        (median_ms(ours, lambda: None, repeats), median_ms(theirs, lambda: None, repeats))
        for _ in range(3)  # in turn: clocks drift under load
    ]
    return tuple(statistics.median(side) for side in zip(*pairs, strict=True))  # type: ignore


def check_same_model(engine: Engine, beside: TorchModel, tokens: int) -> None:
    """Both sides must give the same logits, or the comparison is none."""
    prompt = random_tokens(engine.model.config, tokens, engine.model.device)
    more = random_tokens(engine.model.config, 4, engine.model.device)
    lengths = torch.full((1,), tokens, device=prompt.device, dtype=torch.int32)
    pairs = [(engine.model.prefill(prompt, lengths, engine.cache), beside.prefill(prompt))]
    tables = beside.tables(tokens, 4)
    pairs.append((engine.model.chunk(more, engine.cache)[0], beside.step(more, tokens, tables)))
    for what, (ours, theirs) in zip(("prefill", "step"), pairs, strict=True):
        difference = float((ours - theirs.float()).norm() / ours.norm())
        if not difference < 0.2:  # 16 bits and many layers; another model's are 1.4 apart
            raise RuntimeError(f"{what}: torch's logits are {difference:.1%} apart from ours")


# ---- a shape -----------------------------------------------------------------------------------


class Shape:
    """A shape on the device, ours and torch's; each method makes records and prints a table."""

    def __init__(self, name: str, options: argparse.Namespace, limit: float) -> None:
        device, self.dtype = torch.device("cuda", 0), getattr(torch, options.dtype)
        self.config = common.shape_config(name)
        self.options, self.limit = options, limit
        self.contexts = options.contexts or CONTEXTS[name]
        self.prompt = options.prompt or (256 if name == "tiny" else 2048)
        slots = max(*self.contexts, self.prompt) + max(options.rows)
        slots = min(-(-slots // 64) * 64, self.config.max_position_embeddings)
        weights = random_weights(self.config, device=device, dtype=self.dtype)
        self.engine = graphs.enable(Engine(LlamaModel(self.config, weights), max_seq_len=slots))
        self.engine.cache.k.normal_()
        self.engine.cache.v.normal_()
        self.beside = TorchModel(self.config, slots, device, self.dtype)
        check_same_model(self.engine, self.beside, min(self.prompt, 256))
        self.fields = {"model": name, "dtype": options.dtype}
        self.limit_field = {"read_limit_gb_s": round(limit / 1e9, 1)}

    def measure(self) -> list[Record]:
        """Every measurement asked for."""
        print(f"\n## {self.fields['model']}, {self.options.dtype}")
        records = []
        if "step" in self.options.measure:
            records += self.step()
        if "parts" in self.options.measure:
            for context in self.contexts:
                for rows in self.options.rows if self.options.all_parts else self.options.rows[:1]:
                    records += self.parts(context, rows)
        if "prefill" in self.options.measure:
            records += self.prefill()
        return records

    def step(self) -> list[Record]:
        """The pass of every R at every context."""
        repeats, records, lines = self.options.repeats, [], []
        for context in self.contexts:
            nbytes = common.bytes_per_token(self.config, self.dtype.itemsize, context)
            floor = 1e3 * nbytes / self.limit
            one_row = None
            for rows in self.options.rows:
                ours = measure_step(self.engine, rows, context, repeats)
                theirs = measure_torch_step(self.beside, rows, context, repeats)
                one_row = ours if rows == 1 else one_row
                over = round(ours / one_row, 3) if one_row else None
                records.append(
                    {
                        "bench": "step",
                        **self.fields,
                        "context": context,
                        "rows": rows,
                        "ms": round(ours, 4),
                        "torch_ms": round(theirs, 4),
                        "gb": round(nbytes / 1e9, 3),
                        "pct_read_limit": round(100 * floor / ours, 1),
                        "over_one_row": over,
                        **self.limit_field,
                    }
                )
                lines.append(
                    [str(context), str(rows), f"{ours:.4f}", f"{floor:.4f}"]
                    + [f"{100 * floor / ours:.1f}", f"{over:.3f}" if over else ""]
                    + [f"{theirs:.4f}", f"{theirs / ours:.2f}"]
                )
        header = ["context", "R", "ms", "limit ms", "% of limit", "over R = 1", "torch ms"]
        print("\n" + common.markdown_table([*header, "torch / ours"], lines))
        return records

    def parts(self, context: int, rows: int) -> list[Record]:
        """The parts of one pass."""
        records, lines = [], []
        whole, parts = measure_parts(self.engine, rows, context, self.options.repeats)
        for name, part in parts.items():
            floor = 1e6 * part.nbytes / self.limit
            each = [round(us / part.calls, 2) for us in (floor, 1e3 * part.alone, 1e3 * part.saved)]
            records.append(
                {
                    "bench": "step-part",
                    **self.fields,
                    "context": context,
                    "rows": rows,
                    "part": name,
                    "calls": part.calls,
                    "us_floor": each[0],
                    "us_alone": each[1],
                    "us_in_step": each[2],
                    "chain_ms": round(whole, 4),
                    **self.limit_field,
                }
            )
            lines.append([name, str(part.calls), *map(str, each), f"{part.saved:.4f}"])
        header = ["part", "calls", "floor us", "alone us", "in step us", "all in step ms"]
        print(f"\nAll calls at context {context}, R = {rows}: {whole:.4f} ms\n")
        print(common.markdown_table(header, lines))
        return records

    def prefill(self) -> list[Record]:
        """One prompt."""
        repeats = self.options.repeats // 5 + 1
        ours, theirs = measure_prefill(self.engine, self.beside, self.prompt, repeats)
        ratio = ours / theirs
        header = ["prompt tokens", "prefill ms", "cuBLAS and SDPA ms", "ratio"]
        line = [str(self.prompt), f"{ours:.2f}", f"{theirs:.2f}", f"{ratio:.2f}"]
        print("\n" + common.markdown_table(header, [line]))
        record = {"bench": "prefill", **self.fields, "tokens": self.prompt, "ms": round(ours, 3)}
        return [{**record, "torch_ms": round(theirs, 3), "ratio": round(ratio, 3)}]


def parse_arguments() -> argparse.Namespace:
    """The options, checked; a mistake in them ends the process with status 2."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],  # type: ignore[union-attr]
    )
    shapes = [shape for shape in CONTEXTS if shape != "tiny"]
    parser.add_argument("--shape", nargs="+", choices=sorted(common.SHAPES), default=shapes)
    parser.add_argument("--tiny", action="store_true", help="the same as --shape tiny")
    parser.add_argument("--contexts", nargs="+", type=int, help="cached tokens (default: a list)")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 8], help="tokens a pass, R")
    parser.add_argument("--prompt", type=int, help="tokens of prefill (default 2048, tiny 256)")
    parser.add_argument("--measure", nargs="+", choices=MEASUREMENTS, default=MEASUREMENTS)
    parser.add_argument("--all-parts", action="store_true", help="parts of every R, not the first")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    parser.add_argument("--results", type=Path, default=common.RESULTS)
    options = parser.parse_args()
    if options.tiny:
        options.shape = ["tiny"]
    most_rows = 16
    if not all(1 <= rows <= most_rows for rows in options.rows):
        parser.error(f"--rows must lie between 1 and {most_rows}, found {options.rows}")
    for name in ("repeats", "prompt"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1")
    for shape in options.shape:
        room = common.shape_config(shape).max_position_embeddings - max(options.rows)
        for count in (*(options.contexts or ()), options.prompt or 1):
            if not 1 <= count <= room:
                parser.error(f"{shape} has room for 1 to {room} tokens, found {count}")
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA device")
    if ops.backend_name(is_cuda=True) != "fused":
        parser.error("the compiled kernels are not installed; see tinydecode-generate --info")
    return options


@torch.inference_mode()
def main() -> None:
    """Measure, print the tables, append the records."""
    options = parse_arguments()
    device = torch.device("cuda", 0)
    facts, limit = common.machine_facts(device), common.read_limit(device)
    print(f"{facts['card']}, {facts['when']}, read limit {limit / 1e9:.0f} GB/s")
    for shape in dict.fromkeys(options.shape):
        records = Shape(shape, options, limit).measure()
        path = common.append_records(records, facts, options.results)
        gc.collect()
        torch.cuda.empty_cache()
    print(f"\nrecords in {path}")


if __name__ == "__main__":
    main()
