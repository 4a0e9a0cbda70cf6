// The whole boundary between Python and the kernels: raw pointers, sizes, a device and a stream.
//
// Common to every entry td_<op>:
//   - Returns a cudaError_t as int, 0 for success. A value the op does not take (dtype, head_dim)
//     is cudaErrorInvalidValue. Nothing throws, allocates or synchronises, so every entry may run
//     under stream capture.
//   - `device` is made current for the call and the caller's device is restored; the work goes on
//     `stream` (a cudaStream_t of that device).
//   - `dtype` is a TdDtype and names the storage type of every tensor not said to be otherwise.
//     Arithmetic is float32 inside.
//   - Sizes and strides are in elements. "Dense" means the last dimension has stride 1 and the
//     dimensions before it are packed. Pointers need the alignment of one element, unless the entry
//     says 16 bytes; 16-byte alignment is faster everywhere.
//   - Tensors must not overlap except where the entry allows it.
//   - Shape letters: B batch, T new tokens, S cache slots, H query heads, K kv heads, D head_dim,
//     E hidden_size, F intermediate_size, V vocab.
//   - `seq_lens` is int32 [B] on the device: tokens cached before this call. New token t of row b
//     has position and cache slot seq_lens[b] + t. Lengths are read by the kernels alone, so a
//     captured launch follows them.
//   - The arithmetic of one row depends neither on how many rows there are nor on S.
#pragma once

#include <stdint.h>

#define TD_ABI_VERSION 4       // bump when a signature below changes
#define TD_ATTENTION_CHUNK 64  // keys, at least, of an attention partial
#define TD_ARGMAX_SPLITS 128   // partial maxima per row of logits; sample.cu

enum TdDtype { TD_FLOAT32 = 0, TD_FLOAT16 = 1, TD_BFLOAT16 = 2 };

#ifdef __cplusplus
extern "C" {
#endif

// Facts about the binary and the machine; none of these touches a GPU or creates a context.
int td_abi_version(void);                // TD_ABI_VERSION of the binary
int td_cuda_version(void);               // toolkit of the build, 1000 * major + 10 * minor
int td_driver_version(void);             // newest CUDA the driver supports, same form; 0: no driver
const char* td_archs(void);              // targets of the build, "sm_80 sm_90 compute_90"
const char* td_error_string(int error);  // cudaGetErrorString

// out = x / sqrt(mean(x^2) + eps) * weight; the quotient is rounded to dtype before the product.
//   x [rows, E] row stride x_stride; weight [E]; out [rows, E] dense, may be x when that is dense.
int td_rms_norm(const void* x, const void* weight, void* out, int64_t rows, int64_t hidden_size,
                int64_t x_stride, float eps, int dtype, int device, void* stream);

// residual += x, rounded to dtype; then out = rms_norm(residual).
//   x, residual, out [rows, E] dense; weight [E]. out may be x.
int td_add_rms_norm(const void* x, void* residual, const void* weight, void* out, int64_t rows,
                    int64_t hidden_size, float eps, int dtype, int device, void* stream);

// Rotates pairs (i, i + D/2) of every head by the angles in row `position` of the tables, in place.
//   q [B, T, H, D], k [B, T, K, D]: last two dimensions dense, strides of the first two given.
//   cos, sin float32 [S, D/2] dense; a position past the table takes its last row. D even.
int td_rope(void* q, void* k, const float* cos, const float* sin, const int32_t* seq_lens,
            int64_t batch, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t head_dim,
            int64_t table_rows, int64_t q_batch_stride, int64_t q_token_stride,
            int64_t k_batch_stride, int64_t k_token_stride, int dtype, int device, void* stream);

// Copies k and v into cache slots seq_lens[b] + t; tokens whose slot is past S are dropped.
//   k, v [B, T, K, D]: last two dimensions dense; k_cache, v_cache [B, K, S, D] dense. D even.
int td_kv_append(const void* k, const void* v, void* k_cache, void* v_cache,
                 const int32_t* seq_lens, int64_t batch, int64_t tokens, int64_t kv_heads,
                 int64_t head_dim, int64_t slots, int64_t k_batch_stride, int64_t k_token_stride,
                 int64_t v_batch_stride, int64_t v_token_stride, int dtype, int device,
                 void* stream);

// td_rope, then td_kv_append of the rotated k, in one launch and with the same bits.
int td_rope_kv_append(void* q, void* k, const void* v, const float* cos, const float* sin,
                      void* k_cache, void* v_cache, const int32_t* seq_lens, int64_t batch,
                      int64_t tokens, int64_t heads, int64_t kv_heads, int64_t head_dim,
                      int64_t slots, int64_t table_rows, int64_t q_batch_stride,
                      int64_t q_token_stride, int64_t k_batch_stride, int64_t k_token_stride,
                      int64_t v_batch_stride, int64_t v_token_stride, int dtype, int device,
                      void* stream);

// out = silu(gate) * up; silu is rounded to dtype before the product.
//   gate_up [rows, 2F] dense, gate first; out [rows, F] dense.
int td_silu_mul(const void* gate_up, void* out, int64_t rows, int64_t intermediate_size, int dtype,
                int device, void* stream);

// Query t of row b attends to keys 0 .. seq_lens[b] + t of kv head h / (H / K).
//   q [B, T, H, D]: last two dimensions dense; k_cache, v_cache [B, K, S, D] dense, 16-byte
//   aligned; out [B, T, H * D] dense. D is 64, 80, 96, 128 or 256; H a multiple of K. Slots past a
//   row's end may hold anything. Lengths, and the slots below them, are read early: they must not
//   change in the launch directly in front of this one (a step has td_embed there). workspace:
//   td_attention_workspace bytes, 16-byte aligned, its contents need no preparation and mean nothing
//   afterwards.
int td_attention(const void* q, const void* k_cache, const void* v_cache, const int32_t* seq_lens,
                 void* out, void* workspace, int64_t batch, int64_t tokens, int64_t heads,
                 int64_t kv_heads, int64_t head_dim, int64_t slots, int64_t q_batch_stride,
                 int64_t q_token_stride, float scale, int dtype, int device, void* stream);
int64_t td_attention_workspace(int64_t batch, int64_t tokens, int64_t heads, int64_t head_dim,
                               int64_t slots);

// The four products of a decode step, fused with what stands around them. float16 or bfloat16;
// R = 1 to 16 rows; every pointer 16-byte aligned; K a multiple of 8; needs sm_80.
// All weights row-major [N, K]; norm [K]; norm(x) is rms_norm with the rounding of td_rms_norm.

// q, k, v = norm(x) weight^T, then rope of q and k, then kv_append of k and v.
//   x [B * T, E]; weight [(H + 2 K) * D, E]; q [B * T, H, D]; the rest as in td_rope_kv_append.
int td_linear_qkv(const void* x, const void* norm, const void* weight, const float* cos,
                  const float* sin, void* q, void* k_cache, void* v_cache, const int32_t* seq_lens,
                  int64_t batch, int64_t tokens, int64_t hidden_size, int64_t heads,
                  int64_t kv_heads, int64_t head_dim, int64_t slots, int64_t table_rows, float eps,
                  int dtype, int device, void* stream);

// residual += x weight^T.   x [R, K]; weight [N, K]; residual [R, N], must not overlap x.
int td_linear_add(const void* x, const void* weight, void* residual, int64_t rows, int64_t inputs,
                  int64_t outputs, int dtype, int device, void* stream);

// out = silu(gate) * up with gate, up = norm(x) weight^T.
//   x [R, E]; weight [2F, E], gate first; out [R, F]; F a multiple of 4.
int td_linear_gate_up(const void* x, const void* norm, const void* weight, void* out, int64_t rows,
                      int64_t hidden_size, int64_t intermediate_size, float eps, int dtype,
                      int device, void* stream);

// logits = norm(x) weight^T in float32; then the lengths grow by T, unless they are null.
//   x [B, T, E]; weight [V, E]; logits float32 [B, T, V].
int td_linear_logits(const void* x, const void* norm, const void* weight, float* logits,
                     int32_t* seq_lens, int64_t batch, int64_t tokens, int64_t hidden_size,
                     int64_t vocab_size, float eps, int dtype, int device, void* stream);

// out[r] = table[ids[r]].   ids int64 [R], ids outside the table take its nearest row; table [V,
// E].
int td_embed(const int64_t* ids, const void* table, void* out, int64_t rows, int64_t hidden_size,
             int64_t vocab_size, int dtype, int device, void* stream);

// token[b] = index of the largest logit of row b, the lowest one among equals; NaN is the smallest.
//   logits [B, V] row stride logits_stride; token int64 [B]; nonfinite int32 [1] or null: set to 1
//   when a logit is NaN or infinite, else left alone. workspace: td_argmax_workspace bytes, 8-byte
//   aligned, no preparation.
int td_argmax(const void* logits, int64_t* token, int32_t* nonfinite, void* workspace,
              int64_t batch, int64_t vocab_size, int64_t logits_stride, int dtype, int device,
              void* stream);
int64_t td_argmax_workspace(int64_t batch);

// One token a row by the order of filters in sampling.py, and all that a step leaves behind.
//   logits [B, V]; params one SampleParams, rows SampleRow [B] (sample.cuh has both); bias [V],
//   counts [B, V] (int32, sample.cuh) are read where params say so. tokens int64 [B]: the next
//   input. seq_lens int32 [B] or null: taken back by 1 for a row that ended earlier. ring uint64
//   [slots, B, 64] or null, memory that host and device share. stages is a sum of TdSampleStage;
//   without filters every row is greedy. dtype is TD_FLOAT32. workspace: td_sample_workspace bytes,
//   16-byte aligned, no preparation. V at most 2^20.
enum TdSampleStage { TD_SAMPLE_FILTERS = 1, TD_SAMPLE_LOGPROBS = 2 };
int td_sample(const float* logits, const void* params, void* rows, const float* bias,
              int32_t* counts, int64_t* tokens, int32_t* seq_lens, void* ring, void* workspace,
              int64_t batch, int64_t vocab_size, int64_t slots, int64_t stages, int dtype,
              int device, void* stream);
int64_t td_sample_workspace(int64_t batch, int64_t vocab_size);

// The distribution each row would be drawn from, as Distribution [R] (sample.cuh) at the start of
// the workspace and adjusted logits float32 [R, V padded to 4] at the next 16-byte boundary.
int td_distribution(const float* logits, const void* params, const float* bias, int32_t* counts,
                    void* workspace, int64_t rows, int64_t vocab_size, int dtype, int device,
                    void* stream);

// The two ends of a speculative round. `state` is a RoundState of round.cuh; dtype is TD_FLOAT32.

// draft[0 .. k-1] = the tokens that followed the longest suffix of the text, max_n to min_n tokens,
// where it occurred before, most recently; state->proposed = k, or 0 if it did not.
//   history int32 [capacity], state->length of them in use; draft int64 [k], k 1 to 15; max_n up to
//   16. workspace: td_ngram_workspace bytes, 8-byte aligned, no preparation.
int td_ngram(const int32_t* history, void* state, int64_t* draft, void* workspace, int64_t capacity,
             int64_t k, int64_t max_n, int64_t min_n, int dtype, int device, void* stream);
int64_t td_ngram_workspace(int64_t capacity);

// token[0] = a draw from one row's distribution, the index-th of the round.
//   params SampleParams; q: a td_distribution workspace of one row. workspace: td_accept_workspace.
int td_draft_token(const void* params, const void* state, const void* q, int64_t* token,
                   void* workspace, int64_t vocab_size, int64_t index, int dtype, int device,
                   void* stream);

// Accepts a prefix of the draft, draws the token after it, appends both to the text, and sets the
// lengths: seq_lens to the text less its last token, draft_lens to one less. draft_input takes the
// text's last two tokens, with 0 for an id from draft_rows on.
//   p: a td_distribution workspace of k + 1 rows; q: k of one row, q_stride bytes apart, or null:
//   all mass on the drafted token. draft int64 [k], k 0 to 15; has_proposed: state->proposed says
//   how many of them there are. history int32, room for k + 1 more; next int64 [1]: the text's last
//   token; seq_lens, draft_lens (or null) int32 [1]; draft_input (or null) int64 [2]; ring int64
//   [slots, 32], pinned or on the device. draft_vocab_size at most vocab_size. workspace:
//   td_accept_workspace bytes, 8-byte aligned.
int td_accept(const void* params, void* state, const void* p, const void* q, const int64_t* draft,
              int32_t* history, int64_t* next, int32_t* seq_lens, int32_t* draft_lens,
              int64_t* draft_input, void* ring, void* workspace, int64_t k, int64_t vocab_size,
              int64_t draft_vocab_size, int64_t q_stride, int64_t draft_rows, int64_t has_proposed,
              int64_t slots, int dtype, int device, void* stream);
int64_t td_accept_workspace(int64_t vocab_size);

// td_accept of distributions that are all on the best token of each row, and of drafts without a q.
//   logits float32 [k + 1, V], k 0 to 15. workspace: td_accept_best_workspace bytes, 8-byte
//   aligned, no preparation. The rest as in td_accept.
int td_accept_best(const void* params, void* state, const float* logits, const int64_t* draft,
                   int32_t* history, int64_t* next, int32_t* seq_lens, int32_t* draft_lens,
                   int64_t* draft_input, void* ring, void* workspace, int64_t k, int64_t vocab_size,
                   int64_t draft_rows, int64_t has_proposed, int64_t slots, int dtype, int device,
                   void* stream);
int64_t td_accept_best_workspace(int64_t rows);

// Reads all whole tiles of 32 KB of data (16-byte aligned); writes nothing. sink uint32 [1].
int td_read(const void* data, int64_t bytes, void* sink, int device, void* stream);

#ifdef __cplusplus
}
#endif
