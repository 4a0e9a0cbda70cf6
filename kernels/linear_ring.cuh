// The ring of weights in shared memory, and the warp that fills it.
#pragma once

#include "linear.cuh"

namespace td {

// Stages that a block has on their way at most: two fill the memory's pipeline. More would only
// queue there, and everything else that a kernel waits for behind them (activations above all);
// later three, for the moments when a stage is freed late.
constexpr int kWindowAtFirst = 2;
constexpr int kWindow = 3;

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
constexpr bool kHasBulkCopies = true;
#else
constexpr bool kHasBulkCopies = false;
#endif

// This block's tiles: contiguous, numbers differing by at most one.
__device__ __forceinline__ int first_tile(const LinearArgs& a, int block) {
  return block * a.per_block + (block < a.extra ? block : a.extra);
}

// A place in the ring, and how often it has been come by.
struct Place {
  int slot = 0;
  uint32_t parity;
  __device__ __forceinline__ explicit Place(uint32_t first) : parity(first) {}
  __device__ __forceinline__ void next(int stages) {
    if (++slot == stages) {
      slot = 0;
      parity ^= 1;
    }
  }
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// The producer warp sets up the ring.
__device__ __forceinline__ void init_ring(Header& header, int stages) {
  const int lane = threadIdx.x % kWarpSize;
  if (lane < stages) {
    mbarrier_init(&header.full[lane], 1);
    mbarrier_init(&header.empty[lane], kWarps);
    mbarrier_init_fence();
  }
}

template <typename T, Mode kMode, int kGroup>
__device__ __forceinline__ void produce(const LinearArgs& a, Header& header, unsigned char* ring) {
  const int window = a.stages < kWindow ? a.stages : kWindow;
  const int lane = threadIdx.x % kWarpSize;
  const int last = first_tile(a, blockIdx.x + 1);
  const CachePolicy policy = evict_first();
  // Rows of a tile that lie behind one another and fill a stage are copied as one.
  constexpr int kRun = kMode == Mode::kQkv || kMode == Mode::kGateUp ? 4 : 8;
  const bool joined = a.inputs == kStageCols && (kRun == 4 || a.outputs % kTile == 0);
  const bool copies = lane < kTile && (!joined || lane % kRun == 0);
  Place place(1);   // of the phase before the first, which counts as completed
  Place landed(0);  // the oldest stage on its way
  int under_way = 0, issued = 0;
  for (int group = first_tile(a, blockIdx.x); group < last; group += kGroup) {
    const T* row[kGroup];
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
      row[j] = static_cast<const T*>(a.weight) +
               static_cast<int64_t>(weight_row<kMode>(a, group + j, lane % kTile)) * a.inputs;
    }
#pragma unroll 1
    for (int column = 0; column < a.inputs; column += kStageCols) {
      const int left = a.inputs - column;
      const uint32_t bytes = (left < kStageCols ? left : kStageCols) * sizeof(T);
#pragma unroll
      for (int j = 0; j < kGroup; ++j) {
        if (group + j >= last) break;
        if (under_way == (issued++ < a.stages ? kWindowAtFirst : window)) {
          mbarrier_wait(&header.full[landed.slot], landed.parity);
          landed.next(a.stages);
        } else {
          ++under_way;
        }
        mbarrier_wait(&header.empty[place.slot], place.parity);
        if (lane == 0) mbarrier_expect(&header.full[place.slot], bytes * kTile);
        __syncwarp();  // the barrier knows of the bytes before any can arrive
        if (copies) {
          bulk_copy(ring + place.slot * kStageBytes + lane * kPitch, row[j] + column,
                    joined ? kRun * bytes : bytes, &header.full[place.slot], policy);
        }
        place.next(a.stages);
      }
    }
  }
}

// Returns when the stage has landed.
__device__ __forceinline__ void await_stage(Header& header, const Place& place) {
  mbarrier_wait(&header.full[place.slot], place.parity);
}

// A warp is done with the stage. Without the fence the arrival may overtake reads that have been
// issued and not returned, and the next copy lands in them: seen on an H200 when the ring is full.
__device__ __forceinline__ void give_back_stage(Header& header, const Place& place) {
  __threadfence_block();
  __syncwarp();  // every lane has read the stage
  if (threadIdx.x % kWarpSize == 0) mbarrier_arrive(&header.empty[place.slot]);
}

#else  // the consumers load for themselves

__device__ __forceinline__ void await_stage(Header&, const Place&) {}
__device__ __forceinline__ void give_back_stage(Header&, const Place&) {}

__device__ __forceinline__ void init_ring(Header&, int) {}

template <typename T, Mode kMode, int kGroup>
__device__ __forceinline__ void produce(const LinearArgs&, Header&, unsigned char*) {}

#endif

#endif

}  // namespace td
