// What a speculative round keeps on the device between its graphs' replays, and how it ends.
#pragma once

#include "sample.cuh"

namespace td {

constexpr int kMaxDraft = 15;    // tokens drafted a round: a verify pass of 16 rows
constexpr int kMaxNgram = 16;    // tokens of the longest suffix looked up
constexpr int kRoundWords = 32;  // per round in the ring; see publish_round()

// Set by the host before a generation; ops/ref_round.py has the same layout.
struct RoundState {
  int64_t round;      // rounds so far, over all generations: tags what goes to the host
  int64_t draws;      // counter of the random numbers
  int64_t is_done;    // the end was met: later rounds change nothing
  int64_t length;     // tokens of text, the last of which is in no cache yet
  int64_t remaining;  // tokens until the end, at least 1 unless done
  int64_t proposed;   // tokens that this round's drafter made, 0 to k
};
static_assert(sizeof(RoundState) == 48, "ops/ref_round.py writes this layout");

struct RoundResult {
  int32_t* history;      // [capacity]
  int64_t* next;         // [1] the next round's first input
  int32_t* seq_lens;     // [1] of the target
  int32_t* draft_lens;   // [1] of the draft, or null
  int64_t* draft_input;  // [2] the text's last tokens, for the draft's first pass, or null
  int64_t draft_rows;    // ids from here on the draft does not know: 0 in their place
  Word* ring;            // [slots, kRoundWords] in host memory
  int slots;
};

struct Verdict {
  int proposed;  // drafted tokens judged
  int stands;    // of these
};

// The ids that end a text, one a lane, so that they come in one load. Called by whole warps.
class Stops {
 public:
  __device__ explicit Stops(const SampleParams& params)
      : count_(params.num_stops), mine_(params.stops[threadIdx.x % kWarpSize]) {}

  __device__ bool has(int64_t token) const {
    bool found = false;
    for (int i = 0; i < count_; ++i) found |= __shfl_sync(kFullWarp, mine_, i) == token;
    return found;
  }

 private:
  int count_;
  int32_t mine_;
};
static_assert(kMaxStops == kWarpSize, "one lane each");

// The rule's last step, by one warp: `falls` says of a lane's drafted token whether it does not
// stand. A draft ends with the first stop, since nothing after it would be text, and one token
// before the last that remains.
__device__ __forceinline__ Verdict judge_lanes(int64_t drafted, bool falls, int proposed,
                                               int64_t remaining, const Stops& stops) {
  const int lane = static_cast<int>(threadIdx.x % kWarpSize);
  proposed = static_cast<int>(min(static_cast<int64_t>(proposed), remaining - 1));
  const bool is_stop = stops.has(drafted);
  const unsigned stopped = __ballot_sync(kFullWarp, lane < proposed && is_stop);
  const unsigned fallen = __ballot_sync(kFullWarp, lane < proposed && falls);
  if (stopped != 0) proposed = min(proposed, __ffs(static_cast<int>(stopped)));
  const int stands = fallen == 0 ? proposed : min(proposed, __ffs(static_cast<int>(fallen)) - 1);
  return {proposed, stands};
}

// Appends to the text, moves the state on and tells the host; by one warp.
//
// In the ring, word 0: tokens made, drafted tokens that stand, proposed ones, each 8 bits, then a
// bit that says that no token could be chosen. Word 1: GPU nanoseconds, 48 bits under 16 of the
// round. Then the tokens. Each word but the second is tagged with the round in its upper half.
//
// `drafted` is a lane's drafted token, `token` the one to follow those that stand.
__device__ __forceinline__ void publish_round(RoundState* state, const RoundResult& out,
                                              const Stops& stops, Verdict verdict, int64_t drafted,
                                              bool is_valid, uint32_t token) {
  const int lane = static_cast<int>(threadIdx.x % kWarpSize);
  const RoundState old = *state;
  int64_t last = *out.next, before = last;
  const int most = verdict.stands + (is_valid ? 1 : 0);
  const int64_t mine = lane < verdict.stands ? drafted : static_cast<int64_t>(token);
  const bool ends = stops.has(mine) || lane + 1 == old.remaining;
  const unsigned endings = __ballot_sync(kFullWarp, lane < most && ends);
  const bool is_end = endings != 0, is_bad = !is_valid && !is_end;
  const int made = is_end ? __ffs(static_cast<int>(endings)) : most;
  const int64_t found = __shfl_sync(kFullWarp, mine, made > 0 ? made - 1 : 0);
  const int64_t second = __shfl_sync(kFullWarp, mine, made > 1 ? made - 2 : 0);
  if (made > 0) last = found;
  if (made > 1) before = second;

  const uint32_t tag = static_cast<uint32_t>(old.round + 1);
  Word* words = out.ring + static_cast<int64_t>(tag % out.slots) * kRoundWords;
  const auto publish = [&](int index, uint32_t value) {
    *reinterpret_cast<volatile Word*>(words + index) = static_cast<Word>(tag) << 32 | value;
  };
  __syncwarp();  // every lane has read the state and the token before
  if (lane < made) {
    out.history[old.length + lane] = static_cast<int32_t>(mine);
    publish(2 + lane, static_cast<uint32_t>(mine));
  }
  if (lane != 0) return;
  publish(0, static_cast<uint32_t>(made | verdict.stands << 8 | verdict.proposed << 16 |
                                   (is_bad ? 1 << 24 : 0)));
  const Word stamp = static_cast<Word>(tag) << 48 | (global_timer() & ((Word{1} << 48) - 1));
  *reinterpret_cast<volatile Word*>(words + 1) = stamp;
  *state = {old.round + 1,     old.draws + 1,        is_end || is_bad ? 1 : 0,
            old.length + made, old.remaining - made, old.proposed};
  if (made == 0) return;
  *out.next = last;
  if (out.draft_input != nullptr) {
    out.draft_input[0] = before < out.draft_rows ? before : 0;
    out.draft_input[1] = last < out.draft_rows ? last : 0;
  }
}

// The passes have advanced the lengths by what they ran; the text says what stands. By the thread
// that moved the state on, in every round.
__device__ __forceinline__ void set_lengths(const RoundState& state, const RoundResult& out) {
  const int32_t length = static_cast<int32_t>(state.length);
  *out.seq_lens = length - 1;
  if (out.draft_lens != nullptr) *out.draft_lens = length - 2;
}

}  // namespace td
