"""Memory and file handles of loading, measured in a process of its own (A42)."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from fixtures import (
    cycle_table,
    tiny_config,
    tiny_tensors,
    write_checkpoint,
    write_markov,
    write_tiny,
)

_MEASURE = """
    import os, pathlib, shutil, sys, threading, time
    import torch
    from tinydecode.config import ModelConfig
    from tinydecode.weights import load_weights

    def anonymous_bytes():
        status = pathlib.Path("/proc/self/status").read_text()
        return 1024 * int(status.split("RssAnon:")[1].split()[0])

    directory = pathlib.Path(sys.argv[1])
    config = ModelConfig.from_dir(directory)
    small = ModelConfig.from_dir(sys.argv[2])
    options = {"device": "cpu", "dtype": getattr(torch, sys.argv[3])}
    load_weights(sys.argv[2], small, **options)  # torch's own first-use allocations

    before = anonymous_bytes()
    peak, loading = before, True

    def watch():
        global peak
        while loading:
            peak = max(peak, anonymous_bytes())
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    weights = load_weights(directory, config, **options)
    loading = False
    watcher.join()
    shutil.rmtree(directory)
    total = sum(float(tensor.double().sum()) for tensor in weights.tensors())
    maps = pathlib.Path("/proc/self/maps").read_text()
    links = [os.readlink(entry) for entry in pathlib.Path("/proc/self/fd").iterdir()
             if entry.is_symlink()]
    held = sum("model-000" in text for text in [maps, *links])
    print(peak - before, weights.nbytes, total, held)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_loading_holds_no_second_copy(tmp_path: Path, dtype: str) -> None:
    """Anonymous memory stays at one copy; files deleted after loading are not missed or held."""
    config = tiny_config(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=6, torch_dtype="bfloat16"
    )
    config["num_attention_heads"] = 16
    tensors = {
        name: torch.full_like(tensor, 0.5, dtype=torch.bfloat16)
        for name, tensor in tiny_tensors(config).items()
    }
    stored_bytes = sum(tensor.nbytes for tensor in tensors.values())
    assert stored_bytes > 150 << 20
    write_checkpoint(tmp_path / "model", config, tensors, shards=4)
    write_tiny(tmp_path / "small")
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_MEASURE)]
        + [str(tmp_path / "model"), str(tmp_path / "small"), dtype],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        check=True,
    )
    growth, nbytes, total, held = (float(word) for word in result.stdout.split())
    assert nbytes == stored_bytes * (2 if dtype == "float32" else 1)
    # The largest tensor is 8 MiB; a second copy of one shard would be 40 MiB.
    assert nbytes * 0.9 < growth < nbytes + (24 << 20)
    assert total == stored_bytes // 2 * 0.5
    assert held == 0


_MEASURE_CUDA = """
    import os, pathlib, shutil, sys, threading, time
    import torch
    from tinydecode import Engine, load_hf

    def anonymous_bytes():
        status = pathlib.Path("/proc/self/status").read_text()
        return 1024 * int(status.split("RssAnon:")[1].split()[0])

    directory = pathlib.Path(sys.argv[1])
    Engine(load_hf(sys.argv[2], device="cuda"), max_seq_len=64).generate([1], 2)  # first use
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    gpu_before, before = torch.cuda.memory_allocated(), anonymous_bytes()
    peak, loading = before, True

    def watch():
        global peak
        while loading:
            peak = max(peak, anonymous_bytes())
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    started = time.perf_counter()
    model = load_hf(directory, device="cuda")
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    loading = False
    watcher.join()
    gpu_peak = torch.cuda.max_memory_allocated() - gpu_before
    shutil.rmtree(directory)
    links = [os.readlink(entry) for entry in pathlib.Path("/proc/self/fd").iterdir()
             if entry.is_symlink()]
    held = sum("model-000" in text for text in links)
    ids, _ = Engine(model, max_seq_len=64).generate([1], 4)
    largest = max(tensor.nbytes for tensor in model.weights.tensors())
    print(gpu_peak, model.weights.nbytes, largest, peak - before, held, seconds, *ids)
"""


@pytest.mark.cuda
def test_a42_loading_two_gibibytes_onto_a_gpu(tmp_path: Path) -> None:
    table = cycle_table([1, 2, 3, 4, 5], 256)
    layers = 18
    options = {"hidden": 4096, "intermediate_size": 1024, "dtype": torch.bfloat16, "shards": 4}
    write_markov(tmp_path / "model", table, layers=layers, **options)  # type: ignore[arg-type]
    write_tiny(tmp_path / "small")
    shard = max(path.stat().st_size for path in (tmp_path / "model").glob("*.safetensors"))
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_MEASURE_CUDA)]
        + [str(tmp_path / "model"), str(tmp_path / "small")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    *figures, a, b, c, d = result.stdout.split()
    gpu_peak, nbytes, largest, growth, held, seconds = (float(figure) for figure in figures)
    print(f"loaded {nbytes / 2**30:.2f} GiB in {seconds:.2f} s")
    assert nbytes > 2 * 2**30
    assert gpu_peak <= nbytes + largest + 64 * 2**20
    assert growth <= shard + 256 * 2**20
    assert held == 0
    assert [a, b, c, d] == ["2", "3", "4", "5"]  # the mapping is gone, the model is not
