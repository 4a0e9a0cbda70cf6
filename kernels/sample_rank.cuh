// The ranking of a row's tokens by weight, as one block asks for it: the token of a rank, or the
// one whose weight covers a point of the sum.
//
// A short list (sample_list.cuh makes it) is ranked in shared memory. Where more tokens than that
// share the deciding bins, sample_descent.cuh answers.
#pragma once

#include "sample.cuh"

namespace td {

constexpr int kThreads = 512;  // of the kernel that chooses
constexpr int kListed = 2048;  // tokens that can be ranked in shared memory
constexpr int kPerThread = kListed / kThreads;

// What is drawn and kept.
struct Chosen {
  Word key;
  Distribution distribution;
};

struct Shared {
  Prefixes prefixes;
  Word keys[kListed];     // the list, ranked
  Word sums[kListed];     // weights before each entry; chunks to look at; a histogram
  uint32_t first[kBins];  // where a bin's tokens start in the list; histogram of counts
  Word scratch[kThreads / kWarpSize];
  Word answer[4];
  SampleRow state;  // of the row, before this step
  Chosen chosen;
  Word uniform;
  uint32_t chunks, listed, kept;  // counters, zero at first
  int32_t bin;
};

// A token of the ranking: its key, its weight, and the weights of all before it.
struct Ranked {
  Word key, weight, before;
};

struct Context {
  Shared& shared;
  const SampleParams& params;
  const float* z;  // [V], adjusted
  int vocab;
  float max, temperature;

  __device__ float distance_of(Word key) const {
    return distance(key_value(key), max, temperature);
  }
  __device__ Word weight_of(Word key) const { return weight_at(distance_of(key)); }
};

// ---- the short list --------------------------------------------------------------------------

// Sorts `count` keys, largest first.
inline __device__ void rank_list(Shared& shared, int count) {
  if (count <= kThreads) {  // counting beats sorting
    int counters = 1;       // threads that count for one key
    while (counters < 4 && 2 * counters * count <= kThreads) counters *= 2;
    const int mine = static_cast<int>(threadIdx.x) / counters;
    const Word key = mine < count ? shared.keys[mine] : 0;
    int rank = 0;
#pragma unroll 4
    for (int i = threadIdx.x % counters; i < count; i += counters) rank += shared.keys[i] > key;
    for (int offset = 1; offset < counters; offset *= 2) {
      rank += __shfl_xor_sync(kFullWarp, rank, offset);
    }
    __syncthreads();  // everyone has counted
    if (mine < count && threadIdx.x % counters == 0) shared.keys[rank] = key;
    __syncthreads();  // the list is ranked
    return;
  }
  int size = 2 * kThreads;
  while (size < count) size *= 2;
  for (int i = count + threadIdx.x; i < size; i += kThreads) shared.keys[i] = 0;
  __syncthreads();  // padded
  for (int length = 2; length <= size; length *= 2) {
    for (int stride = length / 2; stride > 0; stride /= 2) {
      for (int i = threadIdx.x; i < size / 2; i += kThreads) {
        const int low = 2 * i - (i & (stride - 1)), high = low + stride;
        const Word a = shared.keys[low], b = shared.keys[high];
        if ((a < b) == ((low & length) == 0)) {
          shared.keys[low] = b;
          shared.keys[high] = a;
        }
      }
      // Up to a stride of 32 a warp's pairs are 64 neighbours, which nobody else touches.
      const int next = stride > 1 ? stride / 2 : length;
      if (max(stride, next) > kWarpSize) {
        __syncthreads();  // one exchange of the bitonic network is done
      } else {
        __syncwarp();
      }
    }
  }
}

// Ranks the list and finds what stands before each entry.
inline __device__ void open_list(const Context& c, int count) {
  Shared& shared = c.shared;
  rank_list(shared, count);
  Word weight[kPerThread], sum = 0, total;
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    const int i = threadIdx.x * kPerThread + j;
    weight[j] = i < count ? c.weight_of(shared.keys[i]) : 0;
    sum += weight[j];
  }
  sum = block_exclusive_sum(sum, shared.scratch, &total);
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    const int i = threadIdx.x * kPerThread + j;
    if (i >= count) break;
    shared.sums[i] = sum;
    sum += weight[j];
    const int bin = bin_at(c.distance_of(shared.keys[i]));
    const bool starts = i == 0 || bin != bin_at(c.distance_of(shared.keys[i - 1]));
    if (starts) shared.first[bin] = i;
  }
  __syncthreads();  // sums and starts are complete
}

// Calls visit(entry, rank) for this thread's entries, best first.
template <typename F>
__device__ __forceinline__ void for_each_entry(const Context& c, int count, F visit) {
  const Shared& shared = c.shared;
  for (int j = 0; j < kPerThread; ++j) {
    const int i = threadIdx.x * kPerThread + j;
    if (i >= count) return;
    const Word key = shared.keys[i];
    const float x = c.distance_of(key);
    const int bin = bin_at(x), start = static_cast<int>(shared.first[bin]);
    const Word before = shared.prefixes.mass[bin] + (shared.sums[i] - shared.sums[start]);
    visit(Ranked{key, weight_at(x), before}, shared.prefixes.count[bin] + (i - start));
  }
}

// The listed entry whose weight covers a point, or the one of a rank; one must be there.
template <bool kByRank>
__device__ Ranked find_listed(const Context& c, int count, Word point) {
  Shared& shared = c.shared;
  for_each_entry(c, count, [&](const Ranked& entry, uint32_t rank) {
    const bool is_it =
        kByRank ? rank == point : entry.before <= point && point - entry.before < entry.weight;
    if (is_it) {
      shared.answer[0] = entry.key;
      shared.answer[1] = entry.weight;
      shared.answer[2] = entry.before;
    }
  });
  __syncthreads();  // the one that found it has written it
  const Ranked found = {shared.answer[0], shared.answer[1], shared.answer[2]};
  __syncthreads();  // everyone has read it
  return found;
}

}  // namespace td
