// Products of a few rows with a weight matrix, fused with what stands around them in a decode step:
//
//   td_linear_qkv      norm -> q, k, v projection -> rope -> q out, k and v into the cache
//   td_linear_add      projection added to the residual stream (o and down)
//   td_linear_gate_up  norm -> gate and up projections -> silu(gate) * up
//   td_linear_logits   norm -> lm_head -> float32 logits
//
// At these sizes the weights are all the traffic, so a kernel is a stream of weights with
// arithmetic hanging off it. One block a multiprocessor; a block owns a contiguous range of tiles.
// A tile is 8 weight rows (output features); a stage is 2048 columns of a tile. One producer warp
// copies stages into a ring in shared memory, eight bulk copies of 4 KB each, and never looks at
// activations: it fills the ring before this kernel's predecessor has finished, which hides most of
// the dependency. Sixteen consumer warps share every stage, 32 columns at a time in turn, and
// multiply on the tensor cores: the activations (up to 16 rows) are the A operand, the weights the
// B operand of m16n8k16. Weights stay as they were stored, row by row. The warps' sums of a tile
// are added in a fixed order by one of them, which then does the epilogue while the others go on.
//
// Which 8 rows make a tile is free, since every row has its own copy: q and k tiles take 4 features
// and their 4 rotation partners, gate_up tiles 4 gate rows and their 4 up rows, so that every
// epilogue finds what it needs in one place.
//
// The arithmetic of a row of activations depends on K alone: neither on how many rows there are,
// nor on the grid, nor on the ring. Rows of A that are not there are zero and cost nothing.
//
// Bytes moved: the weights once. Limits: 1 to 16 rows; fp16 or bf16; K, and head_dim / 2 or the
// number of features where they pair up, multiples of 8 and 4; 16-byte aligned pointers. Before
// sm_90 the consumers load weights straight from global memory, with the same arithmetic; sm_80 is
// the oldest with these tensor-core products.

#include "linear.cuh"

namespace td {
namespace {

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

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

template <typename Head>
__device__ __forceinline__ void init_ring(Head& header, int stages) {
  for (int i = 0; i < stages; ++i) {
    mbarrier_init(&header.full[i], 1);
    mbarrier_init(&header.empty[i], kWarps);
  }
  mbarrier_init_fence();
}

template <typename T, Mode kMode, typename Head>
__device__ __forceinline__ void produce(const LinearArgs& a, Head& header, unsigned char* ring) {
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

#else  // the consumers load for themselves

template <typename Head>
__device__ __forceinline__ void init_ring(Head&, int) {}

template <typename T, Mode kMode, typename Head>
__device__ __forceinline__ void produce(const LinearArgs&, Head&, unsigned char*) {}

#endif

template <typename T, Mode kMode, bool kManyRows, bool kShared>
__device__ __forceinline__ void consume(const LinearArgs& a, Header<kManyRows ? 16 : 8>& header,
                                        const unsigned char* x_shared, const unsigned char* ring) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int g = lane / 4, t = lane % 4;  // of the fragments: row or tile row, and pack
  const int last = first_tile(a, blockIdx.x + 1);
  const uint4 zero = make_uint4(0, 0, 0, 0);
  int slot = 0, turn = 0;
  uint32_t parity = 0;

  // Eight activations of row g or g + 8, zeros where there is no such row or column. A lane without
  // a row reads another one's and drops it: no branch, and no traffic beyond what the others cause.
  const auto activations = [&](int row, int column) {
    const int present = row < a.rows ? row : 0;
    uint4 x = zero;
    if constexpr (kShared) {
      x = *reinterpret_cast<const uint4*>(x_shared + present * a.x_pitch + column * sizeof(T));
    } else if (column < a.inputs) {
      x = __ldcg(reinterpret_cast<const uint4*>(static_cast<const T*>(a.x) +
                                                static_cast<int64_t>(present) * a.inputs + column));
    }
    return row < a.rows ? x : zero;
  };

  for (int tile = first_tile(a, blockIdx.x); tile < last; ++tile, ++turn) {
    const bool finishes = turn % kWarps == warp;
    constexpr int kPasses = kManyRows ? 4 : 2;  // of four rows each in the epilogue
    Early early[kPasses];
    if (finishes) {
#pragma unroll
      for (int i = 0; i < kPasses; ++i) {
        early[i] = load_early<T, kMode>(a, tile, i * 4 + lane / kTile, lane % kTile);
      }
    }

    const T* direct = static_cast<const T*>(a.weight) +
                      static_cast<int64_t>(weight_row<kMode>(a, tile, g)) * a.inputs;
    float even[4] = {}, odd[4] = {};  // two chains of dependent products
    for (int start = 0; start < a.inputs; start += kStageCols) {
      const unsigned char* stage = ring + slot * kStageBytes + g * kPitch;
      if constexpr (kHasBulkCopies) mbarrier_wait(&header.full[slot], parity);
      const int first = warp * kBlockCols + t * 8;  // this lane's columns in the stage
      const auto weights = [&](int offset) {
        return kHasBulkCopies ? *reinterpret_cast<const uint4*>(stage + offset * sizeof(T))
                              : *reinterpret_cast<const uint4*>(direct + start + offset);
      };
      // Which columns meet in a product is free as long as both operands agree: a lane's eight
      // neighbouring columns serve two products, four columns each.
      const auto multiply_block = [&](const uint4& w, const uint4& low, const uint4& high) {
        multiply<T>(even, {low.x, high.x, low.y, high.y}, {w.x, w.y});
        multiply<T>(odd, {low.z, high.z, low.w, high.w}, {w.z, w.w});
      };
      if (start + kStageCols <= a.inputs) {
        constexpr int kBatch = 4;  // blocks whose reads are under way together
#pragma unroll
        for (int i = 0; i < kBlocks; i += kBatch) {
          uint4 w[kBatch], low[kBatch], high[kBatch];
#pragma unroll
          for (int k = 0; k < kBatch; ++k) {
            const int offset = first + (i + k) * kWarps * kBlockCols;
            w[k] = weights(offset);
            low[k] = activations(g, start + offset);
            high[k] = kManyRows ? activations(g + 8, start + offset) : zero;
          }
#pragma unroll
          for (int k = 0; k < kBatch; ++k) multiply_block(w[k], low[k], high[k]);
        }
      } else {
#pragma unroll 1
        for (int offset = first; start + offset - t * 8 < a.inputs; offset += kWarps * kBlockCols) {
          const bool inside = start + offset < a.inputs;  // beyond: whatever the ring held before
          multiply_block(inside ? weights(offset) : zero, activations(g, start + offset),
                         kManyRows ? activations(g + 8, start + offset) : zero);
        }
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

    auto& sums = header.sums[turn % 2];
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
        finish<T, kMode>(a, tile, row, j, sum, early[i]);
      }
    }
  }
}

// kManyRows: more than 8. kShared: the activations fit into shared memory.
template <typename T, Mode kMode, bool kManyRows, bool kShared>
__global__ void __launch_bounds__(kThreads, 1) linear_kernel(const __grid_constant__ LinearArgs a) {
  unsigned char* shared = dynamic_shared();
  auto& header = *reinterpret_cast<Header<kManyRows ? 16 : 8>*>(shared);
  unsigned char* x_shared = shared + sizeof header;
  unsigned char* ring = x_shared + (a.rows * a.x_pitch + 127) / 128 * 128;
  const int thread = threadIdx.x;

  pdl_trigger();
  if constexpr (kHasBulkCopies) {
    if (thread == 0) init_ring(header, a.stages);
  }
  __syncthreads();  // the barriers are there
  if (thread >= kConsumers) {
    if constexpr (kHasBulkCopies) produce<T, kMode>(a, header, ring);
    return;  // the consumers wait for the predecessor
  }
  if constexpr (kMode != Mode::kAdd) {
    const NormPacks norm = load_norm(a);  // weights too: nothing that runs before this writes them
    pdl_wait();
    load_normed_rows<T>(a, header, norm, x_shared);
  } else {
    pdl_wait();
    if constexpr (kShared) load_rows(a, x_shared);
  }
  consume<T, kMode, kManyRows, kShared>(a, header, x_shared, ring);
}

#else

template <typename T, Mode kMode, bool kManyRows, bool kShared>
__global__ void linear_kernel(const __grid_constant__ LinearArgs) {
}  // never launched: see launch()

#endif

// ---- host side -------------------------------------------------------------------------------

constexpr int kOldest = 80;  // compute capability

template <typename T, Mode kMode, bool kManyRows>
int launch_kernel(Launcher& launcher, LinearArgs& a, int shared_limit) {
  const auto fixed = [&] {
    return static_cast<int>(sizeof(Header < kManyRows ? 16 : 8 >)) +
           (a.rows * a.x_pitch + 127) / 128 * 128;
  };
  constexpr int kFewestStages = 2;
  a.x_pitch = activation_pitch(a.inputs);
  if (fixed() + kFewestStages * kStageBytes > shared_limit) {
    if (kMode != Mode::kAdd) return cudaErrorInvalidValue;
    a.x_pitch = 0;  // read where it lies, once a tile, through L2
  }
  const int room = (shared_limit - fixed()) / kStageBytes;
  a.stages = room < kMaxStages ? room : kMaxStages;
  if (a.stages < 1) return cudaErrorInvalidValue;
  const int blocks = launcher.multiprocessors();
  const dim3 grid(static_cast<unsigned>(a.tiles < blocks ? a.tiles : blocks));
  const int shared = fixed() + a.stages * kStageBytes;
  if (kMode == Mode::kAdd && a.x_pitch == 0) {
    launcher.run_with_shared(linear_kernel<T, kMode, kManyRows, kMode != Mode::kAdd>, grid,
                             kThreads, shared, a);
  } else {
    launcher.run_with_shared(linear_kernel<T, kMode, kManyRows, true>, grid, kThreads, shared, a);
  }
  return launcher.status();
}

template <Mode kMode>
int launch(LinearArgs& a, int dtype, int device, void* stream) {
  if (a.rows == 0 || a.tiles == 0) return cudaSuccess;
  if (a.rows < 0 || a.rows > kMaxRows || a.inputs % 8 != 0) return cudaErrorInvalidValue;
  if (dtype == TD_FLOAT32) return cudaErrorInvalidValue;
  if (kMode != Mode::kAdd && a.inputs > kMaxHidden) return cudaErrorInvalidValue;
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
  td::LinearArgs a = td::basic_args(x, norm, weight, q, batch * tokens, hidden_size, outputs, eps);
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
