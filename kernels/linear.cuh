// The parts of linear.cu that are not the stream of weights: its arguments and shared memory, how
// the activations come in (prologue) and what becomes of the sums (epilogue). linear.cu has the
// overview.
#pragma once

#include <type_traits>

#include "common.cuh"

namespace td {

constexpr int kWarps = 16;  // consumers
constexpr int kConsumers = kWarps * kWarpSize;
constexpr int kThreads = kConsumers + kWarpSize;
constexpr int kTile = 8;  // weight rows
constexpr int kStageCols = 2048;
constexpr int kBlockCols = 32;  // of one warp at a time: two matrix products
// Rows of a stage lie 4 KB apart, so that two of the four rows that a quarter warp reads together
// meet in a bank; a pitch without that conflict would put copies at addresses that are no multiple
// of 128 bytes, which costs far more (H200: 236 against 270 us for the head of an 8B model).
constexpr int kPitch = kStageCols * 2;  // bytes between rows of a stage
constexpr int kStageBytes = kTile * kPitch;
constexpr int kBlocks = kStageCols / kBlockCols / kWarps;  // of a warp in a stage
constexpr int kMaxStages = 6;
constexpr int kConsumerBarrier = 1;
constexpr int kMaxHidden = 8192;  // of a normed row
constexpr int kNormPacks = kMaxHidden / 8 / kConsumers;
constexpr int kMaxRows = 16;

enum class Mode { kQkv, kAdd, kGateUp, kLogits };

struct LinearArgs {
  const void* x;       // [R, K]; the residual stream where there is a norm
  const void* norm;    // [K], or null in kAdd
  const void* weight;  // [N, K]
  void* out;           // kQkv: q [R, H, D]; kAdd: residual [R, N], read and written;
                       // kGateUp: [R, N / 2]; kLogits: float [R, N]
  float eps;
  int rows, inputs, outputs, tiles, stages;  // R, K, N; of the grid; of the ring
  int x_pitch;  // bytes between rows of x in shared memory; 0: not there
  // kQkv
  const float* cos;  // [table_rows, D / 2]
  const float* sin;
  const int32_t* seq_lens;  // [B]
  void* k_cache;            // [B, K, S, D]
  void* v_cache;
  int tokens, heads, kv_heads, head_dim, slots, table_rows;
};

// The weight row that is row `j` of a tile.
template <Mode kMode>
__device__ __forceinline__ int weight_row(const LinearArgs& a, int tile, int j) {
  const int far = j / 4, near = j % 4;
  if constexpr (kMode == Mode::kGateUp) return far * (a.outputs / 2) + tile * 4 + near;
  if constexpr (kMode == Mode::kQkv) {
    const int half = a.head_dim / 2, per_head = half / 4;
    return tile / per_head * a.head_dim + far * half + tile % per_head * 4 + near;
  }
  const int row = tile * kTile + j;
  return row < a.outputs ? row : a.outputs - 1;  // a copy that nobody reads
}

// ---- shared memory: barriers and sums, the activations, the ring ------------------------------

template <int kRows>  // 8 or 16: what the fragments hold
struct alignas(128) Header {
  uint64_t full[kMaxStages], empty[kMaxStages];
  float squares[kRows][kWarps];
  float sums[2][kWarps][kRows][kTile];  // of the warps; two tiles alternate
};

// Bytes between activation rows that keep reads free of bank conflicts: 64 modulo 128, with room
// for zeros up to a whole block of columns.
inline int activation_pitch(int inputs) {
  const int bytes = ceil_div(inputs, kBlockCols) * kBlockCols * 2;
  return bytes + (64 + 128 - bytes % 128) % 128;
}

// d += a b on the tensor cores; see ptx.cuh.
template <typename T>
__device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4],
                                         const uint32_t (&b)[2]) {
  if constexpr (std::is_same_v<T, __half>) {
    mma_m16n8k16_fp16(d, a, b);
  } else {
    mma_m16n8k16_bf16(d, a, b);
  }
}

template <typename T>
__device__ __forceinline__ void unpack(const uint4& pack, float (&x)[8]) {
  const uint32_t words[4] = {pack.x, pack.y, pack.z, pack.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack_pair<T>(words[i]);
    x[2 * i] = pair.x;
    x[2 * i + 1] = pair.y;
  }
}

// ---- prologue --------------------------------------------------------------------------------

// The activations of the rows go into shared memory, zeros behind them.
__device__ __forceinline__ void load_rows(const LinearArgs& a, unsigned char* x_shared) {
  const int packs = a.inputs / 8, padded = a.x_pitch / kPackBytes;
  for (int row = 0; row < a.rows; ++row) {
    const uint4* source = static_cast<const uint4*>(a.x) + static_cast<int64_t>(row) * packs;
    uint4* target = reinterpret_cast<uint4*>(x_shared + row * a.x_pitch);
#pragma unroll 4
    for (int i = threadIdx.x; i < padded; i += kConsumers) {
      target[i] = i < packs ? __ldcg(source + i) : make_uint4(0, 0, 0, 0);
    }
  }
  named_barrier(kConsumerBarrier, kConsumers);  // the rows are there
}

// The norm's weights that one thread needs: pack thread + p * kConsumers.
struct NormPacks {
  uint4 raw[kNormPacks];
};

__device__ __forceinline__ NormPacks load_norm(const LinearArgs& a) {
  NormPacks norm;
#pragma unroll
  for (int p = 0; p < kNormPacks; ++p) {
    const int i = threadIdx.x + p * kConsumers;
    norm.raw[p] =
        i < a.inputs / 8 ? __ldg(static_cast<const uint4*>(a.norm) + i) : make_uint4(0, 0, 0, 0);
  }
  return norm;
}

// As load_rows, with the rows normed on the way: they stay in registers until their scale is known.
template <typename T, typename Head>
__device__ __forceinline__ void load_normed_rows(const LinearArgs& a, Head& header,
                                                 const NormPacks& norm, unsigned char* x_shared) {
  const int thread = threadIdx.x, lane = thread % kWarpSize, warp = thread / kWarpSize;
  const int packs = a.inputs / 8, padded = a.x_pitch / kPackBytes;
  constexpr int kAtOnce = 4;  // rows whose reads are under way together
  for (int first = 0; first < a.rows; first += kAtOnce) {
    uint4 raw[kAtOnce][kNormPacks];
#pragma unroll
    for (int r = 0; r < kAtOnce; ++r) {
#pragma unroll
      for (int p = 0; p < kNormPacks; ++p) {
        const int i = thread + p * kConsumers;
        raw[r][p] = make_uint4(0, 0, 0, 0);
        if (i < packs && first + r < a.rows) {
          raw[r][p] =
              __ldcg(static_cast<const uint4*>(a.x) + static_cast<int64_t>(first + r) * packs + i);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kAtOnce; ++r) {
      if (first + r >= a.rows) break;
      float squares = 0.0f;
#pragma unroll
      for (int p = 0; p < kNormPacks; ++p) {
        float x[8];
        unpack<T>(raw[r][p], x);
#pragma unroll
        for (int i = 0; i < 8; ++i) squares = fmaf(x[i], x[i], squares);
      }
      squares = warp_reduce(squares, Add());
      if (lane == 0) header.squares[first + r][warp] = squares;
    }
    named_barrier(kConsumerBarrier, kConsumers);  // the squares of these rows are there
#pragma unroll
    for (int r = 0; r < kAtOnce; ++r) {
      if (first + r >= a.rows) break;
      float total = 0.0f;
#pragma unroll
      for (int i = 0; i < kWarps; ++i) total += header.squares[first + r][i];
      const float scale = rsqrtf(total / static_cast<float>(a.inputs) + a.eps);
      T* target = reinterpret_cast<T*>(x_shared + (first + r) * a.x_pitch);
#pragma unroll
      for (int p = 0; p < kNormPacks; ++p) {
        const int i = thread + p * kConsumers;
        if (i >= padded) break;
        float x[8], w[8];
        unpack<T>(raw[r][p], x);
        unpack<T>(norm.raw[p], w);
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] = rounded<T>(x[j] * scale) * w[j];
        store_pack<T, true>(target + i * 8, 8, x);  // behind the row: zeros
      }
    }
  }
  named_barrier(kConsumerBarrier, kConsumers);  // the normed rows are there
}

// ---- epilogue --------------------------------------------------------------------------------

// Lane `r % 4 * 8 + j` of the warp that finishes a tile has row r and tile row j. What its epilogue
// needs from memory is asked for when the tile starts, so that it is there when the sum is.
struct Early {
  float before = 0.0f;       // kAdd: the residual
  float c = 1.0f, s = 0.0f;  // kQkv: of the angle; v does not turn
  int position = 0;          // kQkv
};

template <typename T, Mode kMode>
__device__ __forceinline__ Early load_early(const LinearArgs& a, int tile, int row, int j) {
  Early early;
  if (row >= a.rows) return early;
  const int feature = weight_row<kMode>(a, tile, j);
  if constexpr (kMode == Mode::kAdd) {
    const T* residual = static_cast<const T*>(a.out);
    early.before = to_float(residual[static_cast<int64_t>(row) * a.outputs + feature]);
  } else if constexpr (kMode == Mode::kQkv) {
    const int half = a.head_dim / 2;
    early.position = a.seq_lens[row / a.tokens] + row % a.tokens;
    if (feature < (a.heads + a.kv_heads) * a.head_dim) {
      const int table_row = early.position < a.table_rows ? early.position : a.table_rows - 1;
      const int64_t angle = static_cast<int64_t>(table_row) * half + feature % half;
      early.c = a.cos[angle];
      early.s = a.sin[angle];
    }
  }
  return early;
}

// Every lane of the warp comes here.
template <typename T, Mode kMode>
__device__ __forceinline__ void finish(const LinearArgs& a, int tile, int row, int j, float sum,
                                       const Early& early) {
  const float partner = __shfl_xor_sync(kFullWarp, sum, 4);
  if (row >= a.rows) return;
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
    const int head = feature / a.head_dim, d = feature % a.head_dim;
    const bool is_first = d < a.head_dim / 2;
    const float value = sum * early.c + (is_first ? -partner : partner) * early.s;
    if (head < a.heads) {
      static_cast<T*>(a.out)[(wide_row * a.heads + head) * a.head_dim + d] = from_float<T>(value);
    } else if (early.position < a.slots) {
      const bool is_key = head < a.heads + a.kv_heads;
      const int64_t kv_head = head - a.heads - (is_key ? 0 : a.kv_heads);
      T* cache = static_cast<T*>(is_key ? a.k_cache : a.v_cache);
      const int64_t slot = (row / a.tokens * a.kv_heads + kv_head) * a.slots + early.position;
      cache[slot * a.head_dim + d] = from_float<T>(value);
    }
  }
}

}  // namespace td
