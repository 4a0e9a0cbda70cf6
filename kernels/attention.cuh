// What the attention launches share.
#pragma once

#include "common.cuh"

namespace td {

constexpr int kChunk = TD_ATTENTION_CHUNK;  // keys of a partial in attention_simple.cu
constexpr float kLog2e = 1.4426950408889634f;

struct AttentionArgs {
  const int32_t* seq_lens;  // [B]
  float* weighted;          // [B, T, H, chunks, D] partial weighted values
  float2* stats;            // [B, T, H, chunks] partial (maximum, sum); scores in units of log 2
  int64_t q_batch_stride, q_token_stride;
  float scale;  // of the scores, times log2(e)
  int tokens, heads, kv_heads, slots;
  int chunks;  // partials of a query row when the cache is full
};

// Tokens cached before this call, held within the cache. They may be read before the predecessor
// has ended, which changes no length (embed.cu sees to it in a step).
__device__ __forceinline__ int cached_length(const AttentionArgs& a, int64_t batch) {
  const int cached = __ldcg(a.seq_lens + batch);
  return cached < 0 ? 0 : cached < a.slots ? cached : a.slots - 1;
}

// Keys that query token t of a row sees.
__device__ __forceinline__ int visible_keys(const AttentionArgs& a, int cached, int t) {
  const int keys = cached + t + 1;
  return keys < a.slots ? keys : a.slots;
}

// Index in [B, T, H] of the query row that is number `row`, token by token, of a kv head's.
__device__ __forceinline__ int64_t query_row(const AttentionArgs& a, int64_t batch, int kv_head,
                                             int row) {
  const int group_size = a.heads / a.kv_heads;
  return (batch * a.tokens + row / group_size) * a.heads + kv_head * group_size + row % group_size;
}

// Calls launch(Dim<D>{}) with a head_dim that there are kernels for.
template <int kDim>
struct Dim {
  static constexpr int kValue = kDim;
};

template <typename F>
int with_head_dim(int64_t head_dim, F&& launch) {
  switch (head_dim) {
    case 64:
      return launch(Dim<64>{});
    case 80:
      return launch(Dim<80>{});
    case 96:
      return launch(Dim<96>{});
    case 128:
      return launch(Dim<128>{});
    case 256:
      return launch(Dim<256>{});
    default:
      return cudaErrorInvalidValue;
  }
}

// On tensor cores (attention_tensor.cu; 16-bit types, sm_80), and without (attention_simple.cu).
// Both set `chunks` and where `stats` are; `weighted` is the start of the workspace.
int attention_tensor(Launcher& launcher, const void* q, const void* k_cache, const void* v_cache,
                     void* out, int64_t batch, int64_t head_dim, int dtype, AttentionArgs& a);
int attention_simple(Launcher& launcher, const void* q, const void* k_cache, const void* v_cache,
                     void* out, int64_t batch, int64_t head_dim, int dtype, AttentionArgs& a);

}  // namespace td
