// Drafting by lookup: the tokens that followed the last ones of the text when they occurred before.
//
// Every thread looks at four places of the text and counts how many tokens before each equal the
// text's last ones. The longest match wins and of equal ones the last, which one 64-bit key orders:
// length above, place below. One block reduces the blocks' keys and copies. The text is read once,
// 0.5 MB at 128K tokens; nearly every comparison ends at its first token, so the time is two
// launches. No loop over the text, whatever its length, and no index to keep.

#include "round.cuh"

namespace td {
namespace {

constexpr int kThreads = 256;
constexpr int kPlaces = 4 * kThreads;  // of one block

__global__ void __launch_bounds__(kThreads)
    ngram_search_kernel(const int32_t* history,   // [capacity]
                        const RoundState* state,  // [1]
                        Word* partials,           // [blocks]
                        int max_n, int min_n) {
  __shared__ Word scratch[kThreads / kWarpSize];
  __shared__ int32_t tail[kMaxNgram];
  begin_kernel();
  const int length = static_cast<int>(state->length);
  if (static_cast<int>(threadIdx.x) < max_n && static_cast<int>(threadIdx.x) < length) {
    tail[threadIdx.x] = history[length - 1 - static_cast<int>(threadIdx.x)];
  }
  __syncthreads();  // the tail is in shared memory
  Word best = 0;
  for (int i = 0; i < 4; ++i) {
    // `end` is the index after the match: at least one token follows it there.
    const int end =
        static_cast<int>(blockIdx.x) * kPlaces + i * kThreads + static_cast<int>(threadIdx.x) + 1;
    if (end >= length) break;
    int matched = 0;
    while (matched < max_n && matched < end && history[end - 1 - matched] == tail[matched]) {
      ++matched;
    }
    if (matched >= min_n) {
      best = Max()(best, static_cast<Word>(matched) << 32 | static_cast<Word>(end));
    }
  }
  best = block_reduce(best, Word{0}, scratch, Max());
  if (threadIdx.x == 0) partials[blockIdx.x] = best;
}

__global__ void __launch_bounds__(kThreads) ngram_copy_kernel(const int32_t* history,  // [capacity]
                                                              RoundState* state,       // [1]
                                                              const Word* partials,    // [blocks]
                                                              int64_t* draft,          // [k]
                                                              int blocks, int k) {
  __shared__ Word scratch[kThreads / kWarpSize];
  begin_kernel();
  Word best = 0;
  for (int i = threadIdx.x; i < blocks; i += kThreads) best = Max()(best, partials[i]);
  best = block_reduce(best, Word{0}, scratch, Max());
  const int length = static_cast<int>(state->length);
  const int end = static_cast<int>(best & 0xffffffffu);
  const int i = static_cast<int>(threadIdx.x);
  // Past the end of the text the copy goes on with its own tokens: a period repeats.
  if (i < k) draft[i] = best == 0 ? 0 : history[end + i % (length - end)];
  if (i == 0) state->proposed = best == 0 ? 0 : k;
}

int blocks_of(int64_t capacity) { return static_cast<int>(ceil_div<int64_t>(capacity, kPlaces)); }

}  // namespace
}  // namespace td

int64_t td_ngram_workspace(int64_t capacity) {
  return td::blocks_of(capacity) * static_cast<int64_t>(sizeof(td::Word));
}

int td_ngram(const int32_t* history, void* state, int64_t* draft, void* workspace, int64_t capacity,
             int64_t k, int64_t max_n, int64_t min_n, int dtype, int device, void* stream) {
  if (dtype != TD_FLOAT32 || capacity <= 0 || k < 1 || k > td::kMaxDraft || min_n < 1 ||
      max_n < min_n || max_n > td::kMaxNgram) {
    return cudaErrorInvalidValue;
  }
  const int blocks = td::blocks_of(capacity);
  auto* partials = static_cast<td::Word*>(workspace);
  auto* round = static_cast<td::RoundState*>(state);
  td::Launcher launcher(device, stream);
  launcher.run(td::ngram_search_kernel, dim3(static_cast<unsigned>(blocks)), td::kThreads, history,
               round, partials, static_cast<int>(max_n), static_cast<int>(min_n));
  launcher.run(td::ngram_copy_kernel, dim3(1), td::kThreads, history, round, partials, draft,
               blocks, static_cast<int>(k));
  return launcher.status();
}
