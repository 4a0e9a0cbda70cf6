// The ranking of a row's tokens by weight, as one block asks for it: the token of a rank, or the
// one whose weight covers a point of the sum.
//
// The short list that sample_filter.cu made is ranked in shared memory. Where more than kListed
// tokens share the deciding bins (a flat row, or thousands of ties), the same questions are
// answered by radix descents over the row itself: exact too, but about 0.1 ms.
#pragma once

#include "sample.cuh"

namespace td {

constexpr int kThreads = 512;
constexpr int kPerThread = kListed / kThreads;

struct Shared {
  Prefixes prefixes;
  Word keys[kListed];     // the list, ranked; histogram of weights in a descent
  Word sums[kListed];     // weights before each entry; scratch of the ranking
  uint32_t first[kBins];  // where a bin's tokens start in the list; histogram of counts
  Word scratch[kThreads / kWarpSize];
  Word answer[4];
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

  __device__ Word weight_of(Word key) const {
    return weight_at(distance(key_value(key), max, temperature));
  }
};

// ---- the short list --------------------------------------------------------------------------

// Sorts `count` keys, largest first.
inline __device__ void rank_list(Shared& shared, int count) {
  constexpr int kCounted = 128;  // up to here counting beats sorting
  if (count <= kCounted) {
    Word key = 0;
    int rank = 0;
    if (static_cast<int>(threadIdx.x) < count) {
      key = shared.keys[threadIdx.x];
      for (int i = 0; i < count; ++i) rank += shared.keys[i] > key;
    }
    __syncthreads();  // everyone has counted
    if (static_cast<int>(threadIdx.x) < count) shared.keys[rank] = key;
    __syncthreads();  // the list is ranked
    return;
  }
  int size = 2 * kCounted;
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
      __syncthreads();  // one exchange of the bitonic network is done
    }
  }
}

// Ranks the list and finds what stands before each entry.
inline __device__ void open_list(const Context& c, const Word* list, int count) {
  Shared& shared = c.shared;
  for (int i = threadIdx.x; i < count; i += kThreads) shared.keys[i] = list[i];
  __syncthreads();  // the list is in
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
    const int bin = bin_at(distance(key_value(shared.keys[i]), c.max, c.temperature));
    const bool starts =
        i == 0 || bin != bin_at(distance(key_value(shared.keys[i - 1]), c.max, c.temperature));
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
    const float x = distance(key_value(key), c.max, c.temperature);
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

// ---- without a list --------------------------------------------------------------------------

// The ranking's key in 52 bits, for descents of few passes.
constexpr int kIdBits = 20, kDigitBits = 10;
__device__ __forceinline__ Word short_key(Word key) {
  constexpr Word kIds = (Word{1} << kIdBits) - 1;
  return key >> 32 << kIdBits | (kIds - key_id(key));
}

// `find_listed` over the whole row: ten bits of the key a pass, from the top.
template <bool kByRank>
__device__ Ranked find_in_row(const Context& c, Word point) {
  Shared& shared = c.shared;
  Word* mass = shared.sums;  // [kBins] each
  uint32_t* counts = shared.first;
  Word prefix = 0, before = 0;
  for (int shift = 32 + kIdBits; shift > 0;) {
    const int width = min(kDigitBits, shift);
    shift -= width;
    const Word last = (Word{1} << width) - 1;
    for (int i = threadIdx.x; i < kBins; i += kThreads) {
      mass[i] = 0;
      counts[i] = 0;
    }
    __syncthreads();  // the tables are empty
    for (int base = 0; base < c.vocab; base += kThreads) {
      const int id = base + threadIdx.x;
      const Word key = id < c.vocab ? make_key(c.z[id], id) : 0;
      const Word weight = id < c.vocab ? c.weight_of(key) : 0;
      const Word digits = short_key(key) >> shift;
      const bool is_in = weight != 0 && digits >> width == prefix;
      const Word bin = last - (digits & last);  // largest key first
      const unsigned members = __ballot_sync(kFullWarp, is_in);
      if (members == 0) continue;
      const int leader = __ffs(static_cast<int>(members)) - 1;
      // A flat row would send a warp's additions to one address; one lane adds for all.
      const Word leaders_bin = __shfl_sync(kFullWarp, bin, leader);
      const Word leaders_weight = __shfl_sync(kFullWarp, weight, leader);
      const bool is_same = !is_in || (bin == leaders_bin && weight == leaders_weight);
      const bool is_flat = __all_sync(kFullWarp, is_same);
      const int lane = threadIdx.x % kWarpSize;
      if (is_flat ? lane == leader : is_in) {
        const uint32_t times = is_flat ? __popc(members) : 1;
        atomicAdd(&counts[bin], times);
        atomicAdd(&mass[bin], weight * times);
      }
    }
    __syncthreads();  // the row is in the tables
    prefix_sums<kThreads>(shared.prefixes, mass, counts, shared.scratch);
    __syncthreads();  // the prefixes are complete
    const Word bin = kByRank ? find_bin(shared.prefixes.count, static_cast<uint32_t>(point))
                             : find_bin(shared.prefixes.mass, point);
    before += shared.prefixes.mass[bin];
    point -= kByRank ? shared.prefixes.count[bin] : shared.prefixes.mass[bin];
    prefix = prefix << width | (last - bin);
  }
  const Word ids = (Word{1} << kIdBits) - 1;
  const uint32_t id = static_cast<uint32_t>(ids - (prefix & ids));
  const Word key = prefix >> kIdBits << 32 | static_cast<uint32_t>(~id);
  return {key, c.weight_of(key), before};
}

}  // namespace td
