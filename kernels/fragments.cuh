// Fragments of m16n8k16 out of rows of 16-bit elements, without shared memory (sm_80).
#pragma once

#include <type_traits>

#include "common.cuh"

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800

namespace td {

// d += a b on the tensor cores; see ptx.cuh.
template <typename T>
__device__ __forceinline__ void product(float (&d)[4], const uint32_t (&a)[4],
                                        const uint32_t (&b)[2]) {
  if constexpr (std::is_same_v<T, __half>) {
    mma_m16n8k16_fp16(d, a, b);
  } else {
    mma_m16n8k16_bf16(d, a, b);
  }
}

// What lane t of `kLanes` holds of rows of kDim elements: 16 bytes of every 16 kLanes, then an even
// share of what is left.
template <typename T, int kDim, int kLanes>
struct Share {
  static constexpr int kWords = kDim / 2 / kLanes;
  static constexpr int kWide = kDim / (8 * kLanes);  // loads of 16 bytes
  static constexpr int kRest = kWords - 4 * kWide;   // words of the last load, 0 to 2

  const T* wide;  // of this lane in row 0
  const T* rest;

  __device__ __forceinline__ Share(const T* rows, int t)
      : wide(rows + t * 8), rest(rows + dim(4 * kWide, t)) {}

  // Dimension of the lower half of word i.
  static __device__ __forceinline__ int dim(int i, int t) {
    return i < 4 * kWide ? i / 4 * 8 * kLanes + t * 8 + i % 4 * 2
                         : kWide * 8 * kLanes + t * 2 * kRest + (i - 4 * kWide) * 2;
  }

  // Of row `row + further`; `further` is known to the compiler, so rows apart share an address.
  __device__ __forceinline__ void load(uint32_t (&x)[kWords], int row, CachePolicy policy,
                                       int further = 0) const {
    const int64_t offset = static_cast<int64_t>(row) * kDim + further * kDim;
#pragma unroll
    for (int i = 0; i < kWide; ++i) {
      load_past_l1<4>(x + 4 * i, wide + offset + i * 8 * kLanes, policy);
    }
    if constexpr (kRest > 0) load_past_l1<kRest>(x + 4 * kWide, rest + offset, policy);
  }
};

__device__ __forceinline__ uint32_t lower_halves(uint32_t x, uint32_t y) {
  return (x & 0xffffu) | y << 16;
}
__device__ __forceinline__ uint32_t upper_halves(uint32_t x, uint32_t y) {
  return x >> 16 | (y & 0xffff0000u);
}

// Two floats as the sum of two packed pairs of 16-bit elements.
template <typename T>
__device__ __forceinline__ void split_pair(float x, float y, uint32_t& high, uint32_t& low) {
  const T high_x = from_float<T>(x), high_y = from_float<T>(y);
  high = bits(high_x) | bits(high_y) << 16;
  low = bits(from_float<T>(x - to_float(high_x))) | bits(from_float<T>(y - to_float(high_y))) << 16;
}

// Whether either element of a word is infinite or NaN.
template <typename T>
__device__ __forceinline__ bool is_nonfinite(uint32_t word) {
  constexpr uint32_t kLower = std::is_same_v<T, __half> ? 0x7c00u : 0x7f80u;
  constexpr uint32_t kUpper = kLower << 16;
  return ((word & kLower) == kLower) | ((word & kUpper) == kUpper);
}

}  // namespace td

#endif
