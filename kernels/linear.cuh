// What the fused products are given, which weights belong together, and what becomes of the sums
// (epilogue). linear.cu has the overview.
#pragma once

#include "common.cuh"

namespace td {

constexpr int kWarps = 8;  // consumers
constexpr int kConsumers = kWarps * kWarpSize;
constexpr int kThreads = kConsumers + kWarpSize;
constexpr int kTile = 8;   // weight rows
constexpr int kGroup = 2;  // tiles whose sums are carried together
constexpr int kStageCols = 2048;
constexpr int kPitch = kStageCols * 2;  // bytes between rows of a stage
constexpr int kStageBytes = kTile * kPitch;
constexpr int kBlockCols = 32;             // of two matrix products
constexpr int kPairCols = 2 * kBlockCols;  // what a warp takes at a time: 128 bytes of every row
constexpr int kPairs = kStageCols / kPairCols / kWarps;  // of a warp in a stage
constexpr int kBlocks = 2 * kPairs;
constexpr int kResidentCols = 4096;  // activations that stay in registers
constexpr int kChunks = kResidentCols / kStageCols;
constexpr int kPacks =
    kResidentCols / 8 / kConsumers;  // of 8 activations, a lane's of a resident row
constexpr int kStagedRows = 2;       // of activations on their way to the lanes
constexpr int kStagedPitch = kPacks * kWarpSize * kPackBytes + 64;
constexpr int kMaxStages = 8;
constexpr int kMaxRows = 16;
constexpr int kConsumerBarrier = 1;

enum class Mode { kQkv, kAdd, kGateUp, kLogits };

// Division by a number that the host knows, exact for quotients of numbers below 2^16.
struct Divisor {
  uint32_t inverse, divisor;
  __device__ __forceinline__ int divide(int n) const {
    return static_cast<int>(__umulhi(static_cast<uint32_t>(n), inverse));
  }
};
inline Divisor divisor(int64_t d) {
  return {static_cast<uint32_t>(((int64_t{1} << 32) + d - 1) / d), static_cast<uint32_t>(d)};
}

struct LinearArgs {
  const void* x;       // [R, K]; the residual stream where there is a norm
  const void* norm;    // [K], or null in kAdd
  const void* weight;  // [N, K]
  void* out;           // kQkv: q [R, H, D]; kAdd: residual [R, N], read and written;
                       // kGateUp: [R, N / 2]; kLogits: float [R, N]
  float eps;
  int rows, inputs, outputs;  // R, K, N
  int tiles, stages;          // of the grid; of the ring
  int per_block, extra;       // tiles of every block; blocks that have one more
  int32_t* advance;           // kLogits: lengths [batch] that grow by `tokens`
  int batch;
  // kQkv
  const float* cos;  // [table_rows, D / 2]
  const float* sin;
  const int32_t* seq_lens;  // [B]
  void* k_cache;            // [B, K, S, D]
  void* v_cache;
  int tokens, heads, kv_heads, head_dim, slots, table_rows;
  Divisor per_head;  // tiles of a head
};

// Gives every block its tiles, at most one block a multiprocessor; returns how many blocks.
inline int spread(Launcher& launcher, LinearArgs& a) {
  const int multiprocessors = launcher.multiprocessors();
  const int blocks = a.tiles < multiprocessors ? a.tiles : multiprocessors;
  a.per_block = a.tiles / blocks;
  a.extra = a.tiles % blocks;
  return blocks;
}

// The weight row that is row `j` of a tile.
template <Mode kMode>
__device__ __forceinline__ int weight_row(const LinearArgs& a, int tile, int j) {
  const int far = j / 4, near = j % 4;
  if constexpr (kMode == Mode::kGateUp) return far * (a.outputs / 2) + tile * 4 + near;
  if constexpr (kMode == Mode::kQkv) {
    const int head = a.per_head.divide(tile), half = a.head_dim / 2;
    return head * half + far * half + tile * 4 + near;  // a head's tiles cover half of its rows
  }
  const int row = tile * kTile + j;
  return row < a.outputs ? row : a.outputs - 1;  // a copy that nobody reads
}

// Shared memory: this, then the ring, then the work area (activations on their way to the lanes,
// later the warps' sums).
struct alignas(128) Header {
  uint64_t full[kMaxStages], empty[kMaxStages];
  float squares[kMaxRows][kWarps];
};

// ---- epilogue --------------------------------------------------------------------------------

// What an output needs from memory, asked for before its sum is there.
struct Early {
  float before = 0.0f;       // kAdd: the residual
  float c = 1.0f, s = 0.0f;  // kQkv: of the angle; v does not turn
  int position = 0;          // kQkv
};

__device__ __forceinline__ int row_position(const LinearArgs& a, int row) {
  if (a.rows == 1) return __ldcg(a.seq_lens);
  return __ldcg(a.seq_lens + row / a.tokens) + row % a.tokens;
}

template <typename T, Mode kMode>
__device__ __forceinline__ Early load_early(const LinearArgs& a, int tile, int row, int j) {
  Early early;
  const int feature = weight_row<kMode>(a, tile, j);
  if constexpr (kMode == Mode::kAdd) {
    const T* residual = static_cast<const T*>(a.out);
    early.before = to_float(residual[static_cast<int64_t>(row) * a.outputs + feature]);
  } else if constexpr (kMode == Mode::kQkv) {
    const int half = a.head_dim / 2;
    early.position = row_position(a, row);
    if (feature < (a.heads + a.kv_heads) * a.head_dim) {
      int table_row = early.position < a.table_rows ? early.position : a.table_rows - 1;
      table_row = table_row < 0 ? 0 : table_row;
      const int d = tile * 4 - a.per_head.divide(tile) * half + j % 4;
      early.c = __ldg(a.cos + static_cast<int64_t>(table_row) * half + d);
      early.s = __ldg(a.sin + static_cast<int64_t>(table_row) * half + d);
    }
  }
  return early;
}

// Every lane of the warp comes here; lanes j and j ^ 4 of a tile are partners.
template <typename T, Mode kMode>
__device__ __forceinline__ void finish(const LinearArgs& a, int tile, int row, int j, float sum,
                                       const Early& early, bool there) {
  const float partner = __shfl_xor_sync(kFullWarp, sum, 4);
  if (!there) return;
  const int64_t wide_row = row;
  const int feature = weight_row<kMode>(a, tile, j);
  if constexpr (kMode == Mode::kLogits) {
    if (tile * kTile + j < a.outputs) {
      static_cast<float*>(a.out)[wide_row * a.outputs + feature] = sum;
    }
  } else if constexpr (kMode == Mode::kAdd) {
    if (tile * kTile + j < a.outputs) {
      static_cast<T*>(a.out)[wide_row * a.outputs + feature] = from_float<T>(early.before + sum);
    }
  } else if constexpr (kMode == Mode::kGateUp) {
    if (j < 4) {
      const float activated = sum / (1.0f + expf(-sum));
      static_cast<T*>(a.out)[wide_row * (a.outputs / 2) + feature] =
          from_float<T>(activated * partner);
    }
  } else {
    const int head = a.per_head.divide(tile), half = a.head_dim / 2;
    const int d = tile * 4 - head * half + j;  // j of the second half: see below
    const bool is_first = j < 4;
    const float value = sum * early.c + (is_first ? -partner : partner) * early.s;
    const int place = is_first ? d : d - 4 + half;
    if (head < a.heads) {
      static_cast<T*>(a.out)[(wide_row * a.heads + head) * a.head_dim + place] =
          from_float<T>(value);
    } else if (early.position < a.slots) {
      const bool is_key = head < a.heads + a.kv_heads;
      const int kv_head = head - a.heads - (is_key ? 0 : a.kv_heads);
      T* cache = static_cast<T*>(is_key ? a.k_cache : a.v_cache);
      const int batch = a.rows == 1 ? 0 : row / a.tokens;
      const int64_t slot =
          static_cast<int64_t>(batch * a.kv_heads + kv_head) * a.slots + early.position;
      cache[slot * a.head_dim + place] = from_float<T>(value);
    }
  }
}

}  // namespace td
