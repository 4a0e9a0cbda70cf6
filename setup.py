"""Build script: the pure-Python package, or the package with the extension ``tinydecode._C``.

Variables (any other ``TD_*`` name is an error, so that a typo is never silently ignored):

  TD_NO_EXT=1            pure Python; nothing of torch is imported, no compiler is needed
  TD_CUDA_VARIANT=cu130  release build: the name becomes tinydecode-cu130; unset: plain name
  TD_CUDA_ARCHS="90"     GPU targets instead of the table below; "80 90+PTX" adds PTX of the last
  TD_CUDART=static       static or shared CUDA runtime; unset: static where the archive exists
  CUDA_HOME, MAX_JOBS, NVCC_THREADS   the toolkit; parallel compilers; threads of one nvcc

An extension that is wanted but cannot be built is an error, never a silent pure build.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from setuptools import Distribution, setup

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "ci"))

from td_backend import NO_EXT_HINT, find_cuda_home, refuse, wants_extension  # noqa: E402

LIMITED_API = "0x030A0000"  # CPython 3.10, the floor of requires-python


@dataclass(frozen=True)
class Variant:
    """One wheel family: a CUDA major version, and so a driver floor."""

    cuda_major: int
    sass: tuple[str, ...]  # machine code for every GPU we claim: no JIT in the driver
    ptx: str  # of the newest target only: insurance for GPUs that do not exist yet
    compress: tuple[str, ...]


VARIANTS = {
    # Drivers before R550 do not read the denser compression of newer toolkits: plain LZ4 here.
    "cu121": Variant(12, ("75", "80", "86", "89", "90"), "90", ("-Xfatbin", "-compress-all")),
    "cu130": Variant(
        13, ("75", "80", "86", "89", "90", "100", "120"), "120", ("--compress-mode=size",)
    ),
}


def cuda_release(cuda_home: Path) -> tuple[int, int]:
    """(major, minor) of the toolkit's nvcc."""
    text = subprocess.run(
        [str(cuda_home / "bin" / "nvcc"), "--version"], capture_output=True, text=True
    ).stdout
    found = re.search(r"release (\d+)\.(\d+)", text)
    if not found:
        raise refuse(f"{cuda_home}/bin/nvcc --version names no release; repair it, {NO_EXT_HINT}")
    return int(found[1]), int(found[2])


def choose_variant(cuda_home: Path) -> Variant:
    """The variant asked for, or the one of the toolkit at hand."""
    name, (major, minor) = os.environ.get("TD_CUDA_VARIANT"), cuda_release(cuda_home)
    if name and VARIANTS[name].cuda_major != major:
        need = VARIANTS[name].cuda_major
        raise refuse(f"TD_CUDA_VARIANT={name} needs CUDA {need}.x; {cuda_home} is {major}.{minor}")
    for variant in VARIANTS.values():
        if variant.cuda_major == major:
            return variant
    raise refuse(f"CUDA {major}.{minor} at {cuda_home} is not supported; use 12.x, 13.x")


def gpu_targets(variant: Variant) -> tuple[list[str], list[str]]:
    """(SASS targets, PTX targets), e.g. (["80", "90"], ["90"])."""
    text = os.environ.get("TD_CUDA_ARCHS", "")
    if not text.strip():
        return list(variant.sass), [variant.ptx]
    sass, ptx = [], []
    for item in re.split(r"[ ;,]+", text.strip()):
        found = re.fullmatch(r"(\d+)\.?(\d)([af]?)(\+PTX)?", item)
        if not found:
            raise refuse(f"TD_CUDA_ARCHS={text!r}: {item!r} is not a target like 90, 9.0 or 90+PTX")
        sass.append(found[1] + found[2] + found[3])
        if found[4]:
            ptx.append(sass[-1])
    return sass, ptx


def cuda_libraries(cuda_home: Path) -> tuple[list[str], list[str]]:
    """(libraries, library folders) of the chosen CUDA runtime."""
    folders = [
        d
        for d in (cuda_home / "lib64", cuda_home / "lib", cuda_home / "targets/x86_64-linux/lib")
        if d.is_dir()
    ]
    has_static = any((d / "libcudart_static.a").is_file() for d in folders)
    kind = os.environ.get("TD_CUDART") or ("static" if has_static else "shared")
    if kind not in ("static", "shared"):
        raise refuse(f"TD_CUDART={kind!r}; expected static or shared")
    if kind == "static" and not has_static:
        raise refuse(f"TD_CUDART=static, but {cuda_home} has no libcudart_static.a; use shared")
    libraries = ["cudart_static", "dl", "rt", "pthread"] if kind == "static" else ["cudart"]
    return libraries, [str(d) for d in folders]


def extension_arguments() -> dict:
    """setup() arguments that build ``tinydecode._C`` from kernels/ with torch's build helper."""
    cuda_home = find_cuda_home()
    variant = choose_variant(cuda_home)
    sass, ptx = gpu_targets(variant)
    libraries, folders = cuda_libraries(cuda_home)
    sources = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "kernels").glob("*.cu"))
    sources.append("kernels/module.cpp")
    try:
        from torch.utils import cpp_extension
    except ImportError as e:
        raise refuse(
            f"building the CUDA extension needs torch ({e}); pip install torch, {NO_EXT_HINT}"
        ) from None

    # torch's helper assumes that torch itself is linked. A CPU build of torch sets no CUDA_HOME;
    # its flags hide the half operators; its version check wants torch's own CUDA.
    cpp_extension.CUDA_HOME = str(cuda_home)
    cpp_extension.min_supported_cpython = LIMITED_API
    cpp_extension.COMMON_NVCC_FLAGS = []
    cpp_extension._check_cuda_version = lambda *args, **kwargs: None

    archs = " ".join([f"sm_{a}" for a in sass] + [f"compute_{a}" for a in ptx])
    common = ["-O3", "-std=c++17", f"-DPy_LIMITED_API={LIMITED_API}", f'-DTD_ARCHS="{archs}"']
    gencode = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in sass]
    gencode += [f"-gencode=arch=compute_{a},code=compute_{a}" for a in ptx]
    threads = os.environ.get("NVCC_THREADS", "1")
    ext = cpp_extension.CUDAExtension(
        "tinydecode._C",
        sources,
        depends=sorted(str(p) for pat in ("*.cuh", "*.h") for p in (ROOT / "kernels").glob(pat)),
        py_limited_api=True,
        extra_compile_args={
            "cxx": [*common, "-Wall", "-fvisibility=hidden"],
            "nvcc": [*common, *gencode, *variant.compress, f"--threads={threads}"]
            + ["-Xcompiler", "-fPIC,-fvisibility=hidden"],
        },
        # Nothing but PyInit__C leaves the module, the static runtime's symbols included.
        extra_link_args=["-Wl,--exclude-libs,ALL", "-Wl,-s"],
    )
    # No torch header can be included and no torch library linked: the rule enforces itself.
    ext.include_dirs = [str(cuda_home / "include")]
    ext.libraries, ext.library_dirs = libraries, folders

    class BuildExt(cpp_extension.BuildExtension):
        def build_extension(self, ext):  # type: ignore[no-untyped-def]
            super().build_extension(ext)
            check_symbols(self.get_ext_fullpath(ext.name))

    return {
        "ext_modules": [ext],
        "cmdclass": {"build_ext": BuildExt},
        "options": {"bdist_wheel": {"py_limited_api": "cp310"}},
    }


def check_symbols(path: str) -> None:
    """Refuses a module with undefined symbols other than Python's, libc's or the CUDA runtime's.

    A kernel declared differently on the two sides of the boundary, or a leak of torch, would
    otherwise show only when the module is imported.
    """
    lines = subprocess.check_output(["nm", "-D", "--undefined-only", path], text=True).splitlines()
    allowed = re.compile(r"_?Py\w+$|\w+@(GLIBC|GLIBCXX|CXXABI|GCC|libcudart)")
    bad = [
        s for kind, s in (ln.split()[-2:] for ln in lines) if kind == "U" and not allowed.match(s)
    ]
    if bad:
        raise refuse(f"{Path(path).name} has undefined symbols: {', '.join(bad)}")


class TinydecodeDistribution(Distribution):
    """Appends the variant to the static name of pyproject.toml."""

    def parse_config_files(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        super().parse_config_files(*args, **kwargs)
        variant = os.environ.get("TD_CUDA_VARIANT")
        if variant and variant not in VARIANTS:
            raise refuse(f"TD_CUDA_VARIANT={variant!r}; expected one of {', '.join(VARIANTS)}")
        if variant:
            self.metadata.name = f"tinydecode-{variant}"


# Metadata and the sdist are the same for every build: they need neither torch nor nvcc.
METADATA_ONLY = {"egg_info", "dist_info", "sdist"}
wanted = wants_extension() and not METADATA_ONLY & set(sys.argv[1:])
setup(distclass=TinydecodeDistribution, **(extension_arguments() if wanted else {}))
