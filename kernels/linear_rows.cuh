// The fused products of more than 8 rows: as linear.cu, with the activations in shared memory
// (linear_shared_rows.cuh), four tiles at a time and loops instead of copies of the code.
//
// Shared memory of a block: Header, ring, slots of activations, the warps' sums. Where the slots
// leave no room for a ring, the consumers load weights straight from global memory.
#pragma once

#include "fragments.cuh"
#include "linear_ring.cuh"
#include "linear_shared_rows.cuh"

namespace td {

constexpr int kRowsGroup = 4;                   // tiles whose sums are carried together
constexpr int kRowsWidth = kRowsGroup * kTile;  // their outputs: one for every lane
static_assert(kRowsWidth == kWarpSize);

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800

// Where a warp's sum for output `i` of a group and row `row` is. Tiles change places from row to
// row, so that the lanes that store sums meet no bank twice.
__device__ __forceinline__ int sum_place(int row, int warp, int i) {
  return (row * kWarps + warp) * kRowsWidth + (i ^ (row % kRowsGroup * kTile));
}

// One tile's columns of a stage, onto its sums. `kPlain`: whole and from the ring.
template <typename T, Mode kMode, bool kPlain>
__device__ __forceinline__ void multiply_tile(const RowsArgs& a, Header& header,
                                              const unsigned char* own, Place& place, int tile,
                                              int start, const uint4 (&low)[kBlocks],
                                              const uint4 (&high)[kBlocks], float (&even)[4],
                                              float (&odd)[4]) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int g = lane / 4, t = lane % 4;
  const bool swaps = g % 2 != 0;
  const bool from_ring = kHasBulkCopies && (kPlain || a.stages > 0);
  if (from_ring) await_stage(header, place);
  const unsigned char* stage = own + place.slot * kStageBytes;
  const T* direct = static_cast<const T*>(a.weight) + start +
                    static_cast<int64_t>(weight_row<kMode>(a, tile, g)) * a.inputs;
  constexpr int kBatch = kPlain ? 4 : 2;  // blocks whose reads are under way together
#pragma unroll
  for (int b = 0; b < kBlocks; b += kBatch) {
    uint4 w[kBatch];
    if (from_ring) {
#pragma unroll
      for (int i = 0; i < kBatch; i += 2) {  // halves of a pair in turns, as in linear.cu
        const unsigned char* pair = stage + (b + i) / 2 * (kWarps * kPairCols * 2);
        const uint4 first = *reinterpret_cast<const uint4*>(pair + (swaps ? 64 : 0));
        const uint4 second = *reinterpret_cast<const uint4*>(pair + (swaps ? 0 : 64));
        w[i] = make_uint4(swaps ? second.x : first.x, swaps ? second.y : first.y,
                          swaps ? second.z : first.z, swaps ? second.w : first.w);
        w[i + 1] = make_uint4(swaps ? first.x : second.x, swaps ? first.y : second.y,
                              swaps ? first.z : second.z, swaps ? first.w : second.w);
      }
    }
    if constexpr (!kPlain) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int column = block_column(warp, t, b + i);
        if (start + column >= a.inputs) {
          w[i] = make_uint4(0, 0, 0, 0);  // whatever the ring held before
        } else if (!from_ring) {
          w[i] = *reinterpret_cast<const uint4*>(direct + column);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const uint4 &x = low[b + i], &y = high[b + i];
      product<T>(even, {x.x, y.x, x.y, y.y}, {w[i].x, w[i].y});
      product<T>(odd, {x.z, y.z, x.w, y.w}, {w[i].z, w[i].w});
    }
  }
  if (from_ring) {
    give_back_stage(header, place);
    place.next(a.stages);
  }
}

__device__ __forceinline__ void rotate(float (&sums)[kRowsGroup][4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float first = sums[0][i];
#pragma unroll
    for (int j = 0; j + 1 < kRowsGroup; ++j) sums[j][i] = sums[j + 1][i];
    sums[kRowsGroup - 1][i] = first;
  }
}

template <typename T, Mode kMode>
__device__ __forceinline__ void consume_rows(const RowsArgs& a, Header& header,
                                             const unsigned char* ring, unsigned char* slots,
                                             float* sums) {
  constexpr bool kNorm = kMode != Mode::kAdd;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int g = lane / 4, t = lane % 4;
  const int rows = a.rows;
  const int begin = first_tile(a, blockIdx.x), last = first_tile(a, blockIdx.x + 1);
  const int out_j = lane % kTile, out_tile = lane / kTile;

  SharedRows<T, kNorm> x(a, slots, sums);
  x.fetch_norm();
  pdl_wait();
  x.fetch_first();
  if (kMode == Mode::kLogits && blockIdx.x == 0 && static_cast<int>(threadIdx.x) < a.batch) {
    a.advance[threadIdx.x] += a.tokens;  // every kernel that reads lengths is done
  }
  x.find_scale(header);

  const unsigned char* own = ring + g * kPitch + warp * (kPairCols * 2) + t * kPackBytes;
  Place place(0);
  int turn = 0;
#pragma unroll 1
  for (int group = begin; group < last; group += kRowsGroup, ++turn) {
    const int tiles = last - group;  // kRowsGroup or more, or what is left
    const bool is_last = tiles <= kRowsGroup, there = out_tile < tiles;
    // The row, and the one kWarps further on, whose outputs this warp finishes. What they need
    // from memory comes in meanwhile.
    constexpr int kFinishes = ceil_div(kMaxRows, kWarps);
    const int out_row = (warp + kWarps - turn % kWarps) % kWarps;
    Early early[kFinishes];
#pragma unroll
    for (int f = 0; f < kFinishes; ++f) {
      const int row = out_row + f * kWarps;
      if ((kMode == Mode::kAdd || kMode == Mode::kQkv) && there && row < rows) {
        early[f] = load_early<T, kMode>(a, group + out_tile, row, out_j);
      }
    }
    float even[kRowsGroup][4] = {}, odd[kRowsGroup][4] = {};  // two chains of dependent products
#pragma unroll 1
    for (int start = 0; start < a.inputs; start += kStageCols) {
      uint4 low[kBlocks], high[kBlocks];
      x.await(start, turn == 0, header);
      x.read(low, high);
      x.fetch_next(start, is_last);
      const bool plain = kHasBulkCopies && a.stages > 0 && start + kStageCols <= a.inputs;
#pragma unroll 1
      for (int j = 0; j < kRowsGroup; ++j) {  // the present tile's sums are always the first
        if (j < tiles) {
          if (plain) {
            multiply_tile<T, kMode, true>(a, header, own, place, group + j, start, low, high,
                                          even[0], odd[0]);
          } else {
            multiply_tile<T, kMode, false>(a, header, own, place, group + j, start, low, high,
                                           even[0], odd[0]);
          }
        }
        rotate(even);
        rotate(odd);
      }
    }
    if (kNorm && kLateScale<T> && turn == 0) x.write_squares(header);

    named_barrier(kConsumerBarrier, kConsumers);  // the work area is nobody's any more
#pragma unroll
    for (int j = 0; j < kRowsGroup; ++j) {
      const auto put = [&](int row, float first, float second) {
        if (row >= rows) return;
        *reinterpret_cast<float2*>(sums + sum_place(row, warp, j * kTile + t * 2)) =
            make_float2(first, second);
      };
      put(g, even[j][0] + odd[j][0], even[j][1] + odd[j][1]);
      put(g + 8, even[j][2] + odd[j][2], even[j][3] + odd[j][3]);
    }
    named_barrier(kConsumerBarrier, kConsumers);  // the sums are there
#pragma unroll
    for (int f = 0; f < kFinishes; ++f) {
      const int row = out_row + f * kWarps;
      if (row >= rows) break;
      float parts[4] = {};
#pragma unroll
      for (int other = 0; other < kWarps; ++other) {
        parts[other % 4] += sums[sum_place(row, other, lane)];
      }
      float sum = (parts[0] + parts[1]) + (parts[2] + parts[3]);
      if constexpr (kNorm && kLateScale<T>) sum *= norm_scale(a, header, row);
      finish<T, kMode>(a, group + out_tile, row, out_j, sum, early[f], there);
    }
  }
}

template <typename T, Mode kMode>
__global__ void __launch_bounds__(kThreads, 1)
    linear_rows_kernel(const __grid_constant__ RowsArgs a) {
  unsigned char* shared = dynamic_shared();
  auto& header = *reinterpret_cast<Header*>(shared);
  unsigned char* ring = shared + sizeof header;
  unsigned char* slots = ring + a.stages * kStageBytes;
  constexpr int kNormLines = kMode == Mode::kAdd ? 0 : 1;
  unsigned char* sums = slots + a.slots * (a.rows + kNormLines) * kPitch;
  pdl_trigger();
  const bool produces = threadIdx.x >= kConsumers;
  if (kHasBulkCopies && produces && a.stages > 0) init_ring(header, a.stages);
  __syncthreads();  // the barriers are there
  if (produces) {
    if constexpr (kHasBulkCopies) {
      if (a.stages > 0) produce<T, kMode, kRowsGroup>(a, header, ring);
    }
    return;  // the consumers wait for the predecessor
  }
  consume_rows<T, kMode>(a, header, ring, slots, reinterpret_cast<float*>(sums));
}

#else

template <typename T, Mode kMode>
__global__ void linear_rows_kernel(const __grid_constant__ RowsArgs) {
}  // never launched: see launch()

#endif

// Shared memory is for activations that stay, or one chunk and the next; then for the ring. A ring
// of one stage would mostly wait: rather one chunk at a time.
template <typename T, Mode kMode>
int launch_rows(Launcher& launcher, const LinearArgs& basic, int shared_limit, bool has_ring) {
  RowsArgs a = {};
  static_cast<LinearArgs&>(a) = basic;
  const int slot_bytes = (a.rows + (kMode == Mode::kAdd ? 0 : 1)) * kPitch;
  const int fixed = static_cast<int>(sizeof(Header)) + a.rows * kConsumers * 4;
  const auto room_beside = [&](int slots) { return shared_limit - fixed - slots * slot_bytes; };
  a.slots = a.inputs > kStageCols ? kMaxSlots : 1;
  if (room_beside(a.slots) < (has_ring ? 2 * kStageBytes : 0)) a.slots = 1;
  const int room = room_beside(a.slots);
  if (room < 0) return cudaErrorInvalidValue;
  a.stages = !has_ring ? 0 : room / kStageBytes < kMaxStages ? room / kStageBytes : kMaxStages;
  const auto blocks = static_cast<unsigned>(spread(launcher, a));
  launcher.run_with_shared(linear_rows_kernel<T, kMode>, dim3(blocks), kThreads,
                           fixed + a.slots * slot_bytes + a.stages * kStageBytes, a);
  return launcher.status();
}

}  // namespace td
