// The short list: every token of a row that can matter, in one block's shared memory.
//
// With a top-k, the chunks' maxima tell which lines of z can hold such a token: a few dozen of
// V = 128256's 4008, and the block reads 16 KB of maxima and 8 KB of z. Otherwise every block has
// left the keys of its part bin after bin, and the tokens of a few bins are a few of each part.
#pragma once

#include "sample_plan.cuh"
#include "sample_rank.cuh"

namespace td {

// No z of a token in this bin is lower, or higher; generous by rounding errors.
__device__ __forceinline__ float lowest_of(const Context& c, int bin) {
  constexpr float kWidth = 1.001f / 32.0f;
  return c.max - c.temperature * (static_cast<float>(bin + 1) * kWidth) - fabsf(c.max) * 1e-6f;
}
__device__ __forceinline__ float highest_of(const Context& c, int bin) {
  constexpr float kWidth = 0.999f / 32.0f;
  return c.max - c.temperature * (static_cast<float>(bin) * kWidth) + fabsf(c.max) * 1e-6f;
}

// Which chunks have a z not below `low`, into shared.sums. A barrier must follow.
__device__ __forceinline__ void list_chunks(const Context& c, const float* chunk_max, float low) {
  constexpr uint32_t kPlaces = 2 * kListed;
  uint32_t* list = reinterpret_cast<uint32_t*>(c.shared.sums);
  const int chunks = ceil_div(c.vocab, kChunk);
#pragma unroll 4
  for (int i = threadIdx.x; i < chunks; i += kThreads) {
    if (chunk_max[i] < low) continue;
    const uint32_t place = atomicAdd(&c.shared.chunks, 1u);
    if (place < kPlaces) list[place] = i;
  }
}

// Lists the tokens of z not below `low`; shared.listed becomes their number, but only kListed have
// a place. A barrier must come before, and one must follow.
__device__ __forceinline__ void list_from(const Context& c, float low) {
  constexpr int kPlaces = 2 * kListed;
  constexpr int kLanes = kChunk / kPack<float>, kTeams = kThreads / kLanes;
  constexpr int kFlying = 4;  // loads of a thread under way at once
  Shared& shared = c.shared;
  const uint32_t* list = reinterpret_cast<const uint32_t*>(shared.sums);
  const int chunks = static_cast<int>(shared.chunks);
  if (chunks > kPlaces) {  // every one has a token for the list
    if (threadIdx.x == 0) shared.listed = kListed + 1;
    return;
  }
  const int lane = threadIdx.x % kLanes;
  for (int base = threadIdx.x / kLanes; base < chunks; base += kTeams * kFlying) {
    float value[kFlying][kPack<float>];
    int start[kFlying];
#pragma unroll
    for (int j = 0; j < kFlying; ++j) {
      const int i = base + j * kTeams;
      start[j] = i < chunks ? static_cast<int>(list[i]) * kChunk + lane * kPack<float> : c.vocab;
      if (start[j] < c.vocab) load_aligned_pack(c.z + start[j], value[j]);
    }
#pragma unroll
    for (int j = 0; j < kFlying; ++j) {
      if (start[j] >= c.vocab) continue;
#pragma unroll
      for (int n = 0; n < kPack<float>; ++n) {
        if (value[j][n] < low) continue;
        const uint32_t place = atomicAdd(&shared.listed, 1u);
        if (place < kListed) shared.keys[place] = make_key(value[j][n], start[j] + n);
      }
    }
  }
}

// Lists the tokens of a plan's bins, for which there is room: a lane each for a range of bins in a
// part, then a lane for each token. `parts` parts, laid out as in SampleScratch. A barrier must
// follow.
__device__ __forceinline__ void list_bins(const Context& c, const Plan& plan, const Word* sorted,
                                          const uint16_t* starts, int parts) {
  constexpr int kWarps = kThreads / kWarpSize, kTeam = kWarpSize / Plan::kRanges;
  Shared& shared = c.shared;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const Bins bins = plan.range(lane % Plan::kRanges);
  for (int base = warp; base < parts; base += kWarps * kTeam) {
    const int part = base + lane / Plan::kRanges * kWarps;
    uint32_t start = 0, count = 0;
    if (part < parts && bins.first <= bins.last) {
      const uint16_t* in_part = starts + part * kStarts;
      start = __ldcg(in_part + bins.first);
      count = __ldcg(in_part + bins.last + 1) - start;
    }
    uint32_t end = count;  // of this lane's tokens among the warp's
#pragma unroll
    for (int offset = 1; offset < kWarpSize; offset *= 2) {
      const uint32_t before = __shfl_up_sync(kFullWarp, end, offset);
      if (lane >= offset) end += before;
    }
    const uint32_t source = part * kPart + start - (end - count);
    const uint32_t tokens = __shfl_sync(kFullWarp, end, kWarpSize - 1);
    uint32_t place = 0;
    if (lane == 0 && tokens != 0) place = atomicAdd(&shared.listed, tokens);
    place = __shfl_sync(kFullWarp, place, 0);
    for (uint32_t first = 0; first < tokens; first += kWarpSize) {
      const uint32_t i = first + lane;
      int owner = 0;  // the lane whose token it is: the first that ends behind it
#pragma unroll
      for (int step = kWarpSize / 2; step > 0; step /= 2) {
        if (__shfl_sync(kFullWarp, end, owner + step - 1) <= i) owner += step;
      }
      const uint32_t from = __shfl_sync(kFullWarp, source, owner) + i;
      if (i < tokens) shared.keys[place + i] = __ldcg(sorted + from);
    }
  }
}

}  // namespace td
