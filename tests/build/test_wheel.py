"""The compiled wheels themselves: tag, ABI, symbols, libraries, GPU targets, size, import.

The wheels are named by TD_WHEELS, separated by colons; `ci/build_wheels.sh` makes them.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from typing import Any

import kernel_resources
import pytest
import td_build

from tinydecode import _ext

pytestmark = pytest.mark.build

ROOT = Path(__file__).parents[2]
WHEELS = [Path(p).resolve() for p in os.environ.get("TD_WHEELS", "").split(os.pathsep) if p]
# The C library and its loader; the static CUDA runtime needs nothing else.
ALLOWED_LIBRARIES = {"libc.so.6", "libm.so.6", "libdl.so.2", "librt.so.1", "libpthread.so.0"}
ALLOWED_LIBRARIES |= {"ld-linux-x86-64.so.2", "libgcc_s.so.1", "libstdc++.so.6"}
FACTS = """
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("tinydecode._C", sys.argv[1])
C = importlib.util.module_from_spec(spec)
spec.loader.exec_module(C)
names = [name for name in vars(C) if not name.startswith("__")]
facts = {"abi": C.abi_version(), "cuda": C.cuda_version(), "driver": C.driver_version()}
print(json.dumps({**facts, "archs": C.archs(), "names": names, "torch": "torch" in sys.modules}))
"""


@pytest.fixture(params=WHEELS or [None], ids=lambda w: w.name.split("-")[0] if w else "none")
def wheel(request: pytest.FixtureRequest) -> Path:
    if request.param is None:
        pytest.skip("TD_WHEELS names no wheel; ci/build_wheels.sh makes one")
    path: Path = request.param
    return path


@pytest.fixture
def module(wheel: Path, tmp_path: Path) -> Path:
    return kernel_resources.extract_module(wheel, tmp_path)


def test_tag_and_size(wheel: Path) -> None:
    """cp310-abi3, a manylinux tag as PyPI asks for, below 20 MB."""
    assert re.fullmatch(
        r"tinydecode_cu1\d\d-[\d.]+-cp310-abi3-manylinux_2_\d+_x86_64(\.manylinux\w+)*\.whl",
        wheel.name,
    )
    assert wheel.stat().st_size < 20e6


def test_contents(wheel: Path) -> None:
    """One module, the whole package, no sources of it, and no library grafted in."""
    with zipfile.ZipFile(wheel) as z:
        names = z.namelist()
        metadata = z.read(next(n for n in names if n.endswith("METADATA"))).decode()
    assert [n for n in names if ".so" in n] == ["tinydecode/_C.abi3.so"]
    assert {"tinydecode/__init__.py", "tinydecode/ops/cuda.py", "tinydecode/_C.pyi"} <= set(names)
    assert not [n for n in names if n.endswith((".cu", ".cuh", ".cpp", ".h"))]
    assert f"Name: tinydecode-{kernel_resources.variant_of(wheel)}\n" in metadata
    assert "Requires-Dist: torch>=2.4\n" in metadata


def test_abi3(wheel: Path) -> None:
    """Only the limited API of CPython 3.10 is used."""
    command = [sys.executable, "-m", "abi3audit", "--strict", "--report", str(wheel)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_symbols_and_libraries(module: Path) -> None:
    """A38: nothing of torch, libcuda or libcudart is needed to load; only PyInit__C is exported."""
    assert td_build.bad_symbols(module) == []
    header = subprocess.check_output(["objdump", "-p", str(module)], text=True)
    assert set(re.findall(r"NEEDED\s+(\S+)", header)) <= ALLOWED_LIBRARIES
    assert not re.search(r"RPATH|RUNPATH", header)
    exported = subprocess.check_output(["nm", "-D", "--defined-only", str(module)], text=True)
    assert [line.split()[-1] for line in exported.splitlines()] == ["PyInit__C"]


def test_gpu_targets_are_the_table(wheel: Path, module: Path) -> None:
    """The machine code inside, and the list stamped into the module, equal ci/td_build.py's."""
    variant = td_build.VARIANTS[kernel_resources.variant_of(wheel)]
    tool = kernel_resources.find_cuobjdump()
    if tool is None:
        pytest.skip("no cuobjdump; pip install nvidia-cuda-cuobjdump")
    listing = subprocess.check_output([tool, "-lelf", "-lptx", str(module)], text=True)
    files = {(kind, t) for t, kind in re.findall(r"\.(sm_\w+)\.(cubin|ptx)", listing)}
    expected = {("cubin", f"sm_{a}") for a in variant.sass} | {
        ("ptx", f"sm_{a}") for a in variant.ptx
    }
    assert files == expected
    stamped = [f"sm_{a}" for a in variant.sass] + [f"compute_{a}" for a in variant.ptx]
    assert facts_of(module, sys.executable)["archs"].split() == stamped


def test_stub_names_what_the_module_has(module: Path) -> None:
    stub = ast.parse((ROOT / "src" / "tinydecode" / "_C.pyi").read_text())
    named = {n.name for n in stub.body if isinstance(n, ast.FunctionDef)}
    named |= {n.target.id for n in stub.body if isinstance(n, ast.AnnAssign)}
    assert named == set(facts_of(module, sys.executable)["names"])


def facts_of(module: Path, python: str) -> dict[str, Any]:
    """Loads the module alone, in isolated mode and so without torch, and asks it for its facts."""
    command = [python, "-I", "-c", FACTS, str(module)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    facts: dict[str, Any] = json.loads(result.stdout)
    return facts


def find_python(name: str) -> str | None:
    """A working interpreter called `name`, from PATH or among pyenv's versions."""
    pyenv = sorted(Path.home().glob(f".pyenv/versions/*/bin/{name}"))
    for path in [shutil.which(name), *map(str, pyenv)]:
        if path and subprocess.run([path, "-c", ""], capture_output=True).returncode == 0:
            return path
    return None


@pytest.mark.parametrize("name", ["python3.10", "python3.11", "python3.12", "python3.13"])
def test_imports_without_torch(wheel: Path, module: Path, name: str) -> None:
    """A38: the binary loads on each CPython at hand, with no torch, driver or compiler."""
    python = find_python(name)
    if python is None:
        pytest.skip(f"no {name} on this machine")
    facts = facts_of(module, python)
    assert facts["abi"] == _ext.ABI_VERSION
    assert facts["torch"] is False
    major = td_build.VARIANTS[kernel_resources.variant_of(wheel)].cuda_major
    assert facts["cuda"] // 1000 == major


@pytest.fixture
def installed_copy(wheel: Path, tmp_path: Path) -> dict[str, str]:
    """An environment with the wheel and everything this one has, except its own tinydecode."""
    site, others = tmp_path / "site", tmp_path / "others"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps"]
    subprocess.check_call([*pip, "--target", str(site), str(wheel)])
    others.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith(("tinydecode", "__editable__")):
            (others / entry.name).symlink_to(entry)
    env = {k: v for k, v in os.environ.items() if k not in ("TD_NO_EXT", "TINYDECODE_NO_EXT")}
    return env | {"PYTHONPATH": f"{site}:{others}", "CUDA_VISIBLE_DEVICES": ""}


GENERATE = """
import sys, warnings, tinydecode
from tinydecode import Engine, _ext, load_hf
warnings.simplefilter("error")
print(tinydecode.__file__, _ext.require().archs())
model = load_hf(sys.argv[1], device="cpu")
print(Engine(model, max_seq_len=32).generate([1, 2, 3], max_new_tokens=4, ignore_eos=True)[0])
"""


def test_installed_beside_this_torch(
    installed_copy: dict[str, str], wheel: Path, tmp_path: Path
) -> None:
    """A38, A44: the installed wheel loads its binary and generates on the CPU without a warning.

    -S keeps the environment's own tinydecode out of sight. Whatever torch is there stays: a dry
    run of the installation plans no other one.
    """
    from fixtures import write_tiny

    model = write_tiny(tmp_path / "model")
    command = [sys.executable, "-S", "-c", GENERATE, str(model)]
    result = subprocess.run(
        command, env=installed_copy, cwd=tmp_path, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    where, tokens = result.stdout.splitlines()
    assert where.startswith(str(tmp_path / "site")) and "sm_90" in where
    assert len(json.loads(tokens)) == 4
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--dry-run"]
    plan = subprocess.run([*pip, "--report", "-", str(wheel)], capture_output=True, text=True)
    assert plan.returncode == 0, plan.stderr
    assert "torch" not in [i["metadata"]["name"] for i in json.loads(plan.stdout)["install"]]
