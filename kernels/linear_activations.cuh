// How the activations of the fused products come in: as fragments of the rows, normed on the way.
#pragma once

#include <type_traits>

#include "linear.cuh"

namespace td {

// ---- packs of 8 activations --------------------------------------------------------------------

template <typename T>
__device__ __forceinline__ void unpack(const uint4& pack, float (&x)[8]) {
  const uint32_t words[4] = {pack.x, pack.y, pack.z, pack.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack_pair<T>(words[i]);
    x[2 * i] = pair.x;
    x[2 * i + 1] = pair.y;
  }
}

template <typename T>
__device__ __forceinline__ uint4 pack_up(const float (&x)[8]) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    words[i] = bits(from_float<T>(x[2 * i])) | bits(from_float<T>(x[2 * i + 1])) << 16;
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

template <typename T>
__device__ __forceinline__ float sum_of_squares(const uint4& pack) {
  float x[8], sum = 0.0f;
  unpack<T>(pack, x);
#pragma unroll
  for (int i = 0; i < 8; ++i) sum = fmaf(x[i], x[i], sum);
  return sum;
}

// Whether the scale of the norm is applied to the sums instead of the activations, so that nobody
// waits for it. Not for float16: unscaled products of activation and weight could overflow.
template <typename T>
constexpr bool kLateScale = !std::is_same_v<T, __half>;

template <typename T>
__device__ __forceinline__ uint4 normed(const uint4& pack, const uint4& norm, float scale) {
  float x[8], w[8];
  unpack<T>(pack, x);
  unpack<T>(norm, w);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    x[i] = (kLateScale<T> ? x[i] : rounded<T>(x[i] * scale)) * w[i];
  }
  return pack_up<T>(x);
}

// What scales row `row`, once every warp's squares are there.
__device__ __forceinline__ float norm_scale(const LinearArgs& a, const Header& header, int row) {
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < kWarps / 4; ++i) {
    const float4 four = reinterpret_cast<const float4*>(header.squares[row])[i];
    total += (four.x + four.y) + (four.z + four.w);
  }
  return rsqrtf(total / static_cast<float>(a.inputs) + a.eps);
}

// First column of block i of this lane in a stage: two blocks, 128 bytes of a row, at a time.
__device__ __forceinline__ int block_column(int warp, int t, int i) {
  return (i / 2 * kWarps + warp) * kPairCols + i % 2 * kBlockCols + t * 8;
}

// ---- activations that stay in registers --------------------------------------------------------

// First column of pack p of this lane: the warp's own columns, in the order of its blocks.
__device__ __forceinline__ int pack_column(int p) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  constexpr int kOfStage = kPairs * 8;
  const int i = p * kWarpSize + lane;
  return i / kOfStage * kStageCols + (i % kOfStage / 8 * kWarps + warp) * kPairCols + i % 8 * 8;
}

struct NormPacks {
  uint4 raw[kPacks];
};

// Weights, so they may be read before the predecessor is done.
__device__ __forceinline__ NormPacks load_norm(const LinearArgs& a) {
  NormPacks norm;
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int column = pack_column(p);
    norm.raw[p] = column < a.inputs ? __ldg(static_cast<const uint4*>(a.norm) + column / 8)
                                    : make_uint4(0, 0, 0, 0);
  }
  return norm;
}

// Normed rows of up to kResidentCols columns, as fragments: lane (g, t) has row g.
template <typename T, int kRows>
__device__ __forceinline__ void load_resident(const LinearArgs& a, const NormPacks& norm,
                                              Header& header, unsigned char* work,
                                              uint4 (&x)[kChunks][kBlocks]) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int g = lane / 4, t = lane % 4;
  const int rows = kRows == 1 ? 1 : a.rows;
  const uint4 zero = make_uint4(0, 0, 0, 0);
  uint4 raw[kRows][kPacks];
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int column = pack_column(p);
    const uint4* source = static_cast<const uint4*>(a.x) + column / 8;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      raw[r][p] = zero;
      if (r < rows && column < a.inputs) raw[r][p] = __ldcg(source);
      source += a.inputs / 8;
    }
  }
  const auto write_squares = [&] {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r >= rows) break;
      float sum = 0.0f;
#pragma unroll
      for (int p = 0; p < kPacks; ++p) sum += sum_of_squares<T>(raw[r][p]);
      sum = warp_reduce(sum, Add());
      if (lane == 0) header.squares[r][warp] = sum;
    }
  };
  if constexpr (!kLateScale<T>) {
    write_squares();
    named_barrier(kConsumerBarrier, kConsumers);  // the squares are there
  }
  // From the lanes that loaded to those that multiply, within the warp.
  unsigned char* own = work + warp * kStagedRows * kStagedPitch;
  constexpr int kAtOnce = kRows < kStagedRows ? kRows : kStagedRows;
#pragma unroll
  for (int first = 0; first < kRows; first += kAtOnce) {
    if (first >= rows) break;
#pragma unroll
    for (int r = first; r < first + kAtOnce; ++r) {
      if (r >= rows) break;
      const float scale = kLateScale<T> ? 1.0f : norm_scale(a, header, r);
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        *reinterpret_cast<uint4*>(own + (r - first) * kStagedPitch +
                                  (p * kWarpSize + lane) * kPackBytes) =
            normed<T>(raw[r][p], norm.raw[p], scale);
      }
    }
    __syncwarp();  // the packs are there
    const bool mine = g >= first && g < first + kAtOnce && g < rows;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        if (first == 0) x[c][i] = zero;
        if (mine) {
          x[c][i] = *reinterpret_cast<const uint4*>(own + (g - first) * kStagedPitch +
                                                    ((c * kBlocks + i) * 4 + t) * kPackBytes);
        }
      }
    }
    __syncwarp();  // they have been read
  }
  if constexpr (kLateScale<T>) write_squares();
}

// ---- activations that come as they are needed, a stage's columns at a time ----------------------

template <typename T, bool kNorm>
struct Stream {
  const LinearArgs& a;
  int warp, g, t;
  float scale = 1.0f;

  __device__ __forceinline__ Stream(const LinearArgs& args, int lane, int of_warp)
      : a(args), warp(of_warp), g(lane / 4), t(lane % 4) {}

  __device__ __forceinline__ void load(int start, uint4 (&x)[kBlocks]) const {
    const uint4* source =
        static_cast<const uint4*>(a.x) + (static_cast<int64_t>(g) * a.inputs + start) / 8;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      const int column = block_column(warp, t, i);
      x[i] = make_uint4(0, 0, 0, 0);
      if (g < a.rows && start + column < a.inputs) x[i] = __ldcg(source + column / 8);
    }
  }

  // Norms what `load` brought.
  __device__ __forceinline__ void prepare(int start, uint4 (&x)[kBlocks]) const {
    if constexpr (kNorm) {
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        const int column = start + block_column(warp, t, i);
        const uint4 norm = column < a.inputs ? __ldg(static_cast<const uint4*>(a.norm) + column / 8)
                                             : make_uint4(0, 0, 0, 0);
        x[i] = normed<T>(x[i], norm, scale);
      }
    }
  }

  // The squares of every column, once beforehand, added up in the order of load_resident.
  __device__ __forceinline__ void find_scale(Header& header) {
    uint4 x[kBlocks];
    float squares[kBlocks] = {};
#pragma unroll 1
    for (int start = 0; start < a.inputs; start += kStageCols) {
      load(start, x);
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) squares[i] += sum_of_squares<T>(x[i]);
    }
#pragma unroll
    for (int far = kBlocks / 2; far > 0; far /= 2) {
#pragma unroll
      for (int i = 0; i < far; ++i) squares[i] += squares[i + far];
    }
    float sum = squares[0];
    sum += __shfl_xor_sync(kFullWarp, sum, 2);
    sum += __shfl_xor_sync(kFullWarp, sum, 1);
    if (t == 0 && g < a.rows) header.squares[g][warp] = sum;
    if constexpr (!kLateScale<T>) {
      named_barrier(kConsumerBarrier, kConsumers);  // the squares are there
      if (g < a.rows) scale = norm_scale(a, header, g);
    }
  }
};

}  // namespace td
