// What kernels/ uses of CUDA C++ and its runtime, on top of the emulator (../emu.h).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <set>

#include "../emu.h"

// ---- language --------------------------------------------------------------------------------

#define __host__
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __grid_constant__
// One variable for all blocks: harness.py gathers these variables in a section of their own, and
// the scheduler swaps its contents when it switches blocks.
#define __shared__ static

#define TD_STRING_(x) #x
#define TD_STRING(x) TD_STRING_(x)
#define TD_SITE __FILE__ ":" TD_STRING(__LINE__)
#define __syncthreads() emu::block_barrier(0, 0, TD_SITE)

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

// ---- warp operations -------------------------------------------------------------------------

template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  return emu::shuffle(mask, value, (emu::lane() & ~(width - 1)) | (source & (width - 1)), "shfl");
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
  const int from = emu::lane() ^ bits;
  const bool inside = from / width == emu::lane() / width;
  return emu::shuffle(mask, value, inside ? from : emu::lane(), "shfl_xor");
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const int from = emu::lane() - static_cast<int>(delta);
  const bool inside = from >= (emu::lane() & ~(width - 1));
  return emu::shuffle(mask, value, inside ? from : emu::lane(), "shfl_up");
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const int from = emu::lane() + static_cast<int>(delta);
  const bool inside = from / width == emu::lane() / width;
  return emu::shuffle(mask, value, inside ? from : emu::lane(), "shfl_down");
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  const emu::Slot* slots = emu::warp_exchange(mask, &predicate, sizeof predicate, "ballot");
  unsigned result = 0;
  for (int i = 0; i < 32; ++i) {
    int given = 0;
    std::memcpy(&given, slots[i].bytes, sizeof given);
    if (mask >> i & 1 && given != 0) result |= 1u << i;
  }
  return result;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) {
  return __ballot_sync(mask, predicate) == mask;
}
inline void __syncwarp(unsigned mask = 0xffffffffu) {
  emu::warp_exchange(mask, nullptr, 0, "syncwarp");
}

// ---- memory ----------------------------------------------------------------------------------

inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __nanosleep(unsigned) { emu::yield(); }
template <typename T>
T __ldg(const T* p) {
  return *p;
}
template <typename T>
T __ldcs(const T* p) {
  return *p;
}
template <typename T>
T __ldcg(const T* p) {
  return *p;
}

// A fiber is never interrupted, so plain code is atomic.
template <typename T, typename F>
T atomic_update(T* p, F&& next) {
  const T old = *p;
  *p = next(old);
  return old;
}
template <typename T>
T atomicAdd(T* p, T x) {
  return atomic_update(p, [=](T old) { return old + x; });
}
template <typename T>
T atomicMax(T* p, T x) {
  return atomic_update(p, [=](T old) { return std::max(old, x); });
}
template <typename T>
T atomicMin(T* p, T x) {
  return atomic_update(p, [=](T old) { return std::min(old, x); });
}
template <typename T>
T atomicOr(T* p, T x) {
  return atomic_update(p, [=](T old) { return old | x; });
}
template <typename T>
T atomicExch(T* p, T x) {
  return atomic_update(p, [=](T) { return x; });
}
template <typename T>
T atomicCAS(T* p, T expected, T x) {
  return atomic_update(p, [=](T old) { return old == expected ? x : old; });
}

// ---- arithmetic ------------------------------------------------------------------------------

template <typename To, typename From>
To bit_cast(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  std::memcpy(&result, &x, sizeof result);
  return result;
}
inline uint32_t __float_as_uint(float x) { return bit_cast<uint32_t>(x); }
inline float __uint_as_float(uint32_t x) { return bit_cast<float>(x); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline unsigned long long __float2ull_rn(float x) {
  return static_cast<unsigned long long>(std::nearbyint(static_cast<double>(x)));
}
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(static_cast<unsigned long long>(a) * b >> 32);
}
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
template <typename N>
N max(N a, N b) {
  return a > b ? a : b;
}
template <typename N>
N min(N a, N b) {
  return a < b ? a : b;
}
inline float __expf(float x) { return std::exp(x); }
inline float __fdividef(float a, float b) { return a / b; }

struct __nv_bfloat16 {
  uint16_t raw;
};
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short x) { return {x}; }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return x.raw; }
inline float __bfloat162float(__nv_bfloat16 x) {
  return __uint_as_float(static_cast<uint32_t>(x.raw) << 16);
}
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  if (x != x) return {0x7fff};
  const uint32_t u = __float_as_uint(x);
  return {static_cast<uint16_t>((u + 0x7fff + (u >> 16 & 1)) >> 16)};
}

struct __half {
  uint16_t raw;
};
inline __half __ushort_as_half(unsigned short x) { return {x}; }
inline unsigned short __half_as_ushort(__half x) { return x.raw; }
inline float __half2float(__half x) {
  const uint32_t sign = (x.raw & 0x8000u) << 16, magnitude = x.raw & 0x7fffu;
  if (magnitude >= 0x7c00u) return __uint_as_float(sign | 0x7f800000u | magnitude << 13);
  // Subnormals and normals alike: the bits read as a float are 2^-112 of the value.
  return __uint_as_float(sign | __float_as_uint(__uint_as_float(magnitude << 13) * 0x1p112f));
}
inline __half __float2half_rn(float x) {
  const uint32_t sign = __float_as_uint(x) >> 16 & 0x8000u;
  const float magnitude = std::fabs(x);
  if (x != x) return {0x7fff};
  if (magnitude >= 65520.0f) return {static_cast<uint16_t>(sign | 0x7c00u)};
  if (magnitude < 0x1p-14f) {  // subnormal: a multiple of 2^-24, rounded to nearest even
    return {
        static_cast<uint16_t>(sign | static_cast<uint32_t>(std::nearbyint(magnitude * 0x1p24f)))};
  }
  const uint32_t u = __float_as_uint(magnitude);
  return {static_cast<uint16_t>(sign | (u - 0x38000000u + 0xfff + (u >> 13 & 1)) >> 13)};
}

// ---- runtime ---------------------------------------------------------------------------------

#define CUDART_VERSION 13000

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInvalidDevice = 101,
  cudaErrorLaunchFailure = 719,
  cudaErrorInvalidClusterSize = 912
};
using cudaStream_t = void*;
enum {
  cudaLaunchAttributeClusterDimension = 4,
  cudaLaunchAttributeProgrammaticStreamSerialization = 6
};
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 97
};
enum cudaFuncAttribute {
  cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
  cudaFuncAttributeNonPortableClusterSizeAllowed = 14
};
struct cudaLaunchAttribute {
  int id;
  union {
    struct {
      unsigned x, y, z;
    } clusterDim;
    int programmaticStreamSerializationAllowed;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};
struct cudaFuncAttributes {
  int ptxVersion;
};

constexpr int kEmulatedDevices = 2;
inline int emulated_device = 0;
inline cudaError_t cudaGetDevice(int* device) { return *device = emulated_device, cudaSuccess; }
inline cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= kEmulatedDevices) return cudaErrorInvalidDevice;
  return emulated_device = device, cudaSuccess;
}
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess              ? "no error"
         : error == cudaErrorLaunchFailure ? emu_error()
                                           : "invalid argument";
}
inline cudaError_t cudaDriverGetVersion(int* version) { return *version = 13000, cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  *value = which == cudaDevAttrMultiProcessorCount      ? emu_multiprocessors()
           : which == cudaDevAttrComputeCapabilityMajor ? emu_capability()
                                                        : 227 * 1024;
  return cudaSuccess;
}
// Kernels that may be launched in clusters of more than the 8 blocks that every GPU has room for.
inline std::set<const void*> emulated_large_clusters;
template <typename T>
cudaError_t cudaFuncSetAttribute(T* kernel, cudaFuncAttribute which, int value) {
  if (which == cudaFuncAttributeNonPortableClusterSizeAllowed && value != 0) {
    emulated_large_clusters.insert(reinterpret_cast<const void*>(kernel));
  }
  return cudaSuccess;
}
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  return attributes->ptxVersion = 90, cudaSuccess;
}
inline dim3 emulated_cluster(const cudaLaunchConfig_t& config) {
  dim3 cluster;
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    if (config.attrs[i].id != cudaLaunchAttributeClusterDimension) continue;
    const auto& given = config.attrs[i].val.clusterDim;
    cluster = dim3(given.x, given.y, given.z);
  }
  return cluster;
}
inline bool emulated_cluster_allowed(const void* kernel, const cudaLaunchConfig_t& config) {
  const unsigned size = emulated_cluster(config).x;
  return size <= 8 || (size <= 16 && emulated_large_clusters.count(kernel) != 0);
}
template <typename T>
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, T* kernel,
                                           const cudaLaunchConfig_t* config) {
  if (!emulated_cluster_allowed(reinterpret_cast<const void*>(kernel), *config)) {
    return cudaErrorInvalidClusterSize;
  }
  return *clusters = emu_clusters(), cudaSuccess;
}
template <typename... P, typename... A>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(P...), A... args) {
  if (!emulated_cluster_allowed(reinterpret_cast<const void*>(kernel), *config)) {
    return cudaErrorInvalidClusterSize;
  }
  const auto run = [=] { kernel(args...); };
  return emu::launch(config->gridDim, config->blockDim, config->dynamicSmemBytes,
                     emulated_cluster(*config), run)
             ? cudaSuccess
             : cudaErrorLaunchFailure;
}
