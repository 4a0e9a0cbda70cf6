// What every kernel shares: storage types, 16-byte packs, reductions, dispatch and launching.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "td_api.h"

#ifdef TD_EMULATE
#include "ptx_emulated.h"
#else
#include "ptx.cuh"
#endif

namespace td {

constexpr int kWarpSize = 32;
constexpr unsigned kFullWarp = 0xffffffffu;
constexpr int kPackBytes = 16;  // the widest load of one thread

template <typename T>
constexpr int kPack = kPackBytes / static_cast<int>(sizeof(T));  // elements in a pack: 4 or 8

template <typename N>
__host__ __device__ constexpr N ceil_div(N a, N b) {
  return (a + b - 1) / b;
}

// ---- storage types: float32 in registers, float32, float16 or bfloat16 in memory -------------

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// x as it would read back after being stored.
template <typename T>
__device__ __forceinline__ float rounded(float x) {
  return to_float(from_float<T>(x));
}

// Two 16-bit elements out of one word, and into one. The lower address is the lower half.
template <typename T>
__device__ __forceinline__ float2 unpack_pair(uint32_t word);
template <>
__device__ __forceinline__ float2 unpack_pair<__half>(uint32_t word) {
  return make_float2(__half2float(__ushort_as_half(static_cast<unsigned short>(word))),
                     __half2float(__ushort_as_half(static_cast<unsigned short>(word >> 16))));
}
template <>
__device__ __forceinline__ float2 unpack_pair<__nv_bfloat16>(uint32_t word) {
  return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
}

__device__ __forceinline__ uint32_t bits(__half x) { return __half_as_ushort(x); }
__device__ __forceinline__ uint32_t bits(__nv_bfloat16 x) { return __bfloat16_as_ushort(x); }

// Two neighbouring elements; p is aligned to both together.
template <typename T>
__device__ __forceinline__ float2 load_pair(const T* p) {
  if constexpr (sizeof(T) == 4) {
    return *reinterpret_cast<const float2*>(p);
  } else {
    return unpack_pair<T>(*reinterpret_cast<const uint32_t*>(p));
  }
}

// ---- packs: 16 bytes where the data allows it, one element at a time where it does not -------
//
// Both forms put the same elements into the same thread, so alignment never changes a result.

template <typename T>
__device__ __forceinline__ void load_aligned_pack(const T* p, float (&x)[kPack<T>]) {
  const uint4 raw = *reinterpret_cast<const uint4*>(p);
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      x[i] = __uint_as_float(words[i]);
    } else {
      const float2 pair = unpack_pair<T>(words[i]);
      x[2 * i] = pair.x;
      x[2 * i + 1] = pair.y;
    }
  }
}

// Loads up to kPack elements of the `left` that remain in the row; the rest of x is 0.
template <typename T, bool kAligned>
__device__ __forceinline__ void load_pack(const T* p, int left, float (&x)[kPack<T>]) {
  if constexpr (kAligned) {
    load_aligned_pack(p, x);
  } else {
#pragma unroll
    for (int i = 0; i < kPack<T>; ++i) x[i] = i < left ? to_float(p[i]) : 0.0f;
  }
}

template <typename T, bool kAligned>
__device__ __forceinline__ void store_pack(T* p, int left, const float (&x)[kPack<T>]) {
  if constexpr (kAligned) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(T) == 4) {
        words[i] = __float_as_uint(x[i]);
      } else {
        words[i] = bits(from_float<T>(x[2 * i])) | bits(from_float<T>(x[2 * i + 1])) << 16;
      }
    }
    *reinterpret_cast<uint4*>(p) = make_uint4(words[0], words[1], words[2], words[3]);
  } else {
#pragma unroll
    for (int i = 0; i < kPack<T>; ++i) {
      if (i < left) p[i] = from_float<T>(x[i]);
    }
  }
}

// Whether rows of `stride` elements from each of these pointers can be read in packs.
template <typename T, typename... P>
bool packs_fit(int64_t stride, const P*... pointers) {
  uintptr_t low_bits = static_cast<uintptr_t>(stride) * sizeof(T);
  ((low_bits |= reinterpret_cast<uintptr_t>(pointers)), ...);
  return low_bits % kPackBytes == 0;
}

// ---- reductions: every lane gets the result; the order of additions is fixed -----------------

struct Add {
  __device__ float operator()(float a, float b) const { return a + b; }
};
struct Max {
  template <typename N>
  __device__ N operator()(N a, N b) const {
    return a > b ? a : b;
  }
};

template <typename N, typename Op>
__device__ __forceinline__ N warp_reduce(N x, Op op) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    x = op(x, __shfl_xor_sync(kFullWarp, x, offset));
  }
  return x;
}

// Over a block of whole warps. `scratch` has one slot a warp and is free again after the next
// barrier; `identity` stands in for the warps that are not there.
template <typename N, typename Op>
__device__ __forceinline__ N block_reduce(N x, N identity, N* scratch, Op op) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int warps = blockDim.x / kWarpSize;
  x = warp_reduce(x, op);
  if (lane == 0) scratch[warp] = x;
  __syncthreads();  // every warp's part is in scratch
  return warp_reduce(lane < warps ? scratch[lane] : identity, op);
}

// The opening of every kernel: allow the next one to be scheduled, then wait for the one before.
// A kernel that read anything earlier could see it half written; one that never waited would let
// its successor overtake its predecessor.
__device__ __forceinline__ void begin_kernel() {
  pdl_trigger();
  pdl_wait();
}

// ---- host side -------------------------------------------------------------------------------

template <typename Type>
struct Tag {
  using T = Type;
};

// Calls launch(Tag<T>{}) with the storage type of a TdDtype.
template <typename F>
int with_dtype(int dtype, F&& launch) {
  switch (dtype) {
    case TD_FLOAT32:
      return launch(Tag<float>{});
    case TD_FLOAT16:
      return launch(Tag<__half>{});
    case TD_BFLOAT16:
      return launch(Tag<__nv_bfloat16>{});
    default:
      return cudaErrorInvalidValue;
  }
}

// Launches kernels on one stream of one device, and puts the caller's device back at the end.
class Launcher {
 public:
  Launcher(int device, void* stream) : device_(device), stream_(static_cast<cudaStream_t>(stream)) {
    status_ = cudaGetDevice(&callers_device_);
    if (status_ == cudaSuccess && callers_device_ != device_) status_ = cudaSetDevice(device_);
  }
  ~Launcher() {
    if (callers_device_ >= 0 && callers_device_ != device_) cudaSetDevice(callers_device_);
    if (status_ != cudaSuccess) cudaGetLastError();  // reported by us: torch must not find it again
  }
  Launcher(const Launcher&) = delete;
  Launcher& operator=(const Launcher&) = delete;

  // Does nothing after an earlier launch of this launcher failed.
  template <typename... P, typename... A>
  void run(void (*kernel)(P...), dim3 grid, int threads, A... args) {
    run_with_shared(kernel, grid, threads, 0, args...);
  }

  // The same with `shared` bytes of dynamic shared memory.
  template <typename... P, typename... A>
  void run_with_shared(void (*kernel)(P...), dim3 grid, int threads, int shared, A... args) {
    run_in_clusters(kernel, grid, threads, shared, 1, args...);
  }

  // The same with blocks in clusters of `cluster` along x, which divides the grid's.
  template <typename... P, typename... A>
  void run_in_clusters(void (*kernel)(P...), dim3 grid, int threads, int shared, int cluster,
                       A... args) {
    constexpr int kWithoutAsking = 48 * 1024;
    if (status_ == cudaSuccess && shared > kWithoutAsking) {
      status_ = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                     cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    }
    if (status_ != cudaSuccess) return;
    cudaLaunchAttribute attributes[2] = {};
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = static_cast<size_t>(shared);
    config.stream = stream_;
    config.attrs = attributes;
    if (waits_in_kernel(reinterpret_cast<const void*>(kernel))) {
      auto& overlap = attributes[config.numAttrs++];
      overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      overlap.val.programmaticStreamSerializationAllowed = 1;
    }
    if (cluster > 1) attributes[config.numAttrs++] = in_clusters(cluster);
    status_ = cudaLaunchKernelEx(&config, kernel, static_cast<P>(args)...);
  }

  // Clusters of a kernel that the GPU holds at once; 0 where it has none, or the code that it runs
  // is older than they are. To be asked before any capture: see ClusterRoom.
  int clusters_at_once(const void* kernel, int threads, int shared, int cluster) {
    if (status_ != cudaSuccess || !waits_in_kernel(kernel)) return 0;
    cudaLaunchAttribute size = in_clusters(cluster);
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(cluster));
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = static_cast<size_t>(shared);
    config.attrs = &size;
    config.numAttrs = 1;
    int clusters = 0;
    const bool found = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            shared) == cudaSuccess &&
                       cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed,
                                            1) == cudaSuccess &&
                       cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) == cudaSuccess;
    if (!found) cudaGetLastError();
    return found ? clusters : 0;
  }

  int device() const { return device_; }

  int attribute(cudaDeviceAttr which) {
    int value = 1;
    if (status_ == cudaSuccess) status_ = cudaDeviceGetAttribute(&value, which, device_);
    return value;
  }
  int multiprocessors() { return attribute(cudaDevAttrMultiProcessorCount); }

  int status() const { return status_; }

 private:
  static cudaLaunchAttribute in_clusters(int size) {
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = static_cast<unsigned>(size);
    attribute.val.clusterDim.y = 1;
    attribute.val.clusterDim.z = 1;
    return attribute;
  }

  // Whether the code that this device runs has the wait of begin_kernel in it: overlapping a kernel
  // without it would be a race. True for code compiled for sm_90 or later (all kernels are built
  // for the same targets, so one answer a device is enough) and a driver that captures such
  // launches into graphs.
  bool waits_in_kernel(const void* kernel) {
    constexpr int kKnown = 64;
    static signed char answers[kKnown];  // 0: not asked yet; racing threads write the same answer
    if (device_ >= kKnown) return false;
    if (answers[device_] == 0) {
      cudaFuncAttributes attributes = {};
      int driver = 0;
      const bool known = cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess &&
                         cudaDriverGetVersion(&driver) == cudaSuccess;
      if (!known) return false;  // the launch will report the error
      answers[device_] = attributes.ptxVersion >= 90 && driver >= 12030 ? 1 : -1;
    }
    return answers[device_] > 0;
  }

  int device_;
  int callers_device_ = -1;
  cudaStream_t stream_;
  cudaError_t status_;
};

// What clusters_at_once found for one kernel, by device and size of the cluster; asked once.
class ClusterRoom {
 public:
  int find(Launcher& launcher, const void* kernel, int threads, int shared, int cluster) {
    int size = 0;
    while (2 << size <= cluster) ++size;
    if (launcher.device() >= kDevices || size >= kSizes) return 0;
    int& answer = answers_[launcher.device()][size];  // racing threads write the same
    if (answer == 0) answer = launcher.clusters_at_once(kernel, threads, shared, cluster) + 1;
    return answer - 1;
  }

 private:
  static constexpr int kDevices = 64, kSizes = 5;
  int answers_[kDevices][kSizes] = {};  // 1 more than the number; 0: not asked yet
};

}  // namespace td
