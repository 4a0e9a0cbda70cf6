// The accept rule of accept.cu where every distribution is all on one token: greedy rows, and
// drafts without a q.
//
// With p(x) one or zero and q(x) one, "stands if u q(x) < p(x)" is "stands if x is the row's best
// token" whatever u is, and both (p - q)+ and the bonus row are drawn from the only token there is,
// the best of the row after those that stand. So logits are enough, and no distribution is made of
// them. Equal text, state and words for the host as by td_distribution and td_accept.
//
// First launch: up to kParts blocks a row, each reduces its part to one key that orders by value,
// then by lower id; a key of all ones says that NaN or +inf is in the part. Second launch: one
// block, a warp a row reduces the keys, and the first warp judges and publishes.

#include "round.cuh"

namespace td {
namespace {

constexpr int kThreads = 256;
constexpr int kParts = 128;         // one load a thread up to 131072 tokens
constexpr Word kBroken = ~Word{0};  // above every key

template <bool kAligned>
__global__ void __launch_bounds__(kThreads) best_kernel(const float* logits,  // [k + 1, V]
                                                        Word* keys,           // [k + 1, kParts]
                                                        int vocab) {
  __shared__ Word scratch[kThreads / kWarpSize];
  begin_kernel();
  constexpr int kPackFloats = kPack<float>;
  const float* row = logits + static_cast<int64_t>(blockIdx.y) * vocab;
  Word best = 0;
  for (int start = static_cast<int>(blockIdx.x * kThreads + threadIdx.x) * kPackFloats;
       start < vocab; start += static_cast<int>(gridDim.x) * kThreads * kPackFloats) {
    float value[kPackFloats];
    load_pack<float, kAligned>(row + start, vocab - start, value);
#pragma unroll
    for (int i = 0; i < kPackFloats; ++i) {
      if (!kAligned && start + i >= vocab) break;
      const bool is_broken = value[i] != value[i] || value[i] == INFINITY;
      best =
          Max()(best, is_broken ? kBroken : make_key(value[i], static_cast<uint32_t>(start + i)));
    }
  }
  best = block_reduce(best, Word{0}, scratch, Max());
  if (threadIdx.x == 0) keys[blockIdx.y * kParts + blockIdx.x] = best;
}

constexpr int kRows = kMaxDraft + 1;
constexpr int kJudges = kRows * kWarpSize;

__global__ void __launch_bounds__(kJudges) accept_best_kernel(const SampleParams* params,  // [1]
                                                              RoundState* state,           // [1]
                                                              const int64_t* draft,        // [k]
                                                              RoundResult out,
                                                              const Word* keys,  // [k + 1, kParts]
                                                              int k, int parts, int has_proposed) {
  __shared__ Word best[kRows];
  begin_kernel();
  const int lane = static_cast<int>(threadIdx.x % kWarpSize);
  const int row = static_cast<int>(threadIdx.x / kWarpSize);
  Word key = 0;
  if (row <= k) {
#pragma unroll
    for (int i = 0; i < kParts / kWarpSize; ++i) {
      const int part = i * kWarpSize + lane;
      if (part < parts) key = Max()(key, keys[row * kParts + part]);
    }
  }
  const Stops stops(*params);
  const RoundState before = *state;
  const int64_t drafted = lane < k ? draft[lane] : -1;
  key = warp_reduce(key, Max());
  if (lane == 0) best[row] = key;
  __syncthreads();  // the rows' best tokens are there
  if (row != 0) return;
  if (!before.is_done) {
    const auto is_valid = [](Word of) { return of != kBroken && key_value(of) > -INFINITY; };
    const int proposed = has_proposed ? static_cast<int>(before.proposed) : k;
    const Word mine = best[lane % kRows];
    const bool stands = is_valid(mine) && static_cast<int64_t>(key_id(mine)) == drafted;
    const Verdict verdict = judge_lanes(drafted, !stands, proposed, before.remaining, stops);
    const Word next = best[verdict.stands];
    publish_round(state, out, stops, verdict, drafted, is_valid(next), key_id(next));
  }
  if (lane == 0) set_lengths(*state, out);
}

}  // namespace
}  // namespace td

int64_t td_accept_best_workspace(int64_t rows) {
  return rows * td::kParts * static_cast<int64_t>(sizeof(td::Word));
}

int td_accept_best(const void* params, void* state, const float* logits, const int64_t* draft,
                   int32_t* history, int64_t* next, int32_t* seq_lens, int32_t* draft_lens,
                   int64_t* draft_input, void* ring, void* workspace, int64_t k, int64_t vocab_size,
                   int64_t draft_rows, int64_t has_proposed, int64_t slots, int dtype, int device,
                   void* stream) {
  if (dtype != TD_FLOAT32 || k < 0 || k > td::kMaxDraft || vocab_size <= 0 ||
      vocab_size > td::kMaxVocab) {
    return cudaErrorInvalidValue;
  }
  const td::RoundResult result = {history,
                                  next,
                                  seq_lens,
                                  draft_lens,
                                  draft_input,
                                  draft_rows,
                                  static_cast<td::Word*>(ring),
                                  static_cast<int>(slots)};
  auto* round = static_cast<td::RoundState*>(state);
  auto* keys = static_cast<td::Word*>(workspace);
  const bool aligned = td::packs_fit<float>(vocab_size, logits);
  const int64_t needed = td::ceil_div<int64_t>(vocab_size, td::kThreads * td::kPack<float>);
  const int parts = static_cast<int>(needed < td::kParts ? needed : td::kParts);
  td::Launcher launcher(device, stream);
  launcher.run(aligned ? td::best_kernel<true> : td::best_kernel<false>,
               dim3(static_cast<unsigned>(parts), static_cast<unsigned>(k + 1)), td::kThreads,
               logits, keys, static_cast<int>(vocab_size));
  launcher.run(td::accept_best_kernel, dim3(1), td::kJudges,
               static_cast<const td::SampleParams*>(params), round, draft, result, keys,
               static_cast<int>(k), parts, static_cast<int>(has_proposed));
  return launcher.status();
}
