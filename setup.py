"""Build script: the pure-Python package, or the package with the extension `tinydecode._C`.

Variables (any other `TD_*` name is an error, so that a typo is never silently ignored):

  TD_NO_EXT=1            pure Python; nothing of torch is imported, no compiler is needed
  TD_CUDA_VARIANT=cu130  release build: the name becomes tinydecode-cu130; unset: plain name
  TD_CUDA_ARCHS="90"     GPU targets instead of the table; "80 90+PTX" adds PTX of the last
  TD_CUDART=static       static or shared CUDA runtime; unset: static where the archive exists
  CUDA_HOME, MAX_JOBS, NVCC_THREADS   the toolkit; parallel compilers; threads of one nvcc

An extension that is wanted but cannot be built is an error, never a silent pure build. The rules
and the table of targets are in ci/td_build.py.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from setuptools import Distribution, setup

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "ci"))

import td_build  # noqa: E402

LIMITED_API = "0x030A0000"  # CPython 3.10, the floor of requires-python


def extension_arguments() -> dict:
    """setup() arguments that build `tinydecode._C` from kernels/ with torch's build helper."""
    cuda_home = td_build.find_cuda_home()
    variant = td_build.choose_variant(cuda_home)
    sass, ptx = td_build.gpu_targets(variant)
    libraries, library_dirs = td_build.cuda_libraries(cuda_home)
    try:
        from torch.utils import cpp_extension
    except ImportError as e:
        raise td_build.refuse(
            f"building the CUDA extension needs torch ({e}); "
            f"pip install torch, {td_build.NO_EXT_HINT}"
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
    kernels = ROOT / "kernels"
    ext = cpp_extension.CUDAExtension(
        "tinydecode._C",
        sorted(f"kernels/{p.name}" for p in [*kernels.glob("*.cu"), *kernels.glob("*.cpp")]),
        depends=sorted(str(p) for p in [*kernels.glob("*.cuh"), *kernels.glob("*.h")]),
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
    ext.libraries, ext.library_dirs = libraries, library_dirs

    class BuildExt(cpp_extension.BuildExtension):
        def build_extension(self, ext):  # type: ignore[no-untyped-def]
            super().build_extension(ext)
            bad = td_build.bad_symbols(self.get_ext_fullpath(ext.name))
            if bad:
                raise td_build.refuse(f"{ext.name} has undefined symbols: {', '.join(bad)}")

    return {
        "ext_modules": [ext],
        "cmdclass": {"build_ext": BuildExt},
        "options": {"bdist_wheel": {"py_limited_api": "cp310"}},
    }


class TinydecodeDistribution(Distribution):
    """Appends the variant to the static name of pyproject.toml."""

    def parse_config_files(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        super().parse_config_files(*args, **kwargs)
        variant = td_build.variant_name()
        if variant:
            self.metadata.name = f"tinydecode-{variant}"


# Metadata and the sdist are the same for every build: they need neither torch nor nvcc.
METADATA_ONLY = {"egg_info", "dist_info", "sdist"}
wanted = td_build.wants_extension() and not METADATA_ONLY & set(sys.argv[1:])
setup(distclass=TinydecodeDistribution, **(extension_arguments() if wanted else {}))
