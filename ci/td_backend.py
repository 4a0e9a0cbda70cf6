"""In-tree PEP 517 backend: setuptools, plus torch when (and only when) the extension is wanted.

A pure build (``TD_NO_EXT=1``) must neither import nor install torch, so torch cannot stand in
``[build-system] requires``. The rules that setup.py shares with this hook live here too; every
refusal is one ``SystemExit`` line, which pip and build print without a traceback.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  (the hooks not overridden below)

KNOWN_VARIABLES = {
    "TD_NO_EXT": "1 builds the pure-Python package",
    "TD_CUDA_VARIANT": "cu121 or cu130: a release build, named tinydecode-<variant>",
    "TD_CUDA_ARCHS": "GPU targets instead of the variant's table, e.g. '90' or '80 90+PTX'",
    "TD_CUDART": "static or shared",
    # Read by the tests; named here because they may be set while a test builds.
    "TD_REQUIRE_CUDA": "tests: a skipped cuda test is a failure",
    "TD_WHEEL": "tests: the wheel to check",
}
NO_EXT_HINT = "or set TD_NO_EXT=1 to build the pure-Python package"


def refuse(message: str) -> SystemExit:
    """The one way a build is refused: a single line."""
    return SystemExit(f"tinydecode: {message}")


def is_set(name: str) -> bool:
    """True for "1", "true", "yes", "on"; False for unset, "", "0", "false", "no", "off"."""
    value = os.environ.get(name, "").strip().lower()
    if value in ("1", "true", "yes", "on"):
        return True
    if value in ("", "0", "false", "no", "off"):
        return False
    raise refuse(f"{name}={value!r} is not understood; expected 1 or 0")


def wants_extension() -> bool:
    """Whether the CUDA extension is to be built; refuses unknown or contradictory variables."""
    unknown = sorted(n for n in os.environ if n.startswith("TD_") and n not in KNOWN_VARIABLES)
    if unknown:
        known = ", ".join(KNOWN_VARIABLES)
        raise refuse(f"unknown variable {', '.join(unknown)}; expected one of {known}")
    pure = is_set("TD_NO_EXT") or is_set("TINYDECODE_NO_EXT")
    if pure and os.environ.get("TD_CUDA_VARIANT"):
        raise refuse("TD_NO_EXT and TD_CUDA_VARIANT contradict each other; unset one of them")
    return not pure


def find_cuda_home() -> Path:
    """The toolkit's root: $CUDA_HOME, then the nvcc on PATH, then /usr/local/cuda."""
    asked = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if asked:
        if not (Path(asked) / "bin" / "nvcc").is_file():
            raise refuse(f"CUDA_HOME={asked} has no bin/nvcc; correct it, {NO_EXT_HINT}")
        return Path(asked)
    candidates = [Path("/usr/local/cuda")]
    on_path = shutil.which("nvcc")
    if on_path:
        candidates.insert(0, Path(on_path).resolve().parent.parent)
    for home in candidates:
        # An nvcc on PATH may be a wrapper script somewhere else; a toolkit has the headers too.
        if (home / "bin" / "nvcc").is_file() and (home / "include" / "cuda_runtime.h").is_file():
            return home
    raise refuse(
        "the CUDA extension is wanted but nvcc was not found; "
        f"install the CUDA toolkit (12.x or 13.0) and set CUDA_HOME, {NO_EXT_HINT}"
    )


def _extension_requires() -> list[str]:
    """What building the extension needs. Checked first: no torch is fetched for a lost cause."""
    if not wants_extension():
        return []
    find_cuda_home()
    return ["torch>=2.4", "ninja"]  # torch: its build helper only, so any version and any build


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    extra = _extension_requires()
    return [*build_meta.get_requires_for_build_wheel(config_settings), *extra]


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    extra = _extension_requires()
    return [*build_meta.get_requires_for_build_editable(config_settings), *extra]
