// What the scheduler (emu.cpp) and the operations of fibers (operations.cpp) share.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <memory>
#include <vector>

#include "emu.h"

namespace emu {

constexpr int kPoison = 0xff;

struct Copy {
  void* target;
  const void* source;
  size_t bytes;
  uint64_t* mbarrier;  // or null, then:
  unsigned fiber, group;
};

struct Mbarrier {
  const uint64_t* word;
  unsigned fiber;  // that has set it up
  // Fibers of other blocks know of it that have waited this often for the cluster's barrier.
  uint64_t known_after = ~uint64_t{0};
};

struct Barrier {
  uint64_t generation = 0;
  unsigned arrived = 0, expected = 0;
  const char* site = nullptr;
};

// Where the lanes of a warp take part in a barrier of the cluster: all in the same place.
struct Meeting {
  uint64_t phase = ~uint64_t{0};
  const char* site = nullptr;
};

struct Warp {
  uint64_t generation = 0;
  unsigned arrived = 0, mask = 0;
  const char* operation = nullptr;
  Slot slots[2][32];  // by parity of the generation: a late reader sees its own round
  Meeting cluster_arrive, cluster_wait;
};

struct Fiber {
  ucontext_t start;
  jmp_buf resume;
  bool started = false, done = false;
  const uint64_t* waits_for = nullptr;  // runnable when null or when *waits_for != waits_while
  uint64_t waits_while = 0;
  const char* site = nullptr;
  unsigned group = 0;                                // of asynchronous copies, the open one
  uint64_t cluster_arrivals = 0, cluster_waits = 0;  // calls so far
};

struct Cluster;

struct Block {
  Cluster* cluster;
  dim3 index;
  unsigned rank;  // in the cluster
  unsigned alive;
  bool begun = false;  // a thread has run
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  Barrier barriers[16];
  std::vector<Copy> copies;
  std::vector<Mbarrier> mbarriers;          // that have been set up
  unsigned held_warp = 0, held_visits = 0;  // a warp that does not run for so many visits
  std::vector<unsigned char> dynamic_shared;
  std::vector<unsigned char> static_shared;  // while another block is current
};

// On its way to the shared memory of another block.
struct Store {
  Block* to;
  unsigned char* target;
  size_t bytes;
  unsigned char value[16];
  uint64_t* mbarrier;  // of that block
  const char* site;
};

// Blocks that are resident together; a launch without clusters has clusters of one block.
struct Cluster {
  unsigned slot;  // among the resident ones: whose stacks it uses
  std::vector<std::unique_ptr<Block>> blocks;
  uint64_t generation = 0;      // of the cluster's barrier
  unsigned alive, arrived = 0;  // fibers; those of them that arrived in this generation
  std::vector<Store> stores;
  unsigned held_block = 0, held_turns = 0;  // a block that does not run for so many turns
};

struct Settings {
  uint64_t seed = 1;
  int resident = 1, multiprocessors = 2, capability = 9, clusters = 1;
};

extern Block* current_block;
extern unsigned current_fiber;
extern size_t dynamic_shared_bytes;  // of each block of the launch

inline Fiber& fiber() { return current_block->fibers[current_fiber]; }

unsigned char* aligned_dynamic(Block& block);

// Leaves the running fiber.
void to_scheduler();

// One copy of the current block, one store of its cluster arrives.
void land(size_t copy);
void land_store(Cluster& cluster, size_t store);

// The running fiber ends.
void leave_cluster();

}  // namespace emu
