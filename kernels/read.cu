// Reads memory and keeps nothing: the yardstick that the benchmarks measure every rate against.
//
// One block a tile of 32 KB, four independent 16-byte loads a thread, which reaches what the memory
// gives on every GPU that was tried.

#include "common.cuh"

namespace td {
namespace {

constexpr int kThreads = 512;
constexpr int kLoads = 4;
constexpr int64_t kTileBytes = int64_t{kThreads} * kLoads * kPackBytes;

__global__ void __launch_bounds__(kThreads) read_kernel(const uint4* data,  // [tiles * 2048]
                                                        uint32_t* sink) {   // [1]
  begin_kernel();
  const uint4* tile = data + static_cast<int64_t>(blockIdx.x) * kThreads * kLoads + threadIdx.x;
  uint4 x[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) x[i] = __ldcs(tile + i * kThreads);
  uint32_t mix = 0;
#pragma unroll
  for (int i = 0; i < kLoads; ++i) mix ^= x[i].x ^ x[i].y ^ x[i].z ^ x[i].w;
  if (mix == 0x9e3779b9u) *sink = mix;  // never in practice, but the compiler cannot know
}

}  // namespace
}  // namespace td

int td_read(const void* data, int64_t bytes, void* sink, int device, void* stream) {
  const int64_t tiles = bytes / td::kTileBytes;
  if (tiles == 0) return cudaSuccess;
  td::Launcher launcher(device, stream);
  launcher.run(td::read_kernel, dim3(static_cast<unsigned>(tiles)), td::kThreads,
               static_cast<const uint4*>(data), static_cast<uint32_t*>(sink));
  return launcher.status();
}
