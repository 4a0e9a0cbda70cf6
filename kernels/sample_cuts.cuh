// The exact cuts and the drawn token of a row, by one block, in three ways of rising cost.
//
// Few tokens matter (choose_few): with a top-k of moderate size nothing needs the whole row's sum.
// One histogram of the maxima of 512 groups of tokens gives a bin that the k-th token is not below;
// all tokens down to it are ranked, and every cut and the draw are points of that list's sums.
//
// All tokens matter (choose_by_plan): the row's histogram of weights, to which every block of the
// launch has added, says which bins hold the cuts and the drawn point; these bins are ranked.
//
// Thousands of tokens share those bins (choose_in_row): descents over the row, one a question.
#pragma once

#include "sample_descent.cuh"

namespace td {

// What the next uniform of a row depends on; `is_draw` false: nothing is to be drawn.
struct Draw {
  bool is_draw;
  int row;

  __device__ Word uniform(const Context& c) const {
    return uniform62(c.params.seed, c.shared.state.draws, row, kDrawToken);
  }
};

// ---- without a list --------------------------------------------------------------------------

// Leaves its answer in shared.chosen. `has_prefixes`: shared.prefixes are the row's already. Not
// inlined, and called with plain values: the common ways would pay with registers.
static __device__ __attribute__((noinline)) void choose_in_row(Shared* shared,
                                                               const SampleParams* params,
                                                               const float* z, int vocab, float max,
                                                               bool has_prefixes, bool is_draw,
                                                               int row, bool needs_cut) {
  const Context c = {*shared, *params, z, vocab, max, params->temperature};
  const Draw draw = {is_draw, row};
  const Prefixes& in = c.shared.prefixes;
  if (!has_prefixes) {
    tally_row(c, c.shared.prefixes,
              [&](float z, uint32_t) { return bin_at(distance(z, c.max, c.temperature)); });
  }
  Word total = in.mass[kBins];
  Chosen chosen = {0, {c.max, c.temperature, kBins, 1, 0, 0}};
  enum { kTopK, kTopP, kDrawn, kCut, kQuestions };
#pragma unroll 1
  for (int question = kTopK; question < kQuestions; ++question) {
    Word point = 0;
    if (question == kTopK) {
      if (c.params.top_k <= 0 || static_cast<uint32_t>(c.params.top_k) >= in.count[kBins]) continue;
      point = static_cast<Word>(c.params.top_k - 1);
    } else if (question == kTopP) {
      if (c.params.top_p >= 1.0) continue;
      point = nucleus_weight(c.params.top_p, total) - 1;
    } else if (question == kDrawn) {
      const float edge = c.params.log_min_p;
      if (edge > -INFINITY) total = min(total, sum_of_row(c, edge));
      chosen.distribution.total = total;
      if (!draw.is_draw) continue;
      point = scale_uniform(draw.uniform(c), total);
    } else {
      if (!needs_cut) continue;
      point = total - 1;
    }
    const Ranked found = find_in_row(c, question == kTopK, point);
    if (question <= kTopP) {
      total = found.before + found.weight;
    } else if (question == kDrawn) {
      chosen.key = found.key;
    } else {
      chosen.distribution.cut_key = found.key;
      chosen.distribution.cut_bin = bin_at(c.distance_of(found.key));
    }
  }
  if (threadIdx.x == 0) c.shared.chosen = chosen;
  __syncwarp();  // the other lanes see it
}

// ---- few tokens ------------------------------------------------------------------------------

// Whether choose_few is for these filters.
__device__ __forceinline__ bool are_few(const SampleParams& params, int chunks) {
  return params.top_k > 0 && 2 * params.top_k <= min(chunks, kThreads);
}

// The best z of the chunks of this thread's group.
__device__ __forceinline__ float group_max(const float* chunk_max, int chunks) {
  float best = -INFINITY;
#pragma unroll 8
  for (int i = threadIdx.x; i < chunks; i += kThreads) best = fmaxf(best, chunk_max[i]);
  return best;
}

// The first bin that top_k groups reach, or the last of all, into shared.bin. The table in
// shared.first is empty.
__device__ __forceinline__ void find_group_bin(const Context& c, float group) {
  Shared& shared = c.shared;
  const float x = distance(group, c.max, c.temperature);
  if (weight_at(x) != 0) atomicAdd(&shared.first[bin_at(x)], 1u);
  if (threadIdx.x == 0) shared.bin = kBins - 1;
  __syncthreads();  // the groups are in the table
  constexpr int kPer = kBins / kThreads;
  uint32_t own[kPer], sum = 0, total;
#pragma unroll
  for (int i = 0; i < kPer; ++i) sum += own[i] = shared.first[threadIdx.x * kPer + i];
  uint32_t* scratch = reinterpret_cast<uint32_t*>(shared.scratch);
  uint32_t before = block_exclusive_sum(sum, scratch, &total);
  const uint32_t k = static_cast<uint32_t>(c.params.top_k);
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    if (before < k && k <= before + own[i]) shared.bin = threadIdx.x * kPer + i;
    before += own[i];
  }
  __syncthreads();  // the bin is there
}

// What the first warp learns. False, and nothing chosen, where too many tokens are in the bins.
__device__ __forceinline__ bool choose_few(const Context& c, const float* chunk_max, float group,
                                           Draw draw, bool needs_cut, Chosen* chosen) {
  Shared& shared = c.shared;
  find_group_bin(c, group);
  const float low = lowest_of(c, shared.bin);
  list_chunks(c, chunk_max, low);
  __syncthreads();  // the chunks are there
  // The last warp finds the least to do below.
  if (draw.is_draw && threadIdx.x == kThreads - 1) shared.uniform = draw.uniform(c);
  list_from(c, low);
  __syncthreads();  // the list is complete
  const int listed = static_cast<int>(shared.listed);
  if (listed > kListed) return false;
  rank_list(shared, listed);

  // The sums of the best top_k, and how many of them min-p leaves.
  const int count = min(listed, c.params.top_k), mine = static_cast<int>(threadIdx.x);
  float x = -INFINITY;
  if (mine < count) x = c.distance_of(shared.keys[mine]);
  const unsigned kept = __ballot_sync(kFullWarp, mine < count && x >= c.params.log_min_p);
  if (kept != 0 && mine % kWarpSize == 0) {
    atomicAdd(&shared.kept, static_cast<uint32_t>(__popc(kept)));
  }
  Word* sums = shared.prefixes.mass;
  Word total;
  const Word before = block_exclusive_sum(weight_at(x), shared.scratch, &total);
  sums[mine] = before;
  sums[kThreads + mine] = total;
  if (mine == 0) sums[kBins] = total;
  __syncthreads();  // the sums are complete

  if (mine >= kWarpSize) return true;
  if (c.params.top_p < 1.0) {
    total = sums[find_bin(sums, nucleus_weight(c.params.top_p, total) - 1) + 1];
  }
  total = min(total, sums[shared.kept]);
  *chosen = {0, {c.max, c.temperature, kBins, 1, 0, total}};
  if (draw.is_draw) {
    chosen->key = shared.keys[find_bin(sums, scale_uniform(shared.uniform, total))];
  }
  if (needs_cut) {
    chosen->distribution.cut_key = shared.keys[find_bin(sums, total - 1)];
    chosen->distribution.cut_bin = bin_at(c.distance_of(chosen->distribution.cut_key));
  }
  return true;
}

// ---- all tokens ------------------------------------------------------------------------------

// Where all blocks of a row leave what they know of their parts.
struct RowParts {
  Word* mass;
  uint32_t *count, *arrived;
  Word* sorted;
  uint16_t* starts;
  int parts;
};

__device__ __forceinline__ RowParts row_parts(const SampleScratch& s, int row) {
  const int64_t first = static_cast<int64_t>(row) * s.parts;
  return {s.mass + row * kBins,     s.count + row * kBins,      s.arrived + row,
          s.sorted + first * kPart, s.starts + first * kStarts, s.parts};
}

// Adds this block's part of the row, four tokens a thread, to the row's histogram, and leaves its
// keys sorted by bin. True for the block that comes last and finds all parts there.
__device__ __forceinline__ bool add_part(const Context& c, const RowParts& all) {
  // Weights in two halves: shared memory adds 32 bits natively.
  constexpr int kHalf = 21, kPackFloats = kPack<float>, kPer = kBins / kThreads;
  static_assert(kPart == kThreads * kPackFloats);
  Shared& shared = c.shared;
  uint32_t* count = reinterpret_cast<uint32_t*>(shared.keys);
  uint32_t *low = count + kBins, *high = low + kBins;
  for (int bin = threadIdx.x; bin < kBins; bin += kThreads) count[bin] = low[bin] = high[bin] = 0;
  __syncthreads();  // the tables are empty
  const int start = blockIdx.x * kPart + threadIdx.x * kPackFloats;
  const int lane = threadIdx.x % kWarpSize;
  float value[kPackFloats];
  if (start < c.vocab) {
    load_aligned_pack(c.z + start, value);
  } else {
#pragma unroll
    for (int i = 0; i < kPackFloats; ++i) value[i] = -INFINITY;
  }
  int bins[kPackFloats];
  uint32_t places[kPackFloats];  // among the part's tokens of the bin
#pragma unroll
  for (int i = 0; i < kPackFloats; ++i) {
    const float x = distance(value[i], c.max, c.temperature);
    const Word w = weight_at(x);
    bins[i] = w != 0 ? bin_at(x) : -1;
    // A flat row would send a warp's 32 additions to one address; one lane adds for all.
    const bool is_flat = __all_sync(kFullWarp, value[i] == __shfl_sync(kFullWarp, value[i], 0));
    const uint32_t times = !is_flat ? 1 : lane == 0 ? kWarpSize : 0;
    places[i] = 0;
    if (w != 0 && times != 0) {
      places[i] = atomicAdd(&count[bins[i]], times);
      atomicAdd(&low[bins[i]], static_cast<uint32_t>(w & ((1u << kHalf) - 1)) * times);
      atomicAdd(&high[bins[i]], static_cast<uint32_t>(w >> kHalf) * times);
    }
    if (is_flat) places[i] = __shfl_sync(kFullWarp, places[i], 0) + lane;
  }
  __syncthreads();  // the block's tokens are in the tables
  uint32_t own[kPer], sum = 0, total;
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const int bin = threadIdx.x * kPer + i;
    sum += own[i] = count[bin];
    if (own[i] == 0) continue;
    Word mass = (static_cast<Word>(high[bin]) << kHalf) + low[bin];
    // Only 2048 tokens of the largest weight overflow the upper half, and to exactly 2^32.
    if (mass == 0) mass = Word{1} << (32 + kHalf);
    atomicAdd(&all.mass[bin], mass);
    atomicAdd(&all.count[bin], own[i]);
  }
  uint32_t before = block_exclusive_sum(sum, reinterpret_cast<uint32_t*>(shared.scratch), &total);
  uint16_t* starts = all.starts + blockIdx.x * kStarts;
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const int bin = threadIdx.x * kPer + i;
    shared.first[bin] = before;
    starts[bin] = static_cast<uint16_t>(before);
    before += own[i];
  }
  if (threadIdx.x == 0) starts[kBins] = static_cast<uint16_t>(total);
  __syncthreads();  // the bins' starts are known
  Word* sorted = all.sorted + blockIdx.x * kPart;
#pragma unroll
  for (int i = 0; i < kPackFloats; ++i) {
    if (bins[i] < 0) continue;
    sorted[shared.first[bins[i]] + places[i]] = make_key(value[i], start + i);
  }
  __threadfence();  // all this comes before the arrival
  __syncthreads();  // of every thread
  if (threadIdx.x == 0) {
    shared.bin = atomicAdd(all.arrived, 1u) == gridDim.x - 1;
    __threadfence();  // and the arrival of the last before its reads
  }
  __syncthreads();  // the answer is there
  return shared.bin;
}

// The listed entry's cut of min-p: weight of the tokens at least log_min_p from the best. `m_bin`
// holds the edge, `whole` is the weight of the bins before it.
inline __device__ Word min_p_total(const Context& c, int listed, int m_bin, Word whole) {
  Shared& shared = c.shared;
  const float edge = c.params.log_min_p;
  if (threadIdx.x == 0) shared.answer[3] = whole;
  __syncthreads();  // the sum of the bins before is there
  for_each_entry(c, listed, [&](const Ranked& entry, uint32_t) {
    const float x = c.distance_of(entry.key);
    if (bin_at(x) == m_bin && x >= edge) {
      atomicMax(&shared.answer[3], entry.before + entry.weight);
    }
  });
  __syncthreads();  // the last token kept has told
  return shared.answer[3];
}

// Every block of the row has left its part. False, and nothing chosen, where too many tokens are
// in the bins.
inline __device__ bool choose_by_plan(const Context& c, const RowParts& all, Draw draw,
                                      bool needs_cut, Chosen* chosen) {
  Shared& shared = c.shared;
  // Volatile: other blocks wrote these during this launch.
  prefix_sums<kThreads>(shared.prefixes, static_cast<const volatile Word*>(all.mass),
                        static_cast<const volatile uint32_t*>(all.count), shared.scratch);
  __syncthreads();  // the prefixes are complete
  const Prefixes& in = shared.prefixes;
  const Word uniform = draw.is_draw ? draw.uniform(c) : 0;
  const Plan plan = make_plan(in, c.params, draw.is_draw, uniform);
  const int listed = static_cast<int>(plan.listed);
  if (listed > kListed) return false;
  if (listed != 0) list_bins(c, plan, all.sorted, all.starts, all.parts);
  __syncthreads();  // the list is complete
  open_list(c, listed);

  Word total = plan.k_total;
  if (plan.k_bin >= 0) {
    const Ranked last = find_listed<true>(c, listed, static_cast<Word>(c.params.top_k - 1));
    total = last.before + last.weight;
  }
  if (c.params.top_p < 1.0) {
    const Ranked last = find_listed<false>(c, listed, nucleus_weight(c.params.top_p, total) - 1);
    total = last.before + last.weight;
  }
  if (plan.m_bin >= 0) {
    total = min(total, min_p_total(c, listed, plan.m_bin, in.mass[plan.m_bin]));
  } else if (c.params.log_min_p > -INFINITY) {
    total = min(total, in.mass[bin_at(c.params.log_min_p) + 1]);
  }

  *chosen = {0, {c.max, c.temperature, kBins, 1, 0, total}};
  if (draw.is_draw) {
    chosen->key = find_listed<false>(c, listed, scale_uniform(uniform, total)).key;
  }
  if (needs_cut) {
    // The last token kept, if it is not the last of its bin: whole bins need no key.
    Distribution& d = chosen->distribution;
    const int bin = find_bin(in.mass, total - 1);
    const bool is_whole = in.mass[bin + 1] == total;
    d.cut_bin = is_whole ? bin + 1 : bin;
    d.cut_key = is_whole ? ~Word{0} : find_listed<false>(c, listed, total - 1).key;
  }
  return true;
}

}  // namespace td
