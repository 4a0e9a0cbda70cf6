// Facts about the binary and the machine that module.cpp cannot know without a CUDA header.

#include <cuda_runtime.h>

#include "td_api.h"

#ifndef TD_ARCHS
#error "TD_ARCHS must be the list of targets, such as \"sm_80 sm_90 compute_90\" (setup.py sets it)"
#endif

int td_abi_version(void) { return TD_ABI_VERSION; }

int td_cuda_version(void) { return CUDART_VERSION; }

int td_driver_version(void) {
  int version = 0;
  return cudaDriverGetVersion(&version) == cudaSuccess ? version : 0;
}

const char* td_archs(void) { return TD_ARCHS; }

const char* td_error_string(int error) {
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}
