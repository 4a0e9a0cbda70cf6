// Products of a few rows with a weight matrix, fused with what stands around them in a decode step:
//
//   td_linear_qkv      norm -> q, k, v projection -> rope -> q out, k and v into the cache
//   td_linear_add      projection added to the residual stream (o and down)
//   td_linear_gate_up  norm -> gate and up projections -> silu(gate) * up
//   td_linear_logits   norm -> lm_head -> float32 logits
//
// At these sizes the weights are all the traffic, so a kernel is a stream of weights with
// arithmetic hanging off it. One block a multiprocessor; a block owns a contiguous range of tiles.
// A tile is 8 weight rows (output features); a stage is 2048 columns of a tile, 32 KB. One producer
// warp copies stages into a ring in shared memory and never looks at activations: it fills the ring
// before this kernel's predecessor has finished, which hides most of the dependency. Eight consumer
// warps share every stage, 64 columns at a time in turn, and multiply on the tensor cores: the
// activations are the A operand, the weights the B operand of m16n8k16. A warp only ever needs its
// own columns of the activations, which stay in registers where they fit; those of more than 8 rows
// go through shared memory (linear_rows.cuh). Weights stay as they were stored, row by row. Two
// tiles at a time, the warps' sums are added in a fixed order by one warp for each row of
// activations, which then does the epilogue while the others go on.
//
// Which 8 rows make a tile is free, since every row has its own copy: q and k tiles take 4 features
// and their 4 rotation partners, gate_up tiles 4 gate rows and their 4 up rows, so that every
// epilogue finds what it needs in one place.
//
// The arithmetic of a row of activations depends on K alone: neither on how many rows there are,
// nor on the grid, nor on the ring.
//
// Kernels are kept short on the way that one row takes: between two uses of a kernel the weights of
// a layer have gone through the caches, so much of its code is fetched anew every time.
//
// Bytes moved: the weights once. Limits: 1 to 16 rows; fp16 or bf16; K, and head_dim / 2 or the
// number of features where they pair up, multiples of 8 and 4; 16-byte aligned pointers. Before
// sm_90 the consumers load weights straight from global memory, with the same arithmetic; sm_80 is
// the oldest with these tensor-core products.

#include "fragments.cuh"
#include "linear_activations.cuh"
#include "linear_ring.cuh"
#include "linear_rows.cuh"

namespace td {
namespace {

// ---- the kernel ------------------------------------------------------------------------------

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800

template <typename T, Mode kMode, int kRows, bool kResident>
__device__ __forceinline__ void consume(const LinearArgs& a, Header& header, unsigned char* work,
                                        const unsigned char* ring, const NormPacks& norm) {
  constexpr bool kNorm = kMode != Mode::kAdd;
  constexpr int kWidth = kGroup * kTile;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int g = lane / 4, t = lane % 4;  // of the fragments: row or tile row, and pack
  const int rows = kRows == 1 ? 1 : a.rows;
  const int begin = first_tile(a, blockIdx.x), last = first_tile(a, blockIdx.x + 1);
  const uint4 zero = make_uint4(0, 0, 0, 0);
  const int out_j = lane % kTile, out_tile = lane % kWidth / kTile;
  float* sums = reinterpret_cast<float*>(work);  // [R][kWarps][kWidth]

  // The first outputs that this warp finishes, and what they need: positions change once a step,
  // so what is found before the predecessor has ended is nearly always right, and is asked again.
  constexpr int kFinishes = ceil_div(kRows, kWarps);  // rows of a warp, kWarps apart
  const int first_turn = warp < rows ? 0 : warp - rows + 1;
  const int first_row = warp < rows ? warp : rows - 1;
  Early early[kFinishes];
  int position[kFinishes] = {};
#pragma unroll
  for (int f = 0; f < kFinishes; ++f) {
    const int tile = begin + first_turn * kGroup + out_tile, row = first_row + f * kWarps;
    if (kMode == Mode::kQkv && tile < last && row < rows) {
      early[f] = load_early<T, kMode>(a, tile, row, out_j);
    }
  }
  uint4 resident[kResident ? kChunks : 1][kBlocks];
  uint4 next[kBlocks];  // the activations of the next stage's columns
  Stream<T, kNorm> stream(a, lane, warp);
  pdl_wait();
#pragma unroll
  for (int f = 0; f < kFinishes; ++f) {
    const int row = first_row + f * kWarps;
    if (kMode == Mode::kQkv && row < rows) position[f] = row_position(a, row);
  }
  if (kMode == Mode::kLogits && blockIdx.x == 0 && static_cast<int>(threadIdx.x) < a.batch) {
    a.advance[threadIdx.x] += a.tokens;  // every kernel that reads lengths is done
  }
  if constexpr (kResident) {
    load_resident<T, kRows>(a, norm, header, work, resident);
  } else {
    if constexpr (kNorm) stream.find_scale(header);
    stream.load(0, next);
  }

  const bool swaps = g % 2 != 0;
  const unsigned char* own = ring + g * kPitch + warp * (kPairCols * 2) + t * kPackBytes;
  Place place(0);
  int turn = 0;
#pragma unroll 1
  for (int group = begin; group < last; group += kGroup, ++turn) {
    const int tiles = last - group;  // kGroup or more, or what is left
    // The row, and the one kWarps further on, whose outputs this warp finishes.
    const int out_row = (warp + kWarps - turn % kWarps) % kWarps;
    const bool there = lane < kWidth && out_tile < tiles;
#pragma unroll
    for (int f = 0; f < kFinishes; ++f) {
      const int row = out_row + f * kWarps;
      if (there && row < rows &&
          (kMode == Mode::kAdd || (kMode == Mode::kQkv && turn > first_turn))) {
        early[f] = load_early<T, kMode>(a, group + out_tile, row, out_j);
      }
    }
    float even[kGroup][4] = {}, odd[kGroup][4] = {};  // two chains of dependent products

    const auto multiply_stage = [&](int j, int start, const uint4(&low)[kBlocks], auto whole) {
      constexpr bool kWhole = decltype(whole)::value;
      await_stage(header, place);
      [[maybe_unused]] const unsigned char* stage = own + place.slot * kStageBytes;
      const T* direct = static_cast<const T*>(a.weight) + start +
                        static_cast<int64_t>(weight_row<kMode>(a, group + j, g)) * a.inputs;
      constexpr int kBatch = 4;  // blocks whose reads are under way together
#pragma unroll
      for (int b = 0; b < kBlocks; b += kBatch) {
        uint4 w[kBatch];
        if constexpr (kHasBulkCopies) {
#pragma unroll
          for (int i = 0; i < kBatch; i += 2) {
            // A row is a multiple of all banks long: neighbouring ones read different halves of
            // the pair first, so that a quarter warp meets no bank twice.
            const unsigned char* pair = stage + (b + i) / 2 * (kWarps * kPairCols * 2);
            const uint4 first = *reinterpret_cast<const uint4*>(pair + (swaps ? 64 : 0));
            const uint4 second = *reinterpret_cast<const uint4*>(pair + (swaps ? 0 : 64));
            w[i] = make_uint4(swaps ? second.x : first.x, swaps ? second.y : first.y,
                              swaps ? second.z : first.z, swaps ? second.w : first.w);
            w[i + 1] = make_uint4(swaps ? first.x : second.x, swaps ? first.y : second.y,
                                  swaps ? first.z : second.z, swaps ? first.w : second.w);
          }
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const int column = block_column(warp, t, b + i);
          const bool inside = kWhole || start + column < a.inputs;
          if constexpr (!kHasBulkCopies) {
            w[i] = inside ? *reinterpret_cast<const uint4*>(direct + column) : zero;
          } else if (!inside) {
            w[i] = zero;  // whatever the ring held before
          }
        }
        // Which columns meet in a product is free as long as both operands agree: a lane's eight
        // neighbouring columns serve two products, four columns each.
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const uint4& x = low[b + i];
          // The lower rows of A are the first, the upper rows the second product's: of `even`
          // the upper and of `odd` the lower sums mean nothing.
          const uint32_t both[4] = {x.x, x.z, x.y, x.w};
          product<T>(even[j], both, {w[i].x, w[i].y});
          product<T>(odd[j], both, {w[i].z, w[i].w});
        }
      }
      give_back_stage(header, place);
      place.next(a.stages);
    };
    const auto multiply_stages = [&](int start, const uint4(&low)[kBlocks]) {
      if (start + kStageCols <= a.inputs) {
#pragma unroll
        for (int j = 0; j < kGroup; ++j) {
          if (j < tiles) multiply_stage(j, start, low, std::true_type{});
        }
      } else {
#pragma unroll
        for (int j = 0; j < kGroup; ++j) {
          if (j < tiles) multiply_stage(j, start, low, std::false_type{});
        }
      }
    };
    if constexpr (kResident) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        if (c * kStageCols < a.inputs) multiply_stages(c * kStageCols, resident[c]);
      }
    } else {
#pragma unroll 1
      for (int start = 0; start < a.inputs; start += kStageCols) {
        uint4 x[kBlocks];
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) x[i] = next[i];
        stream.load(start + kStageCols < a.inputs ? start + kStageCols : 0, next);
        stream.prepare(start, x);
        multiply_stages(start, x);
      }
    }

    named_barrier(kConsumerBarrier, kConsumers);  // the work area is nobody's any more
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
      const auto put = [&](int row, float x, float y) {
        if (row >= rows) return;
        *reinterpret_cast<float2*>(sums + (row * kWarps + warp) * kWidth + j * kTile + t * 2) =
            make_float2(x, y);
      };
      put(g, even[j][0] + odd[j][2], even[j][1] + odd[j][3]);
    }
    named_barrier(kConsumerBarrier, kConsumers);  // the sums are there
#pragma unroll
    for (int f = 0; f < kFinishes; ++f) {
      const int row = out_row + f * kWarps;
      if (row >= rows) break;
      float parts[4] = {};
      const float* of_row = sums + row * kWarps * kWidth + lane % kWidth;
#pragma unroll
      for (int other = 0; other < kWarps; ++other) parts[other % 4] += of_row[other * kWidth];
      float sum = (parts[0] + parts[1]) + (parts[2] + parts[3]);
      if constexpr (kNorm && kLateScale<T>) sum *= norm_scale(a, header, row);
      if (kMode == Mode::kQkv && turn == first_turn && there && early[f].position != position[f]) {
        early[f] = load_early<T, kMode>(a, group + out_tile, row, out_j);  // it was an old one
      }
      finish<T, kMode>(a, group + out_tile, row, out_j, sum, early[f], there);
    }
  }
}

// Threads that the compiler is told of. For one row more than there are, which keeps it to 128
// registers: attention of 64 dimensions then fits on the same SM, and one starts under the other.
template <Mode kMode, int kRows, bool kResident>
constexpr int kBound = kRows == 1 && (kResident || kMode == Mode::kAdd) ? 512 : kThreads;

template <typename T, Mode kMode, int kRows, bool kResident>
__global__ void __launch_bounds__((kBound<kMode, kRows, kResident>), 1)
    linear_kernel(const __grid_constant__ LinearArgs a) {
  unsigned char* shared = dynamic_shared();
  auto& header = *reinterpret_cast<Header*>(shared);
  unsigned char* ring = shared + sizeof header;
  unsigned char* work = ring + a.stages * kStageBytes;
  pdl_trigger();
  const bool produces = threadIdx.x >= kConsumers;
  NormPacks norm;
  if (kHasBulkCopies && produces) init_ring(header, a.stages);
  if (kResident && !produces) norm = load_norm(a);
  __syncthreads();  // the barriers are there
  if (produces) {
    if constexpr (kHasBulkCopies) produce<T, kMode, kGroup>(a, header, ring);
    return;  // the consumers wait for the predecessor
  }
  consume<T, kMode, kRows, kResident>(a, header, work, ring, norm);
}

#else

template <typename T, Mode kMode, int kRows, bool kResident>
__global__ void linear_kernel(const __grid_constant__ LinearArgs) {
}  // never launched: see launch()

#endif

// ---- host side -------------------------------------------------------------------------------

constexpr int kOldest = 80;  // compute capability

template <typename T, Mode kMode, int kRows, bool kResident>
int launch_kernel(Launcher& launcher, LinearArgs& a, int shared_limit) {
  const int sums = a.rows * kWarps * kGroup * kTile * static_cast<int>(sizeof(float));
  const int staged = kResident ? kWarps * kStagedRows * kStagedPitch : 0;
  const int fixed = static_cast<int>(sizeof(Header)) + (sums > staged ? sums : staged);
  const int room = (shared_limit - fixed) / kStageBytes;
  a.stages = room < kMaxStages ? room : kMaxStages;
  if (a.stages < 1) return cudaErrorInvalidValue;
  const auto blocks = static_cast<unsigned>(spread(launcher, a));
  launcher.run_with_shared(linear_kernel<T, kMode, kRows, kResident>, dim3(blocks), kThreads,
                           fixed + a.stages * kStageBytes, a);
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
    if (a.rows > 8) return launch_rows<T, kMode>(launcher, a, limit, major >= 9);
    if constexpr (kMode != Mode::kAdd) {
      if (a.inputs <= kResidentCols) {
        return a.rows == 1 ? launch_kernel<T, kMode, 1, true>(launcher, a, limit)
                           : launch_kernel<T, kMode, 8, true>(launcher, a, limit);
      }
    }
    return a.rows == 1 ? launch_kernel<T, kMode, 1, false>(launcher, a, limit)
                       : launch_kernel<T, kMode, 8, false>(launcher, a, limit);
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
  a.per_head = td::divisor(head_dim / 8);
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
                     int32_t* seq_lens, int64_t batch, int64_t tokens, int64_t hidden_size,
                     int64_t vocab_size, float eps, int dtype, int device, void* stream) {
  td::LinearArgs a =
      td::basic_args(x, norm, weight, logits, batch * tokens, hidden_size, vocab_size, eps);
  a.advance = seq_lens;
  a.batch = seq_lens == nullptr ? 0 : static_cast<int>(batch);
  a.tokens = static_cast<int>(tokens);
  return td::launch<td::Mode::kLogits>(a, dtype, device, stream);
}
