// Attention of a few new tokens over the cache, split over the keys (flash decoding).
//
// Blocks turn some of the keys of one kv head into float32 partials (maximum, sum, weighted values)
// of the query rows that read them; partials are then scaled to the common maximum and added up in
// an order that follows from the keys that the row sees. On tensor cores one launch does it all
// (attention_tensor.cu); for float32 and before sm_80 there are two (attention_simple.cu).
//
// The arithmetic of a query row depends on its position alone: neither on which rows share its
// products nor on B, T, S or the grid.
//
// Bytes moved: keys and values once, 2 D elements a key and kv head. At 32K keys, 8 kv heads, D 128
// in bf16 that is 134 MB, 29 us at the 4.6 TB/s that an H200 reads.
//
// Limits: D in {64, 80, 96, 128, 256}.

#include "attention.cuh"

namespace {
constexpr int kOldestTensor = 80;  // compute capability with the products of attention_tensor.cu
}  // namespace

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
  const bool simple = dtype == TD_FLOAT32 || major * 10 < kOldestTensor;

  td::AttentionArgs a = {};
  a.seq_lens = seq_lens;
  a.q_batch_stride = q_batch_stride;
  a.q_token_stride = q_token_stride;
  a.scale = scale * td::kLog2e;
  a.tokens = static_cast<int>(tokens);
  a.heads = static_cast<int>(heads);
  a.kv_heads = static_cast<int>(kv_heads);
  a.slots = static_cast<int>(slots);
  a.weighted = static_cast<float*>(workspace);
  return (simple ? td::attention_simple : td::attention_tensor)(launcher, q, k_cache, v_cache, out,
                                                                batch, head_dim, dtype, a);
}
