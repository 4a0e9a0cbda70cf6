// Small kernels for test_emulator.py, one for each thing that the emulator offers, right ones and
// ones with a barrier or a wait left out. They are CUDA like any other: nvcc compiles them for
// sm_90.

#include "common.cuh"

namespace {

using namespace td;

// out[i] = in[threads - 1 - i], through static or dynamic shared memory.
template <bool kBarrier>
__global__ void reverse_kernel(const int* in, int* out, bool dynamic) {
  __shared__ int fixed[256];
  int* buffer = dynamic ? reinterpret_cast<int*>(dynamic_shared()) : fixed;
  in += blockIdx.x * blockDim.x;
  out += blockIdx.x * blockDim.x;
  buffer[threadIdx.x] = in[threadIdx.x];
  if (kBarrier) __syncthreads();
  out[threadIdx.x] = buffer[blockDim.x - 1 - threadIdx.x];
}

// Half of the block waits at another barrier than the other half.
__global__ void divergent_kernel(int* out) {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  out[threadIdx.x] = 1;
}

// Some threads leave before a barrier that the others wait at.
__global__ void deserted_kernel(int* out) {
  if (threadIdx.x == 5) return;
  __syncthreads();
  out[threadIdx.x] = 1;
}

// One element past the end of dynamic shared memory.
__global__ void overrun_kernel(int* out) {
  int* buffer = reinterpret_cast<int*>(dynamic_shared());
  if (threadIdx.x <= 4) buffer[threadIdx.x] = 1;
  out[threadIdx.x] = 0;
}

// Every warp operation once; out [9, 32].
__global__ void warp_kernel(int* out) {
  const int lane = threadIdx.x;
  int row = 0;
  const auto put = [&](int value) { out[row++ * 32 + lane] = value; };
  put(__shfl_sync(kFullWarp, lane, 7));
  put(__shfl_xor_sync(kFullWarp, lane, 5));
  put(__shfl_up_sync(kFullWarp, lane, 3));
  put(__shfl_down_sync(kFullWarp, lane, 3));
  put(__shfl_down_sync(kFullWarp, lane, 3, 8));
  put(static_cast<int>(__ballot_sync(kFullWarp, lane % 3 == 0)));
  put(__any_sync(kFullWarp, lane == 31));
  put(__all_sync(kFullWarp, lane < 31));
  put(warp_reduce(lane, Max()));
}

// All blocks add to one counter; the last one to arrive writes the total.
__global__ void atomic_kernel(int* counters, int* out) {
  atomicAdd(&counters[0], static_cast<int>(threadIdx.x));
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0 && atomicAdd(&counters[1], 1) == static_cast<int>(gridDim.x) - 1) {
    out[0] = counters[0];
  }
}

// Blocks wait for one another: needs all of them resident.
__global__ void grid_barrier_kernel(volatile int* arrived, int* out) {
  if (threadIdx.x == 0) {
    atomicAdd(const_cast<int*>(arrived), 1);
    while (*arrived < static_cast<int>(gridDim.x)) __nanosleep(20);
  }
  __syncthreads();
  out[blockIdx.x * blockDim.x + threadIdx.x] = *arrived;
}

// One producer warp fills a ring of two stages by bulk copies, one consumer warp doubles what is
// there. kWait false forgets to wait for the data.
template <bool kWait>
__global__ void ring_kernel(const int* in, int* out, int tiles) {
  constexpr int kStages = 2, kTile = 128;
  __shared__ __align__(128) int ring[kStages][kTile];
  __shared__ uint64_t full[kStages], empty[kStages];
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) mbarrier_init(&full[i], 1), mbarrier_init(&empty[i], 32);
    mbarrier_init_fence();
  }
  __syncthreads();
  const int lane = threadIdx.x % 32;
  for (int tile = 0; tile < tiles; ++tile) {
    const int stage = tile % kStages;
    const unsigned parity = tile / kStages & 1;
    if (threadIdx.x < 32) {
      if (lane == 0) {
        mbarrier_wait(&empty[stage], parity ^ 1);
        mbarrier_expect(&full[stage], sizeof ring[stage]);
        bulk_copy(ring[stage], in + tile * kTile, sizeof ring[stage], &full[stage], evict_first());
      }
    } else {
      if (kWait) mbarrier_wait(&full[stage], parity);
      for (int i = lane; i < kTile; i += 32) out[tile * kTile + i] = 2 * ring[stage][i];
      mbarrier_arrive(&empty[stage]);
    }
  }
  if (!kWait) {  // or the block would end with copies under way
    for (int i = 0; i < kStages; ++i) mbarrier_wait(&full[i], (tiles / kStages - 1) & 1);
  }
}

// Two groups of cp.async, the second still allowed to be under way when the first is read. A kFirst
// of 1 asks for the first group, of 2 forgets to.
template <int kFirst>
__global__ void async_kernel(const int* in, int* out) {
  __shared__ __align__(16) int buffer[2][128];
  const int mine = threadIdx.x * 4;
  for (int group = 0; group < 2; ++group) {
    cp_async16(&buffer[group][mine], in + group * 128 + mine, evict_first());
    cp_async_commit();
  }
  cp_async_wait<kFirst>();
  __syncwarp();
  for (int i = 0; i < 4; ++i) out[mine + i] = buffer[0][127 - mine - i];
  cp_async_wait<0>();
  __syncwarp();
  for (int i = 0; i < 4; ++i) out[128 + mine + i] = buffer[1][127 - mine - i];
}

// Two teams of 64 threads with a barrier each; each reverses its half.
__global__ void teams_kernel(int* out) {
  __shared__ int buffer[128];
  const int team = threadIdx.x / 64, index = threadIdx.x % 64;
  buffer[threadIdx.x] = threadIdx.x;
  if (team == 0) {
    named_barrier(1, 64);
    out[index] = buffer[63 - index];
  } else {
    named_barrier(2, 64);
    out[64 + index] = buffer[64 + 63 - index];
  }
}

// d [16, 8] = a [16, 16] b [16, 8], loaded by the fragment map of ptx.cuh.
__global__ void mma_kernel(const __nv_bfloat16* a, const __nv_bfloat16* b, float* d) {
  const int group = threadIdx.x / 4, pair = threadIdx.x % 4 * 2;
  const auto two = [](__nv_bfloat16 low, __nv_bfloat16 high) {
    return bits(low) | bits(high) << 16;
  };
  uint32_t fa[4], fb[2];
  for (int i = 0; i < 4; ++i) {
    const __nv_bfloat16* p = a + (group + i % 2 * 8) * 16 + pair + i / 2 * 8;
    fa[i] = two(p[0], p[1]);
  }
  for (int i = 0; i < 2; ++i) {
    const __nv_bfloat16* p = b + (pair + i * 8) * 8 + group;
    fb[i] = two(p[0], p[8]);
  }
  float sum[4] = {};
  mma_m16n8k16_bf16(sum, fa, fb);
  for (int i = 0; i < 4; ++i) d[(group + i / 2 * 8) * 8 + pair + i % 2] = sum[i];
}

// ---- clusters --------------------------------------------------------------------------------

enum ClusterFault { kNoFault, kNoStart, kNoWait, kFewBytes, kManyBytes, kOneBuffer };

// Of dynamic shared memory, as many as there may be rounds at once.
struct ClusterBuffer {
  uint64_t arrived[2];
  float4 fours[8];  // by rank
  float2 twos[8];
};

// out [rounds, blocks, 64]: sums of in [rounds, blocks, 64] over the blocks of a cluster. Every
// block gives its sum to all. Who has all sums of a round knows that all blocks have read those of
// the round before, so that two buffers do. What kFault names is left out, or wrong.
template <ClusterFault kFault>
__global__ void cluster_sum_kernel(const int* in, float* out, int ranks, int rounds) {
  __shared__ int scratch[2];
  ClusterBuffer* buffers = reinterpret_cast<ClusterBuffer*>(dynamic_shared());
  const int thread = threadIdx.x, rank = blockIdx.x % ranks;
  if (thread == 0) {
    for (int i = 0; i < 2; ++i) mbarrier_init(buffers[i].arrived, 1);
    mbarrier_init_fence();
  }
  if (kFault == kNoStart) {
    __syncthreads();
  } else {
    cluster_arrive();
    cluster_wait();  // all blocks have begun, with their mbarriers
  }
  for (int round = 0; round < rounds; ++round) {
    const int sides = kFault == kOneBuffer ? 1 : 2;
    ClusterBuffer& buffer = buffers[round % sides];
    const int element = (round * gridDim.x + blockIdx.x) * blockDim.x + thread;
    const int sum = warp_reduce(in[element], [](int a, int b) { return a + b; });
    if (thread % kWarpSize == 0) scratch[thread / kWarpSize] = sum;
    if (thread == 0) {
      const int few = kFault == kFewBytes ? 8 : 0, many = kFault == kManyBytes ? 8 : 0;
      mbarrier_expect(buffer.arrived, ranks * (sizeof(float4) + sizeof(float2)) - few + many);
    }
    __syncthreads();  // the sums of both warps; all threads have read what the round before brought
    const float low = scratch[0], high = scratch[1];
    if (thread < ranks) {
      store_remote(buffer.fours + rank, thread, make_float4(low, 0.0f, 0.0f, high), buffer.arrived);
    } else if (thread < 2 * ranks) {
      store_remote(buffer.twos + rank, thread - ranks, make_float2(high, low), buffer.arrived);
    }
    if (kFault != kNoWait) mbarrier_wait(buffer.arrived, round / sides % 2);  // all sums are there
    float total = 0.0f;
    for (int i = 0; i < ranks; ++i) {
      total +=
          thread % 2 ? buffer.fours[i].x + buffer.fours[i].w : buffer.twos[i].x + buffer.twos[i].y;
    }
    if (kFault == kNoWait) mbarrier_wait(buffer.arrived, round / sides % 2);  // or blocks end early
    out[element] = total;
    __syncthreads();  // scratch may be overwritten
  }
}

// Blocks from the third of a cluster on end at once. The first gives a number to the second, which
// may wait for it, or to the third.
__global__ void cluster_idle_kernel(int to, int waits, float* out) {
  uint64_t* arrived = reinterpret_cast<uint64_t*>(dynamic_shared());
  float2* given = reinterpret_cast<float2*>(arrived + 1);
  const int rank = blockIdx.x % 4;
  if (rank >= 2) return;
  if (threadIdx.x == 0) {
    mbarrier_init(arrived, 1);
    mbarrier_init_fence();
    mbarrier_expect(arrived, sizeof *given);
  }
  cluster_arrive();
  cluster_wait();
  float got = 0.0f;
  if (rank == 0) {
    if (threadIdx.x == 0) store_remote(given, to, make_float2(1.0f, 2.0f), arrived);
  } else if (waits) {
    mbarrier_wait(arrived, 0);
    got = given->y;
  }
  out[blockIdx.x * blockDim.x + threadIdx.x] = got;
}

// One thing that is not allowed, by its number.
__global__ void cluster_misuse_kernel(int which) {
  __shared__ uint64_t fixed;
  uint64_t* arrived = reinterpret_cast<uint64_t*>(dynamic_shared());
  float2* given = reinterpret_cast<float2*>(arrived + 1);
  float2* unaligned = reinterpret_cast<float2*>(dynamic_shared() + 4);
  const float2 value = make_float2(0.0f, 0.0f);
  if (which == 0 && blockIdx.x == 1 && threadIdx.x < 32) named_barrier(1, 64);  // for ever
  if (which == 1) cluster_wait();
  if (threadIdx.x == 0 && (which != 8 || blockIdx.x == 0)) mbarrier_init(arrived, 1);
  if (which < 9 && threadIdx.x == 0) mbarrier_init_fence();
  cluster_arrive();
  if (which == 2) cluster_arrive();
  cluster_wait();
  if (which == 10 && threadIdx.x == 0) mbarrier_init_fence();
  if (which == 3) store_remote(given, 2, value, arrived);
  if (which == 4) store_remote(given + 1, 1, value, arrived);
  if (which == 5) store_remote(unaligned, 1, value, arrived);
  if (which == 7) store_remote(given, 1, value, &fixed);
  if (which >= 8 && blockIdx.x == 0) store_remote(given, 1, value, arrived);
  if (which == 6 && threadIdx.x % 32 == 3) {
    cluster_arrive();
  } else {
    cluster_arrive();
  }
  cluster_wait();
}

cudaLaunchAttribute clusters_of(int blocks) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = blocks;
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  return attribute;
}

template <typename... P, typename... A>
int run_clusters(void (*kernel)(P...), int ranks, int blocks, int dynamic_bytes, A... args) {
  cudaLaunchAttribute attribute = clusters_of(ranks);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(64);
  config.dynamicSmemBytes = dynamic_bytes;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, static_cast<P>(args)...);
}

template <typename... P, typename... A>
int run(void (*kernel)(P...), int blocks, int threads, int dynamic_bytes, A... args) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = dynamic_bytes;
  return cudaLaunchKernelEx(&config, kernel, static_cast<P>(args)...);
}

}  // namespace

extern "C" {
int td_reverse(const int* in, int* out, int64_t blocks, int64_t threads, int64_t dynamic,
               int64_t barrier, int, void*) {
  return run(barrier ? reverse_kernel<true> : reverse_kernel<false>, blocks, threads,
             dynamic ? threads * 4 : 0, in, out, dynamic != 0);
}
int td_divergent(int* out, int, void*) { return run(divergent_kernel, 1, 64, 0, out); }
int td_deserted(int* out, int, void*) { return run(deserted_kernel, 1, 64, 0, out); }
int td_overrun(int* out, int, void*) { return run(overrun_kernel, 1, 32, 16, out); }
int td_warp(int* out, int, void*) { return run(warp_kernel, 1, 32, 0, out); }
int td_atomic(int* counters, int* out, int, void*) {
  return run(atomic_kernel, 5, 64, 0, counters, out);
}
int td_grid_barrier(int* arrived, int* out, int64_t blocks, int, void*) {
  return run(grid_barrier_kernel, blocks, 32, 0, arrived, out);
}
int td_ring(const int* in, int* out, int64_t tiles, int64_t wait, int, void*) {
  return run(wait ? ring_kernel<true> : ring_kernel<false>, 1, 64, 0, in, out, tiles);
}
int td_async_copy(const int* in, int* out, int64_t first, int, void*) {
  return run(first == 1 ? async_kernel<1> : async_kernel<2>, 1, 32, 0, in, out);
}
int td_teams(int* out, int, void*) { return run(teams_kernel, 1, 128, 0, out); }
// `calls`: how often this was called, as host code remembers it.
int td_counted(int* calls, int* out, int, void*) {
  static int so_far;
  *calls = ++so_far;
  return run(teams_kernel, 1, 128, 0, out);
}
int td_mma(const void* a, const void* b, float* d, int, void*) {
  return run(mma_kernel, 1, 32, 0, static_cast<const __nv_bfloat16*>(a),
             static_cast<const __nv_bfloat16*>(b), d);
}
int td_cluster_sum(const int* in, float* out, int64_t ranks, int64_t blocks, int64_t rounds,
                   int64_t fault, int, void*) {
  const auto kernel = fault == kNoFault     ? cluster_sum_kernel<kNoFault>
                      : fault == kNoStart   ? cluster_sum_kernel<kNoStart>
                      : fault == kNoWait    ? cluster_sum_kernel<kNoWait>
                      : fault == kFewBytes  ? cluster_sum_kernel<kFewBytes>
                      : fault == kManyBytes ? cluster_sum_kernel<kManyBytes>
                                            : cluster_sum_kernel<kOneBuffer>;
  return run_clusters(kernel, ranks, blocks, 2 * sizeof(ClusterBuffer), in, out, ranks, rounds);
}
int td_cluster_idle(int64_t to, int64_t waits, float* out, int, void*) {
  return run_clusters(cluster_idle_kernel, 4, 8, 16, to, waits, out);
}
int td_cluster_misuse(int64_t which, int, void*) {
  return run_clusters(cluster_misuse_kernel, 2, 2, 16, which);
}
int td_cluster_room(int64_t ranks, int64_t allowed, int* room, int, void*) {
  cudaLaunchAttribute attribute = clusters_of(ranks);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(ranks);
  config.blockDim = dim3(64);
  config.attrs = &attribute;
  config.numAttrs = 1;
  const auto kernel = cluster_misuse_kernel;
  if (allowed) {
    const int status =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    if (status != cudaSuccess) return status;
  }
  return cudaOccupancyMaxActiveClusters(room, kernel, &config);
}
}
