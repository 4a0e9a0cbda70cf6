// kernels/ptx.cuh for the emulator: the same functions, by their definition.
#pragma once

#include "cuda_bf16.h"
#include "cuda_runtime.h"

namespace td {

inline unsigned char* dynamic_shared() { return emu::dynamic_shared(); }

inline void pdl_trigger() {}
inline void pdl_wait() {}

inline uint64_t global_timer() { return 0x1000; }

using CachePolicy = uint64_t;
inline CachePolicy evict_first() { return 0; }
inline void cp_async16(void* shared, const void* global, CachePolicy) {
  emu::async_copy(shared, global, 16, nullptr);
}
inline void cp_async16(void* shared, const void* global) {
  emu::async_copy(shared, global, 16, nullptr);
}
template <int kWords>
void load_past_l1(uint32_t* x, const void* global, CachePolicy) {
  if (reinterpret_cast<uintptr_t>(global) % (4 * kWords) != 0) {
    emu::fail(nullptr, "load of %d words that is not aligned to their size", kWords);
  }
  std::memcpy(x, global, 4 * kWords);
}
inline void bulk_prefetch_l2(const void* global, uint32_t bytes, CachePolicy) {
  if ((reinterpret_cast<uintptr_t>(global) | bytes) % 16 != 0 || bytes == 0) {
    emu::fail(nullptr, "bulk prefetch that is not aligned to 16 bytes, or of nothing");
  }
}
inline void cp_async_commit() { emu::async_commit(); }
template <int kPending>
void cp_async_wait() {
  emu::async_wait(kPending);
}

#define named_barrier(id, threads) emu_named_barrier(id, threads, TD_SITE)
inline void emu_named_barrier(int id, int threads, const char* site) {
  emu::block_barrier(id, static_cast<unsigned>(threads), site);
}

inline void mbarrier_init(uint64_t* barrier, int arrivals) {
  emu::mbarrier_init(barrier, static_cast<unsigned>(arrivals));
}
inline void mbarrier_init_fence() { emu::mbarrier_init_fence(); }
inline void mbarrier_arrive(uint64_t* barrier) { emu::mbarrier_arrive(barrier, 0); }
inline void mbarrier_expect(uint64_t* barrier, uint32_t bytes) {
  emu::mbarrier_arrive(barrier, bytes);
}
inline void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
  emu::mbarrier_wait(barrier, parity);
}
inline void mbarrier_wait_remote(uint64_t* barrier, uint32_t parity) {
  emu::mbarrier_wait(barrier, parity);
}
inline void bulk_copy(void* shared, const void* global, uint32_t bytes, uint64_t* barrier,
                      CachePolicy) {
  emu::async_copy(shared, global, bytes, barrier);
}

inline void emu_cluster_arrive(const char* site) { emu::cluster_arrive(site); }
inline void emu_cluster_wait(const char* site) { emu::cluster_wait(site); }
inline void emu_store_remote(const char* site, float4* mine, uint32_t rank, float4 x,
                             uint64_t* barrier) {
  emu::store_remote(mine, rank, &x, sizeof x, barrier, site);
}
inline void emu_store_remote(const char* site, float2* mine, uint32_t rank, float2 x,
                             uint64_t* barrier) {
  emu::store_remote(mine, rank, &x, sizeof x, barrier, site);
}

#define cluster_arrive() emu_cluster_arrive(TD_SITE)
#define cluster_wait() emu_cluster_wait(TD_SITE)
#define store_remote(...) emu_store_remote(TD_SITE, __VA_ARGS__)

template <typename Convert>
void emu_mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Convert convert) {
  uint32_t mine[6] = {a[0], a[1], a[2], a[3], b[0], b[1]};
  const emu::Slot* slots = emu::warp_exchange(0xffffffffu, mine, sizeof mine, "mma");
  // Element `upper` (0 or 1) of register `index` of a lane; a: 0 to 3, b: 4 and 5.
  const auto element = [&](int lane, int index, int upper) {
    uint16_t raw;
    std::memcpy(&raw, slots[lane].bytes + index * 4 + upper * 2, sizeof raw);
    return convert(raw);
  };
  const int group = emu::lane() / 4, pair = emu::lane() % 4;
  for (int i = 0; i < 4; ++i) {
    const int row = group + i / 2 * 8, column = pair * 2 + i % 2;
    for (int k = 0; k < 16; ++k) {
      const int holder = k % 8 / 2, far = k / 8;  // the lane of a group of four; k 8 to 15
      const float x = element(row % 8 * 4 + holder, far * 2 + row / 8, k % 2);
      const float y = element(column * 4 + holder, 4 + far, k % 2);
      d[i] = std::fma(x, y, d[i]);
    }
  }
}

inline void mma_m16n8k16_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  emu_mma(d, a, b, [](uint16_t raw) { return __bfloat162float(__ushort_as_bfloat16(raw)); });
}
inline void mma_m16n8k16_fp16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  emu_mma(d, a, b, [](uint16_t raw) { return __half2float(__ushort_as_half(raw)); });
}

}  // namespace td
