"""Each kernel alone: microseconds, GB/s, share of the read limit, torch beside it.

    python bench/ops.py                       # the shapes of a 1B and an 8B decode step
    python bench/ops.py --dtype float16

Calls are captured in a graph, several over rotating buffers so that nothing stays in L2, and timed
by events; the time is that of one call inside the graph. Records go to results/<card>.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import torch
import torch.nn.functional as F
from torch import Tensor

from tinydecode import ops
from tinydecode.device_sampler import DeviceSampler, Stages
from tinydecode.ops import cuda, ref
from tinydecode.sampling import SamplingParams

L2_BYTES = 3 * 60 * 2**20  # rotate over three times an H200's L2


def time_calls(calls: list[Callable[[], object]]) -> float:
    """Seconds of one call, the calls captured one after the other."""

    def run() -> None:
        for call in calls:
            call()

    return common.median_gpu_seconds(common.graphed(run), repeats=30) / len(calls)


def rotate(nbytes: int) -> int:
    """How many buffer sets of this size to go round: past L2, within reason."""
    return max(4, min(64, L2_BYTES // max(nbytes, 1) + 1))


def norm_case(hidden: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """add_rms_norm of one row."""
    copies = 32
    x = torch.randn(copies, 1, hidden, device=device).to(dtype)
    residual, out = torch.zeros_like(x), torch.empty_like(x)
    weight = torch.ones(hidden, device=device, dtype=dtype)

    def torch_way(i: int) -> Tensor:
        residual[i].add_(x[i])
        return F.rms_norm(residual[i], (hidden,), weight, 1e-5)

    return {
        "op": "add_rms_norm",
        "shape": f"E={hidden}",
        "bytes": 5 * hidden * x.element_size(),
        "kernel": [lambda i=i: cuda.add_rms_norm(x[i], residual[i], weight, 1e-5, out[i])
                   for i in range(copies)],
        "torch": [lambda i=i: torch_way(i) for i in range(copies)],
    }  # fmt: skip


def silu_case(ffn: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """silu_mul of one row."""
    copies = 32
    x = torch.randn(copies, 1, 2 * ffn, device=device).to(dtype)
    out = torch.empty(copies, 1, ffn, device=device, dtype=dtype)
    return {
        "op": "silu_mul",
        "shape": f"F={ffn}",
        "bytes": 3 * ffn * x.element_size(),
        "kernel": [lambda i=i: cuda.silu_mul(x[i], out[i]) for i in range(copies)],
        "torch": [lambda i=i: F.silu(x[i, :, :ffn]).mul_(x[i, :, ffn:]) for i in range(copies)],
    }


def rope_case(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """rope_kv_append of one token; the twin stands for torch."""
    copies, slots = 32, 512
    qkv = torch.randn(copies, 1, 1, heads + 2 * kv_heads, dim, device=device).to(dtype)
    k_cache = torch.zeros(1, kv_heads, slots, dim, device=device, dtype=dtype)
    v_cache = torch.zeros_like(k_cache)
    angle = torch.rand(slots, dim // 2, device=device)
    cos, sin = angle.cos(), angle.sin()
    seq_lens = torch.tensor([200], device=device, dtype=torch.int32)

    def call(module: Any, i: int) -> None:
        q, k, v = qkv[i].split((heads, kv_heads, kv_heads), dim=2)
        module.rope_kv_append(q, k, v, cos, sin, k_cache, v_cache, seq_lens)

    return {
        "op": "rope_kv_append",
        "shape": f"H={heads} K={kv_heads} D={dim}",
        "bytes": (2 * heads + 5 * kv_heads) * dim * qkv.element_size() + 4 * dim,
        "kernel": [lambda i=i: call(cuda, i) for i in range(copies)],
        "torch": [lambda i=i: call(ref, i) for i in range(copies)],
    }


def attention_case(
    keys: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """One token against `keys` cached keys; torch's scaled_dot_product_attention beside it."""
    nbytes = 2 * kv_heads * keys * dim * torch.finfo(dtype).bits // 8
    copies = rotate(nbytes)
    q = torch.randn(1, 1, heads, dim, device=device).to(dtype)
    caches = [
        torch.randn(2, 1, kv_heads, keys, dim, device=device).to(dtype) for _ in range(copies)
    ]
    seq_lens = torch.tensor([keys - 1], device=device, dtype=torch.int32)
    out = torch.empty(1, 1, heads * dim, device=device, dtype=dtype)
    by_head = q.transpose(1, 2)

    def sdpa(cache: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(by_head, cache[0], cache[1], enable_gqa=True)

    return {
        "op": "attention",
        "shape": f"S={keys} H={heads} K={kv_heads} D={dim}",
        "bytes": nbytes,
        "kernel": [lambda c=c: cuda.attention(q, c[0], c[1], seq_lens, None, out) for c in caches],
        "torch": [lambda c=c: sdpa(c) for c in caches],
    }


def argmax_case(vocab: int, device: torch.device) -> dict[str, Any]:
    """Greedy choice from float32 logits."""
    copies = 64
    logits = torch.randn(copies, 1, vocab, device=device)
    token = torch.empty(1, device=device, dtype=torch.int64)
    flag = torch.zeros(1, device=device, dtype=torch.int32)
    return {
        "op": "argmax",
        "shape": f"V={vocab}",
        "bytes": 4 * vocab,
        "kernel": [lambda i=i: cuda.argmax(logits[i], token, flag) for i in range(copies)],
        "torch": [lambda i=i: torch.argmax(logits[i], dim=-1) for i in range(copies)],
    }


def sample_case(name: str, vocab: int, device: torch.device) -> dict[str, Any]:
    """The whole sampler of a step, its twin beside it."""
    copies = 64
    params = SAMPLINGS[name]
    stages = Stages.of(params)
    sampler = DeviceSampler(1, vocab, device)
    sampler.begin(params, 1, [range(100)])
    logits = 3 * torch.randn(copies, 1, vocab, device=device)
    seq_lens = torch.zeros(1, device=device, dtype=torch.int32)

    def torch_way(i: int) -> None:
        with ops.forced(ref):
            twin.enqueue(logits[i], seq_lens, stages)

    with ops.forced(ref):
        twin = DeviceSampler(1, vocab, device)
    twin.begin(params, 1, [range(100)])
    return {
        "op": "sample",
        "shape": f"V={vocab} {name}",
        "bytes": 4 * vocab,
        "kernel": [lambda i=i: sampler.enqueue(logits[i], seq_lens, stages) for i in range(copies)],
        "torch": [lambda i=i: torch_way(i) for i in range(4)],
    }


SAMPLINGS = {
    "greedy": SamplingParams(),
    "temperature": SamplingParams(0.8),
    "top-k, top-p, min-p": SamplingParams(0.8, 50, 0.95, 0.05),
    "every stage": SamplingParams(
        *(0.8, 50, 0.95, 0.05, 1.1),
        presence_penalty=0.1,
        frequency_penalty=0.1,
        logit_bias={5: 1.0},
        banned_token_ids=[7],
    ),
}


def main() -> None:
    """Measure every case, print the table, append the records."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--results", type=Path, default=common.RESULTS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA device")
    device, dtype = torch.device("cuda", 0), getattr(torch, options.dtype)
    facts, limit = common.machine_facts(device), common.read_limit(device)

    cases = [norm_case(hidden, dtype, device) for hidden in (2048, 4096)]
    cases += [silu_case(ffn, dtype, device) for ffn in (8192, 14336)]
    cases += [rope_case(32, 8, dim, dtype, device) for dim in (64, 128)]
    cases += [attention_case(keys, 32, 8, 64, dtype, device) for keys in (512, 4096)]
    cases += [attention_case(keys, 32, 8, 128, dtype, device) for keys in (512, 4096, 32768)]
    cases += [argmax_case(128256, device)]
    cases += [sample_case(name, 128256, device) for name in SAMPLINGS]

    records, rows = [], []
    for case in cases:
        kernel, beside = time_calls(case["kernel"]), time_calls(case["torch"])
        rate = case["bytes"] / kernel
        records.append(
            {
                "bench": "ops",
                "op": case["op"],
                "shape": case["shape"],
                "dtype": options.dtype,
                "us": round(1e6 * kernel, 2),
                "torch_us": round(1e6 * beside, 2),
                "gb_s": round(rate / 1e9, 1),
                "pct_read_limit": round(100 * rate / limit, 1),
                "read_limit_gb_s": round(limit / 1e9, 1),
            }
        )
        rows.append(
            [case["op"], case["shape"], f"{1e6 * kernel:.2f}", f"{1e6 * beside:.2f}"]
            + [f"{rate / 1e9:.0f}", f"{100 * rate / limit:.1f}"]
        )
    print(f"\n{facts['card']}, {options.dtype}, read limit {limit / 1e9:.0f} GB/s, {facts['when']}")
    print(common.markdown_table(["op", "shape", "us", "torch us", "GB/s", "% of limit"], rows))
    print(f"records in {common.append_records(records, facts, options.results)}")


if __name__ == "__main__":
    main()
