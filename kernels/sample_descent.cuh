// The questions of sample_rank.cuh where thousands of tokens share the deciding bins: one block
// goes over the whole row, exactly too.
//
// A bin is split into 1024 finer ones by one pass; what is in the one that matters is listed by
// another. Only with thousands of tokens 2^-15 nats apart, or equal, it takes a radix descent of
// six passes over their keys.
#pragma once

#include "sample_list.cuh"

namespace td {

// Calls visit(z, id) for every token, whole warps at a time; past the end z is -inf.
template <typename F>
__device__ __forceinline__ void for_each_token(const Context& c, F visit) {
  constexpr int kFlying = 4;  // loads of a thread under way at once
  for (int base = 0; base < c.vocab; base += kThreads * kFlying) {
    float value[kFlying];
#pragma unroll
    for (int j = 0; j < kFlying; ++j) {
      const int id = base + j * kThreads + static_cast<int>(threadIdx.x);
      value[j] = id < c.vocab ? c.z[id] : -INFINITY;
    }
#pragma unroll
    for (int j = 0; j < kFlying; ++j) visit(value[j], base + j * kThreads + threadIdx.x);
  }
}

// Adds a token to a table of counts and weights, if it is in. Called by whole warps.
__device__ __forceinline__ void tally(uint32_t* counts, Word* mass, bool is_in, int bin,
                                      Word weight) {
  const unsigned members = __ballot_sync(kFullWarp, is_in);
  if (members == 0) return;
  const int leader = __ffs(static_cast<int>(members)) - 1;
  // A flat row would send a warp's additions to one address; one lane adds for all.
  const int leaders_bin = __shfl_sync(kFullWarp, bin, leader);
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

// One pass: prefixes over 1024 bins, of the tokens for which bin_of(z, id) is not negative.
template <typename F>
__device__ __forceinline__ void tally_row(const Context& c, Prefixes& out, F bin_of) {
  Shared& shared = c.shared;
  Word* mass = shared.sums;  // [kBins] each
  uint32_t* counts = shared.first;
  for (int i = threadIdx.x; i < kBins; i += kThreads) {
    mass[i] = 0;
    counts[i] = 0;
  }
  __syncthreads();  // the tables are empty
  for_each_token(c, [&](float z, uint32_t id) {
    const int bin = bin_of(z, id);
    const Word weight = bin >= 0 ? weight_at(distance(z, c.max, c.temperature)) : 0;
    tally(counts, mass, weight != 0, bin, weight);
  });
  __syncthreads();  // the row is in the tables
  prefix_sums<kThreads>(out, mass, counts, shared.scratch);
  __syncthreads();  // the prefixes are complete
}

// Which of 1024 equal parts of its bin a token is in. Exact but for the last rounding, so parts
// follow the ranking as bins do.
__device__ __forceinline__ int part_at(float x, int bin) {
  const float y = fmaxf(x, -31.9f) * -32.0f - static_cast<float>(bin);
  return min(static_cast<int>(y * kBins), kBins - 1);
}

// The ranking's key in 52 bits, for descents of few passes.
constexpr int kIdBits = 20, kDigitBits = 10;
__device__ __forceinline__ Word short_key(Word key) {
  constexpr Word kIds = (Word{1} << kIdBits) - 1;
  return key >> 32 << kIdBits | (kIds - key_id(key));
}

// The token of a rank, or the one whose weight covers a point; one must be there. shared.prefixes
// are the row's.
inline __device__ Ranked find_in_row(const Context& c, bool by_rank, Word point) {
  Shared& shared = c.shared;
  static_assert(sizeof(Prefixes) <= sizeof(shared.keys));
  Prefixes& parts = *reinterpret_cast<Prefixes*>(shared.keys);
  Word before = 0;
  // The bin that holds the point, which becomes one from its start.
  const auto descend = [&](const Prefixes& in) {
    const int bin =
        by_rank ? find_bin(in.count, static_cast<uint32_t>(point)) : find_bin(in.mass, point);
    before += in.mass[bin];
    point -= by_rank ? in.count[bin] : in.mass[bin];
    return bin;
  };
  const int bin = descend(shared.prefixes);
  const float low = lowest_of(c, bin), high = highest_of(c, bin);
  const auto part_of = [&](float z) {  // -1: not in the bin
    if (z < low || z > high) return -1;
    const float x = distance(z, c.max, c.temperature);
    return bin_at(x) == bin ? part_at(x, bin) : -1;
  };
  if (threadIdx.x == 0) shared.listed = 0;
  tally_row(c, parts, [&](float z, uint32_t) { return part_of(z); });
  const int part = descend(parts);
  const int count = static_cast<int>(parts.count[part + 1] - parts.count[part]);

  if (count <= kListed) {
    __syncthreads();  // everyone has read the parts, whose place is taken now
    for_each_token(c, [&](float z, uint32_t id) {
      if (part_of(z) != part || weight_at(distance(z, c.max, c.temperature)) == 0) return;
      shared.keys[atomicAdd(&shared.listed, 1u)] = make_key(z, id);
    });
    __syncthreads();  // the list is complete
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
      const bool is_covered = sum <= point && point - sum < weight[j];
      if (i < count && (by_rank ? static_cast<Word>(i) == point : is_covered)) {
        shared.answer[0] = shared.keys[i];
        shared.answer[1] = weight[j];
        shared.answer[2] = sum;
      }
      sum += weight[j];
    }
    __syncthreads();  // the one that found it has written it
    return {shared.answer[0], shared.answer[1], before + shared.answer[2]};
  }

  Word prefix = 0;  // of the key, from the top
  for (int shift = 32 + kIdBits; shift > 0;) {
    const int width = min(kDigitBits, shift);
    shift -= width;
    const Word last = (Word{1} << width) - 1;
    tally_row(c, parts, [&](float z, uint32_t id) {
      if (part_of(z) != part) return -1;
      const Word digits = short_key(make_key(z, id)) >> shift;
      if (digits >> width != prefix) return -1;
      return static_cast<int>(last - (digits & last));  // largest key first
    });
    prefix = prefix << width | (last - descend(parts));
  }
  const Word ids = (Word{1} << kIdBits) - 1;
  const uint32_t id = static_cast<uint32_t>(ids - (prefix & ids));
  const Word key = prefix >> kIdBits << 32 | static_cast<uint32_t>(~id);
  return {key, c.weight_of(key), before};
}

// Weight of the tokens at most `edge` from the best.
inline __device__ Word sum_of_row(const Context& c, float edge) {
  Word sum = 0, total;
  for_each_token(c, [&](float z, uint32_t) {
    const float x = distance(z, c.max, c.temperature);
    if (x >= edge) sum += weight_at(x);
  });
  block_exclusive_sum(sum, c.shared.scratch, &total);
  __syncthreads();  // scratch is read by everyone before it is used again
  return total;
}

}  // namespace td
