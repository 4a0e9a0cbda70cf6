// Sampling, first half: adjusted logits, their maximum, a histogram of weights, and a short list of
// the tokens that can still decide anything. sample.cuh has the arithmetic, sample_choose.cu ends.
//
// No sort of the vocabulary. With the best token known, every token's weight falls into one of 1024
// bins of 1/32 nat; the bins' counts and sums say in which bins the k-th token, the edge of the
// nucleus, the min-p edge and the drawn point lie, up to the few bins that the inexactness of one
// bound adds to the next. Only tokens of those bins are listed, and one block ranks the list.
//
// Three launches of one block a slice of 1024 tokens, so that V = 128256 keeps nearly every
// multiprocessor at work; each is bound by its latency, not by the 0.5 MB it reads from L2.
// Dependent launches rather than grid-wide barriers: the boundary costs the same and cannot hang.

#include <type_traits>

#include "sample_plan.cuh"

namespace td {

SampleScratch sample_scratch(void* workspace, int64_t batch, int64_t vocab, int64_t* bytes) {
  constexpr int64_t kAlign = 16;
  SampleScratch s = {};
  s.vocab = static_cast<int>(vocab);
  s.splits = static_cast<int>(ceil_div<int64_t>(vocab, kSlice));
  s.padded = static_cast<int>(ceil_div<int64_t>(vocab, 4) * 4);
  int64_t used = 0;
  const auto place = [&](auto*& pointer, int64_t count) {
    using T = std::remove_reference_t<decltype(*pointer)>;
    pointer = reinterpret_cast<T*>(static_cast<char*>(workspace) + used);
    used += ceil_div<int64_t>(count * static_cast<int64_t>(sizeof(T)), kAlign) * kAlign;
  };
  place(s.distribution, batch);  // first, and z second: callers find them there
  place(s.z, batch * s.padded);
  place(s.maxima, batch * s.splits);
  place(s.mass, batch * kBins);
  place(s.count, batch * kBins);
  place(s.list, batch * kListed);
  place(s.listed, batch);
  place(s.tops, batch * s.splits * kMaxLogprobs);
  place(s.sums, batch * s.splits);
  place(s.row_tops, batch * kMaxLogprobs);
  place(s.row_log_sum, batch);
  if (bytes != nullptr) *bytes = used;
  return s;
}

namespace {

constexpr int kPackFloats = kPack<float>;
constexpr Word kPoisoned = ~Word{0};

// Stages 1 and 2 of sampling.py. Separate roundings: a fused multiply-add would not be the twin's.
__device__ __forceinline__ float adjusted(float z, int id, const SampleParams& params,
                                          const float* bias, const int32_t* counts) {
  if (params.has_bias) z = __fadd_rn(z, bias[id]);
  if (params.has_counts) {
    const int32_t count = counts[id];
    if (count != 0 && params.repetition != 1.0f) {
      z = z > 0.0f ? __fdiv_rn(z, params.repetition) : __fmul_rn(z, params.repetition);
    }
    const int32_t generated = count & (kInPrompt - 1);
    if (generated != 0) {
      z = __fadd_rn(z, -params.presence);
      z = __fadd_rn(z, -__fmul_rn(params.frequency, static_cast<float>(generated)));
    }
  }
  return z;
}

template <bool kAligned>
__global__ void __launch_bounds__(kFilterThreads)
    adjust_kernel(const SampleParams* params,  // [1]
                  const SampleRow* rows,       // [B] or null
                  const float* logits,         // [B, V]
                  const float* bias,           // [V]
                  const int32_t* counts,       // [B, V]
                  SampleScratch s, bool needs_histogram) {
  __shared__ Word scratch[kFilterThreads / kWarpSize];
  begin_kernel();
  const int row = blockIdx.y;
  if (rows != nullptr && rows[row].is_done) return;
  if (needs_histogram) {  // empty: the next kernel adds to it
    const int stride = gridDim.x * kFilterThreads;
    for (int bin = blockIdx.x * kFilterThreads + threadIdx.x; bin < kBins; bin += stride) {
      s.mass[row * kBins + bin] = 0;
      s.count[row * kBins + bin] = 0;
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) s.listed[row] = 0;
  }
  const float* in = logits + static_cast<int64_t>(row) * s.vocab;
  const int32_t* row_counts = counts + static_cast<int64_t>(row) * s.vocab;
  float* out = s.z + static_cast<int64_t>(row) * s.padded;
  const int start = blockIdx.x * kSlice + threadIdx.x * kPackFloats;
  Word best = 0;
  bool is_bad = false;
  if (start < s.vocab) {
    float value[kPackFloats];
    load_pack<float, kAligned>(in + start, s.vocab - start, value);
#pragma unroll
    for (int i = 0; i < kPackFloats; ++i) {
      const int id = start + i;
      if (!kAligned && id >= s.vocab) {
        value[i] = -INFINITY;
        continue;
      }
      is_bad |= value[i] != value[i] || value[i] == INFINITY;
      value[i] = adjusted(value[i], id, *params, bias, row_counts);
      const Word key = make_key(value[i], id);
      best = key > best ? key : best;
    }
    if (needs_histogram) store_pack<float, true>(out + start, kPackFloats, value);
  }
  best = block_reduce(is_bad ? kPoisoned : best, Word{0}, scratch, Max());
  if (threadIdx.x == 0) s.maxima[row * s.splits + blockIdx.x] = best;
}

// What the two kernels below know of a row before they look at tokens.
struct Row {
  bool is_sampled;  // false: nothing to do for this row
  float max, temperature;
};

__device__ __forceinline__ Row open_row(const SampleParams& params, const SampleRow* rows,
                                        const SampleScratch& s, int row, Word* scratch) {
  if (params.temperature == 0.0f || params.top_k == 1) return {false, 0.0f, 0.0f};
  if (rows != nullptr && rows[row].is_done) return {false, 0.0f, 0.0f};
  Word best = 0;
  for (int i = threadIdx.x; i < s.splits; i += kFilterThreads) {
    best = Max()(best, s.maxima[row * s.splits + i]);
  }
  best = block_reduce(best, Word{0}, scratch, Max());
  const float max = key_value(best);
  return {best != kPoisoned && is_finite(max), max, params.temperature};
}

// This thread's part of a slice of adjusted logits; -inf past the end.
__device__ __forceinline__ void load_slice(const SampleScratch& s, int row,
                                           float (&value)[kPackFloats]) {
  const int start = blockIdx.x * kSlice + threadIdx.x * kPackFloats;
  if (start < s.padded) {
    load_aligned_pack(s.z + static_cast<int64_t>(row) * s.padded + start, value);
  } else {
#pragma unroll
    for (int i = 0; i < kPackFloats; ++i) value[i] = -INFINITY;
  }
}

__global__ void __launch_bounds__(kFilterThreads)
    histogram_kernel(const SampleParams* params,  // [1]
                     const SampleRow* rows,       // [B] or null
                     SampleScratch s) {
  // Weights in two halves: shared memory adds 32 bits natively, and 1024 tokens of the largest
  // weight, 2^42 or 2^21 in the upper half, do not overflow them.
  constexpr int kHalf = 21;
  __shared__ uint32_t count[kBins], low[kBins], high[kBins];
  __shared__ Word scratch[kFilterThreads / kWarpSize];
  begin_kernel();
  const int row = blockIdx.y;
  const Row r = open_row(*params, rows, s, row, scratch);
  if (!r.is_sampled) return;
  for (int bin = threadIdx.x; bin < kBins; bin += kFilterThreads) {
    count[bin] = low[bin] = high[bin] = 0;
  }
  __syncthreads();  // the tables are empty
  float value[kPackFloats];
  load_slice(s, row, value);
#pragma unroll
  for (int i = 0; i < kPackFloats; ++i) {
    const float x = distance(value[i], r.max, r.temperature);
    const Word w = weight_at(x);
    // A flat row would send a warp's 32 additions to one address; one lane adds for all.
    const bool is_flat = __all_sync(kFullWarp, w == __shfl_sync(kFullWarp, w, 0));
    const uint32_t times = !is_flat ? 1 : threadIdx.x % kWarpSize == 0 ? kWarpSize : 0;
    if (w != 0 && times != 0) {
      const int bin = bin_at(x);
      atomicAdd(&count[bin], times);
      atomicAdd(&low[bin], static_cast<uint32_t>(w & ((1u << kHalf) - 1)) * times);
      atomicAdd(&high[bin], static_cast<uint32_t>(w >> kHalf) * times);
    }
  }
  __syncthreads();  // the slice is in the tables
  for (int bin = threadIdx.x; bin < kBins; bin += kFilterThreads) {
    if (count[bin] == 0) continue;
    const Word mass = (static_cast<Word>(high[bin]) << kHalf) + low[bin];
    atomicAdd(&s.mass[row * kBins + bin], mass);
    atomicAdd(&s.count[row * kBins + bin], count[bin]);
  }
}

// Lists the tokens of the bins that the plan marks, if there is room for them.
__global__ void __launch_bounds__(kFilterThreads)
    gather_kernel(const SampleParams* params,  // [1]
                  const SampleRow* rows,       // [B] or null
                  SampleScratch s, bool is_draw) {
  __shared__ Prefixes prefixes;
  __shared__ Word scratch[kFilterThreads / kWarpSize];
  begin_kernel();
  const int row = blockIdx.y;
  const Row r = open_row(*params, rows, s, row, scratch);
  if (!r.is_sampled) return;
  float value[kPackFloats];
  load_slice(s, row, value);
  __syncthreads();  // scratch is read by everyone before it is used again
  prefix_sums<kFilterThreads>(prefixes, s.mass + row * kBins, s.count + row * kBins, scratch);
  __syncthreads();  // the prefixes are complete
  const Plan plan = make_plan(prefixes, *params, plan_uniform(*params, rows, row, is_draw));
  if (plan.listed > kListed) return;
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int i = 0; i < kPackFloats; ++i) {
    const float x = distance(value[i], r.max, r.temperature);
    const bool is_marked = weight_at(x) != 0 && plan.marks(bin_at(x));
    const unsigned marked = __ballot_sync(kFullWarp, is_marked);
    if (marked == 0) continue;
    uint32_t place = 0;
    if (lane == 0) place = atomicAdd(&s.listed[row], static_cast<uint32_t>(__popc(marked)));
    place = __shfl_sync(kFullWarp, place, 0) + __popc(marked & ((1u << lane) - 1));
    const int id = blockIdx.x * kSlice + threadIdx.x * kPackFloats + i;
    if (is_marked) s.list[row * kListed + place] = make_key(value[i], id);
  }
}

}  // namespace

void launch_filters(Launcher& launcher, const SampleParams* params, const SampleRow* rows,
                    const float* logits, const float* bias, const int32_t* counts, int64_t batch,
                    const SampleScratch& s, bool has_filters, bool is_draw) {
  const dim3 grid(s.splits, static_cast<unsigned>(batch));
  const bool aligned = packs_fit<float>(s.vocab, logits);
  launcher.run(aligned ? adjust_kernel<true> : adjust_kernel<false>, grid, kFilterThreads, params,
               rows, logits, bias, counts, s, has_filters);
  if (!has_filters) return;
  launcher.run(histogram_kernel, grid, kFilterThreads, params, rows, s);
  launcher.run(gather_kernel, grid, kFilterThreads, params, rows, s, is_draw);
}

}  // namespace td
