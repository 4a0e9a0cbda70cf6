// Drafting by lookup: the tokens that followed the last ones of the text when they occurred before.
//
// Every thread looks at eight places of the text and counts how many tokens before each equal the
// text's last ones. The longest match wins and of equal ones the last, which one 64-bit key orders:
// length above, place below. No loop over the text, whatever its length, and no index to keep.
//
// The text is read once, 0.5 MB at 128K tokens, so the time is that of loads that wait for each
// other. A block reads its part into shared memory before it knows how long the text is, and looks
// there. Up to kPlaces tokens one block does everything; beyond, a second launch reduces the
// blocks' keys and copies.

#include "round.cuh"

namespace td {
namespace {

constexpr int kThreads = 1024;
constexpr int kPerThread = 8;
constexpr int kPlaces = kPerThread * kThreads;  // of one block

struct Lookup {
  const int32_t* history;  // [capacity]
  RoundState* state;       // [1]
  int64_t* draft;          // [k]
  int capacity, k, max_n, min_n;
};

// All threads call it. Past the end of the text the copy goes on with its own tokens: a period
// repeats. `text` is the text, from wherever it is read fastest.
__device__ __forceinline__ void copy_draft(const Lookup& l, const int32_t* text, int length,
                                           Word best) {
  const int end = static_cast<int>(best & 0xffffffffu);
  const int i = static_cast<int>(threadIdx.x);
  if (i < l.k) l.draft[i] = best == 0 ? 0 : text[end + i % (length - end)];
  if (i == 0) l.state->proposed = best == 0 ? 0 : l.k;
}

// kIsAlone: the only block, which copies too; otherwise it leaves a key in partials.
template <bool kIsAlone>
__global__ void __launch_bounds__(kThreads)
    ngram_search_kernel(Lookup l, Word* partials) {  // [blocks]
  __shared__ Word scratch[kThreads / kWarpSize];
  __shared__ int32_t tile[kMaxNgram + kPlaces];  // the tokens before this block's places come first
  __shared__ int32_t tail[kMaxNgram];            // the last tokens, the very last first
  begin_kernel();
  const int mine = static_cast<int>(threadIdx.x);
  const int first = static_cast<int>(blockIdx.x) * kPlaces;
  int32_t token[kPerThread];
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int at = first + i * kThreads + mine;
    token[i] = at < l.capacity ? l.history[at] : 0;
  }
  const int length = static_cast<int>(l.state->length);
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) tile[kMaxNgram + i * kThreads + mine] = token[i];
  if (!kIsAlone && mine < kMaxNgram) {
    tile[mine] = first > 0 ? l.history[first - kMaxNgram + mine] : 0;
    if (mine < length) tail[mine] = l.history[length - 1 - mine];
  }
  __syncthreads();                         // the tokens are in shared memory
  const int32_t* text = tile + kMaxNgram;  // from the block's first place on
  if (kIsAlone) {
    if (mine < kMaxNgram && mine < length) tail[mine] = text[length - 1 - mine];
    __syncthreads();  // the tail is there
  }

  Word best = 0;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    // `end` is the index after the match: at least one token follows it there.
    const int place = i * kThreads + mine, end = first + place + 1;
    if (end >= length || token[i] != tail[0]) continue;
    int matched = 1;
    while (matched < l.max_n && matched < end && text[place - matched] == tail[matched]) ++matched;
    if (matched >= l.min_n) {
      best = Max()(best, static_cast<Word>(matched) << 32 | static_cast<Word>(end));
    }
  }
  best = block_reduce(best, Word{0}, scratch, Max());
  if (kIsAlone) {
    copy_draft(l, text, length, best);
  } else if (mine == 0) {
    partials[blockIdx.x] = best;
  }
}

constexpr int kCopyThreads = 256;

__global__ void __launch_bounds__(kCopyThreads)
    ngram_copy_kernel(Lookup l, const Word* partials, int blocks) {  // [blocks]
  __shared__ Word scratch[kCopyThreads / kWarpSize];
  begin_kernel();
  Word best = 0;
  const int length = static_cast<int>(l.state->length);
  for (int i = threadIdx.x; i < blocks; i += kCopyThreads) best = Max()(best, partials[i]);
  best = block_reduce(best, Word{0}, scratch, Max());
  copy_draft(l, l.history, length, best);
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
  const td::Lookup lookup = {history,
                             static_cast<td::RoundState*>(state),
                             draft,
                             static_cast<int>(capacity),
                             static_cast<int>(k),
                             static_cast<int>(max_n),
                             static_cast<int>(min_n)};
  td::Launcher launcher(device, stream);
  const dim3 grid(static_cast<unsigned>(blocks));
  if (blocks == 1) {
    launcher.run(td::ngram_search_kernel<true>, grid, td::kThreads, lookup, partials);
  } else {
    launcher.run(td::ngram_search_kernel<false>, grid, td::kThreads, lookup, partials);
    launcher.run(td::ngram_copy_kernel, dim3(1), td::kCopyThreads, lookup, partials, blocks);
  }
  return launcher.status();
}
