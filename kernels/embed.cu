// The first kernel of a step: the embeddings of the tokens.
//
// A block copies one row. Bytes moved: R rows of E elements, read and written.
//
// Unlike the others it lets its successor start only when its predecessors are done: whatever they
// did to the lengths of the rows is then seen by every kernel of the step, even by one that looks
// before its own predecessor has ended.

#include "common.cuh"

namespace td {
namespace {

constexpr int kThreads = 256;

template <typename T, bool kAligned>
__global__ void __launch_bounds__(kThreads) embed_kernel(const int64_t* ids,  // [R]
                                                         const T* table,      // [V, E]
                                                         T* out,              // [R, E]
                                                         int hidden_size, int64_t vocab_size) {
  pdl_wait();
  pdl_trigger();
  int64_t id = ids[blockIdx.x];
  id = id < 0 ? 0 : id < vocab_size ? id : vocab_size - 1;
  const T* source = table + id * hidden_size;
  T* target = out + static_cast<int64_t>(blockIdx.x) * hidden_size;
  for (int i = threadIdx.x * kPack<T>; i < hidden_size; i += kThreads * kPack<T>) {
    float x[kPack<T>];
    load_pack<T, kAligned>(source + i, hidden_size - i, x);
    store_pack<T, kAligned>(target + i, hidden_size - i, x);
  }
}

}  // namespace
}  // namespace td

int td_embed(const int64_t* ids, const void* table, void* out, int64_t rows, int64_t hidden_size,
             int64_t vocab_size, int dtype, int device, void* stream) {
  if (rows == 0) return cudaSuccess;
  if (vocab_size <= 0) return cudaErrorInvalidValue;
  return td::with_dtype(dtype, [&](auto tag) -> int {
    using T = typename decltype(tag)::T;
    td::Launcher launcher(device, stream);
    launcher.run(td::packs_fit<T>(hidden_size, table, out) ? td::embed_kernel<T, true>
                                                           : td::embed_kernel<T, false>,
                 dim3(static_cast<unsigned>(rows)), td::kThreads, ids, static_cast<const T*>(table),
                 static_cast<T*>(out), static_cast<int>(hidden_size), vocab_size);
    return launcher.status();
  });
}
