// RMSNorm, alone and with the residual addition before it.
//
// One block owns one row; a thread owns the 16-byte packs threadIdx.x, threadIdx.x + threads, ...
// of it. The first pack stays in registers between the two passes, so up to 1024 packs (8192
// elements of 16 bits) the row is read once; longer rows are read again, from cache. The number of
// threads, and with it the order of additions, follows from the length of a row alone.
//
// Bytes moved per row: (2E + E of weights, cached) elements, with the addition 4E. At decode sizes
// the time is latency: one load, one block reduction, one store. Any E; 16-byte accesses where
// every row starts on 16 bytes.

#include "common.cuh"

namespace td {
namespace {

constexpr int kMaxThreads = 1024;

template <typename T, bool kAligned, bool kAdd>
__global__ void __launch_bounds__(kMaxThreads)
    rms_norm_kernel(const T* x,       // [rows, E], rows x_stride apart
                    T* residual,      // [rows, E] with kAdd, else unused
                    const T* weight,  // [E]
                    T* out,           // [rows, E]
                    int64_t x_stride, int hidden_size, float eps) {
  __shared__ float scratch[kMaxThreads / kWarpSize];
  const int first = threadIdx.x * kPack<T>, step = blockDim.x * kPack<T>;
  x += blockIdx.x * x_stride;
  out += static_cast<int64_t>(blockIdx.x) * hidden_size;
  if constexpr (kAdd) residual += static_cast<int64_t>(blockIdx.x) * hidden_size;
  begin_kernel();

  float sum = 0.0f;
  float first_value[kPack<T>] = {}, first_weight[kPack<T>] = {};
  if (first < hidden_size)
    load_pack<T, kAligned>(weight + first, hidden_size - first, first_weight);
  for (int start = first; start < hidden_size; start += step) {
    float value[kPack<T>];
    load_pack<T, kAligned>(x + start, hidden_size - start, value);
    if constexpr (kAdd) {
      float old[kPack<T>];
      load_pack<T, kAligned>(residual + start, hidden_size - start, old);
#pragma unroll
      for (int i = 0; i < kPack<T>; ++i) value[i] = rounded<T>(old[i] + value[i]);
      store_pack<T, kAligned>(residual + start, hidden_size - start, value);
    }
#pragma unroll
    for (int i = 0; i < kPack<T>; ++i) {
      sum = fmaf(value[i], value[i], sum);
      if (start == first) first_value[i] = value[i];
    }
  }
  sum = block_reduce(sum, 0.0f, scratch, Add());
  const float scale = rsqrtf(sum / static_cast<float>(hidden_size) + eps);

  for (int start = first; start < hidden_size; start += step) {
    float value[kPack<T>], factor[kPack<T>];
    if (start == first) {
#pragma unroll
      for (int i = 0; i < kPack<T>; ++i) value[i] = first_value[i], factor[i] = first_weight[i];
    } else {
      load_pack<T, kAligned>((kAdd ? residual : x) + start, hidden_size - start, value);
      load_pack<T, kAligned>(weight + start, hidden_size - start, factor);
    }
#pragma unroll
    for (int i = 0; i < kPack<T>; ++i) value[i] = rounded<T>(value[i] * scale) * factor[i];
    store_pack<T, kAligned>(out + start, hidden_size - start, value);
  }
}

template <typename T, bool kAdd>
int launch(const T* x, T* residual, const T* weight, T* out, int64_t rows, int64_t hidden_size,
           int64_t x_stride, float eps, int device, void* stream) {
  if (rows == 0 || hidden_size == 0) return cudaSuccess;
  const int64_t packs = ceil_div<int64_t>(hidden_size, kPack<T>);
  const int64_t warps = ceil_div<int64_t>(packs, kWarpSize);
  const int threads =
      static_cast<int>(warps < kMaxThreads / kWarpSize ? warps * kWarpSize : kMaxThreads);
  const bool aligned = packs_fit<T>(x_stride | hidden_size, x, residual, weight, out);
  Launcher launcher(device, stream);
  launcher.run(aligned ? rms_norm_kernel<T, true, kAdd> : rms_norm_kernel<T, false, kAdd>,
               dim3(static_cast<unsigned>(rows)), threads, x, residual, weight, out, x_stride,
               static_cast<int>(hidden_size), eps);
  return launcher.status();
}

}  // namespace
}  // namespace td

int td_rms_norm(const void* x, const void* weight, void* out, int64_t rows, int64_t hidden_size,
                int64_t x_stride, float eps, int dtype, int device, void* stream) {
  return td::with_dtype(dtype, [&](auto tag) -> int {
    using T = typename decltype(tag)::T;
    return td::launch<T, false>(static_cast<const T*>(x), nullptr, static_cast<const T*>(weight),
                                static_cast<T*>(out), rows, hidden_size, x_stride, eps, device,
                                stream);
  });
}

int td_add_rms_norm(const void* x, void* residual, const void* weight, void* out, int64_t rows,
                    int64_t hidden_size, float eps, int dtype, int device, void* stream) {
  return td::with_dtype(dtype, [&](auto tag) -> int {
    using T = typename decltype(tag)::T;
    return td::launch<T, true>(static_cast<const T*>(x), static_cast<T*>(residual),
                               static_cast<const T*>(weight), static_cast<T*>(out), rows,
                               hidden_size, hidden_size, eps, device, stream);
  });
}
