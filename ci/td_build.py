"""The rules of a build: which variables count, whether the extension is wanted, toolkit, targets.

Shared by the PEP 517 hook (td_backend.py), setup.py and the tests. Imports neither torch nor
setuptools. Every refusal is one `SystemExit` line, which pip and build print without a traceback.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

KNOWN_VARIABLES = {
    "TD_NO_EXT": "1 builds the pure-Python package",
    "TD_CUDA_VARIANT": "cu121 or cu130: a release build, named tinydecode-<variant>",
    "TD_CUDA_ARCHS": "GPU targets instead of the variant's table, e.g. '90' or '80 90+PTX'",
    "TD_CUDART": "static or shared",
    # Read by the tests; named here because they may be set while a test builds.
    "TD_REQUIRE_CUDA": "tests: a skipped cuda test is a failure",
    "TD_WHEELS": "tests: the wheels to check, separated by colons",
}
NO_EXT_HINT = "or set TD_NO_EXT=1 to build the pure-Python package"
DEFAULT_CUDA_HOME = Path("/usr/local/cuda")


@dataclass(frozen=True)
class Variant:
    """One wheel family: a CUDA major version, and so a driver floor."""

    cuda_major: int
    sass: tuple[str, ...]  # machine code for every GPU we claim: no JIT in the driver
    ptx: tuple[str, ...]  # insurance for GPUs without machine code here, compiled by their driver
    compress: tuple[str, ...]


VARIANTS = {
    # Drivers before R550 do not read the denser compression of newer toolkits: plain LZ4 here.
    "cu121": Variant(12, ("75", "80", "86", "89", "90"), ("90",), ("-Xfatbin", "-compress-all")),
    # PTX of 120 alone would leave out GPUs between 100 and 120, such as 110.
    "cu130": Variant(
        13,
        ("75", "80", "86", "89", "90", "100", "120"),
        ("90", "120"),
        ("--compress-mode=size",),
    ),
}


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
    if pure and variant_name():
        raise refuse("TD_NO_EXT and TD_CUDA_VARIANT contradict each other; unset one of them")
    return not pure


def variant_name() -> str | None:
    """The release variant asked for by TD_CUDA_VARIANT; None for a local build."""
    name = os.environ.get("TD_CUDA_VARIANT") or None
    if name and name not in VARIANTS:
        raise refuse(f"TD_CUDA_VARIANT={name!r}; expected one of {', '.join(VARIANTS)}")
    return name


def find_cuda_home() -> Path:
    """The toolkit's root: $CUDA_HOME, then the nvcc on PATH, then /usr/local/cuda."""
    asked = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if asked:
        if not (Path(asked) / "bin" / "nvcc").is_file():
            raise refuse(f"CUDA_HOME={asked} has no bin/nvcc; correct it, {NO_EXT_HINT}")
        return Path(asked)
    candidates = [DEFAULT_CUDA_HOME]
    on_path = shutil.which("nvcc")
    if on_path:
        candidates.insert(0, Path(on_path).resolve().parent.parent)
    for home in candidates:
        # An nvcc on PATH may be a wrapper script somewhere else; a toolkit has the headers too.
        if (home / "bin" / "nvcc").is_file() and (home / "include" / "cuda_runtime.h").is_file():
            return home
    raise refuse(
        "the CUDA extension is wanted but nvcc was not found; "
        f"install the CUDA toolkit (12.x or 13.x) and set CUDA_HOME, {NO_EXT_HINT}"
    )


def choose_variant(cuda_home: Path) -> Variant:
    """The variant asked for, or for a local build the one of the toolkit at hand."""
    text = subprocess.run(
        [str(cuda_home / "bin" / "nvcc"), "--version"], capture_output=True, text=True
    ).stdout
    found = re.search(r"release ((\d+)\.\d+)", text)
    if not found:
        raise refuse(f"{cuda_home}/bin/nvcc --version names no release; repair it, {NO_EXT_HINT}")
    release, major, asked = found[1], int(found[2]), variant_name()
    if asked and VARIANTS[asked].cuda_major != major:
        need = VARIANTS[asked].cuda_major
        raise refuse(f"TD_CUDA_VARIANT={asked} needs CUDA {need}.x; {cuda_home} is {release}")
    for variant in VARIANTS.values():
        if variant.cuda_major == major:
            return variant
    raise refuse(f"CUDA {release} at {cuda_home} is not supported; use 12.x or 13.x")


def gpu_targets(variant: Variant) -> tuple[list[str], list[str]]:
    """(SASS targets, PTX targets), e.g. (["80", "90"], ["90"])."""
    text = os.environ.get("TD_CUDA_ARCHS", "").strip()
    if not text:
        return list(variant.sass), list(variant.ptx)
    sass, ptx = [], []
    for item in re.split(r"[ ;,]+", text):
        found = re.fullmatch(r"(\d+)\.?(\d)([af]?)(\+PTX)?", item)
        if not found:
            raise refuse(f"TD_CUDA_ARCHS={text!r}: {item!r} is not a target like 90, 9.0 or 90+PTX")
        sass.append(found[1] + found[2] + found[3])
        if found[4]:
            ptx.append(sass[-1])
    return sass, ptx


def cuda_libraries(cuda_home: Path) -> tuple[list[str], list[str]]:
    """(libraries, library folders) of the CUDA runtime: static where its archive is at hand."""
    folders = [cuda_home / "lib64", cuda_home / "lib", cuda_home / "targets/x86_64-linux/lib"]
    folders = [d for d in folders if d.is_dir()]
    has_static = any((d / "libcudart_static.a").is_file() for d in folders)
    kind = os.environ.get("TD_CUDART") or ("static" if has_static else "shared")
    if kind not in ("static", "shared"):
        raise refuse(f"TD_CUDART={kind!r}; expected static or shared")
    if kind == "static" and not has_static:
        raise refuse(f"TD_CUDART=static, but {cuda_home} has no libcudart_static.a; use shared")
    libraries = ["cudart_static", "dl", "rt", "pthread"] if kind == "static" else ["cudart"]
    return libraries, [str(d) for d in folders]


def bad_symbols(module: str | os.PathLike[str]) -> list[str]:
    """Undefined symbols of a compiled module other than Python's, libc's and the CUDA runtime's.

    A kernel declared differently on the two sides of the boundary, or a leak of torch, would
    otherwise show only when the module is imported.
    """
    lines = subprocess.check_output(["nm", "-D", "--undefined-only", str(module)], text=True)
    symbols = [line.split()[-2:] for line in lines.splitlines()]
    allowed = re.compile(r"_?Py\w+$|\w+@(GLIBC|GLIBCXX|CXXABI|GCC|libcudart)")
    return [name for kind, name in symbols if kind == "U" and not allowed.match(name)]
