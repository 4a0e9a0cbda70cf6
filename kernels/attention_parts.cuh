// How the tensor-core attention deals out the keys of a kv head, and how the parts become one
// again.
#pragma once

#include "attention.cuh"

namespace td {

constexpr int kTileKeys = 16;  // of a warp in a step

// Of a block. At 64 dimensions it is small enough to stand beside one of the step's products, which
// hides the launch of either; above it would not be, and more warps read long contexts faster.
template <int kDim>
constexpr int kWarps = kDim > 64 ? 8 : 4;

template <int kDim>
constexpr int kThreads = kWarps<kDim> * kWarpSize;

template <int kDim>
constexpr int kPartKeys = kWarps<kDim> * kTileKeys;  // neighbours that a block has

// Blocks that share the keys of a kv head; as many as a cluster can have.
constexpr int kParts = 16;

// From a warp's keys to its next ones.
template <int kDim>
constexpr int kStride = kParts * kPartKeys<kDim>;

// Parts that hold the first `keys` keys.
template <int kDim>
__host__ __device__ constexpr int part_count(int keys) {
  return keys >= kStride<kDim> ? kParts : ceil_div(keys, kPartKeys<kDim>);
}

// Shared memory of a block: where its warps meet, and what the blocks of the cluster send it.
template <int kDim>
struct Meeting {
  static constexpr int kPitch = kDim + 4;
  uint64_t* arrived;     // of the parcels
  float* values;         // [kWarps<kDim>][rows][kPitch]
  float4* parcels;       // [parts][parcel]
  float2* stats;         // [kWarps<kDim>][rows] (maximum, sum)
  float2* parcel_stats;  // [parts][rows]
  int rows;              // of this block

  __device__ __forceinline__ Meeting(unsigned char* shared, int rows_of_block) {
    rows = rows_of_block;
    arrived = reinterpret_cast<uint64_t*>(shared);
    values = reinterpret_cast<float*>(shared + 16);
    parcels = reinterpret_cast<float4*>(values + kWarps<kDim> * rows * kPitch);
    stats = reinterpret_cast<float2*>(parcels + rows * kDim / 4 + kParts);
    parcel_stats = stats + kWarps<kDim> * rows;
  }
  static constexpr int bytes(int rows) {
    return 16 + rows * (kWarps<kDim> * (kPitch * 4 + 8) + kDim * 4 + kParts * 8) + kParts * 16;
  }
};

// A query row's output out of partials: four dimensions. First look at all (maximum, sum), then
// add all in order. A partial that saw nothing, (-infinity, 0), changes no bit.
struct Join {
  float top = -INFINITY, total = 0.0f;
  float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  __device__ __forceinline__ void look(const float2& stat) { top = stat.x > top ? stat.x : top; }
  __device__ __forceinline__ void add(const float2& stat, const float4& y) {
    const float weight = exp2f(stat.x - (top == -INFINITY ? 0.0f : top));
    total = fmaf(weight, stat.y, total);
    x.x = fmaf(weight, y.x, x.x);
    x.y = fmaf(weight, y.y, x.y);
    x.z = fmaf(weight, y.z, x.z);
    x.w = fmaf(weight, y.w, x.w);
  }
  __device__ __forceinline__ float4 result() const {
    return make_float4(x.x / total, x.y / total, x.z / total, x.w / total);
  }
};

template <typename T>
__device__ __forceinline__ void store_four(T* out, const float4& x) {
  *reinterpret_cast<uint2*>(out) =
      make_uint2(bits(from_float<T>(x.x)) | bits(from_float<T>(x.y)) << 16,
                 bits(from_float<T>(x.z)) | bits(from_float<T>(x.w)) << 16);
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800

// Whether the blocks of a kv head can be a cluster: above 64 dimensions a GPU has not room for
// enough of them at once.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
template <int kDim>
constexpr bool kMayCluster = kDim == 64;
#else
template <int kDim>
constexpr bool kMayCluster = false;
#endif

// The last step of a block, once its warps' sums are in shared memory: they become one, which goes
// to the blocks of the cluster that finish the outputs, or to the workspace.
template <typename T, int kDim>
__device__ __forceinline__ void join_block(const AttentionArgs& a, const Meeting<kDim>& meeting,
                                           T* out, int64_t batch, int kv_head, int first_row,
                                           int part, int parts, bool clustered) {
  const int all = meeting.rows * (kDim / 4), parcel = ceil_div(all, parts);  // of four outputs
  for (int i = threadIdx.x; i < all; i += kThreads<kDim>) {
    const int row = i / (kDim / 4), d = i % (kDim / 4);
    Join join;
#pragma unroll
    for (int w = 0; w < kWarps<kDim>; ++w) join.look(meeting.stats[w * meeting.rows + row]);
#pragma unroll
    for (int w = 0; w < kWarps<kDim>; ++w) {
      const float* values = meeting.values + (w * meeting.rows + row) * meeting.kPitch;
      join.add(meeting.stats[w * meeting.rows + row], reinterpret_cast<const float4*>(values)[d]);
    }
    if (kMayCluster<kDim> && clustered) {
      if constexpr (kMayCluster<kDim>) {
        // Neighbours to different blocks, and the row's (maximum, sum) to all.
        store_remote(meeting.parcels + part * parcel + i / parts, i % parts, join.x,
                     meeting.arrived);
        if (d < parts) {
          store_remote(meeting.parcel_stats + part * meeting.rows + row, d,
                       make_float2(join.top, join.total), meeting.arrived);
        }
      }
    } else {
      const int64_t partial = query_row(a, batch, kv_head, first_row + row) * a.chunks + part;
      *reinterpret_cast<float4*>(a.weighted + partial * kDim + d * 4) = join.x;
      if (d == 0) a.stats[partial] = make_float2(join.top, join.total);
    }
  }
  if constexpr (kMayCluster<kDim>) {
    if (!clustered) return;
    mbarrier_wait_remote(meeting.arrived, 0);  // every block's parcels are there
    for (int i = threadIdx.x * parts + part; i < all; i += kThreads<kDim> * parts) {
      const int row = i / (kDim / 4), d = i % (kDim / 4);
      Join join;
#pragma unroll 4
      for (int p = 0; p < parts; ++p) join.look(meeting.parcel_stats[p * meeting.rows + row]);
#pragma unroll 4
      for (int p = 0; p < parts; ++p) {
        join.add(meeting.parcel_stats[p * meeting.rows + row],
                 meeting.parcels[p * parcel + i / parts]);
      }
      store_four(out + query_row(a, batch, kv_head, first_row + row) * kDim + d * 4, join.result());
    }
  }
}

#endif

// ---- the second launch, where there are no clusters --------------------------------------------

template <int kDim>
constexpr int kJoinRows = kDim < 128 ? kWarpSize * 4 / kDim : 1;  // of a block

template <int kDim>
constexpr int kJoinThreads = kJoinRows<kDim> * kDim / 4;

template <typename T, int kDim>
__global__ void __launch_bounds__(kJoinThreads<kDim>)
    attention_join_kernel(T* out,  // [B, T, H, D]
                          int rows, const __grid_constant__ AttentionArgs a) {
  const int row = blockIdx.x * kJoinRows<kDim> + threadIdx.x / (kDim / 4);  // of [B, T, H]
  const int d = threadIdx.x % (kDim / 4);
  pdl_trigger();
  if (row >= rows) return;
  const int cached = cached_length(a, row / a.heads / a.tokens);
  const int parts = part_count<kDim>(visible_keys(a, cached, row / a.heads % a.tokens));
  const int64_t first = static_cast<int64_t>(row) * a.chunks;
  const float4* weighted = reinterpret_cast<const float4*>(a.weighted) + first * (kDim / 4) + d;
  pdl_wait();
  float2 stat[kParts];
  float4 value[kParts];
#pragma unroll
  for (int p = 0; p < kParts; ++p) {  // all under way together
    stat[p] = make_float2(-INFINITY, 0.0f);
    value[p] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (p < parts) {
      stat[p] = __ldcg(a.stats + first + p);
      value[p] = __ldcg(weighted + p * (kDim / 4));
    }
  }
  Join join;
#pragma unroll
  for (int p = 0; p < kParts; ++p) join.look(stat[p]);
#pragma unroll
  for (int p = 0; p < kParts; ++p) join.add(stat[p], value[p]);
  store_four(out + static_cast<int64_t>(row) * kDim + d * 4, join.result());
}

}  // namespace td
