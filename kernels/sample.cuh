// What the sampling kernels share, and what a kernel needs to evaluate or draw from a row's
// distribution without having it in memory.
//
// The order of all filters is that of sampling.py. A row's adjusted logits z (bias, bans and
// penalties applied) give each token an integer weight
//
//   w = round(2^42 exp((z - max) / temperature))            0 from about 29.8 nats down
//
// and everything after that is integer: sums do not depend on the order of additions, cuts are
// exact, and the same seed draws the same token however the work is split. Tokens are ranked by
// (z descending, id ascending); top-k, top-p and min-p each keep a prefix of that ranking, so all
// of them together keep one prefix, and a row's distribution is a few numbers:
//
//   Distribution d;  p(token) = d.weight(z, id) / d.total    (0 past the cut)
//
// A uniform of 62 random bits and `scale_uniform` give a point in [0, total): the token whose
// weight covers the point, in any fixed order of the tokens, is a draw. 62 bits over weights of
// 2^-42 draw a token 20 nats down at its true rate, to one part in 10^4.
#pragma once

#include "common.cuh"

namespace td {

using Word = unsigned long long;  // uint64_t under the name that atomics know

constexpr float kWeightOne = 4398046511104.0f;  // 2^42, the weight of the best token
constexpr int kMaxVocab = 1 << 20;              // weights add up to less than 2^62
constexpr int kMaxStops = 32;                   // one lane each
constexpr int kMaxLogprobs = 20;
constexpr int kRingWords = 64;  // per step and row; see publish() in sample_choose.cu

// Written by the host before a generation, read by every step. ops/ref_sample.py has the layout
// too.
struct SampleParams {
  Word seed;
  double top_p;                           // 1 and above: off
  float temperature;                      // 0: greedy
  float log_min_p;                        // -inf: off
  float repetition, presence, frequency;  // 1, 0, 0: off
  int32_t top_k;                          // 0: off
  int32_t has_bias;                       // whether the bias row is read
  int32_t has_counts;                     // whether the counts are read and kept
  int32_t num_stops;                      // of `stops`
  int32_t num_logprobs;                   // alternatives to report, where logprobs are
  int32_t stops[kMaxStops];               // ids that end a row
};
static_assert(sizeof(SampleParams) == 184, "ops/ref_sample.py writes this layout");

// What a row carries from step to step.
struct SampleRow {
  Word draws;         // uniforms used so far: the counter of the generator
  uint32_t sequence;  // steps so far, over all generations: tags what goes to the host
  int32_t is_done;    // the end was met: later steps change nothing
  int32_t remaining;  // tokens until the row is done; 0: no limit
  int32_t unused;
};
static_assert(sizeof(SampleRow) == 24, "ops/ref_sample.py writes this layout");

// A row's count of a token: how often it was generated, and this bit if the prompt has it.
constexpr int32_t kInPrompt = 1 << 30;

// ---- order -----------------------------------------------------------------------------------

// A float as an unsigned number in the same order; -0 and +0 alike, NaN below everything.
__device__ __forceinline__ uint32_t ordered_bits(float value) {
  const uint32_t raw = __float_as_uint(value + 0.0f);
  if (value != value) return 0;
  return raw & 0x80000000u ? ~raw : raw | 0x80000000u;
}

__device__ __forceinline__ float from_ordered_bits(uint32_t ordered) {
  return __uint_as_float(ordered & 0x80000000u ? ordered & 0x7fffffffu : ~ordered);
}

// Orders by value, then by lower id; zero is below every key.
__device__ __forceinline__ Word make_key(float value, uint32_t id) {
  return static_cast<Word>(ordered_bits(value)) << 32 | static_cast<uint32_t>(~id);
}

__device__ __forceinline__ float key_value(Word key) {
  return from_ordered_bits(static_cast<uint32_t>(key >> 32));
}

__device__ __forceinline__ uint32_t key_id(Word key) { return ~static_cast<uint32_t>(key); }

__device__ __forceinline__ bool is_finite(float x) {
  return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u;
}

// ---- weights ---------------------------------------------------------------------------------

// Nats below the best token, after temperature; 0 or negative. Follows the order of z exactly.
__device__ __forceinline__ float distance(float z, float max, float temperature) {
  return __fdiv_rn(z - max, temperature);
}

__device__ __forceinline__ Word weight_at(float x) { return __float2ull_rn(expf(x) * kWeightOne); }

// Tokens with a weight fall into bins of 1/32 nat, which follow their ranking.
constexpr int kBins = 1024;
__device__ __forceinline__ int bin_at(float x) {
  return min(static_cast<int>(fmaxf(x, -31.9f) * -32.0f), kBins - 1);
}

// A row after all filters. Tokens in bins before cut_bin are kept, in it those of a key not below
// cut_key.
struct Distribution {
  float max;          // of the adjusted logits
  float temperature;  // 0: the best token, key `cut_key`, is all there is
  int32_t cut_bin;
  int32_t is_valid;  // 0: no token can be chosen (NaN, +inf, or everything banned)
  Word cut_key;
  Word total;  // sum of the kept weights

  // The weight of a token that has adjusted logit z; 0 when a filter removed it.
  __device__ Word weight(float z, uint32_t id) const {
    const Word key = make_key(z, id);
    if (temperature == 0.0f) return key == cut_key ? total : 0;
    const float x = distance(z, max, temperature);
    const Word w = weight_at(x);
    if (w == 0) return 0;
    const int bin = bin_at(x);
    return bin < cut_bin || (bin == cut_bin && key >= cut_key) ? w : 0;
  }
};
static_assert(sizeof(Distribution) == 32, "ops/sample.py gives this layout away");

// ---- random numbers --------------------------------------------------------------------------

// Philox4x32-10: 128 random bits for each counter and key.
// Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", section 5.
__device__ __forceinline__ uint4 philox(uint4 counter, Word key) {
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const Word a = static_cast<Word>(0xD2511F53u) * counter.x;
    const Word b = static_cast<Word>(0xCD9E8D57u) * counter.z;
    counter = make_uint4(static_cast<uint32_t>(b >> 32) ^ counter.y ^ k0, static_cast<uint32_t>(b),
                         static_cast<uint32_t>(a >> 32) ^ counter.w ^ k1, static_cast<uint32_t>(a));
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return counter;
}

// What a uniform is for: draws of different purpose at one count are independent.
enum UniformUse : uint32_t { kDrawToken = 0, kAcceptToken = 1, kDrawResidual = 2, kDrawDraft = 3 };

// 62 random bits; `draws` counts the uniforms of a row so far.
__device__ __forceinline__ Word uniform62(Word seed, Word draws, uint32_t row, UniformUse use) {
  const uint4 r = philox(
      make_uint4(static_cast<uint32_t>(draws), static_cast<uint32_t>(draws >> 32), row, use), seed);
  return static_cast<Word>(r.x >> 1) << 31 | r.y >> 1;
}

// floor(uniform * total / 2^62): a point in [0, total), total at least 1 and below 2^62.
__device__ __forceinline__ Word scale_uniform(Word uniform, Word total) {
  return __umul64hi(uniform << 2, total);
}

// ---- block-wide helpers ----------------------------------------------------------------------

struct Sum {
  template <typename N>
  __device__ N operator()(N a, N b) const {
    return a + b;
  }
};

// Sum of x over the threads before this one; `total` over all. `scratch` has one slot a warp and is
// free again after the next barrier.
template <typename N>
__device__ __forceinline__ N block_exclusive_sum(N x, N* scratch, N* total) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int warps = blockDim.x / kWarpSize;
  N inclusive = x;
#pragma unroll
  for (int offset = 1; offset < kWarpSize; offset *= 2) {
    const N below = __shfl_up_sync(kFullWarp, inclusive, offset);
    if (lane >= offset) inclusive += below;
  }
  if (lane == kWarpSize - 1) scratch[warp] = inclusive;
  __syncthreads();  // every warp's sum is in scratch
  N before = 0, all = 0;
  for (int i = 0; i < warps; ++i) {
    before += i < warp ? scratch[i] : 0;
    all += scratch[i];
  }
  *total = all;
  return before + inclusive - x;
}

// The last of kBins ascending prefix sums that is not above `point`, the first being 0. Called by
// whole warps with the same arguments.
template <typename N>
__device__ __forceinline__ int find_bin(const N* prefix, N point) {
  constexpr int kGroups = kBins / kWarpSize;
  static_assert(kGroups == kWarpSize);
  const int lane = threadIdx.x % kWarpSize;
  const unsigned groups = __ballot_sync(kFullWarp, prefix[lane * kWarpSize] <= point);
  const int group = 31 - __clz(static_cast<int>(groups));
  const unsigned bins = __ballot_sync(kFullWarp, prefix[group * kWarpSize + lane] <= point);
  return group * kWarpSize + 31 - __clz(static_cast<int>(bins));
}

// Weights and numbers of tokens in the bins before each; [kBins] has the totals.
struct Prefixes {
  Word mass[kBins + 1];
  uint32_t count[kBins + 1];
};

// The prefixes of a histogram; a barrier must follow before they are read.
template <int kThreads, typename M, typename C>
__device__ __forceinline__ void prefix_sums(Prefixes& out, M mass, C count, Word* scratch) {
  constexpr int kPer = kBins / kThreads;
  Word m[kPer], mass_sum = 0;
  uint32_t c[kPer], count_sum = 0;
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const int bin = threadIdx.x * kPer + i;
    mass_sum += m[i] = mass[bin];
    count_sum += c[i] = count[bin];
  }
  Word mass_total, count_total;
  Word mass_before = block_exclusive_sum(mass_sum, scratch, &mass_total);
  __syncthreads();  // scratch is read by everyone before it is used again
  Word count_before = block_exclusive_sum(static_cast<Word>(count_sum), scratch, &count_total);
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const int bin = threadIdx.x * kPer + i;
    out.mass[bin] = mass_before;
    out.count[bin] = static_cast<uint32_t>(count_before);
    mass_before += m[i];
    count_before += c[i];
  }
  if (threadIdx.x == 0) {
    out.mass[kBins] = mass_total;
    out.count[kBins] = static_cast<uint32_t>(count_total);
  }
}

// ---- scratch memory --------------------------------------------------------------------------

constexpr int kFilterThreads = 256;         // of the kernels that go over the vocabulary
constexpr int kSlice = 4 * kFilterThreads;  // tokens of one of their blocks, one load a thread
constexpr int kChunk = 32;                  // tokens whose best z is known, one line of z
constexpr int kPart = 2048;                 // of a block of the kernel that chooses
constexpr int kStarts = kBins + 1;

// Pointers into the workspace; every row has its own part of each.
struct SampleScratch {
  Word* maxima;                // [B, splits] best key of a slice; all ones: NaN or +inf in it
  Distribution* distribution;  // [B]
  float* chunk_max;            // [B, chunks] best z of 32 tokens; +inf: NaN or +inf among them
  Word* mass;                  // [B, kBins]
  uint32_t* count;             // [B, kBins]
  uint32_t* arrived;           // [B] blocks whose part is in mass, count, sorted and starts
  Word* sorted;                // [B, parts, kPart] keys of a part's tokens, bin after bin
  uint16_t* starts;            // [B, parts, kStarts] where a bin starts in them; their number
  Word* tops;                  // [B, splits, kMaxLogprobs] a slice's likeliest tokens
  double* sums;                // [B, splits] exp relative to the slice's best
  Word* row_tops;              // [B, kMaxLogprobs]
  double* row_log_sum;         // [B] log of the sum of exp of the model's logits
  float* z;                    // [B, padded] adjusted logits, -inf after the last
  int splits, chunks, parts, padded, vocab;
};

// Lays the scratch out; `bytes`, unless null, receives its size.
SampleScratch sample_scratch(void* workspace, int64_t batch, int64_t vocab, int64_t* bytes);

// Maxima, and with has_filters also z, the chunks' maxima and empty tables. rows may be null: no
// row has ended.
void launch_adjust(Launcher& launcher, const SampleParams* params, const SampleRow* rows,
                   const float* logits, const float* bias, const int32_t* counts, int64_t batch,
                   const SampleScratch& s, bool has_filters);

// The model's own log-probabilities: row_tops and row_log_sum.
void launch_logprobs(Launcher& launcher, const SampleParams* params, const SampleRow* rows,
                     const float* logits, int64_t batch, const SampleScratch& s);

}  // namespace td
