// Log-probabilities of the model's own distribution, before bias, penalties, temperature and
// filters: the log of the sum of exponentials, and the likeliest tokens. Launched only for calls
// that ask for them.
//
// First launch: a block a slice of 1024 tokens takes its best ones in turn. Second: a block a row
// merges the slices' lists, which are ranked, by looking at their heads. Sums in a fixed order.

#include "sample.cuh"

namespace td {
namespace {

constexpr int kPackFloats = kPack<float>;
constexpr int kMergeThreads = 512;

template <bool kAligned>
__global__ void __launch_bounds__(kFilterThreads)
    logprob_slices_kernel(const SampleParams* params,  // [1]
                          const SampleRow* rows,       // [B]
                          const float* logits,         // [B, V]
                          SampleScratch s) {
  __shared__ Word scratch[kFilterThreads / kWarpSize];
  __shared__ double sums[kFilterThreads / kWarpSize];
  begin_kernel();
  const int row = blockIdx.y;
  if (rows[row].is_done) return;
  const int start = blockIdx.x * kSlice + threadIdx.x * kPackFloats;
  const float* in = logits + static_cast<int64_t>(row) * s.vocab;
  float value[kPackFloats] = {};
  if (start < s.vocab) load_pack<float, kAligned>(in + start, s.vocab - start, value);
  Word key[kPackFloats];
#pragma unroll
  for (int i = 0; i < kPackFloats; ++i) {
    key[i] = start + i < s.vocab ? make_key(value[i], start + i) : 0;
  }
  const int64_t slice = static_cast<int64_t>(row) * s.splits + blockIdx.x;
  const int count = max(params->num_logprobs, 1);  // the best one scales the sum
  float max_value = 0.0f;
  for (int n = 0; n < count; ++n) {
    Word best = 0;
#pragma unroll
    for (int i = 0; i < kPackFloats; ++i) best = key[i] > best ? key[i] : best;
    best = block_reduce(best, Word{0}, scratch, Max());
    __syncthreads();  // scratch is read by everyone before it is used again
    if (n == 0) max_value = key_value(best);
    if (threadIdx.x == 0) s.tops[slice * kMaxLogprobs + n] = best;
#pragma unroll
    for (int i = 0; i < kPackFloats; ++i) key[i] = key[i] == best ? 0 : key[i];
  }
  double sum = 0;
#pragma unroll
  for (int i = 0; i < kPackFloats; ++i) {
    if (start + i < s.vocab) sum += static_cast<double>(expf(value[i] - max_value));
  }
  sum = block_reduce(sum, 0.0, sums, Sum());
  if (threadIdx.x == 0) s.sums[slice] = sum;
}

__global__ void __launch_bounds__(kMergeThreads)
    logprob_merge_kernel(const SampleParams* params,  // [1]
                         const SampleRow* rows,       // [B]
                         SampleScratch s) {
  constexpr int kHeads = kMaxVocab / kSlice / kMergeThreads;  // slices of a thread
  __shared__ Word scratch[kMergeThreads / kWarpSize];
  __shared__ double sums[kMergeThreads / kWarpSize];
  begin_kernel();
  const int row = blockIdx.x;
  if (rows[row].is_done) return;
  const int count = max(params->num_logprobs, 1);
  const Word* tops = s.tops + static_cast<int64_t>(row) * s.splits * kMaxLogprobs;
  Word head[kHeads];
  int taken[kHeads];
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    const int slice = threadIdx.x + i * kMergeThreads;
    taken[i] = 0;
    head[i] = slice < s.splits ? tops[slice * kMaxLogprobs] : 0;
  }
  double sum = 0;
  Word first_of[kHeads];
#pragma unroll
  for (int i = 0; i < kHeads; ++i) first_of[i] = head[i];
  float max_value = 0.0f;
  for (int n = 0; n < count; ++n) {
    Word best = 0;
#pragma unroll
    for (int i = 0; i < kHeads; ++i) best = head[i] > best ? head[i] : best;
    best = block_reduce(best, Word{0}, scratch, Max());
    __syncthreads();  // scratch is read by everyone before it is used again
    if (n == 0) max_value = key_value(best);
    if (threadIdx.x == 0) s.row_tops[row * kMaxLogprobs + n] = best;
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      if (head[i] == 0 || head[i] != best) continue;
      const int slice = threadIdx.x + i * kMergeThreads;
      head[i] = ++taken[i] < count ? tops[slice * kMaxLogprobs + taken[i]] : 0;
    }
  }
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    const int slice = threadIdx.x + i * kMergeThreads;
    if (slice >= s.splits) break;
    sum += s.sums[static_cast<int64_t>(row) * s.splits + slice] *
           exp(static_cast<double>(key_value(first_of[i])) - max_value);
  }
  sum = block_reduce(sum, 0.0, sums, Sum());
  if (threadIdx.x == 0) s.row_log_sum[row] = max_value + log(sum);
}

}  // namespace

void launch_logprobs(Launcher& launcher, const SampleParams* params, const SampleRow* rows,
                     const float* logits, int64_t batch, const SampleScratch& s) {
  const dim3 grid(s.splits, static_cast<unsigned>(batch));
  const bool aligned = packs_fit<float>(s.vocab, logits);
  launcher.run(aligned ? logprob_slices_kernel<true> : logprob_slices_kernel<false>, grid,
               kFilterThreads, params, rows, logits, s);
  launcher.run(logprob_merge_kernel, dim3(static_cast<unsigned>(batch)), kMergeThreads, params,
               rows, s);
}

}  // namespace td
