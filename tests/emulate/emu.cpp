// The scheduler of emu.h: fibers, barriers, warp operations and copies in flight.

#include "emu.h"

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <memory>
#include <numeric>
#include <vector>

dim3 threadIdx, blockIdx, blockDim, gridDim;

// The static __shared__ variables of all kernels: what was .bss of their object files (harness.py).
extern "C" {
extern unsigned char __start_td_shared[] __attribute__((weak));
extern unsigned char __stop_td_shared[] __attribute__((weak));
}

namespace emu {
namespace {

constexpr size_t kStackBytes = 128 * 1024;
constexpr size_t kCanaryBytes = 1024;  // after dynamic shared memory
constexpr int kPoison = 0xff;
constexpr uint64_t kMaxSweeps = 50'000'000;  // a spin that never ends

struct Copy {
  void* target;
  const void* source;
  size_t bytes;
  uint64_t* mbarrier;  // or null, then:
  unsigned fiber, group;
};

struct Barrier {
  uint64_t generation = 0;
  unsigned arrived = 0, expected = 0;
  const char* site = nullptr;
};

struct Warp {
  uint64_t generation = 0;
  unsigned arrived = 0, mask = 0;
  const char* operation = nullptr;
  Slot slots[2][32];  // by parity of the generation: a late reader sees its own round
};

struct Fiber {
  ucontext_t start;
  jmp_buf resume;
  bool started = false, done = false;
  const uint64_t* waits_for = nullptr;  // runnable when null or when *waits_for != waits_while
  uint64_t waits_while = 0;
  const char* site = nullptr;
  unsigned group = 0;  // of asynchronous copies, the open one
};

struct Block {
  dim3 index;
  unsigned slot;  // among the resident blocks: whose stacks it uses
  unsigned alive;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  Barrier barriers[16];
  std::vector<Copy> copies;
  std::vector<const uint64_t*> mbarriers;  // that have been set up
  unsigned held_warp = 0, held_visits = 0;  // a warp that does not run for so many visits
  std::vector<unsigned char> dynamic_shared;
  std::vector<unsigned char> static_shared;  // while another block is current
};

struct Settings {
  uint64_t seed = 1;
  int resident = 1, multiprocessors = 2, capability = 9;
} settings;

uint64_t random_state = 1;
char error[512];
Block* current_block;
unsigned current_fiber;
jmp_buf scheduler, failed;
const std::function<void()>* entry;
std::vector<void*> stacks;

Fiber& fiber() { return current_block->fibers[current_fiber]; }

void resume_here() {
  const unsigned x = blockDim.x, y = blockDim.y;
  threadIdx = dim3(current_fiber % x, current_fiber / x % y, current_fiber / x / y);
  blockIdx = current_block->index;
}

void to_scheduler() {
  if (_setjmp(fiber().resume) == 0) _longjmp(scheduler, 1);
  resume_here();
}

void trampoline() {
  resume_here();
  (*entry)();
  fiber().done = true;
  --current_block->alive;
  _longjmp(scheduler, 1);
}

void run_fiber(unsigned index) {
  current_fiber = index;
  Fiber& f = fiber();
  f.waits_for = nullptr;
  if (_setjmp(scheduler) != 0) return;  // back from the fiber
  if (f.started) _longjmp(f.resume, 1);
  f.started = true;
  getcontext(&f.start);
  f.start.uc_stack.ss_sp = stacks[current_block->slot * current_block->fibers.size() + index];
  f.start.uc_stack.ss_size = kStackBytes;
  f.start.uc_link = nullptr;
  makecontext(&f.start, trampoline, 0);
  setcontext(&f.start);
}

// mbarrier word: bit 0 phase, 8..19 arrivals of a phase, 20..31 arrivals missing, 32..63 bytes
// missing (modulo 2^32, since copies may land before they are announced).
struct Mbarrier {
  uint64_t word;
  unsigned arrivals() const { return word >> 8 & 0xfff; }
  unsigned missing() const { return word >> 20 & 0xfff; }
  uint32_t bytes() const { return static_cast<uint32_t>(word >> 32); }
  void set(unsigned phase, unsigned arrivals, unsigned missing, uint32_t bytes) {
    word = phase | arrivals << 8 | static_cast<uint64_t>(missing) << 20 |
           static_cast<uint64_t>(bytes) << 32;
  }
};

// What lies in shared memory before the set-up may happen to look like a barrier that waits.
void mbarrier_check(const uint64_t* word) {
  const std::vector<const uint64_t*>& known = current_block->mbarriers;
  if (std::find(known.begin(), known.end(), word) == known.end()) {
    fail(nullptr, "mbarrier used before it was set up");
  }
}

void mbarrier_update(uint64_t* word, unsigned arrived, uint32_t more_bytes) {
  mbarrier_check(word);
  Mbarrier b = {*word};
  if (arrived > b.missing()) fail(nullptr, "mbarrier: more arrivals than it was made for");
  const unsigned missing = b.missing() - arrived, phase = b.word & 1;
  const uint32_t bytes = b.bytes() + more_bytes;
  const bool complete = missing == 0 && bytes == 0;
  b.set(complete ? !phase : phase, b.arrivals(), complete ? b.arrivals() : missing, bytes);
  *word = b.word;
}

void land(size_t index) {
  std::vector<Copy>& copies = current_block->copies;
  const Copy copy = copies[index];
  copies[index] = copies.back();
  copies.pop_back();
  std::memcpy(copy.target, copy.source, copy.bytes);
  if (copy.mbarrier) mbarrier_update(copy.mbarrier, 0, -static_cast<uint32_t>(copy.bytes));
}

// One visit: every runnable fiber of the block once, in a random order, and some copies land. Now
// and then a warp is held back, so that the others get as far ahead of it as barriers let them.
bool visit(Block& block) {
  bool progress = false;
  const unsigned count = block.fibers.size();
  if (block.held_visits > 0) {
    --block.held_visits;
    progress = true;  // later
  } else if (count > 32 && random_number() % 64 == 0) {
    block.held_warp = random_number() % block.warps.size();
    block.held_visits = random_number() % 256;
    progress = true;  // the warp held back may be the only one that could run
  }
  unsigned stride = 1 + random_number() % count;
  while (std::gcd(stride, count) != 1) ++stride;
  unsigned index = random_number() % count;
  for (unsigned i = 0; i < count; ++i, index = (index + stride) % count) {
    Fiber& f = block.fibers[index];
    if (f.done || (f.waits_for && *f.waits_for == f.waits_while)) continue;
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

std::unique_ptr<Block> make_block(unsigned number, unsigned slot, unsigned threads,
                                  size_t dynamic_bytes) {
  auto block = std::make_unique<Block>();
  block->slot = slot;
  block->index =
      dim3(number % gridDim.x, number / gridDim.x % gridDim.y, number / gridDim.x / gridDim.y);
  block->alive = threads;
  block->fibers.resize(threads);
  block->warps.resize((threads + 31) / 32);
  block->dynamic_shared.assign(dynamic_bytes + kCanaryBytes + 1024, kPoison);
  return block;
}

unsigned char* aligned_dynamic(Block& block) {
  const auto address = reinterpret_cast<uintptr_t>(block.dynamic_shared.data());
  return reinterpret_cast<unsigned char*>((address + 1023) & ~uintptr_t{1023});
}

void check_finished(Block& block, size_t dynamic_bytes) {
  if (!block.copies.empty()) fail(nullptr, "a block ended with copies under way");
  const unsigned char* canary = aligned_dynamic(block) + dynamic_bytes;
  for (size_t i = 0; i < kCanaryBytes / 2; ++i) {
    if (canary[i] != kPoison) fail(nullptr, "write past the end of dynamic shared memory");
  }
}

void report_deadlock(const Block& block) {
  for (const Fiber& f : block.fibers) {
    if (f.done) continue;
    fail(f.site, "deadlock in block (%u, %u, %u): thread %u waits here; %u of %u threads ended",
         block.index.x, block.index.y, block.index.z,
         static_cast<unsigned>(&f - block.fibers.data()),
         static_cast<unsigned>(block.fibers.size()) - block.alive,
         static_cast<unsigned>(block.fibers.size()));
  }
}

void run_grid(unsigned threads, size_t dynamic_bytes,
              std::vector<std::unique_ptr<Block>>& resident) {
  std::vector<unsigned> waiting(gridDim.x * gridDim.y * gridDim.z);
  std::iota(waiting.begin(), waiting.end(), 0u);
  std::vector<unsigned> free_slots(settings.resident);
  std::iota(free_slots.begin(), free_slots.end(), 0u);
  uint64_t sweeps = 0;
  while (!waiting.empty() || !resident.empty()) {
    while (!waiting.empty() && !free_slots.empty()) {
      std::swap(waiting[random_number() % waiting.size()], waiting.back());
      resident.push_back(make_block(waiting.back(), free_slots.back(), threads, dynamic_bytes));
      waiting.pop_back();
      free_slots.pop_back();
    }
    bool progress = false;
    for (size_t i = 0; i < resident.size(); ++i) {
      Block& block = *resident[i];
      make_current(&block);
      for (unsigned visits = 1 + random_number() % 8; visits > 0 && block.alive > 0; --visits) {
        progress |= visit(block);
      }
      if (block.alive == 0) {
        check_finished(block, dynamic_bytes);
        current_block = nullptr;
        free_slots.push_back(block.slot);
        std::swap(resident[i], resident.back());
        resident.pop_back();
        progress = true;
        break;
      }
    }
    if (!progress) report_deadlock(*resident[0]);
    if (++sweeps > kMaxSweeps) fail(nullptr, "the launch does not end");
  }
}

}  // namespace

bool launch(dim3 grid, dim3 block, size_t dynamic_bytes, const std::function<void()>& kernel) {
  const unsigned threads = block.x * block.y * block.z;
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || threads == 0 || threads > 1024) {
    std::snprintf(error, sizeof error, "impossible grid or block");
    return false;
  }
  while (stacks.size() < static_cast<size_t>(threads) * settings.resident) {
    stacks.push_back(
        mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  }
  gridDim = grid;
  blockDim = block;
  entry = &kernel;
  current_block = nullptr;
  random_state = settings.seed * 0x9e3779b97f4a7c15u | 1;
  std::vector<std::unique_ptr<Block>> resident;
  if (_setjmp(failed) != 0) return false;
  run_grid(threads, dynamic_bytes, resident);
  return true;
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
  Mbarrier b;
  b.set(0, arrivals, arrivals, 0);
  *word = b.word;
  current_block->mbarriers.push_back(word);
}

void mbarrier_arrive(uint64_t* word, uint32_t expected_bytes) {
  mbarrier_update(word, 1, expected_bytes);
}

void mbarrier_wait(uint64_t* word, uint32_t parity) {
  mbarrier_check(word);
  while ((*word & 1) == parity) wait_while_equal(word, *word, "mbarrier_wait");
}

}  // namespace emu

void emu_configure(uint64_t seed, int resident, int multiprocessors, int capability) {
  emu::settings = {seed, resident, multiprocessors, capability};
}

const char* emu_error() { return emu::error; }

int emu_multiprocessors() { return emu::settings.multiprocessors; }

int emu_capability() { return emu::settings.capability; }
