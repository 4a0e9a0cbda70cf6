// Attention of a few new tokens over the cache, split over the keys (flash decoding).
//
// Split launch: blocks turn chunks of keys (attention.cuh) of one kv head into float32 partials
// (maximum, sum, weighted values) of the query rows that read them, on tensor cores
// (attention_tensor.cu) or, for float32 and before sm_80, without (attention_simple.cu).
// Merge launch: a block owns 16 dimensions of one query row and adds up the partials, scaled to the
// common maximum, in an order that follows from the number of chunks that the row sees.
//
// The arithmetic of a query row depends on its position alone: neither on which rows share its
// products nor on B, T, S or the grid.
//
// Bytes moved: keys and values once, 2 D elements a key and kv head, and the partials, which stay
// in L2 because the cache is read with an evict-first hint. At 32K keys, 8 kv heads, D 128 in bf16
// that is 134 MB, 29 us at the 4.6 TB/s that an H200 reads.
//
// Limits: D in {64, 80, 96, 128, 256}.

#include "attention.cuh"

namespace td {
namespace {

constexpr int kOldestTensor = 80;  // compute capability with the products of attention_tensor.cu

// ---- merge -----------------------------------------------------------------------------------

constexpr int kMergeThreads = 256;
constexpr int kMergeWarps = kMergeThreads / kWarpSize;
constexpr int kMergeDims = 16;                             // of one block
constexpr int kMergeLanes = kMergeDims / 4;                // threads a partial, four floats each
constexpr int kMergeGroups = kMergeThreads / kMergeLanes;  // partials read at once

template <typename T>
__global__ void __launch_bounds__(kMergeThreads)
    attention_merge_kernel(T* out,  // [B, T, H, D]
                           int head_dim, const __grid_constant__ AttentionArgs a) {
  __shared__ float sums[kMergeWarps][kMergeDims];
  __shared__ float totals[kMergeWarps];
  const int thread = threadIdx.x, warp = thread / kWarpSize;
  const int64_t row = blockIdx.x;  // over [B, T, H]
  const int token = static_cast<int>(row / a.heads % a.tokens);
  const int64_t batch = row / a.heads / a.tokens;
  const int group = thread / kMergeLanes, lane = thread % kMergeLanes;
  const int first_dim = blockIdx.y * kMergeDims;
  pdl_trigger();
  // As in the split launch: nearly always right, and asked again.
  int chunks = chunk_count(a, visible_keys(a, likely_length(a, batch), token));
  pdl_wait();
  const int confirmed = __ldcg(a.seq_lens + batch);

  const float2* stats = a.stats + row * a.chunks;
  const float* weighted = a.weighted + row * a.chunks * head_dim + first_dim + lane * 4;
  const auto load = [&](int i) {
    return *reinterpret_cast<const float4*>(weighted + static_cast<int64_t>(i) * head_dim);
  };
  // The first of a thread's partials is under way while the maximum is found, by every warp for
  // itself.
  float4 first_values = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  float2 first_stat = make_float2(-INFINITY, 0.0f);
  float maximum = -INFINITY;
  const auto load_first = [&] {
    if (thread % kWarpSize < chunks) maximum = stats[thread % kWarpSize].x;
    if (group < chunks) {
      first_values = load(group);
      first_stat = stats[group];
    }
  };
  load_first();
  const int likely_chunks = chunks;
  chunks = chunk_count(a, visible_keys(a, confirmed, token));
  if (chunks != likely_chunks) {
    maximum = -INFINITY;
    load_first();
  }
  for (int i = thread % kWarpSize + kWarpSize; i < chunks; i += kWarpSize) {
    maximum = stats[i].x > maximum ? stats[i].x : maximum;
  }
  maximum = warp_reduce(maximum, Max());

  float sum[5] = {};  // four dimensions, and the divisor
  const auto add = [&](float4 x, float2 stat) {
    const float weight = exp2f(stat.x - maximum);
    sum[0] = fmaf(weight, x.x, sum[0]);
    sum[1] = fmaf(weight, x.y, sum[1]);
    sum[2] = fmaf(weight, x.z, sum[2]);
    sum[3] = fmaf(weight, x.w, sum[3]);
    sum[4] = fmaf(weight, stat.y, sum[4]);
  };
  if (group < chunks) add(first_values, first_stat);
#pragma unroll 4
  for (int i = group + kMergeGroups; i < chunks; i += kMergeGroups) add(load(i), stats[i]);
#pragma unroll
  for (int i = 0; i < 5; ++i) {
#pragma unroll
    for (int offset = kMergeLanes; offset < kWarpSize; offset *= 2) {
      sum[i] += __shfl_xor_sync(kFullWarp, sum[i], offset);
    }
  }
  if (thread % kWarpSize < kMergeLanes) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[warp][lane * 4 + i] = sum[i];
    totals[warp] = sum[4];  // the same from each
  }
  __syncthreads();  // every warp's sums are there

  if (thread < kMergeDims) {
    float result = 0.0f, divisor = 0.0f;
#pragma unroll
    for (int i = 0; i < kMergeWarps; ++i) {
      result += sums[i][thread];
      divisor += totals[i];
    }
    out[row * head_dim + first_dim + thread] = from_float<T>(result / divisor);
  }
}

}  // namespace
}  // namespace td

int64_t td_attention_workspace(int64_t batch, int64_t tokens, int64_t heads, int64_t head_dim,
                               int64_t slots) {
  const int64_t partials = batch * tokens * heads * td::ceil_div<int64_t>(slots, td::kChunk);
  return partials *
         (head_dim * static_cast<int64_t>(sizeof(float)) + static_cast<int64_t>(sizeof(float2)));
}

int td_attention(const void* q, const void* k_cache, const void* v_cache, const int32_t* seq_lens,
                 void* out, void* workspace, int64_t batch, int64_t tokens, int64_t heads,
                 int64_t kv_heads, int64_t head_dim, int64_t slots, int64_t q_batch_stride,
                 int64_t q_token_stride, float scale, int dtype, int device, void* stream) {
  if (batch * tokens * heads == 0) return cudaSuccess;
  if (kv_heads <= 0 || heads % kv_heads != 0 || slots <= 0) return cudaErrorInvalidValue;
  td::Launcher launcher(device, stream);
  const int major = launcher.attribute(cudaDevAttrComputeCapabilityMajor);
  if (launcher.status() != cudaSuccess) return launcher.status();
  const bool simple = dtype == TD_FLOAT32 || major * 10 < td::kOldestTensor;

  td::AttentionArgs a = {};
  a.seq_lens = seq_lens;
  a.q_batch_stride = q_batch_stride;
  a.q_token_stride = q_token_stride;
  a.scale = scale * td::kLog2e;
  a.tokens = static_cast<int>(tokens);
  a.heads = static_cast<int>(heads);
  a.kv_heads = static_cast<int>(kv_heads);
  a.slots = static_cast<int>(slots);
  a.long_from = simple ? td::ceil_div(a.slots, td::kChunk) * td::kChunk : td::kLongFrom;
  a.chunks = td::chunk_count(a, a.slots);
  a.weighted = static_cast<float*>(workspace);
  a.stats = reinterpret_cast<float2*>(a.weighted + batch * tokens * heads * a.chunks * head_dim);

  const int status = (simple ? td::attention_split_simple : td::attention_split_tensor)(
      launcher, q, k_cache, v_cache, batch, head_dim, dtype, a);
  if (status != cudaSuccess) return status;
  return td::with_dtype(dtype, [&](auto tag) -> int {
    using T = typename decltype(tag)::T;
    launcher.run(td::attention_merge_kernel<T>,
                 dim3(static_cast<unsigned>(batch * tokens * heads),
                      static_cast<unsigned>(head_dim / td::kMergeDims)),
                 td::kMergeThreads, static_cast<T*>(out), static_cast<int>(head_dim), a);
    return launcher.status();
  });
}
