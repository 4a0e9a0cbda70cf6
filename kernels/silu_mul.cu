// silu(gate) * up, the activation of the MLP.
//
// One thread owns one 16-byte pack of the output. Bytes moved: 3F elements a row; at decode sizes
// one load latency and one store. Any F; 16-byte accesses where F and the pointers allow it.

#include "common.cuh"

namespace td {
namespace {

constexpr int kThreads = 128;

template <typename T, bool kAligned>
__global__ void __launch_bounds__(kThreads) silu_mul_kernel(const T* gate_up,  // [rows, 2F]
                                                            T* out,            // [rows, F]
                                                            int intermediate_size) {
  const int start = (blockIdx.y * kThreads + threadIdx.x) * kPack<T>;
  const int left = intermediate_size - start;
  begin_kernel();
  if (left <= 0) return;

  const T* gate_row = gate_up + static_cast<int64_t>(blockIdx.x) * 2 * intermediate_size;
  float gate[kPack<T>], up[kPack<T>];
  load_pack<T, kAligned>(gate_row + start, left, gate);
  load_pack<T, kAligned>(gate_row + intermediate_size + start, left, up);
#pragma unroll
  for (int i = 0; i < kPack<T>; ++i) {
    up[i] *= rounded<T>(gate[i] / (1.0f + expf(-gate[i])));
  }
  store_pack<T, kAligned>(out + static_cast<int64_t>(blockIdx.x) * intermediate_size + start, left,
                          up);
}

}  // namespace
}  // namespace td

int td_silu_mul(const void* gate_up, void* out, int64_t rows, int64_t intermediate_size, int dtype,
                int device, void* stream) {
  if (rows == 0 || intermediate_size == 0) return cudaSuccess;
  return td::with_dtype(dtype, [&](auto tag) -> int {
    using T = typename decltype(tag)::T;
    const int64_t packs = td::ceil_div<int64_t>(intermediate_size, td::kPack<T>);
    const dim3 grid(static_cast<unsigned>(rows),
                    static_cast<unsigned>(td::ceil_div<int64_t>(packs, td::kThreads)));
    const bool aligned = td::packs_fit<T>(intermediate_size, gate_up, out);
    td::Launcher launcher(device, stream);
    launcher.run(aligned ? td::silu_mul_kernel<T, true> : td::silu_mul_kernel<T, false>, grid,
                 td::kThreads, static_cast<const T*>(gate_up), static_cast<T*>(out),
                 static_cast<int>(intermediate_size));
    return launcher.status();
  });
}
