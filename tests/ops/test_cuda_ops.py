"""What only a GPU can show: streams, graphs, device indices. Results are in test_kernel_*.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tinydecode.ops import cuda, ref

pytestmark = pytest.mark.cuda
B, T, H, K, D, S = 2, 3, 8, 2, 64, 200


@dataclass
class Op:
    """One op with inputs to read from, tensors it writes, and its twin.

    Attributes:
        inputs: copied in before a run; the first is what differs between runs.
        call: (module, inputs) -> results. Tensors written in place are results too.
    """

    inputs: list[Tensor]
    call: Callable[[object, list[Tensor]], list[Tensor]]


def make_ops(device: torch.device) -> dict[str, Op]:
    def rand(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    angle = torch.rand(S, D // 2, device=device)
    tables = [angle.cos(), angle.sin()]
    lengths = torch.tensor([70, 5], dtype=torch.int32, device=device)
    q, k, v = rand(B, T, H, D), rand(B, T, K, D), rand(B, T, K, D)
    caches = [rand(B, K, S, D), rand(B, K, S, D)]

    def rope(module, x):
        module.rope(x[0], x[1], x[2], x[3], x[4])
        return x[:2]

    def kv_append(module, x):
        module.kv_append(*x)
        return x[2:4]

    def rope_kv_append(module, x):
        if module is ref:
            ref.rope(x[0], x[1], x[3], x[4], x[7])
            ref.kv_append(x[1], x[2], x[5], x[6], x[7])
        else:
            module.rope_kv_append(*x)
        return [x[0], x[1], x[5], x[6]]

    def add_rms_norm(module, x):
        return [module.add_rms_norm(*x, 1e-5), x[1]]

    def argmax(module, x):
        return [x[0].argmax(-1) if module is ref else module.argmax(x[0])]

    return {
        "rms_norm": Op([rand(B, 256), rand(256)], lambda m, x: [m.rms_norm(*x, 1e-5)]),
        "add_rms_norm": Op([rand(B, 256), rand(B, 256), rand(256)], add_rms_norm),
        "rope": Op([q, k, *tables, lengths], rope),
        "kv_append": Op([k, v, *caches, lengths], kv_append),
        "rope_kv_append": Op([q, k, v, *tables, *caches, lengths], rope_kv_append),
        "silu_mul": Op([rand(B, 512)], lambda m, x: [m.silu_mul(*x)]),
        "attention": Op([q, *caches, lengths], lambda m, x: [m.attention(*x)]),
        "argmax": Op([torch.randn(B, 5000, device=device)], argmax),
    }


NAMES = list(make_ops(torch.device("cpu")))


def expected(op: Op, first: Tensor) -> list[Tensor]:
    inputs = [first.clone(), *(x.clone() for x in op.inputs[1:])]
    return [x.clone() for x in op.call(ref, inputs)]


def assert_same(found: list[Tensor], wanted: list[Tensor]) -> None:
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", NAMES)
def test_work_goes_on_the_current_stream(name: str) -> None:
    """A43: behind a sleep that delays the input, on a side stream."""
    op = make_ops(torch.device("cuda"))[name]
    inputs = [x.clone() for x in op.inputs]
    late = op.inputs[0].flip(0).contiguous()
    wanted = expected(op, late)
    op.call(cuda, [x.clone() for x in op.inputs])  # modules are loaded, memory is cached
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)  # about 50 ms
        inputs[0].copy_(late)
        found = op.call(cuda, inputs)
    assert not side.query(), "the call waited for the GPU"
    side.synchronize()
    assert_same(found, wanted)


@pytest.mark.parametrize("name", NAMES)
def test_captured_calls_follow_their_inputs(name: str) -> None:
    """A43: capture, then replay with other inputs and other lengths."""
    op = make_ops(torch.device("cuda"))[name]
    inputs = [x.clone() for x in op.inputs]
    torch.cuda.synchronize()
    warm_up = torch.cuda.Stream()
    with torch.cuda.stream(warm_up):
        op.call(cuda, [x.clone() for x in op.inputs])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = op.call(cuda, inputs)
    for shift in (0, 1, 40):
        changed = [x.clone() for x in op.inputs]
        changed[0] = op.inputs[0].roll(shift, -1)
        if changed[-1].dtype == torch.int32:
            changed[-1] += shift
        for target, source in zip(inputs, changed, strict=True):
            target.copy_(source)
        graph.replay()
        torch.cuda.synchronize()
        assert_same(found, [x.clone() for x in op.call(ref, changed)])
        # Captured and eager calls give the same bits.
        again = [x.roll(shift, -1) if i == 0 else x.clone() for i, x in enumerate(op.inputs)]
        if again[-1].dtype == torch.int32:
            again[-1] += shift
        for x, y in zip(found, op.call(cuda, again), strict=True):
            assert torch.equal(x, y)


def test_a_chain_of_overlapping_kernels_is_ordered() -> None:
    """Kernels that are launched before their predecessor ends must still wait for it."""
    torch.manual_seed(0)
    ops = make_ops(torch.device("cuda"))
    x, weight = torch.randn(1, 8192, device="cuda"), torch.ones(8192, device="cuda")

    def chain(module) -> Tensor:
        y = x
        for _ in range(50):
            y = module.rms_norm(module.silu_mul(torch.cat((y, y), -1)), weight, 1e-5)
            y = module.rms_norm(y, weight, 1e-5)
        return y

    def decode() -> list[Tensor]:
        op = ops["rope_kv_append"]
        q, k, v, cos, sin, k_cache, v_cache, lengths = (t.clone() for t in op.inputs)
        outs = []
        for _ in range(20):
            cuda.rope_kv_append(q, k, v, cos, sin, k_cache, v_cache, lengths)
            outs.append(cuda.attention(q, k_cache, v_cache, lengths))
        return outs

    torch.testing.assert_close(chain(cuda), chain(ref), rtol=1e-3, atol=1e-3)
    first = decode()
    for _ in range(20):
        for a, b in zip(decode(), first, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("name", NAMES)
def test_every_device_index(name: str) -> None:
    torch.cuda.set_device(0)
    for index in range(torch.cuda.device_count()):
        op = make_ops(torch.device("cuda", index))[name]
        wanted = expected(op, op.inputs[0])
        assert_same(op.call(cuda, [x.clone() for x in op.inputs]), wanted)
        assert torch.cuda.current_device() == 0


def test_long_contexts() -> None:
    """More chunks than blocks, and more than the threads of a merge."""
    slots = 40_000
    q = torch.randn(1, 2, 8, 128, device="cuda", dtype=torch.bfloat16)
    caches = [torch.randn(1, 2, slots, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    for cached in (16_383, 39_990):
        lengths = torch.tensor([cached], dtype=torch.int32, device="cuda")
        found = cuda.attention(q, *caches, lengths)
        torch.testing.assert_close(found, ref.attention(q, *caches, lengths), rtol=2e-2, atol=2e-3)
        alone = cuda.attention(q[:, :1], *caches, lengths)
        assert torch.equal(alone, found[:, :1])


def test_a_wrong_launch_raises_and_the_next_works() -> None:
    x = torch.randn(4, 64, device="cuda")
    entry = cuda.native().rms_norm
    with pytest.raises(RuntimeError, match="td_rms_norm: invalid argument"):
        entry(0, 0, 0, 1, 64, 64, 1e-5, 7, 0, 0)  # no such dtype
    with pytest.raises(TypeError, match="expected 10 arguments, found 1"):
        entry(1)
    torch.testing.assert_close(
        cuda.rms_norm(x, torch.ones(64, device="cuda"), 1e-5),
        ref.rms_norm(x, torch.ones(64, device="cuda"), 1e-5),
    )
