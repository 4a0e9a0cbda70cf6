"""The compiled module: kernels/module.cpp. Only ops/cuda.py and _ext.py import it."""

def abi_version() -> int: ...
def cuda_version() -> int: ...  # of the build, 1000 * major + 10 * minor
def driver_version() -> int: ...  # newest CUDA the driver supports, same form; 0: no driver
def archs() -> str: ...  # e.g. "sm_80 sm_90 compute_90"
