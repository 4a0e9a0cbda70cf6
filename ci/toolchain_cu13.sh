#!/usr/bin/env bash
# Puts a CUDA 13.0 toolkit, enough to compile our wheels, in FOLDER; prints its CUDA_HOME.
#
#   ci/toolchain_cu13.sh FOLDER
#
# From 13.0 on the compiler itself is on the Python package index, so pip is all it takes. Where an
# nvcc 13.0 is installed already, setup.py finds that one and this script is not needed.
set -euo pipefail

folder=$(realpath -m "${1:?usage: ci/toolchain_cu13.sh FOLDER}")
home=$folder/cuda-13.0
if [[ ! -f $home/.complete ]]; then
  rm -rf "$home" "$folder/packages"
  python3 -m pip install -q --no-deps --target "$folder/packages" 'nvidia-cuda-nvcc==13.0.*' \
    'nvidia-nvvm==13.0.*' 'nvidia-cuda-crt==13.0.*' 'nvidia-cuda-runtime==13.0.*' \
    'nvidia-cuda-cccl==13.0.*' >&2
  mv "$folder/packages/nvidia/cu13" "$home"
  rm -rf "$folder/packages"
  "$home/bin/nvcc" --version >&2
  touch "$home/.complete"
fi
echo "$home"
