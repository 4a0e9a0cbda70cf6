// Products of a few rows with a weight matrix, fused with what stands around them in a decode step:
//
//   td_linear_qkv      norm -> q, k, v projection -> rope -> q out, k and v into the cache
//   td_linear_add      projection added to the residual stream (o and down)
//   td_linear_gate_up  norm -> gate and up projections -> silu(gate) * up
//   td_linear_logits   norm -> lm_head -> float32 logits
//
// At these sizes the weights are all the traffic, so a kernel is a stream of weights with arithmetic
// hanging off it. One block a multiprocessor; a block owns a contiguous range of tiles. A tile is 8
// weight rows (output features); a stage is 1024 columns of a tile. One producer warp copies stages
// into a ring in shared memory, eight bulk copies of 2 KB each, and never looks at activations: it
// fills the ring before this kernel's predecessor has finished, which hides most of the dependency.
// Eight consumer warps share every stage, 32 columns at a time in turn, and multiply on the tensor
// cores: the activations (up to 16 rows) are the A operand, the weights the B operand of m16n8k16.
// Weights stay as they were stored, row by row. The eight warps' sums of a tile are added in a fixed
// order by one of them, which then does the epilogue while the others go on.
//
// Which 8 rows make a tile is free, since every row has its own copy: q and k tiles take 4 features
// and their 4 rotation partners, gate_up tiles 4 gate rows and their 4 up rows, so that every
// epilogue finds what it needs in one place.
//
// The arithmetic of a row of activations depends on K alone: neither on how many rows there are, nor
// on the grid, nor on the ring. Rows of A that are not there are zero and cost nothing.
//
// Bytes moved: the weights once. Limits: 1 to 16 rows; fp16 or bf16; K, and head_dim / 2 or the
// number of features where they pair up, multiples of 8 and 4; 16-byte aligned pointers. Before
// sm_90 the consumers load weights straight from global memory, with the same arithmetic; sm_80 is
// the oldest with these tensor-core products.

#include <type_traits>

#include "common.cuh"

namespace td {
namespace {

constexpr int kWarps = 8;                    // consumers
constexpr int kConsumers = kWarps * kWarpSize;
constexpr int kThreads = kConsumers + kWarpSize;
constexpr int kTile = 8;                     // weight rows
constexpr int kStageCols = 1024;
constexpr int kBlockCols = 32;               // of one warp at a time: two matrix products
// Neighbouring rows are 64 bytes apart modulo 128: the eight 16-byte reads of a quarter warp, two
// rows by four packs, then touch every bank once. The same holds for the activations.
constexpr int kPitch = kStageCols * 2 + 64;  // bytes between rows of a stage
constexpr int kStageBytes = kTile * kPitch;
constexpr int kMaxStages = 12;
constexpr int kConsumerBarrier = 1;
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
  int x_pitch;                               // bytes between rows of x in shared memory; 0: not there
  // kQkv
  const float* cos;          // [table_rows, D / 2]
  const float* sin;
  const int32_t* seq_lens;   // [B]
  void* k_cache;             // [B, K, S, D]
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

// ---- shared memory: barriers, sums, the norm weights, the activations, the ring ---------------

struct Header {
  uint64_t full[kMaxStages], empty[kMaxStages];
  float squares[kMaxRows][kWarps];
  float sums[2][kWarps][kMaxRows][kTile];  // of the eight warps; two tiles alternate
};
constexpr int kHeaderBytes = (sizeof(Header) + 127) / 128 * 128;

// Bytes between activation rows that keep reads free of bank conflicts: 64 modulo 128, with room
// for zeros up to a whole block of columns.
int activation_pitch(int inputs) {
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

// ---- prologue --------------------------------------------------------------------------------

// Puts the activations, normed where the mode has a norm, into shared memory, zeros behind them.
template <typename T, Mode kMode>
__device__ __forceinline__ void load_activations(const LinearArgs& a, Header& header,
                                                 const T* norm, unsigned char* x_shared) {
  const int thread = threadIdx.x, lane = thread % kWarpSize, warp = thread / kWarpSize;
  const int packs = a.inputs / kPack<T>, padded = a.x_pitch / kPackBytes;
  for (int row = 0; row < a.rows; ++row) {
    const uint4* source = static_cast<const uint4*>(a.x) + static_cast<int64_t>(row) * packs;
    uint4* target = reinterpret_cast<uint4*>(x_shared + row * a.x_pitch);
    float squares = 0.0f;
    for (int i = thread; i < padded; i += kConsumers) {
      uint4 raw = make_uint4(0, 0, 0, 0);
      if (i < packs) raw = __ldcg(source + i);
      target[i] = raw;
      if constexpr (kMode != Mode::kAdd) {
        const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float2 pair = unpack_pair<T>(words[j]);
          squares = fmaf(pair.x, pair.x, squares);
          squares = fmaf(pair.y, pair.y, squares);
        }
      }
    }
    if constexpr (kMode != Mode::kAdd) {
      squares = warp_reduce(squares, Add());
      if (lane == 0) header.squares[row][warp] = squares;
    }
  }
  named_barrier(kConsumerBarrier, kConsumers);  // squares, and rows where there is no norm
  if constexpr (kMode != Mode::kAdd) {
    for (int row = 0; row < a.rows; ++row) {
      float total = 0.0f;
#pragma unroll
      for (int i = 0; i < kWarps; ++i) total += header.squares[row][i];
      const float scale = rsqrtf(total / static_cast<float>(a.inputs) + a.eps);
      T* target = reinterpret_cast<T*>(x_shared + row * a.x_pitch);
      for (int i = thread; i < packs; i += kConsumers) {
        float x[kPack<T>], w[kPack<T>];
        load_aligned_pack(target + i * kPack<T>, x);
        load_aligned_pack(norm + i * kPack<T>, w);
#pragma unroll
        for (int j = 0; j < kPack<T>; ++j) x[j] = rounded<T>(x[j] * scale) * w[j];
        store_pack<T, true>(target + i * kPack<T>, kPack<T>, x);
      }
    }
    named_barrier(kConsumerBarrier, kConsumers);  // normed rows are there
  }
}

// ---- epilogue --------------------------------------------------------------------------------

// Lane `r % 4 * 8 + j` holds the sum of row r and tile row j; every lane of the warp comes here.
template <typename T, Mode kMode>
__device__ __forceinline__ void finish(const LinearArgs& a, int tile, int row, int j, float sum,
                                       float before) {
  const bool present = row < a.rows;
  const float partner = __shfl_xor_sync(kFullWarp, sum, 4);
  const int feature = weight_row<kMode>(a, tile, j);
  if constexpr (kMode == Mode::kLogits) {
    if (present && tile * kTile + j < a.outputs) {
      static_cast<float*>(a.out)[static_cast<int64_t>(row) * a.outputs + feature] = sum;
    }
  } else if constexpr (kMode == Mode::kAdd) {
    if (present && tile * kTile + j < a.outputs) {
      static_cast<T*>(a.out)[static_cast<int64_t>(row) * a.outputs + feature] =
          from_float<T>(before + sum);
    }
  } else if constexpr (kMode == Mode::kGateUp) {
    if (present && j < 4) {
      const float activated = sum / (1.0f + expf(-sum));
      static_cast<T*>(a.out)[static_cast<int64_t>(row) * (a.outputs / 2) + feature] =
          from_float<T>(activated * partner);
    }
  } else {
    if (!present) return;
    const int half = a.head_dim / 2, head = feature / a.head_dim, d = feature % a.head_dim;
    const int batch = row / a.tokens;
    const int position = a.seq_lens[batch] + row % a.tokens;
    float value = sum;
    if (head < a.heads + a.kv_heads) {  // q and k turn, v does not
      const int table_row = position < a.table_rows ? position : a.table_rows - 1;
      const int64_t angle = static_cast<int64_t>(table_row) * half + d % half;
      const float c = a.cos[angle], s = a.sin[angle];
      value = d < half ? sum * c - partner * s : sum * c + partner * s;
    }
    if (head < a.heads) {
      static_cast<T*>(a.out)[(static_cast<int64_t>(row) * a.heads + head) * a.head_dim + d] =
          from_float<T>(value);
    } else if (position < a.slots) {
      const bool is_key = head < a.heads + a.kv_heads;
      const int kv_head = head - a.heads - (is_key ? 0 : a.kv_heads);
      T* cache = static_cast<T*>(is_key ? a.k_cache : a.v_cache);
      cache[((static_cast<int64_t>(batch) * a.kv_heads + kv_head) * a.slots + position) *
                a.head_dim + d] = from_float<T>(value);
    }
  }
}

// ---- the kernel ------------------------------------------------------------------------------

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
constexpr bool kHasBulkCopies = true;
#else
constexpr bool kHasBulkCopies = false;
#endif

// This block's tiles: contiguous, sizes differing by at most one.
__device__ __forceinline__ int first_tile(const LinearArgs& a, int block) {
  return static_cast<int>(static_cast<int64_t>(a.tiles) * block / gridDim.x);
}

template <typename T, Mode kMode>
__device__ __forceinline__ void produce(const LinearArgs& a, Header& header, unsigned char* ring) {
  const int lane = threadIdx.x % kWarpSize;
  const int last = first_tile(a, blockIdx.x + 1);
  int slot = 0;
  uint32_t parity = 1;  // of the phase before the first, which counts as completed
  for (int tile = first_tile(a, blockIdx.x); tile < last; ++tile) {
    const T* row = nullptr;
    if (lane < kTile) {
      row = static_cast<const T*>(a.weight) +
            static_cast<int64_t>(weight_row<kMode>(a, tile, lane)) * a.inputs;
    }
    for (int column = 0; column < a.inputs; column += kStageCols) {
      const int left = a.inputs - column;
      const uint32_t bytes = (left < kStageCols ? left : kStageCols) * sizeof(T);
      mbarrier_wait(&header.empty[slot], parity);
      if (lane == 0) mbarrier_expect(&header.full[slot], bytes * kTile);
      __syncwarp();  // the barrier knows of the bytes before any can arrive
      if (lane < kTile) {
        bulk_copy(ring + slot * kStageBytes + lane * kPitch, row + column, bytes,
                  &header.full[slot]);
      }
      if (++slot == a.stages) {
        slot = 0;
        parity ^= 1;
      }
    }
  }
}

template <typename T, Mode kMode, bool kManyRows>
__device__ __forceinline__ void consume(const LinearArgs& a, Header& header,
                                        const unsigned char* x_shared,
                                        const unsigned char* ring) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int g = lane / 4, t = lane % 4;  // of the fragments: row or tile row, and pack
  const int last = first_tile(a, blockIdx.x + 1);
  const uint4 zero = make_uint4(0, 0, 0, 0);
  int slot = 0, turn = 0;
  uint32_t parity = 0;

  // Eight activations of one row, zeros where there is no such row or column.
  const auto activations = [&](int row, int column) {
    if (row >= a.rows) return zero;
    if (a.x_pitch != 0) {
      return *reinterpret_cast<const uint4*>(x_shared + row * a.x_pitch + column * sizeof(T));
    }
    if (column >= a.inputs) return zero;
    return __ldcg(reinterpret_cast<const uint4*>(static_cast<const T*>(a.x) +
                                                 static_cast<int64_t>(row) * a.inputs + column));
  };

  for (int tile = first_tile(a, blockIdx.x); tile < last; ++tile, ++turn) {
    const bool finishes = turn % kWarps == warp;
    constexpr int kPasses = kManyRows ? 4 : 2;  // of four rows each in the epilogue
    float before[kPasses] = {};
    if (kMode == Mode::kAdd && finishes) {
#pragma unroll
      for (int i = 0; i < kPasses; ++i) {
        const int row = i * 4 + lane / kTile, feature = tile * kTile + lane % kTile;
        if (row < a.rows && feature < a.outputs) {
          before[i] = to_float(
              static_cast<const T*>(a.out)[static_cast<int64_t>(row) * a.outputs + feature]);
        }
      }
    }

    const T* direct = static_cast<const T*>(a.weight) +
                      static_cast<int64_t>(weight_row<kMode>(a, tile, g)) * a.inputs;
    float even[4] = {}, odd[4] = {};  // two chains of dependent products
    for (int start = 0; start < a.inputs; start += kStageCols) {
      const unsigned char* stage = ring + slot * kStageBytes + g * kPitch;
      if constexpr (kHasBulkCopies) mbarrier_wait(&header.full[slot], parity);
#pragma unroll
      for (int i = 0; i < kStageCols / kBlockCols / kWarps; ++i) {
        const int offset = (i * kWarps + warp) * kBlockCols, column = start + offset + t * 8;
        if (start + offset >= a.inputs) break;
        uint4 w = zero;
        if (column < a.inputs) {  // beyond: whatever the ring held before
          w = kHasBulkCopies
                  ? *reinterpret_cast<const uint4*>(stage + (offset + t * 8) * sizeof(T))
                  : *reinterpret_cast<const uint4*>(direct + column);
        }
        // Which columns meet in a product is free as long as both operands agree: a lane's eight
        // neighbouring columns serve two products, four columns each.
        const uint4 low = activations(g, column);
        const uint4 high = kManyRows ? activations(g + 8, column) : zero;
        multiply<T>(even, {low.x, high.x, low.y, high.y}, {w.x, w.y});
        multiply<T>(odd, {low.z, high.z, low.w, high.w}, {w.z, w.w});
      }
      if constexpr (kHasBulkCopies) {
        __syncwarp();  // every lane has read the stage
        if (lane == 0) mbarrier_arrive(&header.empty[slot]);
        if (++slot == a.stages) {
          slot = 0;
          parity ^= 1;
        }
      }
    }

    float(&sums)[kWarps][kMaxRows][kTile] = header.sums[turn % 2];
    *reinterpret_cast<float2*>(&sums[warp][g][t * 2]) =
        make_float2(even[0] + odd[0], even[1] + odd[1]);
    if (kManyRows) {
      *reinterpret_cast<float2*>(&sums[warp][g + 8][t * 2]) =
          make_float2(even[2] + odd[2], even[3] + odd[3]);
    }
    // The sums are there. It also says that the warp of the tile before last is done with its own,
    // which this buffer's next user relies on.
    named_barrier(kConsumerBarrier, kConsumers);
    if (finishes) {
#pragma unroll
      for (int i = 0; i < kPasses; ++i) {
        if (i * 4 >= a.rows) break;
        const int row = i * 4 + lane / kTile, j = lane % kTile;
        float sum = 0.0f;
#pragma unroll
        for (int other = 0; other < kWarps; ++other) sum += sums[other][row][j];
        finish<T, kMode>(a, tile, row, j, sum, before[i]);
      }
    }
  }
}

template <typename T, Mode kMode, bool kManyRows>
__global__ void __launch_bounds__(kThreads, 1) linear_kernel(const __grid_constant__ LinearArgs a) {
  unsigned char* shared = dynamic_shared();
  Header& header = *reinterpret_cast<Header*>(shared);
  T* norm = reinterpret_cast<T*>(shared + kHeaderBytes);
  const int norm_bytes = kMode == Mode::kAdd ? 0 : (a.inputs * 2 + 127) / 128 * 128;
  unsigned char* x_shared = shared + kHeaderBytes + norm_bytes;
  unsigned char* ring = x_shared + (a.rows * a.x_pitch + 127) / 128 * 128;
  const int thread = threadIdx.x;

  pdl_trigger();
  if (kHasBulkCopies && thread == 0) {
    for (int i = 0; i < a.stages; ++i) {
      mbarrier_init(&header.full[i], 1);
      mbarrier_init(&header.empty[i], kWarps);
    }
    mbarrier_init_fence();
  }
  if constexpr (kMode != Mode::kAdd) {  // weights too: nothing that runs before this kernel writes them
    for (int i = thread; i < a.inputs / kPack<T>; i += kThreads) {
      reinterpret_cast<uint4*>(norm)[i] = static_cast<const uint4*>(a.norm)[i];
    }
  }
  __syncthreads();  // barriers and norm weights are there
  if (thread >= kConsumers) {
    if constexpr (kHasBulkCopies) produce<T, kMode>(a, header, ring);
    return;  // the consumers wait for the predecessor
  }
  pdl_wait();
  if (a.x_pitch != 0) load_activations<T, kMode>(a, header, norm, x_shared);
  consume<T, kMode, kManyRows>(a, header, x_shared, ring);
}

#else

template <typename T, Mode kMode, bool kManyRows>
__global__ void linear_kernel(const __grid_constant__ LinearArgs) {}  // never launched: see launch()

#endif

// ---- host side -------------------------------------------------------------------------------

constexpr int kOldest = 80;  // compute capability

template <typename T, Mode kMode, bool kManyRows>
int launch_kernel(Launcher& launcher, LinearArgs& a, int shared_limit) {
  const int norm_bytes = kMode == Mode::kAdd ? 0 : (a.inputs * 2 + 127) / 128 * 128;
  const auto fixed = [&] {
    return kHeaderBytes + norm_bytes + (a.rows * a.x_pitch + 127) / 128 * 128;
  };
  constexpr int kFewestStages = 4;
  a.x_pitch = activation_pitch(a.inputs);
  if (fixed() + kFewestStages * kStageBytes > shared_limit) {
    if (kMode != Mode::kAdd) return cudaErrorInvalidValue;
    a.x_pitch = 0;  // read where it lies, once a tile, through L2
  }
  const int room = (shared_limit - fixed()) / kStageBytes;
  a.stages = room < kMaxStages ? room : kMaxStages;
  if (a.stages < 1) return cudaErrorInvalidValue;
  const int blocks = launcher.multiprocessors();
  launcher.run_with_shared(linear_kernel<T, kMode, kManyRows>,
                           dim3(static_cast<unsigned>(a.tiles < blocks ? a.tiles : blocks)),
                           kThreads, fixed() + a.stages * kStageBytes, a);
  return launcher.status();
}

template <Mode kMode>
int launch(LinearArgs& a, int dtype, int device, void* stream) {
  if (a.rows == 0 || a.tiles == 0) return cudaSuccess;
  if (a.rows < 0 || a.rows > kMaxRows || a.inputs % 8 != 0) return cudaErrorInvalidValue;
  if (dtype == TD_FLOAT32) return cudaErrorInvalidValue;
  Launcher launcher(device, stream);
  const int major = launcher.attribute(cudaDevAttrComputeCapabilityMajor);
  if (launcher.status() == cudaSuccess && major * 10 < kOldest) return cudaErrorInvalidValue;
  const int limit = launcher.attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  const auto with_type = [&](auto tag) -> int {
    using T = typename decltype(tag)::T;
    return a.rows <= 8 ? launch_kernel<T, kMode, false>(launcher, a, limit)
                       : launch_kernel<T, kMode, true>(launcher, a, limit);
  };
  if (launcher.status() != cudaSuccess) return launcher.status();
  return dtype == TD_FLOAT16 ? with_type(Tag<__half>{}) : with_type(Tag<__nv_bfloat16>{});
}

LinearArgs basic_args(const void* x, const void* norm, const void* weight, void* out, int64_t rows,
                      int64_t inputs, int64_t outputs, float eps) {
  LinearArgs a = {};
  a.x = x;
  a.norm = norm;
  a.weight = weight;
  a.out = out;
  a.eps = eps;
  a.rows = static_cast<int>(rows);
  a.inputs = static_cast<int>(inputs);
  a.outputs = static_cast<int>(outputs);
  a.tiles = ceil_div(a.outputs, kTile);
  return a;
}

}  // namespace
}  // namespace td

int td_linear_qkv(const void* x, const void* norm, const void* weight, const float* cos,
                  const float* sin, void* q, void* k_cache, void* v_cache, const int32_t* seq_lens,
                  int64_t batch, int64_t tokens, int64_t hidden_size, int64_t heads,
                  int64_t kv_heads, int64_t head_dim, int64_t slots, int64_t table_rows, float eps,
                  int dtype, int device, void* stream) {
  if (head_dim % 8 != 0) return cudaErrorInvalidValue;
  const int64_t outputs = (heads + 2 * kv_heads) * head_dim;
  td::LinearArgs a =
      td::basic_args(x, norm, weight, q, batch * tokens, hidden_size, outputs, eps);
  a.cos = cos;
  a.sin = sin;
  a.seq_lens = seq_lens;
  a.k_cache = k_cache;
  a.v_cache = v_cache;
  a.tokens = static_cast<int>(tokens);
  a.heads = static_cast<int>(heads);
  a.kv_heads = static_cast<int>(kv_heads);
  a.head_dim = static_cast<int>(head_dim);
  a.slots = static_cast<int>(slots);
  a.table_rows = static_cast<int>(table_rows);
  return td::launch<td::Mode::kQkv>(a, dtype, device, stream);
}

int td_linear_add(const void* x, const void* weight, void* residual, int64_t rows, int64_t inputs,
                  int64_t outputs, int dtype, int device, void* stream) {
  td::LinearArgs a = td::basic_args(x, nullptr, weight, residual, rows, inputs, outputs, 0.0f);
  return td::launch<td::Mode::kAdd>(a, dtype, device, stream);
}

int td_linear_gate_up(const void* x, const void* norm, const void* weight, void* out, int64_t rows,
                      int64_t hidden_size, int64_t intermediate_size, float eps, int dtype,
                      int device, void* stream) {
  if (intermediate_size % 4 != 0) return cudaErrorInvalidValue;
  td::LinearArgs a =
      td::basic_args(x, norm, weight, out, rows, hidden_size, 2 * intermediate_size, eps);
  return td::launch<td::Mode::kGateUp>(a, dtype, device, stream);
}

int td_linear_logits(const void* x, const void* norm, const void* weight, float* logits,
                     int64_t rows, int64_t hidden_size, int64_t vocab_size, float eps, int dtype,
                     int device, void* stream) {
  td::LinearArgs a = td::basic_args(x, norm, weight, logits, rows, hidden_size, vocab_size, eps);
  return td::launch<td::Mode::kLogits>(a, dtype, device, stream);
}
