// What the attention launches share: their arguments, and where the chunks of keys lie.
//
// A chunk is a fixed range of positions that one block turns into a partial. Chunks of
// kChunk keys let a short context spread over the GPU; beyond kLongFrom positions there are blocks
// enough, and chunks of kLongChunk keep the partials few. Where a chunk lies depends on positions
// alone, so the additions of a query row do too.
#pragma once

#include "common.cuh"

#ifndef TD_ATTENTION_LONG_CHUNK
#define TD_ATTENTION_LONG_CHUNK 128
#define TD_ATTENTION_LONG_FROM 4096
#endif

namespace td {

constexpr int kChunk = TD_ATTENTION_CHUNK;
constexpr int kLongChunk = TD_ATTENTION_LONG_CHUNK;
constexpr int kLongFrom = TD_ATTENTION_LONG_FROM;
constexpr float kLog2e = 1.4426950408889634f;
static_assert(kLongChunk % kChunk == 0 && kLongFrom % kChunk == 0);

struct AttentionArgs {
  const int32_t* seq_lens;  // [B]
  float* weighted;          // [B, T, H, chunks, D] partial weighted values
  float2* stats;            // [B, T, H, chunks] partial (maximum, sum); scores in units of log 2
  int64_t q_batch_stride, q_token_stride;
  float scale;  // of the scores, times log2(e)
  int tokens, heads, kv_heads, slots;
  int long_from;  // position of the first long chunk; past every slot: all chunks are short
  int chunks;     // of the whole capacity
};

// Keys that query token t of a row sees.
__device__ __forceinline__ int visible_keys(const AttentionArgs& a, int cached, int t) {
  const int keys = cached + t + 1;
  return keys < a.slots ? keys : a.slots;
}

// A row's length as it is before the predecessor has ended: right or not, within the cache.
__device__ __forceinline__ int likely_length(const AttentionArgs& a, int64_t batch) {
  const int cached = __ldcg(a.seq_lens + batch);
  return cached < 0 ? 0 : cached < a.slots ? cached : a.slots - 1;
}

// Chunks that hold the first `keys` keys.
__host__ __device__ __forceinline__ int chunk_count(const AttentionArgs& a, int keys) {
  if (keys <= a.long_from) return ceil_div(keys, kChunk);
  return a.long_from / kChunk + ceil_div(keys - a.long_from, kLongChunk);
}

// Position of the first key of a chunk.
__device__ __forceinline__ int chunk_start(const AttentionArgs& a, int chunk) {
  const int far = chunk - a.long_from / kChunk;
  return far <= 0 ? chunk * kChunk : a.long_from + far * kLongChunk;
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

// The split launch: on tensor cores (attention_tensor.cu; 16-bit types, sm_80), and without
// (attention_simple.cu; all chunks must be short).
int attention_split_tensor(Launcher& launcher, const void* q, const void* k_cache,
                           const void* v_cache, int64_t batch, int64_t head_dim, int dtype,
                           const AttentionArgs& a);
int attention_split_simple(Launcher& launcher, const void* q, const void* k_cache,
                           const void* v_cache, int64_t batch, int64_t head_dim, int dtype,
                           const AttentionArgs& a);

}  // namespace td
