"""Building without torch, without nvcc, with wrong variables; and what the sdist holds (A36).

Each build runs the in-tree backend's own hooks in a copy of the tree, where a planted `torch`
raises as soon as anything imports it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import td_build

ROOT = Path(__file__).parents[2]
SOURCES = ["setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE", "README.md", "CHANGELOG.md"]
SOURCES += ["CONTRIBUTING.md", "src", "kernels", "ci"]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what a build reads, free of earlier builds."""
    tree = tmp_path / "tree"
    tree.mkdir()
    unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.so")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=unwanted)
        else:
            shutil.copy(ROOT / name, tree / name)
    torch = tmp_path / "planted" / "torch"
    torch.mkdir(parents=True)
    (torch / "__init__.py").write_text("raise ImportError('the planted torch was imported')\n")
    return tree


def hook(tree: Path, call: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs `td_backend.<call>` as pip would, with only the given build variables set."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("TD_", "TINYDECODE_", "CUDA_"))}
    env["PYTHONPATH"] = os.pathsep.join([str(tree.parent / "planted"), str(tree / "ci")])
    return subprocess.run(
        [sys.executable, "-c", f"import td_backend; print(td_backend.{call})"],
        cwd=tree,
        env={**env, **variables},
        capture_output=True,
        text=True,
    )


def fake_toolkit(folder: Path, release: str = "13.0") -> str:
    """A CUDA_HOME whose nvcc only tells its release."""
    (folder / "bin").mkdir(parents=True)
    nvcc = folder / "bin" / "nvcc"
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'\n")
    nvcc.chmod(0o755)
    return str(folder)


def assert_refused(result: subprocess.CompletedProcess[str], *words: str) -> None:
    """The build ended in one line of ours with these words, not in a traceback."""
    assert result.returncode != 0
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("tinydecode: "), result.stderr
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in last


@pytest.mark.build
@pytest.mark.parametrize("switch", ["TD_NO_EXT", "TINYDECODE_NO_EXT"])
def test_pure_wheel_needs_no_torch(tree: Path, tmp_path: Path, switch: str) -> None:
    """A36: nothing imports torch, and the wheel is py3-none-any with the whole package."""
    requires = hook(tree, "get_requires_for_build_wheel()", **{switch: "1"})
    assert requires.returncode == 0 and "torch" not in requires.stdout, requires.stderr
    built = hook(tree, f"build_wheel({str(tmp_path)!r})", **{switch: "1"})
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl") and wheel.name.startswith("tinydecode-")
    with zipfile.ZipFile(wheel) as z:
        names = z.namelist()
        metadata = z.read(next(n for n in names if n.endswith("METADATA"))).decode()
        scripts = z.read(next(n for n in names if n.endswith("entry_points.txt"))).decode()
    assert {"tinydecode/__init__.py", "tinydecode/ops/ref.py", "tinydecode/py.typed"} <= set(names)
    assert not [n for n in names if n.endswith((".cu", ".cuh", ".so", ".cpp"))]
    assert "Requires-Dist: torch>=2.4\n" in metadata
    assert "License-Expression: Apache-2.0\n" in metadata
    assert "tinydecode-generate = tinydecode.cli:main" in scripts


@pytest.mark.build
def test_sdist_builds_what_the_tree_builds(tree: Path, tmp_path: Path) -> None:
    """The sdist holds the kernels, their headers and the backend; its wheel equals the tree's."""
    assert hook(tree, f"build_sdist({str(tmp_path)!r})").returncode == 0  # needs no TD_NO_EXT
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as t:
        t.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    for name in ("ci/td_backend.py", "ci/td_build.py", "setup.py", "LICENSE"):
        assert (unpacked / name).is_file(), name
    kernels = {p.name for p in (tree / "kernels").iterdir()}
    assert kernels == {p.name for p in (unpacked / "kernels").iterdir()}
    assert {"td_api.h", "module.cpp", "common.cuh", "rms_norm.cu"} <= kernels

    lists = []
    for source in (tree, unpacked):
        out = tmp_path / f"wheel-{source.name}"
        out.mkdir()
        planted = unpacked.parent / "planted"
        if not planted.exists():
            shutil.copytree(tmp_path / "planted", planted)
        result = hook(source, f"build_wheel({str(out)!r})", TD_NO_EXT="1")
        assert result.returncode == 0, result.stderr
        (wheel,) = out.glob("*.whl")
        with zipfile.ZipFile(wheel) as z:
            lists.append(sorted(z.namelist()))
    assert lists[0] == lists[1]


def test_extension_asks_for_torch_and_ninja(tree: Path, tmp_path: Path) -> None:
    home = fake_toolkit(tmp_path / "cuda")
    result = hook(tree, "get_requires_for_build_wheel()", CUDA_HOME=home)
    assert result.returncode == 0, result.stderr
    assert "torch>=2.4" in result.stdout and "ninja" in result.stdout


def test_wanted_extension_without_torch_is_one_line(tree: Path, tmp_path: Path) -> None:
    home = fake_toolkit(tmp_path / "cuda")
    result = hook(tree, f"build_wheel({str(tmp_path)!r})", CUDA_HOME=home)
    assert_refused(result, "torch", "TD_NO_EXT=1")


def test_wanted_extension_without_nvcc_is_one_line(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong CUDA_HOME, and no toolkit at all: both say what to do before torch is fetched."""
    result = hook(tree, "get_requires_for_build_wheel()", CUDA_HOME=str(tmp_path / "nowhere"))
    assert_refused(result, "CUDA_HOME", "TD_NO_EXT=1")
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(td_build, "DEFAULT_CUDA_HOME", tmp_path / "cuda")
    with pytest.raises(SystemExit, match="nvcc was not found.*TD_NO_EXT=1"):
        td_build.find_cuda_home()


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"TD_NOEXT": "1"}, ["TD_NOEXT", "TD_NO_EXT"]),
        ({"TD_NO_EXT": "maybe"}, ["TD_NO_EXT", "maybe"]),
        ({"TD_NO_EXT": "1", "TD_CUDA_VARIANT": "cu130"}, ["TD_NO_EXT", "TD_CUDA_VARIANT"]),
        ({"TD_CUDA_VARIANT": "cu118"}, ["cu118", "cu121", "cu130"]),
    ],
)
def test_wrong_variables_are_refused(
    tree: Path, variables: dict[str, str], words: list[str]
) -> None:
    assert_refused(hook(tree, "get_requires_for_build_wheel()", **variables), *words)


def test_variant_and_toolkit_must_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    twelve = Path(fake_toolkit(tmp_path / "12", "12.4"))
    monkeypatch.delenv("TD_CUDA_VARIANT", raising=False)
    assert td_build.choose_variant(twelve) is td_build.VARIANTS["cu121"]
    monkeypatch.setenv("TD_CUDA_VARIANT", "cu130")
    with pytest.raises(SystemExit, match="cu130 needs CUDA 13.x; .* is 12.4"):
        td_build.choose_variant(twelve)
    monkeypatch.delenv("TD_CUDA_VARIANT")
    with pytest.raises(SystemExit, match="11.8 .* not supported"):
        td_build.choose_variant(Path(fake_toolkit(tmp_path / "11", "11.8")))


def test_gpu_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables of both wheels, and the ways to write TD_CUDA_ARCHS."""
    monkeypatch.delenv("TD_CUDA_ARCHS", raising=False)
    cu121, cu130 = td_build.VARIANTS["cu121"], td_build.VARIANTS["cu130"]
    assert td_build.gpu_targets(cu121) == (["75", "80", "86", "89", "90"], ["90"])
    assert td_build.gpu_targets(cu130)[0] == ["75", "80", "86", "89", "90", "100", "120"]
    monkeypatch.setenv("TD_CUDA_ARCHS", "8.0; 9.0a 10.0+PTX,120")
    assert td_build.gpu_targets(cu130) == (["80", "90a", "100", "120"], ["100"])
    monkeypatch.setenv("TD_CUDA_ARCHS", "Hopper")
    with pytest.raises(SystemExit, match="Hopper"):
        td_build.gpu_targets(cu130)


def test_cuda_runtime_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TD_CUDART", raising=False)
    (tmp_path / "lib64").mkdir()
    assert td_build.cuda_libraries(tmp_path) == (["cudart"], [str(tmp_path / "lib64")])
    monkeypatch.setenv("TD_CUDART", "static")
    with pytest.raises(SystemExit, match="libcudart_static.a"):
        td_build.cuda_libraries(tmp_path)
    (tmp_path / "lib64" / "libcudart_static.a").touch()
    monkeypatch.delenv("TD_CUDART")
    assert td_build.cuda_libraries(tmp_path)[0][0] == "cudart_static"
