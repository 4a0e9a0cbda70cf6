// The host emulator: runs kernel sources, compiled by the host compiler, one fiber per GPU thread.
//
// A fiber runs until it has to wait (barrier, warp operation, mbarrier) and the scheduler then
// picks another; which one, which warp is held back for a while, how many blocks are resident, and
// when asynchronous copies land follows from a seed. There is no preemption between those points,
// which makes a missing barrier show as stale or poisoned data under some order rather than as a
// rare tear. What it finds: wrong indices, missing and divergent barriers, mbarriers used before
// their set-up, deadlocks, data read before it was written or copied, stores to blocks of a cluster
// that have not begun, have not set up the mbarrier, or end too early. What it cannot find:
// memory-ordering bugs, bank conflicts, anything about speed.
//
// Shared memory, static and dynamic, is filled with 0xFF (NaN in every float type) when a block
// starts. Errors end the launch: td_* entries return 719 and emu_error() says what happened.
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

// Set by the scheduler before a fiber continues.
extern dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emu {

// ---- launching -------------------------------------------------------------------------------

// Runs a grid to its end; false, with the reason in emu_error(), if it went wrong.
bool launch(dim3 grid, dim3 block, size_t dynamic_shared_bytes, dim3 cluster,
            const std::function<void()>& kernel);

// Ends the launch with a message; `site` is where in the source, may be null.
[[noreturn]] void fail(const char* site, const char* format, ...)
    __attribute__((format(printf, 2, 3)));

// ---- what the running fiber can do -----------------------------------------------------------

uint64_t random_number();
unsigned char* dynamic_shared();
int lane();
void yield();  // continues later

// Continues when *word differs from value.
void wait_while_equal(const uint64_t* word, uint64_t value, const char* site);

// All of `threads` (0: the whole block) must arrive at barrier `id` from the same place.
void block_barrier(int id, unsigned threads, const char* site);

// Each lane of `mask` gives up to 32 bytes; returns the table of what all lanes gave, valid until
// the lane's next warp operation. All lanes of the mask must take part in the same operation.
struct Slot {
  alignas(16) unsigned char bytes[32];
};
const Slot* warp_exchange(unsigned mask, const void* value, size_t bytes, const char* operation);

// Asynchronous copies: the target is poisoned at once and filled at some later point, at the latest
// when cp_async_wait asks for its group, or never before the mbarrier completes.
void async_copy(void* target, const void* source, size_t bytes, uint64_t* mbarrier);
void async_commit();
void async_wait(int pending);

// mbarriers, in a layout of our own. Waits return when the phase of that parity has completed. The
// fence is for other blocks: see below.
void mbarrier_init(uint64_t* word, unsigned arrivals);
void mbarrier_init_fence();
void mbarrier_arrive(uint64_t* word, uint32_t expected_bytes);
void mbarrier_wait(uint64_t* word, uint32_t parity);

// Clusters. A thread that has ended counts as arrived; the barrier orders no data. A store goes to
// the dynamic shared memory of another block, to the place that `mine` has in this one's. The
// target is poisoned at once and filled at some later point, in any order, and as many bytes
// complete on the mbarrier at the place of `mbarrier` in that block. That block must have begun and
// have set the mbarrier up, the thread that did so fenced it and arrived at the cluster's barrier
// after that, and the thread that stores waited for that barrier.
void cluster_arrive(const char* site);
void cluster_wait(const char* site);
void store_remote(void* mine, unsigned rank, const void* value, size_t bytes, uint64_t* mbarrier,
                  const char* site);

template <typename T>
T shuffle(unsigned mask, T value, int source, const char* operation) {
  static_assert(sizeof(T) <= sizeof(Slot));
  const Slot* slots = warp_exchange(mask, &value, sizeof(T), operation);
  T result;
  std::memcpy(&result, slots[source].bytes, sizeof(T));
  return result;
}

}  // namespace emu

extern "C" {
// seed: of the schedule. resident: blocks, or clusters of them, that run side by side.
// multiprocessors, capability: what cudaDeviceGetAttribute reports, so that kernels that size their
// grid by the first can be made to loop, and those that choose by the second (major compute
// capability) can be made to choose. clusters: what cudaOccupancyMaxActiveClusters reports; with 0
// launches of clusters fail.
void emu_configure(uint64_t seed, int resident, int multiprocessors, int capability, int clusters);
const char* emu_error();  // of the last launch that failed
int emu_multiprocessors();
int emu_capability();
int emu_clusters();
}
