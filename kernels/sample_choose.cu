// Sampling, second launch: the choice, then everything a step leaves behind.
//
// One block a row does all of it where the best token or a top-k decides, and the row's other
// blocks leave at once. Where every token's weight matters, each block adds its 2048 tokens to the
// row's histogram and sorts them by bin, and the block that comes last chooses. Which it is the
// parameters say, so a captured graph serves all.
//
// Two dependent launches rather than one with a grid-wide barrier: the boundary costs the same and
// cannot hang. No sort of the vocabulary on any way.

#include "sample_cuts.cuh"
#include "sample_finish.cuh"

namespace td {
namespace {

// For 80 registers a thread: nothing is spilled, and blocks of the launch before have room beside.
constexpr int kBound = 768;
static_assert(kThreads <= kBound);

__global__ void __launch_bounds__(kBound) choose_kernel(Step step, SampleScratch s) {
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared());
  begin_kernel();
  const int row = blockIdx.y;
  const SampleParams& params = *step.params;
  const bool is_greedy = params.temperature == 0.0f || params.top_k == 1;
  const bool is_few = is_greedy || are_few(params, s.chunks);
  if (blockIdx.x != 0 && is_few) return;
  // Whatever is read at all is read before the first barrier: one round trip to L2.
  const int32_t stop = read_stop(step);
  if (threadIdx.x == 0) shared.state = step.rows != nullptr ? step.rows[row] : SampleRow{};
  const float* chunk_max = s.chunk_max + static_cast<int64_t>(row) * s.chunks;
  float group = -INFINITY;
  if (step.has_filters && blockIdx.x == 0) group = group_max(chunk_max, s.chunks);
  Word best = 0;
  for (int i = threadIdx.x; i < s.splits; i += kThreads) {
    best = Max()(best, s.maxima[row * s.splits + i]);
  }
  if (step.has_filters) {
    for (int bin = threadIdx.x; bin < kBins; bin += kThreads) shared.first[bin] = 0;
    if (threadIdx.x == 0) shared.chunks = shared.listed = shared.kept = 0;
  }
  best = block_reduce(best, Word{0}, shared.scratch, Max());
  if (shared.state.is_done) {
    if (blockIdx.x == 0 && threadIdx.x == 0) finish_nothing(step, shared.state, row);
    return;
  }
  const float max = key_value(best);
  const bool is_valid = best != ~Word{0} && is_finite(max);
  Chosen chosen = {best, {max, 0.0f, 0, is_valid, best, 1}};
  if (is_valid && !is_greedy && step.has_filters) {
    const float* z = s.z + static_cast<int64_t>(row) * s.padded;
    const Context c = {shared, params, z, s.vocab, max, params.temperature};
    const Draw draw = {step.rows != nullptr, row};
    const bool needs_cut = step.needs_distribution || step.has_logprobs;
    bool is_chosen;
    if (is_few) {
      is_chosen = choose_few(c, chunk_max, group, draw, needs_cut, &chosen);
    } else {
      const RowParts all = row_parts(s, row);
      if (!add_part(c, all)) return;
      is_chosen = choose_by_plan(c, all, draw, needs_cut, &chosen);
    }
    if (!is_chosen) {
      choose_in_row(&shared, &params, z, s.vocab, max, !is_few, draw.is_draw, row, needs_cut);
      chosen = shared.chosen;
    }
  } else if (blockIdx.x != 0) {
    return;
  }
  if (threadIdx.x >= kWarpSize) return;
  if (step.needs_distribution && threadIdx.x == 0) s.distribution[row] = chosen.distribution;
  if (step.rows == nullptr) return;
  const uint32_t token = is_valid ? key_id(chosen.key) : ~0u;
  finish(step, s, shared.state, stop, row, token, chosen.distribution);
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
  launch_adjust(launcher, step.params, step.rows, step.logits, bias, step.counts, batch, s,
                step.has_filters);
  const int parts = step.has_filters ? s.parts : 1;
  launcher.run_with_shared(choose_kernel, dim3(parts, static_cast<unsigned>(batch)), kThreads,
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
