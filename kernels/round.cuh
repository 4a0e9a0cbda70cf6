// What a speculative round keeps on the device between its graphs' replays.
#pragma once

#include "sample.cuh"

namespace td {

constexpr int kMaxDraft = 15;    // tokens drafted a round: a verify pass of 16 rows
constexpr int kMaxNgram = 16;    // tokens of the longest suffix looked up
constexpr int kRoundWords = 32;  // per round in the ring; see publish_round() in accept.cu

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

}  // namespace td
