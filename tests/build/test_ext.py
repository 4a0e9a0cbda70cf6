"""The loader of the compiled module: every way in which a binary can be unusable (A37, A38, A44).

The binary is a Python file planted where `tinydecode._C` would be.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import tinydecode
from tinydecode import _ext

GOOD = """
def abi_version(): return {abi}
def cuda_version(): return 13000
def driver_version(): return 13000
def archs(): return "sm_80 sm_90 compute_90"
"""
BROKEN = "raise ImportError('_C.abi3.so: undefined symbol: _ZN3c105ErrorC2E')"
Plant = Callable[..., None]


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("TD_NO_EXT", "TINYDECODE_NO_EXT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tinydecode, "__path__", list(tinydecode.__path__))
    monkeypatch.delitem(sys.modules, "tinydecode._C", raising=False)
    _ext.reset()
    yield
    sys.modules.pop("tinydecode._C", None)
    vars(tinydecode).pop("_C", None)
    _ext.reset()


@pytest.fixture
def plant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plant:
    """Puts a binary in place, and the records of the distributions that brought it."""

    def plant(source: str, dists: tuple[str, ...] = ("tinydecode-cu130",)) -> None:
        package, site = tmp_path / "package", tmp_path / "site"
        package.mkdir()
        (package / "_C.py").write_text(source)
        monkeypatch.setattr(tinydecode, "__path__", [str(package), *tinydecode.__path__])
        for name in dists:
            info = site / f"{name.replace('-', '_')}-0.1.0.dist-info"
            info.mkdir(parents=True)
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
            (info / "RECORD").write_text("")
        # Only the planted records: the environment of the tests has its own tinydecode.
        keep = [p for p in sys.path if not list(Path(p or ".").glob("tinydecode*.dist-info"))]
        monkeypatch.setattr(sys, "path", [str(site), *keep])
        _ext.reset()

    return plant


def test_good_binary_loads(plant: Plant) -> None:
    plant(GOOD.format(abi=_ext.ABI_VERSION))
    module = _ext.load()
    assert module is not None and module is _ext.require()
    assert _ext.reason is None and not _ext.absent
    _ext.check_usable()


def test_no_binary_is_the_torch_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain `tinydecode`: not a fault, but require() says which packages have the kernels."""
    monkeypatch.setattr(tinydecode, "__path__", [])
    assert _ext.load() is None and _ext.absent
    _ext.check_usable()
    with pytest.raises(RuntimeError, match="tinydecode-cu130.*tinydecode-cu121"):
        _ext.require()


@pytest.mark.parametrize("name", ["TD_NO_EXT", "TINYDECODE_NO_EXT"])
def test_switched_off(plant: Plant, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    plant(BROKEN)
    monkeypatch.setenv(name, "0")
    assert _ext.load() is None and not _ext.absent
    _ext.reset()
    monkeypatch.setenv(name, "1")
    assert _ext.load() is None and _ext.absent and "TD_NO_EXT" in str(_ext.reason)
    assert "tinydecode._C" not in sys.modules


def test_broken_binary(plant: Plant) -> None:
    """A37: the message has the torch found, what the binary was built for, and the fix."""
    plant(BROKEN)
    assert _ext.load() is None and not _ext.absent
    for check in (_ext.require, _ext.check_usable):
        with pytest.raises(RuntimeError) as e:
            check()
        text = str(e.value)
        assert "undefined symbol: _ZN3c10" in text
        assert torch.__version__ in text
        assert "tinydecode-cu130" in text and "torch >= 2.4" in text
        assert "pip install --force-reinstall --no-deps tinydecode-cu130" in text


def test_broken_binary_leaves_the_cpu_alone(plant: Plant, tmp_path: Path) -> None:
    """A37: the CPU generates; device="cuda" is refused with the whole story."""
    from fixtures import write_tiny

    path = write_tiny(tmp_path / "model")
    plant(BROKEN)
    model = tinydecode.load_hf(path, device="cpu")
    ids, _ = tinydecode.Engine(model, max_seq_len=32).generate([1, 2, 3], max_new_tokens=4)
    assert len(ids) >= 1
    with pytest.raises(RuntimeError, match="undefined symbol") as e:
        tinydecode.load_hf(path, device="cuda")
    assert torch.__version__ in str(e.value) and "reinstall" in str(e.value)


def test_binary_of_another_version(plant: Plant) -> None:
    plant(GOOD.format(abi=_ext.ABI_VERSION + 1))
    assert _ext.load() is None and not _ext.absent
    assert "rebuild" in str(_ext.reason) and str(_ext.ABI_VERSION + 1) in str(_ext.reason)


def test_two_variants_installed(plant: Plant) -> None:
    plant(GOOD.format(abi=_ext.ABI_VERSION), ("tinydecode-cu121", "tinydecode-cu130"))
    assert _ext.installed() == ["tinydecode-cu121", "tinydecode-cu130"]
    with pytest.raises(RuntimeError, match="pip uninstall -y tinydecode-cu121 tinydecode-cu130"):
        _ext.require()


def test_egg_info_of_a_build_is_not_an_installation(plant: Plant, tmp_path: Path) -> None:
    plant(GOOD.format(abi=_ext.ABI_VERSION))
    info = tmp_path / "site" / "tinydecode.egg-info"
    info.mkdir()
    (info / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: tinydecode\nVersion: 0.1.0\n")
    assert _ext.installed() == ["tinydecode-cu130"]


@pytest.mark.parametrize(
    ("cuda", "driver", "words"),
    [
        (13000, 13000, None),
        (13000, 13010, None),
        (12040, 12000, None),  # minor version compatibility: any R525+
        (12040, 13000, None),
        (13000, 12080, ["R580", "12.8", "tinydecode-cu121"]),
        (12040, 11080, ["R525", "11.8"]),
        (13000, 0, ["R580", "found none"]),
    ],
)
def test_driver_floor(cuda: int, driver: int, words: list[str] | None) -> None:
    fault = _ext.driver_fault(cuda, driver)
    if words is None:
        assert fault is None
    else:
        assert fault is not None
        for word in [*words, "TD_NO_EXT=1"]:
            assert word in fault


@pytest.mark.parametrize(
    ("capability", "archs", "runs"),
    [
        ((8, 0), "sm_80", True),
        ((8, 9), "sm_80", True),  # machine code runs on later minors of its major
        ((8, 0), "sm_86", False),  # but not on earlier ones
        ((9, 0), "sm_80", False),  # nor on another major
        ((9, 0), "sm_80 compute_80", True),  # PTX runs on anything later
        ((7, 5), "compute_80", False),
        ((9, 0), "sm_90a", True),  # architecture-specific: exactly that chip
        ((10, 3), "sm_100a", False),
        ((10, 3), "sm_100", True),
        ((12, 1), "sm_75 sm_120 compute_120", True),
        ((7, 0), "sm_75 sm_80 sm_90 compute_90", False),
    ],
)
def test_gpu_targets(capability: tuple[int, int], archs: str, runs: bool) -> None:
    fault = _ext.arch_fault("Some GPU", capability, archs)
    assert (fault is None) is runs
    if fault:
        assert "Some GPU" in fault and archs in fault
        assert f"TD_CUDA_ARCHS={capability[0]}{capability[1]}" in fault


def test_device_is_checked_before_any_launch(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(GOOD.format(abi=_ext.ABI_VERSION))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 6))
    _ext.check_device(0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    with pytest.raises(RuntimeError, match="GPU 1 .*sm_75"):
        _ext.check_device(1)
    monkeypatch.setattr(_ext.require(), "driver_version", lambda: 12080)
    with pytest.raises(RuntimeError, match="R580"):
        _ext.check_device(0)


def test_cuda_package_beside_a_cpu_torch(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    """A44: device="auto" has one warning to give; TD_NO_EXT and a usable GPU give none."""
    plant(GOOD.format(abi=_ext.ABI_VERSION))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    text = str(_ext.cpu_warning())
    assert "tinydecode-cu130" in text and torch.__version__ in text and "without CUDA" in text
    monkeypatch.setenv("TD_NO_EXT", "1")
    assert _ext.cpu_warning() is None
    monkeypatch.delenv("TD_NO_EXT")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert _ext.cpu_warning() is None


def test_auto_warns_once_under_a_cuda_package(
    plant: Plant, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A44: "auto" loads on the CPU with one warning, "cpu" with none, "cuda" names the torch."""
    from fixtures import write_tiny

    path = write_tiny(tmp_path / "model")
    plant(GOOD.format(abi=_ext.ABI_VERSION))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.warns(UserWarning, match="running on the CPU") as caught:
        assert tinydecode.load_hf(path, device="auto").device.type == "cpu"
    assert len(caught) == 1
    assert tinydecode.load_hf(path, device="cpu").device.type == "cpu"
    with pytest.raises(RuntimeError, match="torch") as e:
        tinydecode.load_hf(path, device="cuda")
    assert torch.__version__ in str(e.value)
