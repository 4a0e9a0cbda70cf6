// Sampling, second half: the exact cuts and the drawn token of each row, then everything a step
// leaves behind: the next input, the counts, the flags, and a few words in the host's memory.
//
// One block a row. The short list that sample_filter.cu made is ranked in shared memory; every cut
// is then "the token whose weight covers this point" or "the token of this rank" of the ranking.
// Where more than kListed tokens share the deciding bins (a flat row, or thousands of ties), the
// same questions are answered by radix descents over the row itself: exact too, but about 0.1 ms.

#include "sample_plan.cuh"

namespace td {
namespace {

constexpr int kThreads = 512;
constexpr int kPerThread = kListed / kThreads;

struct Shared {
  Prefixes prefixes;
  Word keys[kListed];     // the list, ranked; histogram of weights in a descent
  Word sums[kListed];     // weights before each entry; scratch of the ranking
  uint32_t first[kBins];  // where a bin's tokens start in the list; histogram of counts
  Word scratch[kThreads / kWarpSize];
  Word answer[4];
};

// A token of the ranking: its key, its weight, and the weights of all before it.
struct Ranked {
  Word key, weight, before;
};

struct Context {
  Shared& shared;
  const SampleParams& params;
  const float* z;  // [V], adjusted
  int vocab;
  float max, temperature;

  __device__ Word weight_of(Word key) const {
    return weight_at(distance(key_value(key), max, temperature));
  }
};

// ---- the short list --------------------------------------------------------------------------

// Sorts `count` keys, largest first.
__device__ void rank_list(Shared& shared, int count) {
  constexpr int kCounted = 128;  // up to here counting beats sorting
  if (count <= kCounted) {
    Word key = 0;
    int rank = 0;
    if (static_cast<int>(threadIdx.x) < count) {
      key = shared.keys[threadIdx.x];
      for (int i = 0; i < count; ++i) rank += shared.keys[i] > key;
    }
    __syncthreads();  // everyone has counted
    if (static_cast<int>(threadIdx.x) < count) shared.keys[rank] = key;
    __syncthreads();  // the list is ranked
    return;
  }
  int size = 2 * kCounted;
  while (size < count) size *= 2;
  for (int i = count + threadIdx.x; i < size; i += kThreads) shared.keys[i] = 0;
  __syncthreads();  // padded
  for (int length = 2; length <= size; length *= 2) {
    for (int stride = length / 2; stride > 0; stride /= 2) {
      for (int i = threadIdx.x; i < size / 2; i += kThreads) {
        const int low = 2 * i - (i & (stride - 1)), high = low + stride;
        const Word a = shared.keys[low], b = shared.keys[high];
        if ((a < b) == ((low & length) == 0)) {
          shared.keys[low] = b;
          shared.keys[high] = a;
        }
      }
      __syncthreads();  // one exchange of the bitonic network is done
    }
  }
}

// Ranks the list and finds what stands before each entry.
__device__ void open_list(const Context& c, const Word* list, int count) {
  Shared& shared = c.shared;
  for (int i = threadIdx.x; i < count; i += kThreads) shared.keys[i] = list[i];
  __syncthreads();  // the list is in
  rank_list(shared, count);
  Word weight[kPerThread], sum = 0, total;
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    const int i = threadIdx.x * kPerThread + j;
    weight[j] = i < count ? c.weight_of(shared.keys[i]) : 0;
    sum += weight[j];
  }
  sum = block_exclusive_sum(sum, shared.scratch, &total);
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    const int i = threadIdx.x * kPerThread + j;
    if (i >= count) break;
    shared.sums[i] = sum;
    sum += weight[j];
    const int bin = bin_at(distance(key_value(shared.keys[i]), c.max, c.temperature));
    const bool starts =
        i == 0 || bin != bin_at(distance(key_value(shared.keys[i - 1]), c.max, c.temperature));
    if (starts) shared.first[bin] = i;
  }
  __syncthreads();  // sums and starts are complete
}

// Calls visit(entry, rank) for this thread's entries, best first.
template <typename F>
__device__ __forceinline__ void for_each_entry(const Context& c, int count, F visit) {
  const Shared& shared = c.shared;
  for (int j = 0; j < kPerThread; ++j) {
    const int i = threadIdx.x * kPerThread + j;
    if (i >= count) return;
    const Word key = shared.keys[i];
    const float x = distance(key_value(key), c.max, c.temperature);
    const int bin = bin_at(x), start = static_cast<int>(shared.first[bin]);
    const Word before = shared.prefixes.mass[bin] + (shared.sums[i] - shared.sums[start]);
    visit(Ranked{key, weight_at(x), before}, shared.prefixes.count[bin] + (i - start));
  }
}

// The listed entry whose weight covers a point, or the one of a rank; one must be there.
template <bool kByRank>
__device__ Ranked find_listed(const Context& c, int count, Word point) {
  Shared& shared = c.shared;
  for_each_entry(c, count, [&](const Ranked& entry, uint32_t rank) {
    const bool is_it =
        kByRank ? rank == point : entry.before <= point && point - entry.before < entry.weight;
    if (is_it) {
      shared.answer[0] = entry.key;
      shared.answer[1] = entry.weight;
      shared.answer[2] = entry.before;
    }
  });
  __syncthreads();  // the one that found it has written it
  const Ranked found = {shared.answer[0], shared.answer[1], shared.answer[2]};
  __syncthreads();  // everyone has read it
  return found;
}

// ---- without a list --------------------------------------------------------------------------

// The ranking's key in 52 bits, for descents of few passes.
constexpr int kIdBits = 20, kDigitBits = 10;
__device__ __forceinline__ Word short_key(Word key) {
  constexpr Word kIds = (Word{1} << kIdBits) - 1;
  return key >> 32 << kIdBits | (kIds - key_id(key));
}

// `find_listed` over the whole row: ten bits of the key a pass, from the top.
template <bool kByRank>
__device__ Ranked find_in_row(const Context& c, Word point) {
  Shared& shared = c.shared;
  Word* mass = shared.sums;  // [kBins] each
  uint32_t* counts = shared.first;
  Word prefix = 0, before = 0;
  for (int shift = 32 + kIdBits; shift > 0;) {
    const int width = min(kDigitBits, shift);
    shift -= width;
    const Word last = (Word{1} << width) - 1;
    for (int i = threadIdx.x; i < kBins; i += kThreads) {
      mass[i] = 0;
      counts[i] = 0;
    }
    __syncthreads();  // the tables are empty
    for (int base = 0; base < c.vocab; base += kThreads) {
      const int id = base + threadIdx.x;
      const Word key = id < c.vocab ? make_key(c.z[id], id) : 0;
      const Word weight = id < c.vocab ? c.weight_of(key) : 0;
      const Word digits = short_key(key) >> shift;
      const bool is_in = weight != 0 && digits >> width == prefix;
      const Word bin = last - (digits & last);  // largest key first
      const unsigned members = __ballot_sync(kFullWarp, is_in);
      if (members == 0) continue;
      const int leader = __ffs(static_cast<int>(members)) - 1;
      // A flat row would send a warp's additions to one address; one lane adds for all.
      const Word leaders_bin = __shfl_sync(kFullWarp, bin, leader);
      const Word leaders_weight = __shfl_sync(kFullWarp, weight, leader);
      const bool is_same = !is_in || (bin == leaders_bin && weight == leaders_weight);
      const bool is_flat = __all_sync(kFullWarp, is_same);
      const int lane = threadIdx.x % kWarpSize;
      if (is_flat ? lane == leader : is_in) {
        const uint32_t times = is_flat ? __popc(members) : 1;
        atomicAdd(&counts[bin], times);
        atomicAdd(&mass[bin], weight * times);
      }
    }
    __syncthreads();  // the row is in the tables
    prefix_sums<kThreads>(shared.prefixes, mass, counts, shared.scratch);
    __syncthreads();  // the prefixes are complete
    const Word bin = kByRank ? find_bin(shared.prefixes.count, static_cast<uint32_t>(point))
                             : find_bin(shared.prefixes.mass, point);
    before += shared.prefixes.mass[bin];
    point -= kByRank ? shared.prefixes.count[bin] : shared.prefixes.mass[bin];
    prefix = prefix << width | (last - bin);
  }
  const Word ids = (Word{1} << kIdBits) - 1;
  const uint32_t id = static_cast<uint32_t>(ids - (prefix & ids));
  const Word key = prefix >> kIdBits << 32 | static_cast<uint32_t>(~id);
  return {key, c.weight_of(key), before};
}

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
