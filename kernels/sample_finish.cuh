// Everything a step leaves behind: the next input, the counts, the flags, and a few words in the
// host's memory.
#pragma once

#include "sample.cuh"

namespace td {

struct Step {
  const SampleParams* params;  // [1]
  SampleRow* rows;             // [B] or null: nothing is drawn, only distributions are made
  const float* logits;         // [B, V] as the model gave them
  int32_t* counts;             // [B, V]
  int64_t* tokens;             // [B] next input
  int32_t* seq_lens;           // [B] or null
  Word* ring;                  // [slots, B, kRingWords] in host memory, or null
  int slots;
  bool has_filters, has_logprobs, needs_distribution;
};

// A word in the host's memory and the step it belongs to. Eight bytes arrive together, so the host
// needs no other sign that they are there, and no fence is needed between words.
__device__ __forceinline__ void publish(Word* word, uint32_t sequence, uint32_t value) {
  *reinterpret_cast<volatile Word*>(word) = static_cast<Word>(sequence) << 32 | value;
}

__device__ __forceinline__ Word* ring_words(const Step& step, int row, int batch,
                                            uint32_t sequence) {
  return step.ring + (static_cast<int64_t>(sequence % step.slots) * batch + row) * kRingWords;
}

// Word 0: the token, all ones if there is none. Word 1: GPU nanoseconds, 48 bits, under 16 of the
// sequence. Words 2, 3: logprob and sampled logprob of the token. Then three a favourite: id,
// logprob, sampled logprob.
__device__ __forceinline__ void publish_token(const Step& step, int row, int batch,
                                              uint32_t sequence, uint32_t token) {
  if (step.ring == nullptr) return;
  Word* words = ring_words(step, row, batch, sequence);
  const Word stamp = static_cast<Word>(sequence) << 48 | (global_timer() & ((Word{1} << 48) - 1));
  *reinterpret_cast<volatile Word*>(words + 1) = stamp;
  publish(words, sequence, token);
}

__device__ __forceinline__ void publish_logprobs(const Step& step, const SampleScratch& s, int row,
                                                 int batch, uint32_t sequence, uint32_t token,
                                                 const Distribution& d) {
  Word* words = ring_words(step, row, batch, sequence);
  const float* logits = step.logits + static_cast<int64_t>(row) * s.vocab;
  const float* z = s.z + static_cast<int64_t>(row) * s.padded;
  const double log_sum = s.row_log_sum[row];
  const int favourites = min(step.params->num_logprobs, s.vocab);
  const int i = static_cast<int>(threadIdx.x);
  if (i > favourites) return;
  // Thread 0 for the token, the others for a favourite each.
  const uint32_t id = i == 0 ? token : key_id(s.row_tops[row * kMaxLogprobs + i - 1]);
  const float plain = static_cast<float>(logits[id] - log_sum);
  // Greedy keeps one token, whatever z holds.
  const Word weight = d.temperature == 0.0f ? (id == token ? d.total : 0) : d.weight(z[id], id);
  const float sampled = weight == 0 ? -INFINITY
                                    : static_cast<float>(log(static_cast<double>(weight)) -
                                                         log(static_cast<double>(d.total)));
  Word* out = words + (i == 0 ? 1 : 1 + 3 * i);
  if (i != 0) publish(out, sequence, id);
  publish(out + 1, sequence, __float_as_uint(plain));
  publish(out + 2, sequence, __float_as_uint(sampled));
}

// The lane's stop id, if there are so many. Loaded at the start of a step, for its end: a round
// trip to L2 less.
__device__ __forceinline__ int32_t read_stop(const Step& step) {
  return step.rows == nullptr ? 0 : step.params->stops[threadIdx.x % kMaxStops];
}

// Called by one warp. `before` is the row's state until now, `stop` from read_stop. `token` is all
// ones if none could be chosen.
__device__ __forceinline__ void finish(const Step& step, const SampleScratch& s,
                                       const SampleRow& before, int32_t stop, int row,
                                       uint32_t token, const Distribution& d) {
  const int batch = static_cast<int>(gridDim.y);
  const uint32_t sequence = before.sequence + 1;
  const bool is_valid = token != ~0u;
  if (step.has_logprobs && is_valid && step.ring != nullptr) {
    publish_logprobs(step, s, row, batch, sequence, token, d);
  }
  __syncwarp();  // some lanes have nothing to publish
  const int lane = static_cast<int>(threadIdx.x);
  const bool is_mine = lane < step.params->num_stops && stop == static_cast<int32_t>(token);
  const bool is_stop = __any_sync(kFullWarp, is_mine);
  if (lane != 0) return;
  publish_token(step, row, batch, sequence, token);
  SampleRow& state = step.rows[row];
  state.sequence = sequence;
  if (step.params->temperature != 0.0f && step.params->top_k != 1) {
    state.draws = before.draws + 1;
  }
  const int32_t remaining = before.remaining - 1;
  if (is_stop || !is_valid || remaining == 0) state.is_done = 1;
  if (remaining >= 0) state.remaining = remaining;
  if (!is_valid) return;
  step.tokens[row] = token;
  if (step.params->has_counts) {
    atomicAdd(&step.counts[static_cast<int64_t>(row) * s.vocab + token], 1);  // needs no reply
  }
}

// A step after the end: the pass before it has cached a token, which is taken back.
__device__ __forceinline__ void finish_nothing(const Step& step, const SampleRow& before, int row) {
  const uint32_t sequence = before.sequence + 1;
  step.rows[row].sequence = sequence;
  if (step.seq_lens != nullptr) --step.seq_lens[row];
  publish_token(step, row, static_cast<int>(gridDim.y), sequence, ~0u);
}

}  // namespace td
