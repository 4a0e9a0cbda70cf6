#!/usr/bin/env bash
# Assembles a CUDA 12.4 toolkit, enough to compile our wheels, in FOLDER; prints its CUDA_HOME.
#
#   ci/toolchain_cu12.sh FOLDER        about 1 GB of downloads, once; then the folder is reused
#
# The compiler and the static CUDA runtime are Debian's (trixie, non-free), unpacked and not
# installed, from the mirror this machine's apt already uses; the libcu++ headers come through pip.
# Code of any 12.x compiler runs on every driver from R525 on, so 12.4 serves the cu121 wheel.
set -euo pipefail

folder=$(realpath -m "${1:?usage: ci/toolchain_cu12.sh FOLDER}")
home=$folder/cuda-12.4
if [[ -x $home/bin/nvcc && -f $home/.complete ]]; then
  echo "$home"
  exit 0
fi

work=$folder/download
rm -rf "$home" "$work"
mkdir -p "$home"/{bin,lib64,nvvm/bin,nvvm/libdevice} "$work"/{lists/partial,cache/archives/partial}

# An apt of our own: the machine's configuration, but its own sources and package lists.
mirror=$(cat /etc/apt/sources.list /etc/apt/sources.list.d/* 2>/dev/null |
  sed -nE 's/^URIs: *([^ ]+).*/\1/p; s/^deb +(\[[^]]*\] +)?([^ ]+).*/\2/p' |
  grep -E '/debian/?$' | head -n 1) || true
if [[ -z $mirror ]]; then
  echo "toolchain_cu12: apt on this machine has no Debian mirror" >&2
  exit 1
fi
keys=/usr/share/keyrings/debian-archive-keyring.gpg
echo "deb [signed-by=$keys] $mirror trixie non-free" >"$work/sources.list"
apt=(-q -o "Dir::Etc::SourceList=$work/sources.list" -o Dir::Etc::SourceParts=-
  -o "Dir::State::Lists=$work/lists" -o "Dir::Cache=$work/cache" -o APT::Sandbox::User=root)
(
  cd "$work"
  apt-get "${apt[@]}" update
  apt-get "${apt[@]}" download nvidia-cuda-toolkit nvidia-cuda-dev
  python3 -m pip download -q --no-deps --only-binary=:all: -d . 'nvidia-cuda-cccl-cu12==12.4.*'
  dpkg -x nvidia-cuda-toolkit_*.deb tree
  dpkg --fsys-tarfile nvidia-cuda-dev_*.deb | tar -x -C tree ./usr/include \
    ./usr/lib/x86_64-linux-gnu/libcudart_static.a ./usr/lib/x86_64-linux-gnu/libcudadevrt.a
  python3 -m zipfile -e nvidia_cuda_cccl_cu12-*.whl tree
) >&2

tree=$work/tree/usr
private=$tree/lib/nvidia-cuda-toolkit
cp "$private/bin/nvcc" "$tree"/bin/{cudafe++,fatbinary,ptxas,nvlink,bin2c,cuobjdump} "$home/bin/"
cp "$private/bin/cicc" "$home/nvvm/bin/"
cp "$private/libdevice/libdevice.10.bc" "$home/nvvm/libdevice/"
cp "$tree"/lib/x86_64-linux-gnu/libcuda{rt_static,devrt}.a "$home/lib64/"
cp -r "$tree/include" "$home/include"
cp -r "$work"/tree/nvidia/cuda_cccl/include/. "$home/include/"
cp -r "$private/bin/crt" "$home/bin/" 2>/dev/null || true
cat >"$home/bin/nvcc.profile" <<'PROFILE'
TOP = $(_HERE_)/..
NVVMIR_LIBRARY_DIR = $(TOP)/nvvm/libdevice
PATH += $(TOP)/nvvm/bin:$(_HERE_):
INCLUDES += "-I$(TOP)/include" $(_SPACE_)
LIBRARIES =+ $(_SPACE_) "-L$(TOP)/lib64"
PROFILE
"$home/bin/nvcc" --version >&2
rm -rf "$work"
touch "$home/.complete"
echo "$home"
