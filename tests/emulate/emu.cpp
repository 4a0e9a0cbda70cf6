// The scheduler of emu.h: grids, clusters, blocks and their fibers.

#include <sys/mman.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <numeric>

#include "state.h"

dim3 threadIdx, blockIdx, blockDim, gridDim;

// The static __shared__ variables of all kernels: what was .bss of their object files (harness.py).
// What host code remembers from call to call is there as well, between launches.
extern "C" {
extern unsigned char __start_td_shared[] __attribute__((weak));
extern unsigned char __stop_td_shared[] __attribute__((weak));
}

namespace emu {

Block* current_block;
unsigned current_fiber;
size_t dynamic_shared_bytes;

namespace {

constexpr size_t kStackBytes = 128 * 1024;
constexpr size_t kCanaryBytes = 1024;        // after dynamic shared memory
constexpr uint64_t kMaxSweeps = 50'000'000;  // a spin that never ends

Settings settings;
uint64_t random_state = 1;
char error[512];
jmp_buf scheduler, failed;
const std::function<void()>* entry;
std::vector<void*> stacks;

void resume_here() {
  const unsigned x = blockDim.x, y = blockDim.y;
  threadIdx = dim3(current_fiber % x, current_fiber / x % y, current_fiber / x / y);
  blockIdx = current_block->index;
}

void trampoline() {
  resume_here();
  (*entry)();
  fiber().done = true;
  --current_block->alive;
  leave_cluster();
  _longjmp(scheduler, 1);
}

void run_fiber(unsigned index) {
  current_fiber = index;
  Fiber& f = fiber();
  f.waits_for = nullptr;
  if (_setjmp(scheduler) != 0) return;  // back from the fiber
  if (f.started) _longjmp(f.resume, 1);
  f.started = true;
  current_block->begun = true;
  const Cluster& cluster = *current_block->cluster;
  const size_t block_slot = cluster.slot * cluster.blocks.size() + current_block->rank;
  getcontext(&f.start);
  f.start.uc_stack.ss_sp = stacks[block_slot * current_block->fibers.size() + index];
  f.start.uc_stack.ss_size = kStackBytes;
  f.start.uc_link = nullptr;
  makecontext(&f.start, trampoline, 0);
  setcontext(&f.start);
}

bool can_run(const Fiber& f) { return !f.done && !(f.waits_for && *f.waits_for == f.waits_while); }

// One visit: every runnable fiber of the block once, in a random order, and some copies land. Now
// and then a warp is held back, so that the others get as far ahead of it as barriers let them. In
// a cluster the visit may end early, and another block runs before the rest of this one.
bool visit(Block& block) {
  bool progress = false;
  const unsigned count = block.fibers.size();
  if (block.held_visits > 0) {
    --block.held_visits;
  } else if (count > 32 && random_number() % 64 == 0) {
    block.held_warp = random_number() % block.warps.size();
    block.held_visits = random_number() % 256;
  }
  unsigned stride = 1 + random_number() % count;
  while (std::gcd(stride, count) != 1) ++stride;
  unsigned index = random_number() % count;
  unsigned visited = count;
  if (block.cluster->blocks.size() > 1 && random_number() % 2) visited = random_number() % count;
  for (unsigned i = 0; i < visited; ++i, index = (index + stride) % count) {
    if (!can_run(block.fibers[index])) continue;
    if (block.held_visits > 0 && index / 32 == block.held_warp) continue;
    run_fiber(index);
    progress = true;
  }
  for (unsigned n = random_number() % 32; n > 0 && !block.copies.empty(); --n) {
    land(random_number() % block.copies.size());
    progress = true;
  }
  return progress;
}

void make_current(Block* block) {
  const size_t bytes = __stop_td_shared - __start_td_shared;
  if (block == current_block || bytes == 0) {
    current_block = block;
    return;
  }
  if (current_block) {
    current_block->static_shared.assign(__start_td_shared, __stop_td_shared);
  }
  if (block->static_shared.empty()) {
    std::memset(__start_td_shared, kPoison, bytes);
  } else {
    std::memcpy(__start_td_shared, block->static_shared.data(), bytes);
  }
  current_block = block;
}

std::unique_ptr<Block> make_block(Cluster& cluster, unsigned number, unsigned threads) {
  auto block = std::make_unique<Block>();
  block->cluster = &cluster;
  block->rank = cluster.blocks.size();
  block->index =
      dim3(number % gridDim.x, number / gridDim.x % gridDim.y, number / gridDim.x / gridDim.y);
  block->alive = threads;
  block->fibers.resize(threads);
  block->warps.resize((threads + 31) / 32);
  block->dynamic_shared.assign(dynamic_shared_bytes + kCanaryBytes + 1024, kPoison);
  return block;
}

void hold_block(Cluster& cluster, unsigned size) {
  cluster.held_block = random_number() % size;
  cluster.held_turns = random_number() % 256;
}

std::unique_ptr<Cluster> make_cluster(unsigned number, unsigned slot, unsigned size,
                                      unsigned threads) {
  auto cluster = std::make_unique<Cluster>();
  cluster->slot = slot;
  cluster->alive = size * threads;
  if (size > 1) hold_block(*cluster, size);  // one begins late
  for (unsigned rank = 0; rank < size; ++rank) {
    cluster->blocks.push_back(make_block(*cluster, number * size + rank, threads));
  }
  return cluster;
}

void check_finished(Block& block) {
  if (!block.copies.empty()) fail(nullptr, "a block ended with copies under way");
  const unsigned char* canary = aligned_dynamic(block) + dynamic_shared_bytes;
  for (size_t i = 0; i < kCanaryBytes / 2; ++i) {
    if (canary[i] != kPoison) fail(nullptr, "write past the end of dynamic shared memory");
  }
}

// One turn: some visits to the block, or to blocks of a larger cluster in an order of their own, of
// which now and then one is held back, as warps are.
bool run_cluster(Cluster& cluster) {
  bool progress = false;
  const unsigned size = cluster.blocks.size();
  for (unsigned i = 0; i < size; ++i) {
    unsigned rank = 0;
    if (size > 1) {
      if (cluster.held_turns > 0) {
        --cluster.held_turns;
      } else if (random_number() % 64 == 0) {
        hold_block(cluster, size);
      }
      rank = random_number() % size;
      if (cluster.held_turns > 0 && rank == cluster.held_block) continue;
    }
    Block& block = *cluster.blocks[rank];
    if (block.alive == 0) continue;
    make_current(&block);
    for (unsigned visits = 1 + random_number() % 8; visits > 0 && block.alive > 0; --visits) {
      progress |= visit(block);
    }
    if (block.alive == 0) check_finished(block);
    if (cluster.stores.empty()) continue;
    const unsigned most = random_number() % 2 ? 4 : 64;  // a block wakes up among a few, or many
    for (unsigned n = random_number() % most; n > 0 && !cluster.stores.empty(); --n) {
      land_store(cluster, random_number() % cluster.stores.size());
      progress = true;
    }
  }
  return progress;
}

// Whether anything could happen in the cluster if nothing were held back.
bool is_stuck(Cluster& cluster) {
  if (!cluster.stores.empty()) return false;
  for (const auto& block : cluster.blocks) {
    make_current(block.get());  // what fibers wait for may lie in its shared memory
    if (!block->copies.empty()) return false;
    if (std::any_of(block->fibers.begin(), block->fibers.end(), can_run)) return false;
  }
  return true;
}

// Shows a thread that waits, if there is one not for its cluster but for something else.
void report_deadlock(const Cluster& cluster) {
  const Block* stuck = nullptr;
  const Fiber* shown = nullptr;
  for (const auto& block : cluster.blocks) {
    for (const Fiber& f : block->fibers) {
      if (f.done || (shown && (shown->waits_for != &cluster.generation ||
                               f.waits_for == &cluster.generation))) {
        continue;
      }
      stuck = block.get();
      shown = &f;
    }
  }
  const auto threads = static_cast<unsigned>(stuck->fibers.size());
  fail(shown->site, "deadlock in block (%u, %u, %u): thread %u waits here; %u of %u threads ended",
       stuck->index.x, stuck->index.y, stuck->index.z,
       static_cast<unsigned>(shown - stuck->fibers.data()), threads - stuck->alive, threads);
}

void run_grid(unsigned threads, unsigned cluster_size,
              std::vector<std::unique_ptr<Cluster>>& resident) {
  std::vector<unsigned> waiting(gridDim.x * gridDim.y * gridDim.z / cluster_size);
  std::iota(waiting.begin(), waiting.end(), 0u);
  std::vector<unsigned> free_slots(settings.resident);
  std::iota(free_slots.begin(), free_slots.end(), 0u);
  uint64_t sweeps = 0;
  while (!waiting.empty() || !resident.empty()) {
    while (!waiting.empty() && !free_slots.empty()) {
      std::swap(waiting[random_number() % waiting.size()], waiting.back());
      resident.push_back(make_cluster(waiting.back(), free_slots.back(), cluster_size, threads));
      waiting.pop_back();
      free_slots.pop_back();
    }
    bool progress = false;
    for (size_t i = 0; i < resident.size(); ++i) {
      Cluster& cluster = *resident[i];
      progress |= run_cluster(cluster);
      if (cluster.alive == 0) {
        current_block = nullptr;
        free_slots.push_back(cluster.slot);
        std::swap(resident[i], resident.back());
        resident.pop_back();
        progress = true;
        break;
      }
    }
    const auto stuck = [](const auto& cluster) { return is_stuck(*cluster); };
    if (!progress && std::all_of(resident.begin(), resident.end(), stuck)) {
      report_deadlock(*resident[0]);
    }
    if (++sweeps > kMaxSweeps) fail(nullptr, "the launch does not end");
  }
}

}  // namespace

bool launch(dim3 grid, dim3 block, size_t dynamic_bytes, dim3 cluster,
            const std::function<void()>& kernel) {
  const unsigned threads = block.x * block.y * block.z;
  const char* impossible = nullptr;
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || threads == 0 || threads > 1024) {
    impossible = "impossible grid or block";
  } else if (cluster.x == 0 || cluster.y != 1 || cluster.z != 1 || grid.x % cluster.x != 0) {
    impossible = "impossible cluster: it must divide the grid, and only x may be more than 1";
  } else if (cluster.x > 1 && settings.capability < 9) {
    impossible = "clusters before compute capability 9";
  } else if (cluster.x > 1 && settings.clusters == 0) {
    impossible = "no room for a cluster: cudaOccupancyMaxActiveClusters says 0";
  }
  if (impossible) {
    std::snprintf(error, sizeof error, "%s", impossible);
    return false;
  }
  while (stacks.size() < static_cast<size_t>(threads) * cluster.x * settings.resident) {
    stacks.push_back(
        mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  }
  gridDim = grid;
  blockDim = block;
  dynamic_shared_bytes = dynamic_bytes;
  entry = &kernel;
  current_block = nullptr;
  random_state = settings.seed * 0x9e3779b97f4a7c15u | 1;
  std::vector<std::unique_ptr<Cluster>> resident;
  const std::vector<unsigned char> of_the_host(__start_td_shared, __stop_td_shared);
  const bool ended = _setjmp(failed) == 0;
  if (ended) run_grid(threads, cluster.x, resident);
  std::copy(of_the_host.begin(), of_the_host.end(), __start_td_shared);
  return ended;
}

void fail(const char* site, const char* format, ...) {
  char text[400];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  std::snprintf(error, sizeof error, "%s%s%s", site ? site : "", site ? ": " : "", text);
  _longjmp(failed, 1);
}

uint64_t random_number() {  // xorshift64
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return random_state >> 11;
}

void to_scheduler() {
  if (_setjmp(fiber().resume) == 0) _longjmp(scheduler, 1);
  resume_here();
}

unsigned char* aligned_dynamic(Block& block) {
  const auto address = reinterpret_cast<uintptr_t>(block.dynamic_shared.data());
  return reinterpret_cast<unsigned char*>((address + 1023) & ~uintptr_t{1023});
}

}  // namespace emu

void emu_configure(uint64_t seed, int resident, int multiprocessors, int capability, int clusters) {
  emu::settings = {seed, resident, multiprocessors, capability, clusters};
  std::fill(__start_td_shared, __stop_td_shared, 0);  // host code may remember another GPU
}

const char* emu_error() { return emu::error; }

int emu_multiprocessors() { return emu::settings.multiprocessors; }

int emu_capability() { return emu::settings.capability; }

int emu_clusters() { return emu::settings.clusters; }
