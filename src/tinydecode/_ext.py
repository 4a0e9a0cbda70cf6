"""Loads the compiled module ``tinydecode._C``, checks it, and keeps the reason when it is unusable.

Importing this file does nothing; importing the package works whatever state the binary is in.
Nothing is compiled, downloaded or written here.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
from types import ModuleType

ABI_VERSION = 4  # of kernels/td_api.h; module.cpp carries the same number

VARIANTS = {12: "tinydecode-cu121", 13: "tinydecode-cu130"}  # by CUDA major version
DRIVER_FLOORS = {12: (12000, "R525"), 13: (13000, "R580")}  # what cudaDriverGetVersion reports
DISTRIBUTIONS = ("tinydecode", *VARIANTS.values())  # all install the same folder

reason: str | None = None  # why load() returned None, as one line; None when it did not
absent = False  # no binary is wanted or installed: the torch twins are the intended path

_module: ModuleType | None = None
_loaded = False


def load() -> ModuleType | None:
    """The compiled module, or None with `reason` set. Never raises; the answer is kept."""
    global _module, _loaded, absent, reason
    if not _loaded:
        _loaded = True
        absent, reason = _absent()
        if reason is None:
            _module, reason = _import_checked()
    return _module


def reset() -> None:
    """Forgets what load() found, so that the next call looks again (for tests)."""
    global _module, _loaded, absent, reason
    _module, _loaded, absent, reason = None, False, False, None


def require() -> ModuleType:
    """The compiled module.

    Raises:
        RuntimeError: it is absent or unusable; the message is `reason`.
    """
    module = load()
    if module is None:
        raise RuntimeError(reason)
    return module


def no_ext_wanted() -> bool:
    """Whether TD_NO_EXT (or TINYDECODE_NO_EXT) asks for the torch twins."""
    values = (os.environ.get(name, "") for name in ("TD_NO_EXT", "TINYDECODE_NO_EXT"))
    return any(v.strip().lower() not in ("", "0", "false", "no", "off") for v in values)


def check_usable() -> None:
    """Refuses a binary that is installed but cannot be used; passes where there is none at all.

    To be asked before CUDA is used: the twins would run instead, but not what was installed.

    Raises:
        RuntimeError: naming what was found, what the binary was built for and the fix.
    """
    if load() is None and not absent:
        raise RuntimeError(f"{reason}; or use device='cpu'")


def check_device(index: int) -> None:
    """Refuses a GPU on which the binary cannot run, before anything is launched.

    Args:
        index: CUDA device index as torch counts them; the device exists.

    Raises:
        RuntimeError: the driver is too old or the GPU is not among the compiled targets.
    """
    import torch

    module = load()
    if module is not None:
        fault = driver_fault(module.cuda_version(), module.driver_version()) or arch_fault(
            torch.cuda.get_device_name(index),
            torch.cuda.get_device_capability(index),
            module.archs(),
        )
        if fault:
            raise RuntimeError(fault)


def cpu_warning() -> str | None:
    """What to tell a user of a CUDA wheel whose device="auto" ends on the CPU; None: nothing."""
    import torch

    names = [name for name in installed() if name in VARIANTS.values()]
    if not names or no_ext_wanted() or torch.cuda.is_available():
        return None
    cause = "sees no usable GPU" if torch.version.cuda else "is a build without CUDA"
    return f"{names[0]} is installed, but torch {torch.__version__} {cause}: running on the CPU"


def driver_fault(cuda_version: int, driver_version: int) -> str | None:
    """What is wrong when a binary built with one CUDA meets a driver; None when nothing is.

    Args:
        cuda_version: of the build, as 1000 * major + 10 * minor.
        driver_version: newest CUDA that the driver supports, in the same form; 0 for no driver.
    """
    floor, name = DRIVER_FLOORS[cuda_version // 1000]
    if driver_version >= floor:
        return None
    found = f"one for CUDA {_dotted(driver_version)}" if driver_version else "none"
    others = [v for major, v in VARIANTS.items() if DRIVER_FLOORS[major][0] <= driver_version]
    other = f"install {others[-1]}, " if others else ""
    return (
        f"this build of tinydecode (CUDA {_dotted(cuda_version)}) needs NVIDIA driver {name} or "
        f"newer; found {found}; update the driver, {other}or set TD_NO_EXT=1 for the torch path"
    )


def arch_fault(gpu: str, capability: tuple[int, int], archs: str) -> str | None:
    """What is wrong when no compiled target runs on a GPU; None when one does.

    Args:
        gpu: name, for the message.
        capability: (major, minor) of the GPU.
        archs: targets of the build, such as "sm_80 sm_90 sm_90a compute_90".
    """
    major, minor = capability
    for target in archs.split():
        kind, _, number = target.partition("_")
        if number.endswith("a"):  # architecture-specific code runs on exactly that chip
            if kind == "sm" and number == f"{major}{minor}a":
                return None
            continue
        target_major, target_minor = divmod(int(number.rstrip("f")), 10)
        if kind == "compute" and (target_major, target_minor) <= (major, minor):
            return None
        if kind == "sm" and target_major == major and target_minor <= minor:
            return None
    return (
        f"{gpu} (sm_{major}{minor}) is not among the targets of this build of tinydecode "
        f"({archs}); install another tinydecode-cuNNN, build from source with "
        f"TD_CUDA_ARCHS={major}{minor}, or set TD_NO_EXT=1 for the torch path"
    )


def installed() -> list[str]:
    """Names of the installed distributions that provide this package, such as ["tinydecode"]."""
    found = []
    for name in DISTRIBUTIONS:
        try:
            record = importlib.metadata.distribution(name).read_text("RECORD")
        except importlib.metadata.PackageNotFoundError:
            continue
        if record is not None:  # without one it is an .egg-info that a build left in the tree
            found.append(name)
    return found


def _absent() -> tuple[bool, str | None]:
    if no_ext_wanted():
        return True, "the compiled kernels are switched off by TD_NO_EXT"
    if importlib.util.find_spec("tinydecode._C") is None:
        return True, (
            "this installation of tinydecode has no compiled kernels; "
            "pip install tinydecode-cu130 (driver R580+) or tinydecode-cu121 (driver R525+)"
        )
    return False, None


def _import_checked() -> tuple[ModuleType | None, str | None]:
    names = installed()
    if len(names) > 1:
        return None, (
            f"{' and '.join(names)} are installed together and overwrite each other's files; "
            f"pip uninstall -y {' '.join(names)}, then install one of them"
        )
    try:
        module = importlib.import_module("tinydecode._C")
    except Exception as e:  # a broken binary must not take the CPU path down with it
        return None, _unloadable(e, names)
    if module.abi_version() != ABI_VERSION:
        return None, (
            f"tinydecode._C has ABI version {module.abi_version()}, the package expects "
            f"{ABI_VERSION}: the binary is from another version; rebuild or reinstall it "
            f"({_reinstall(names)})"
        )
    return module, None


def _unloadable(error: Exception, names: list[str]) -> str:
    import torch

    built = next((n for n in names if n in VARIANTS.values()), "a local build")
    return (
        f"tinydecode._C cannot be loaded ({type(error).__name__}: {error}); found torch "
        f"{torch.__version__} (CUDA {torch.version.cuda or 'none'}), the binary is {built}, built "
        f"for any torch >= 2.4, so it is damaged or not ours; reinstall it ({_reinstall(names)})"
    )


def _reinstall(names: list[str]) -> str:
    name = next((n for n in names if n in VARIANTS.values()), None)
    if name is None:
        return "pip install --force-reinstall --no-deps . in the source tree"
    return f"pip install --force-reinstall --no-deps {name}"


def _dotted(version: int) -> str:
    """13000 -> "13.0"."""
    return f"{version // 1000}.{version % 1000 // 10}"
