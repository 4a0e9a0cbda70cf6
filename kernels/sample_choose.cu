// Sampling, second half: the exact cuts and the drawn token of each row, then everything a step
// leaves behind: the next input, the counts, the flags, and a few words in the host's memory.
//
// One block a row. Every cut is "the token whose weight covers this point" or "the token of this
// rank" of the ranking that sample_rank.cuh finds.

#include "sample_plan.cuh"
#include "sample_rank.cuh"

namespace td {
namespace {

// ---- the cuts --------------------------------------------------------------------------------

template <bool kByRank>
__device__ Ranked find(const Context& c, int listed, Word point) {
  if (listed <= kListed) return find_listed<kByRank>(c, listed, point);
  return find_in_row<kByRank>(c, point);
}

// Weight of the tokens at least log_min_p from the best. `m_bin` holds the edge, `whole` is the
// weight of the bins before it.
__device__ Word min_p_total(const Context& c, int listed, int m_bin, Word whole) {
  Shared& shared = c.shared;
  const float edge = c.params.log_min_p;
  if (listed > kListed) {
    Word sum = 0, total;
    for (int id = threadIdx.x; id < c.vocab; id += kThreads) {
      const float x = distance(c.z[id], c.max, c.temperature);
      if (x >= edge) sum += weight_at(x);
    }
    block_exclusive_sum(sum, shared.scratch, &total);
    return total;  // whatever uses scratch next has a barrier before that
  }
  if (threadIdx.x == 0) shared.answer[3] = whole;
  __syncthreads();  // the sum of the bins before is there
  for_each_entry(c, listed, [&](const Ranked& entry, uint32_t) {
    const float x = distance(key_value(entry.key), c.max, c.temperature);
    if (bin_at(x) == m_bin && x >= edge) {
      atomicMax(&shared.answer[3], entry.before + entry.weight);
    }
  });
  __syncthreads();  // the last token kept has told
  return shared.answer[3];
}

struct Chosen {
  Word key;
  Distribution distribution;
};

__device__ Chosen choose(const Context& c, const SampleScratch& s, int row, PlanUniform draw,
                         bool needs_cut) {
  Shared& shared = c.shared;
  prefix_sums<kThreads>(shared.prefixes, s.mass + row * kBins, s.count + row * kBins,
                        shared.scratch);
  __syncthreads();  // the prefixes are complete
  const Prefixes& in = shared.prefixes;
  const Plan plan = make_plan(in, c.params, draw);
  const int listed = static_cast<int>(plan.listed);
  // A descent overwrites the prefixes: what is needed of them is read first.
  const Word m_before = plan.m_bin >= 0 ? in.mass[plan.m_bin] : 0;
  Word min_p_bound = ~Word{0};
  if (c.params.log_min_p > -INFINITY) min_p_bound = in.mass[bin_at(c.params.log_min_p) + 1];
  if (listed <= kListed) open_list(c, s.list + row * kListed, listed);

  Word total = plan.k_total;
  if (plan.k_bin >= 0) {
    const Ranked last = find<true>(c, listed, static_cast<Word>(c.params.top_k - 1));
    total = last.before + last.weight;
  }
  if (c.params.top_p < 1.0) {
    const Ranked last = find<false>(c, listed, nucleus_weight(c.params.top_p, total) - 1);
    total = last.before + last.weight;
  }
  if (plan.m_bin >= 0) min_p_bound = min_p_total(c, listed, plan.m_bin, m_before);
  total = min(total, min_p_bound);

  Chosen chosen = {0, {c.max, c.temperature, kBins, 1, 0, total}};
  if (draw.is_draw) chosen.key = find<false>(c, listed, scale_uniform(draw.uniform, total)).key;
  if (needs_cut) {
    // The last token kept, if it is not the last of its bin: whole bins need no key.
    Distribution& d = chosen.distribution;
    if (listed <= kListed) {
      const int bin = find_bin(in.mass, total - 1);
      const bool is_whole = in.mass[bin + 1] == total;
      d.cut_bin = is_whole ? bin + 1 : bin;
      d.cut_key = is_whole ? ~Word{0} : find_listed<false>(c, listed, total - 1).key;
    } else {
      d.cut_key = find_in_row<false>(c, total - 1).key;
      d.cut_bin = bin_at(distance(key_value(d.cut_key), c.max, c.temperature));
    }
  }
  return chosen;
}

// ---- what a step leaves behind ---------------------------------------------------------------

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
__device__ void publish_token(const Step& step, int row, int batch, uint32_t sequence,
                              uint32_t token) {
  if (step.ring == nullptr) return;
  Word* words = ring_words(step, row, batch, sequence);
  const Word stamp = static_cast<Word>(sequence) << 48 | (global_timer() & ((Word{1} << 48) - 1));
  *reinterpret_cast<volatile Word*>(words + 1) = stamp;
  publish(words, sequence, token);
}

__device__ void publish_logprobs(const Step& step, const SampleScratch& s, int row, int batch,
                                 uint32_t sequence, uint32_t token, const Distribution& d) {
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

// Called by every thread, behind a barrier since the row's state was read for the choice. `token`
// is all ones if none could be chosen.
__device__ void finish(const Step& step, const SampleScratch& s, int row, uint32_t token,
                       const Distribution& d) {
  const int batch = static_cast<int>(gridDim.x);
  const uint32_t sequence = step.rows[row].sequence + 1;
  const bool is_valid = token != ~0u;
  if (step.has_logprobs && is_valid && step.ring != nullptr) {
    publish_logprobs(step, s, row, batch, sequence, token, d);
  }
  if (threadIdx.x >= kWarpSize) return;
  const int lane = threadIdx.x;
  const bool is_mine =
      lane < step.params->num_stops && step.params->stops[lane] == static_cast<int32_t>(token);
  const bool is_stop = __any_sync(kFullWarp, is_mine);
  if (lane != 0) return;
  publish_token(step, row, batch, sequence, token);
  SampleRow& state = step.rows[row];
  state.sequence = sequence;
  if (step.params->temperature != 0.0f && step.params->top_k != 1) ++state.draws;
  const int32_t remaining = state.remaining - 1;
  if (is_stop || !is_valid || remaining == 0) state.is_done = 1;
  if (remaining >= 0) state.remaining = remaining;
  if (!is_valid) return;
  step.tokens[row] = token;
  if (step.params->has_counts) ++step.counts[static_cast<int64_t>(row) * s.vocab + token];
}

// A step after the end: the pass before it has cached a token, which is taken back.
__device__ void finish_nothing(const Step& step, int row) {
  SampleRow& state = step.rows[row];
  const uint32_t sequence = ++state.sequence;
  if (step.seq_lens != nullptr) --step.seq_lens[row];
  publish_token(step, row, static_cast<int>(gridDim.x), sequence, ~0u);
}

__global__ void __launch_bounds__(kThreads) choose_kernel(Step step, SampleScratch s) {
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared());
  begin_kernel();
  const int row = blockIdx.x;
  if (step.rows != nullptr && step.rows[row].is_done) {
    if (threadIdx.x == 0) finish_nothing(step, row);
    return;
  }
  Word best = 0;
  for (int i = threadIdx.x; i < s.splits; i += kThreads) {
    best = Max()(best, s.maxima[row * s.splits + i]);
  }
  best = block_reduce(best, Word{0}, shared.scratch, Max());
  const float max = key_value(best);
  const SampleParams& params = *step.params;
  const bool is_greedy = params.temperature == 0.0f || params.top_k == 1;
  const bool is_valid = best != ~Word{0} && is_finite(max);
  Word key = best;
  Distribution d = {max, 0.0f, 0, is_valid, best, 1};
  if (is_valid && !is_greedy && step.has_filters) {
    __syncthreads();  // scratch is read by everyone before it is used again
    const float* z = s.z + static_cast<int64_t>(row) * s.padded;
    const Context c = {shared, params, z, s.vocab, max, params.temperature};
    const PlanUniform draw = plan_uniform(params, step.rows, row, step.rows != nullptr);
    const Chosen chosen = choose(c, s, row, draw, step.needs_distribution || step.has_logprobs);
    key = chosen.key;
    d = chosen.distribution;
  }
  if (step.needs_distribution && threadIdx.x == 0) s.distribution[row] = d;
  if (step.rows == nullptr) return;
  finish(step, s, row, is_valid ? key_id(key) : ~0u, d);
}

int run(const Step& step, const float* bias, void* workspace, int64_t batch, int64_t vocab_size,
        int device, void* stream) {
  if (batch == 0) return cudaSuccess;
  if (vocab_size <= 0 || vocab_size > kMaxVocab) return cudaErrorInvalidValue;
  const SampleScratch s = sample_scratch(workspace, batch, vocab_size, nullptr);
  Launcher launcher(device, stream);
  if (step.has_logprobs) {
    launch_logprobs(launcher, step.params, step.rows, step.logits, batch, s);
  }
  launch_filters(launcher, step.params, step.rows, step.logits, bias, step.counts, batch, s,
                 step.has_filters, step.rows != nullptr);
  launcher.run_with_shared(choose_kernel, dim3(static_cast<unsigned>(batch)), kThreads,
                           sizeof(Shared), step, s);
  return launcher.status();
}

}  // namespace
}  // namespace td

int64_t td_sample_workspace(int64_t batch, int64_t vocab_size) {
  int64_t bytes = 0;
  td::sample_scratch(nullptr, batch, vocab_size, &bytes);
  return bytes;
}

int td_sample(const float* logits, const void* params, void* rows, const float* bias,
              int32_t* counts, int64_t* tokens, int32_t* seq_lens, void* ring, void* workspace,
              int64_t batch, int64_t vocab_size, int64_t slots, int64_t stages, int dtype,
              int device, void* stream) {
  if (dtype != TD_FLOAT32 || rows == nullptr) return cudaErrorInvalidValue;
  const td::Step step = {static_cast<const td::SampleParams*>(params),
                         static_cast<td::SampleRow*>(rows),
                         logits,
                         counts,
                         tokens,
                         seq_lens,
                         static_cast<td::Word*>(ring),
                         static_cast<int>(slots),
                         (stages & TD_SAMPLE_FILTERS) != 0,
                         (stages & TD_SAMPLE_LOGPROBS) != 0,
                         false};
  return td::run(step, bias, workspace, batch, vocab_size, device, stream);
}

int td_distribution(const float* logits, const void* params, const float* bias, int32_t* counts,
                    void* workspace, int64_t rows, int64_t vocab_size, int dtype, int device,
                    void* stream) {
  if (dtype != TD_FLOAT32) return cudaErrorInvalidValue;
  const td::Step step = {static_cast<const td::SampleParams*>(params),
                         nullptr,
                         logits,
                         counts,
                         nullptr,
                         nullptr,
                         nullptr,
                         1,
                         true,
                         false,
                         true};
  return td::run(step, bias, workspace, rows, vocab_size, device, stream);
}
