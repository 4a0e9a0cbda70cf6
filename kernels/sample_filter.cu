// Sampling, first launch: bias, bans and penalties, and the best tokens of every part of the
// vocabulary. sample.cuh has the arithmetic, sample_choose.cu the second and last launch.
//
// One block a slice of 1024 tokens, so that V = 128256 keeps nearly every multiprocessor at work;
// bound by its latency, not by the 0.5 MB it reads from L2 and the 0.5 MB it writes there.

#include <type_traits>

#include "sample.cuh"

namespace td {

SampleScratch sample_scratch(void* workspace, int64_t batch, int64_t vocab, int64_t* bytes) {
  constexpr int64_t kAlign = 16;
  SampleScratch s = {};
  s.vocab = static_cast<int>(vocab);
  s.splits = static_cast<int>(ceil_div<int64_t>(vocab, kSlice));
  s.chunks = static_cast<int>(ceil_div<int64_t>(vocab, kChunk));
  s.parts = static_cast<int>(ceil_div<int64_t>(vocab, kPart));
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
  place(s.chunk_max, batch * s.chunks);
  place(s.mass, batch * kBins);
  place(s.count, batch * kBins);
  place(s.arrived, batch);
  place(s.sorted, batch * s.parts * kPart);
  place(s.starts, batch * s.parts * kStarts);
  place(s.tops, batch * s.splits * kMaxLogprobs);
  place(s.sums, batch * s.splits);
  place(s.row_tops, batch * kMaxLogprobs);
  place(s.row_log_sum, batch);
  if (bytes != nullptr) *bytes = used;
  return s;
}

namespace {

constexpr int kPackFloats = kPack<float>;
constexpr int kChunkLanes = kChunk / kPackFloats;
constexpr Word kPoisoned = ~Word{0};

// Stage 2 of sampling.py for a token of this count. Separate roundings: a fused multiply-add would
// not be the twin's.
__device__ __forceinline__ float penalised(float z, int32_t count, const SampleParams& params) {
  if (count != 0 && params.repetition != 1.0f) {
    z = z > 0.0f ? __fdiv_rn(z, params.repetition) : __fmul_rn(z, params.repetition);
  }
  const int32_t generated = count & (kInPrompt - 1);
  if (generated != 0) {
    z = __fadd_rn(z, -params.presence);
    z = __fadd_rn(z, -__fmul_rn(params.frequency, static_cast<float>(generated)));
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
                  SampleScratch s, bool has_filters) {
  __shared__ Word scratch[kFilterThreads / kWarpSize];
  begin_kernel();
  const int row = blockIdx.y;
  const int start = blockIdx.x * kSlice + threadIdx.x * kPackFloats;
  const int64_t first = static_cast<int64_t>(row) * s.vocab + start;
  const bool is_inside = start < s.vocab;
  // The logits before anything that says whether they are needed: one round trip to L2, not two.
  float value[kPackFloats] = {};
  if (is_inside) load_pack<float, kAligned>(logits + first, s.vocab - start, value);
  const bool has_bias = params->has_bias, has_counts = params->has_counts;
  if (rows != nullptr && rows[row].is_done) return;
  if (has_filters) {  // empty: the next kernel adds to them
    for (int bin = blockIdx.x * kFilterThreads + threadIdx.x; bin < kBins;
         bin += gridDim.x * kFilterThreads) {
      s.mass[row * kBins + bin] = 0;
      s.count[row * kBins + bin] = 0;
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) s.arrived[row] = 0;
  }
  bool is_bad = false;
#pragma unroll
  for (int i = 0; i < kPackFloats; ++i) is_bad |= value[i] != value[i] || value[i] == INFINITY;
  float shift[kPackFloats], count[kPackFloats];  // counts are integers, moved as they are
  const float* counted = reinterpret_cast<const float*>(counts);
  if (has_bias && is_inside) load_pack<float, kAligned>(bias + start, s.vocab - start, shift);
  if (has_counts && is_inside) load_pack<float, kAligned>(counted + first, s.vocab - start, count);
  if (has_bias && is_inside) {
#pragma unroll
    for (int i = 0; i < kPackFloats; ++i) value[i] = __fadd_rn(value[i], shift[i]);
  }
  if (has_counts && is_inside) {
#pragma unroll
    for (int i = 0; i < kPackFloats; ++i) {
      value[i] = penalised(value[i], static_cast<int32_t>(__float_as_uint(count[i])), *params);
    }
  }
  Word best = 0;
  float max_value = -INFINITY;
#pragma unroll
  for (int i = 0; i < kPackFloats; ++i) {
    if (kAligned ? !is_inside : start + i >= s.vocab) {
      value[i] = -INFINITY;
      continue;
    }
    const Word key = make_key(value[i], start + i);
    best = key > best ? key : best;
    max_value = fmaxf(max_value, value[i]);
  }
  if (has_filters) {
    if (is_inside) {
      store_pack<float, true>(s.z + static_cast<int64_t>(row) * s.padded + start, kPackFloats,
                              value);
    }
    if (is_bad) max_value = INFINITY;
#pragma unroll
    for (int offset = 1; offset < kChunkLanes; offset *= 2) {
      max_value = fmaxf(max_value, __shfl_xor_sync(kFullWarp, max_value, offset));
    }
    if (threadIdx.x % kChunkLanes == 0 && is_inside) {
      s.chunk_max[static_cast<int64_t>(row) * s.chunks + start / kChunk] = max_value;
    }
  }
  best = block_reduce(is_bad ? kPoisoned : best, Word{0}, scratch, Max());
  if (threadIdx.x == 0) s.maxima[row * s.splits + blockIdx.x] = best;
}

}  // namespace

void launch_adjust(Launcher& launcher, const SampleParams* params, const SampleRow* rows,
                   const float* logits, const float* bias, const int32_t* counts, int64_t batch,
                   const SampleScratch& s, bool has_filters) {
  const dim3 grid(s.splits, static_cast<unsigned>(batch));
  const bool aligned = packs_fit<float>(s.vocab, logits) && packs_fit<float>(s.vocab, bias, counts);
  launcher.run(aligned ? adjust_kernel<true> : adjust_kernel<false>, grid, kFilterThreads, params,
               rows, logits, bias, counts, s, has_filters);
}

}  // namespace td
