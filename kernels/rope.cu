// Rotary embedding in place, appending to the cache, and both in one launch.
//
// One thread owns one 16-byte pack in the first half of a head and its partner in the second half,
// for one token. Heads are counted through q, k, v in that order; what happens to a head follows
// from which of the three it belongs to. Bytes moved: every head read and written once, k and v
// heads written to the cache besides; at decode sizes the time is latency: seq_lens, then the
// tables and the head, then the stores. Any even D; 16-byte accesses where D and the strides allow.

#include "common.cuh"

namespace td {
namespace {

constexpr int kThreads = 128;

template <typename T>
struct RopeArgs {
  T* q;                     // [B, T, H, D]
  T* k;                     // [B, T, K, D]
  const T* v;               // [B, T, K, D]
  const float* cos;         // [table_rows, D/2]
  const float* sin;         // [table_rows, D/2]
  T* k_cache;               // [B, K, S, D]
  T* v_cache;               // [B, K, S, D]
  const int32_t* seq_lens;  // [B]
  int tokens, heads, kv_heads, half_dim, slots, table_rows;
  int64_t q_batch_stride, q_token_stride;
  int64_t k_batch_stride, k_token_stride;
  int64_t v_batch_stride, v_token_stride;
};

template <typename T, bool kAligned, bool kRotate, bool kAppend>
__global__ void __launch_bounds__(kThreads) rope_kernel(const RopeArgs<T> a) {
  const int packs = ceil_div(a.half_dim, kPack<T>);  // per half head
  const int item = blockIdx.y * kThreads + threadIdx.x;
  const int start = item % packs * kPack<T>, left = a.half_dim - start;
  const int any_head = item / packs;
  const bool is_q = any_head < a.heads;
  const bool is_k = !is_q && any_head < a.heads + a.kv_heads;
  const bool is_v = !is_q && !is_k && kAppend && any_head < a.heads + 2 * a.kv_heads;
  const int64_t batch = blockIdx.x / a.tokens, token = blockIdx.x % a.tokens;
  begin_kernel();
  if (!is_q && !is_k && !is_v) return;

  const int position = a.seq_lens[batch] + static_cast<int>(token);
  const int head = is_q ? any_head : is_k ? any_head - a.heads : any_head - a.heads - a.kv_heads;
  const int64_t offset = static_cast<int64_t>(head) * 2 * a.half_dim + start;
  T* source = is_q   ? a.q + batch * a.q_batch_stride + token * a.q_token_stride
              : is_k ? a.k + batch * a.k_batch_stride + token * a.k_token_stride
                     : const_cast<T*>(a.v) + batch * a.v_batch_stride + token * a.v_token_stride;
  source += offset;
  float low[kPack<T>], high[kPack<T>];
  load_pack<T, kAligned>(source, left, low);
  load_pack<T, kAligned>(source + a.half_dim, left, high);

  if (kRotate && !is_v) {
    const int row = position < a.table_rows ? position : a.table_rows - 1;
    const int64_t entry = static_cast<int64_t>(row) * a.half_dim + start;
#pragma unroll
    for (int i = 0; i < kPack<T>; i += kPack<float>) {
      float c[kPack<float>], s[kPack<float>];
      load_pack<float, kAligned>(a.cos + entry + i, left - i, c);
      load_pack<float, kAligned>(a.sin + entry + i, left - i, s);
#pragma unroll
      for (int j = 0; j < kPack<float>; ++j) {
        const float x = low[i + j], y = high[i + j];
        // Written out, so that every instantiation rounds alike.
        low[i + j] = fmaf(x, c[j], -__fmul_rn(y, s[j]));
        high[i + j] = fmaf(y, c[j], __fmul_rn(x, s[j]));
      }
    }
    store_pack<T, kAligned>(source, left, low);
    store_pack<T, kAligned>(source + a.half_dim, left, high);
  }
  if (kAppend && !is_q && position < a.slots) {
    T* cache = (is_k ? a.k_cache : a.v_cache) +
               ((batch * a.kv_heads + head) * a.slots + position) * 2 * a.half_dim + start;
    store_pack<T, kAligned>(cache, left, low);
    store_pack<T, kAligned>(cache + a.half_dim, left, high);
  }
}

// The three entries share one signature; what an entry lacks is null or 0.
template <bool kRotate, bool kAppend>
int launch(void* q, void* k, const void* v, const float* cos, const float* sin, void* k_cache,
           void* v_cache, const int32_t* seq_lens, int64_t batch, int64_t tokens, int64_t heads,
           int64_t kv_heads, int64_t head_dim, int64_t slots, int64_t table_rows,
           const int64_t (&strides)[6], int dtype, int device, void* stream) {
  const int64_t all_heads = heads + (kAppend ? 2 : 1) * kv_heads;
  if (batch * tokens * all_heads * head_dim == 0) return cudaSuccess;
  if (head_dim % 2 != 0) return cudaErrorInvalidValue;
  return with_dtype(dtype, [&](auto tag) -> int {
    using T = typename decltype(tag)::T;
    RopeArgs<T> a = {};
    a.q = static_cast<T*>(q);
    a.k = static_cast<T*>(k);
    a.v = static_cast<const T*>(v);
    a.cos = cos;
    a.sin = sin;
    a.k_cache = static_cast<T*>(k_cache);
    a.v_cache = static_cast<T*>(v_cache);
    a.seq_lens = seq_lens;
    a.tokens = static_cast<int>(tokens);
    a.heads = static_cast<int>(heads);
    a.kv_heads = static_cast<int>(kv_heads);
    a.half_dim = static_cast<int>(head_dim / 2);
    a.slots = static_cast<int>(slots);
    a.table_rows = static_cast<int>(table_rows);
    a.q_batch_stride = strides[0];
    a.q_token_stride = strides[1];
    a.k_batch_stride = strides[2];
    a.k_token_stride = strides[3];
    a.v_batch_stride = strides[4];
    a.v_token_stride = strides[5];

    int64_t all_strides =
        a.half_dim;  // a half head that fills packs makes heads and tables fit too
    for (int64_t stride : strides) all_strides |= stride;
    const bool aligned = packs_fit<T>(all_strides, q, k, v, cos, sin, k_cache, v_cache);
    const int64_t items = all_heads * ceil_div(a.half_dim, kPack<T>);
    const dim3 grid(static_cast<unsigned>(batch * tokens),
                    static_cast<unsigned>(ceil_div<int64_t>(items, kThreads)));
    Launcher launcher(device, stream);
    launcher.run(
        aligned ? rope_kernel<T, true, kRotate, kAppend> : rope_kernel<T, false, kRotate, kAppend>,
        grid, kThreads, a);
    return launcher.status();
  });
}

}  // namespace
}  // namespace td

int td_rope(void* q, void* k, const float* cos, const float* sin, const int32_t* seq_lens,
            int64_t batch, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t head_dim,
            int64_t table_rows, int64_t q_batch_stride, int64_t q_token_stride,
            int64_t k_batch_stride, int64_t k_token_stride, int dtype, int device, void* stream) {
  return td::launch<true, false>(
      q, k, nullptr, cos, sin, nullptr, nullptr, seq_lens, batch, tokens, heads, kv_heads, head_dim,
      0, table_rows, {q_batch_stride, q_token_stride, k_batch_stride, k_token_stride, 0, 0}, dtype,
      device, stream);
}

int td_kv_append(const void* k, const void* v, void* k_cache, void* v_cache,
                 const int32_t* seq_lens, int64_t batch, int64_t tokens, int64_t kv_heads,
                 int64_t head_dim, int64_t slots, int64_t k_batch_stride, int64_t k_token_stride,
                 int64_t v_batch_stride, int64_t v_token_stride, int dtype, int device,
                 void* stream) {
  void* read_only_k = const_cast<void*>(k);  // without kRotate the kernel does not write it
  return td::launch<false, true>(
      nullptr, read_only_k, v, nullptr, nullptr, k_cache, v_cache, seq_lens, batch, tokens, 0,
      kv_heads, head_dim, slots, 0,
      {0, 0, k_batch_stride, k_token_stride, v_batch_stride, v_token_stride}, dtype, device,
      stream);
}

int td_rope_kv_append(void* q, void* k, const void* v, const float* cos, const float* sin,
                      void* k_cache, void* v_cache, const int32_t* seq_lens, int64_t batch,
                      int64_t tokens, int64_t heads, int64_t kv_heads, int64_t head_dim,
                      int64_t slots, int64_t table_rows, int64_t q_batch_stride,
                      int64_t q_token_stride, int64_t k_batch_stride, int64_t k_token_stride,
                      int64_t v_batch_stride, int64_t v_token_stride, int dtype, int device,
                      void* stream) {
  return td::launch<true, true>(q, k, v, cos, sin, k_cache, v_cache, seq_lens, batch, tokens, heads,
                                kv_heads, head_dim, slots, table_rows,
                                {q_batch_stride, q_token_stride, k_batch_stride, k_token_stride,
                                 v_batch_stride, v_token_stride},
                                dtype, device, stream);
}
