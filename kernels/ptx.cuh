// The few instructions that CUDA C++ has no name for, one function each, and nothing else.
//
// tests/emulate/ptx_emulated.h has the same functions for the host; a kernel written against this
// list runs there too. Functions marked sm_90 must not be reached on older targets.
#pragma once

#include <cstdint>

namespace td {

// An address in shared memory as the 32-bit number that PTX wants.
__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Shared memory whose size the launch gives.
__device__ __forceinline__ unsigned char* dynamic_shared() {
  extern __shared__ __align__(1024) unsigned char td_dynamic_shared[];
  return td_dynamic_shared;
}

// ---- programmatic dependent launch (nothing before sm_90) -----------------------------------

// Lets the next kernel's blocks be scheduled while this one still runs.
__device__ __forceinline__ void pdl_trigger() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Returns when every kernel before this one has finished and its writes are visible.
__device__ __forceinline__ void pdl_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Nanoseconds of a clock that the whole GPU shares; its resolution depends on the GPU.
__device__ __forceinline__ uint64_t global_timer() {
  uint64_t time;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
  return time;
}

// ---- asynchronous copies, 16 bytes a thread (plain copies before sm_80) ----------------------

// How long L2 should keep what a copy reads.
using CachePolicy = uint64_t;

// For data that is read once: what is read again soon (partials, activations) stays instead.
__device__ __forceinline__ CachePolicy evict_first() {
  CachePolicy policy = 0;
#if __CUDA_ARCH__ >= 800
  asm("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));
#endif
  return policy;
}

// Global to shared, past L1. Both addresses 16-byte aligned.
__device__ __forceinline__ void cp_async16(void* shared, const void* global, CachePolicy policy) {
#if __CUDA_ARCH__ >= 800
  asm volatile(
      "cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
      "l"(global), "l"(policy)
      : "memory");
#else
  *static_cast<uint4*>(shared) = __ldcs(static_cast<const uint4*>(global));
#endif
}

// The same for data that stays in L2 as long as other data does.
__device__ __forceinline__ void cp_async16(void* shared, const void* global) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)),
               "l"(global)
               : "memory");
#else
  *static_cast<uint4*>(shared) = __ldcg(static_cast<const uint4*>(global));
#endif
}

// 4, 8 or 16 bytes from global memory to registers, past L1; the address is a multiple of as many.
template <int kWords>
__device__ __forceinline__ void load_past_l1(uint32_t* x, const void* global, CachePolicy policy) {
  static_assert(kWords == 1 || kWords == 2 || kWords == 4);
#if __CUDA_ARCH__ >= 800
  if constexpr (kWords == 1) {
    asm volatile("ld.global.cg.L2::cache_hint.b32 %0, [%1], %2;"
                 : "=r"(x[0])
                 : "l"(global), "l"(policy));
  } else if constexpr (kWords == 2) {
    asm volatile("ld.global.cg.L2::cache_hint.v2.b32 {%0, %1}, [%2], %3;"
                 : "=r"(x[0]), "=r"(x[1])
                 : "l"(global), "l"(policy));
  } else {
    asm volatile("ld.global.cg.L2::cache_hint.v4.b32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "l"(global), "l"(policy));
  }
#else
  for (int i = 0; i < kWords; ++i) x[i] = __ldcs(static_cast<const uint32_t*>(global) + i);
#endif
}

// Starts to bring a region into L2, 16-byte multiples (nothing before sm_90). Changes nothing else,
// so an address that is read from memory still being written does no harm.
__device__ __forceinline__ void bulk_prefetch_l2(const void* global, uint32_t bytes,
                                                 CachePolicy policy) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global.L2::cache_hint [%0], %1, %2;" ::"l"(global),
               "r"(bytes), "l"(policy));
#endif
}

// Closes the group of copies this thread has issued since the last commit; a group may be empty.
__device__ __forceinline__ void cp_async_commit() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Returns when all but the newest kPending groups of this thread have landed. Other threads see
// them after a barrier.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

// ---- barriers among part of a block ----------------------------------------------------------

// Barrier `id` (1 to 15) among `threads` threads, a multiple of 32.
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- clusters of blocks (nothing before sm_90) -----------------------------------------------

// Counts this block in at the cluster's barrier. All threads come here, and to the wait. Orders
// nothing but the beginning of blocks and their mbarrier_init_fence; blocks that have ended count.
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

// Returns when all blocks of the cluster have arrived.
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Makes initialised mbarriers visible to the copy engine; a block barrier must still follow.
__device__ __forceinline__ void mbarrier_init_fence() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// ---- mbarriers and bulk copies (sm_90) -------------------------------------------------------

__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals)
               : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Arrives, and makes the phase wait for `bytes` more of bulk copies.
__device__ __forceinline__ void mbarrier_expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(bytes)
               : "memory");
}

// Returns when the phase with this parity (0 for the first) has completed.
__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n .reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
      " @!done bra again;\n}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// The same for what other blocks of the cluster have written: see store_remote.
__device__ __forceinline__ void mbarrier_wait_remote(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n .reg .pred done;\n"
      "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      " @!done bra again;\n}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// One contiguous region, global to shared, completing on an mbarrier. 16-byte multiples throughout.
__device__ __forceinline__ void bulk_copy(void* shared, const void* global, uint32_t bytes,
                                          uint64_t* barrier, CachePolicy policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1], "
      "%2, [%3], %4;" ::"r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

// ---- stores to other blocks of a cluster (sm_90) ----------------------------------------------

// Writes to the shared memory of block `rank` of the cluster, where `mine` is in this block's, and
// completes as many bytes of that block's `barrier`: who has waited for it (mbarrier_wait_remote)
// sees them. The other block must have begun, and stay until then.
__device__ __forceinline__ void store_remote(float4* mine, uint32_t rank, float4 x,
                                             uint64_t* barrier) {
  asm volatile(
      "{\n .reg .b32 remote, arrived;\n"
      " mapa.shared::cluster.u32 remote, %0, %2;\n"
      " mapa.shared::cluster.u32 arrived, %1, %2;\n"
      " st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [remote], {%3, %4, %5, %6}, "
      "[arrived];\n}" ::"r"(shared_address(mine)),
      "r"(shared_address(barrier)), "r"(rank), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
      : "memory");
}
__device__ __forceinline__ void store_remote(float2* mine, uint32_t rank, float2 x,
                                             uint64_t* barrier) {
  asm volatile(
      "{\n .reg .b32 remote, arrived;\n"
      " mapa.shared::cluster.u32 remote, %0, %2;\n"
      " mapa.shared::cluster.u32 arrived, %1, %2;\n"
      " st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [remote], {%3, %4}, "
      "[arrived];\n}" ::"r"(shared_address(mine)),
      "r"(shared_address(barrier)), "r"(rank), "f"(x.x), "f"(x.y)
      : "memory");
}

#endif

// ---- matrix product (sm_80 for bf16) ---------------------------------------------------------

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800

// d += a b for a 16x16 (rows), b 16x8 (columns), bf16 in, float32 out. With g = lane / 4 and
// t = lane % 4: a holds (g, 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8), each with its right
// neighbour; b holds (2t, g), (2t + 8, g), each with its lower neighbour; d holds (g, 2t),
// (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1).
__device__ __forceinline__ void mma_m16n8k16_bf16(float (&d)[4], const uint32_t (&a)[4],
                                                  const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The same for fp16.
__device__ __forceinline__ void mma_m16n8k16_fp16(float (&d)[4], const uint32_t (&a)[4],
                                                  const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

#endif

}  // namespace td
