// What the running fiber can do (emu.h): barriers, warp operations, copies, stores to other blocks.

#include <algorithm>

#include "state.h"

namespace emu {
namespace {

// mbarrier word: bit 0 phase, 8..19 arrivals of a phase, 20..31 arrivals missing, 32..63 bytes
// missing (modulo 2^32, since copies may land before they are announced).
struct Word {
  uint64_t word;
  unsigned arrivals() const { return word >> 8 & 0xfff; }
  unsigned missing() const { return word >> 20 & 0xfff; }
  uint32_t bytes() const { return static_cast<uint32_t>(word >> 32); }
  void set(unsigned phase, unsigned arrivals, unsigned missing, uint32_t bytes) {
    word = phase | arrivals << 8 | static_cast<uint64_t>(missing) << 20 |
           static_cast<uint64_t>(bytes) << 32;
  }
};

// The latest set-up; null if there was none. What lies in shared memory before may happen to look
// like a barrier that waits.
const Mbarrier* find_mbarrier(const Block& block, const uint64_t* word) {
  const auto found = std::find_if(block.mbarriers.rbegin(), block.mbarriers.rend(),
                                  [&](const Mbarrier& m) { return m.word == word; });
  return found == block.mbarriers.rend() ? nullptr : &*found;
}

void mbarrier_check(const uint64_t* word) {
  if (!find_mbarrier(*current_block, word)) fail(nullptr, "mbarrier used before it was set up");
}

void mbarrier_update(uint64_t* word, unsigned arrived, uint32_t more_bytes) {
  Word b = {*word};
  if (arrived > b.missing()) fail(nullptr, "mbarrier: more arrivals than it was made for");
  const unsigned missing = b.missing() - arrived, phase = b.word & 1;
  const uint32_t bytes = b.bytes() + more_bytes;
  const bool complete = missing == 0 && bytes == 0;
  b.set(complete ? !phase : phase, b.arrivals(), complete ? b.arrivals() : missing, bytes);
  *word = b.word;
}

// Ends the phase of the cluster's barrier when every fiber that has not ended has arrived.
void end_phase(Cluster& cluster) {
  if (cluster.arrived == 0 || cluster.arrived < cluster.alive) return;
  cluster.arrived = 0;
  ++cluster.generation;
}

void check_converged(Meeting& meeting, uint64_t phase, const char* site) {
  if (meeting.phase == phase && std::strcmp(meeting.site, site) != 0) {
    fail(site, "divergent warp: other lanes are at %s", meeting.site);
  }
  meeting = {phase, site};
}

}  // namespace

void land_store(Cluster& cluster, size_t index) {
  const Store store = cluster.stores[index];
  cluster.stores[index] = cluster.stores.back();
  cluster.stores.pop_back();
  std::memcpy(store.target, store.value, store.bytes);
  mbarrier_update(store.mbarrier, 0, -static_cast<uint32_t>(store.bytes));
}

void leave_cluster() {
  Cluster& cluster = *current_block->cluster;
  if (current_block->alive == 0) {
    for (const Store& store : cluster.stores) {
      if (store.to == current_block) fail(store.site, "a block ended with stores to it under way");
    }
  }
  if (fiber().cluster_arrivals > cluster.generation) --cluster.arrived;
  --cluster.alive;
  end_phase(cluster);
}

void land(size_t index) {
  std::vector<Copy>& copies = current_block->copies;
  const Copy copy = copies[index];
  copies[index] = copies.back();
  copies.pop_back();
  std::memcpy(copy.target, copy.source, copy.bytes);
  if (!copy.mbarrier) return;
  mbarrier_check(copy.mbarrier);
  mbarrier_update(copy.mbarrier, 0, -static_cast<uint32_t>(copy.bytes));
}

unsigned char* dynamic_shared() { return aligned_dynamic(*current_block); }

int lane() { return current_fiber % 32; }

void yield() { to_scheduler(); }

void wait_while_equal(const uint64_t* word, uint64_t value, const char* site) {
  while (*word == value) {
    fiber().waits_for = word;
    fiber().waits_while = value;
    fiber().site = site;
    to_scheduler();
  }
}

void block_barrier(int id, unsigned threads, const char* site) {
  Barrier& barrier = current_block->barriers[id];
  if (threads == 0) threads = current_block->fibers.size();
  if (barrier.arrived == 0) {
    barrier.site = site;
    barrier.expected = threads;
  } else if (barrier.expected != threads || std::strcmp(barrier.site, site) != 0) {
    fail(site, "divergent barrier: other threads of the block are at %s", barrier.site);
  }
  const uint64_t generation = barrier.generation;
  if (++barrier.arrived == barrier.expected) {
    barrier.arrived = 0;
    ++barrier.generation;
  } else {
    wait_while_equal(&barrier.generation, generation, site);
  }
}

const Slot* warp_exchange(unsigned mask, const void* value, size_t bytes, const char* operation) {
  Warp& warp = current_block->warps[current_fiber / 32];
  const unsigned bit = 1u << lane();
  if (!(mask & bit)) fail(operation, "lane %d is not in its own mask", lane());
  if (warp.arrived == 0) {
    warp.mask = mask;
    warp.operation = operation;
  } else if (warp.mask != mask || std::strcmp(warp.operation, operation) != 0) {
    fail(operation, "divergent warp: other lanes are in %s", warp.operation);
  }
  const uint64_t generation = warp.generation;
  Slot* slots = warp.slots[generation & 1];
  if (bytes) std::memcpy(slots[lane()].bytes, value, bytes);
  warp.arrived |= bit;
  if (warp.arrived == warp.mask) {
    warp.arrived = 0;
    ++warp.generation;
  } else {
    wait_while_equal(&warp.generation, generation, operation);
  }
  return slots;
}

void async_copy(void* target, const void* source, size_t bytes, uint64_t* mbarrier) {
  const auto misaligned = reinterpret_cast<uintptr_t>(target) |
                          reinterpret_cast<uintptr_t>(source) | static_cast<uintptr_t>(bytes);
  if (misaligned % 16 != 0) fail(nullptr, "asynchronous copy that is not aligned to 16 bytes");
  std::memset(target, kPoison, bytes);
  current_block->copies.push_back({target, source, bytes, mbarrier, current_fiber, fiber().group});
}

void async_commit() { ++fiber().group; }

void async_wait(int pending) {
  const std::vector<Copy>& copies = current_block->copies;
  for (size_t i = copies.size(); i-- > 0;) {
    const Copy& c = copies[i];
    if (!c.mbarrier && c.fiber == current_fiber &&
        c.group + static_cast<unsigned>(pending) < fiber().group) {
      land(i);
    }
  }
}

void mbarrier_init(uint64_t* word, unsigned arrivals) {
  Word b;
  b.set(0, arrivals, arrivals, 0);
  *word = b.word;
  current_block->mbarriers.push_back({word, current_fiber});
}

void mbarrier_init_fence() {
  for (Mbarrier& m : current_block->mbarriers) {
    if (m.fiber == current_fiber) {
      m.known_after = std::min(m.known_after, fiber().cluster_arrivals + 1);
    }
  }
}

void mbarrier_arrive(uint64_t* word, uint32_t expected_bytes) {
  mbarrier_check(word);
  mbarrier_update(word, 1, expected_bytes);
}

void mbarrier_wait(uint64_t* word, uint32_t parity) {
  mbarrier_check(word);
  while ((*word & 1) == parity) wait_while_equal(word, *word, "mbarrier_wait");
}

void cluster_arrive(const char* site) {
  Fiber& f = fiber();
  if (f.cluster_arrivals != f.cluster_waits) {
    fail(site, "cluster_arrive again without a cluster_wait between");
  }
  check_converged(current_block->warps[current_fiber / 32].cluster_arrive, f.cluster_waits, site);
  ++f.cluster_arrivals;
  ++current_block->cluster->arrived;
  end_phase(*current_block->cluster);
}

void cluster_wait(const char* site) {
  Fiber& f = fiber();
  if (f.cluster_arrivals == f.cluster_waits) fail(site, "cluster_wait without a cluster_arrive");
  check_converged(current_block->warps[current_fiber / 32].cluster_wait, f.cluster_waits, site);
  wait_while_equal(&current_block->cluster->generation, f.cluster_waits, site);
  ++f.cluster_waits;
}

void store_remote(void* mine, unsigned rank, const void* value, size_t bytes, uint64_t* mbarrier,
                  const char* site) {
  Cluster& cluster = *current_block->cluster;
  if (rank >= cluster.blocks.size()) {
    fail(site, "store to block %u of a cluster of %zu", rank, cluster.blocks.size());
  }
  Block& to = *cluster.blocks[rank];
  const auto there = [&](const char* what, void* here, size_t size) {
    const size_t offset = static_cast<unsigned char*>(here) - dynamic_shared();
    if (offset > dynamic_shared_bytes || size > dynamic_shared_bytes - offset) {
      fail(site, "%s in another block at an address outside dynamic shared memory", what);
    }
    if (offset % size != 0) fail(site, "%s that is not aligned to its %zu bytes", what, size);
    return aligned_dynamic(to) + offset;
  };
  Store store = {&to, there("store", mine, bytes), bytes, {}, nullptr, site};
  store.mbarrier = reinterpret_cast<uint64_t*>(there("mbarrier", mbarrier, sizeof *mbarrier));
  if (!to.begun) fail(site, "store to the shared memory of a block that has not begun");
  if (to.alive == 0) fail(site, "store to the shared memory of a block that has ended");
  const Mbarrier* known = find_mbarrier(to, store.mbarrier);
  if (!known) fail(site, "the other block has not set up the mbarrier");
  if (&to != current_block && fiber().cluster_waits < known->known_after) {
    fail(site, "no fence and barrier of the cluster since the other block set up the mbarrier");
  }
  std::memcpy(store.value, value, bytes);
  std::memset(store.target, kPoison, bytes);
  cluster.stores.push_back(store);
}

}  // namespace emu
