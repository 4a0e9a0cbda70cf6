// The accept rule of speculative decoding, and the draw of a drafted token.
//
// Rows of logits are given as the Distribution and the adjusted logits that td_distribution left:
// integer weights of 42 bits over an exact total, zero past the filters' cut. Drafted token x of
// row i stands if u q(x) < p(x); at the first that does not, the next token is drawn from (p - q)+,
// and from the row after the last when all stand. A draft without a q had all its mass on its
// token. Everything is decided in float64 and integers of 60 bits, so that twin and kernel agree
// bit for bit, and a token 20 nats down is drawn at its rate.
//
// First launch: one block a slice of 1024 tokens. Each block decides how many drafted tokens stand
// (k tests in one warp: cheaper than a launch and a round trip) and sums its slice of the weights
// to draw from. Second launch: one block finds slice and token, writes text, lengths, counters and
// the host's ring. Greedy rows are no other code here: their weights are one token's.
// accept_best.cu comes to the same without distributions.

#include "round.cuh"

namespace td {
namespace {

constexpr int kThreads = kFilterThreads;
constexpr double kOne = 1152921504606846976.0;  // 2^60, all of a distribution

// One row of a td_distribution workspace.
struct Row {
  const Distribution* distribution;
  const float* z;
  int vocab;

  __device__ Word weight(uint32_t id) const {
    return static_cast<int>(id) < vocab ? distribution->weight(z[id], id) : 0;
  }
  __device__ double probability(uint32_t id) const {
    return static_cast<double>(weight(id)) / static_cast<double>(distribution->total);
  }
  // Of 2^60.
  __device__ Word share(uint32_t id) const {
    const double scale = kOne / static_cast<double>(distribution->total);
    return static_cast<Word>(static_cast<double>(weight(id)) * scale);
  }
};

struct Rows {
  const char* base;  // null: no such rows
  int64_t stride;    // bytes from one row's workspace to the next; 0: one workspace for all
  int64_t rows;      // in one workspace
  int vocab;

  __device__ Row operator[](int row) const {
    const char* workspace = base + row * stride;
    const int inside = stride == 0 ? row : 0;
    const int64_t padded = ceil_div<int64_t>(vocab, 4) * 4;
    const auto* d = reinterpret_cast<const Distribution*>(workspace);
    // sample_scratch: the distributions, rounded up to 16 bytes, which 32 are, then z.
    const auto* z = reinterpret_cast<const float*>(workspace + rows * sizeof(Distribution));
    return {d + inside, z + inside * padded, vocab};
  }
};

struct Round {
  const SampleParams* params;  // [1]
  RoundState* state;           // [1]
  Rows p, q;                   // k + 1 rows; k rows or none
  const int64_t* draft;        // [k]
  int k;
  int has_proposed;  // whether state->proposed tells how many of the k there are

  __device__ int64_t drafted(int lane) const { return lane < k ? draft[lane] : -1; }
  // A draft whose logits were not finite drew nothing: its token was certain, like a copied one.
  __device__ bool has_q(int row) const {
    return q.base != nullptr && q[row].distribution->is_valid;
  }
};

__device__ __forceinline__ double unit(Word uniform) {
  return static_cast<double>(uniform >> 9) * 0x1p-53;  // 53 bits: below 1 after rounding too
}

// How far the draft stands. By the first warp; `shared` takes it to the others.
__device__ Verdict judge(const Round& r, Verdict* shared) {
  if (threadIdx.x < kWarpSize) {
    const int lane = static_cast<int>(threadIdx.x);
    const RoundState& state = *r.state;
    const int proposed = r.has_proposed ? static_cast<int>(state.proposed) : r.k;
    const int64_t token = r.drafted(lane);
    bool falls = false;
    if (lane < proposed) {
      const Row p = r.p[lane];
      const uint32_t id = static_cast<uint32_t>(token);
      const double mine = p.distribution->is_valid ? p.probability(id) : 0.0;
      const double theirs = r.has_q(lane) ? r.q[lane].probability(id) : 1.0;
      const Word u = uniform62(r.params->seed, static_cast<Word>(state.draws),
                               static_cast<uint32_t>(lane), kAcceptToken);
      falls = !(unit(u) * theirs < mine);
    }
    const Verdict verdict = judge_lanes(token, falls, proposed, state.remaining, Stops(*r.params));
    if (lane == 0) *shared = verdict;
  }
  __syncthreads();  // the verdict is there
  return *shared;
}

// What the next token is drawn by: weights that add up to at most 2^62.
struct Target {
  Row p;
  bool is_residual;
  bool has_q;
  Row q;
  uint32_t drafted;

  __device__ Word weight(uint32_t id) const {
    if (!is_residual) return p.weight(id);
    if (!has_q) return id == drafted ? 0 : p.weight(id);
    const Word mine = p.share(id), theirs = q.share(id);
    return mine > theirs ? mine - theirs : 0;
  }
};

__device__ Target target_of(const Round& r, Verdict verdict) {
  const bool is_residual = verdict.stands < verdict.proposed;
  Target target = {r.p[verdict.stands], is_residual, false, {}, 0};
  if (is_residual) {
    target.has_q = r.has_q(verdict.stands);
    target.drafted = static_cast<uint32_t>(r.draft[verdict.stands]);
    if (target.has_q) target.q = r.q[verdict.stands];
  }
  return target;
}

constexpr int kPerThread = kSlice / kThreads;

__device__ Word slice_sum(const Target& target, int slice, Word* scratch) {
  Word sum = 0, total;
  for (int i = 0; i < kPerThread; ++i) {
    sum += target.weight(static_cast<uint32_t>(slice * kSlice + i * kThreads + threadIdx.x));
  }
  block_exclusive_sum(sum, scratch, &total);
  return total;
}

// The token whose weight covers a point of its slice, in the order of ids. All threads call it;
// *found is there after the barrier at its end.
__device__ void find_in_slice(const Target& target, int slice, Word point, Word* scratch,
                              uint32_t* found) {
  Word weights[kPerThread], sum = 0, total;
  const uint32_t first = static_cast<uint32_t>(slice * kSlice + threadIdx.x * kPerThread);
  for (int i = 0; i < kPerThread; ++i) sum += weights[i] = target.weight(first + i);
  Word before = block_exclusive_sum(sum, scratch, &total);
  for (int i = 0; i < kPerThread; ++i) {
    if (point >= before && point < before + weights[i]) *found = first + i;
    before += weights[i];
  }
  __syncthreads();  // the one thread that covers the point has told
}

// Draws by the slices' sums, which the blocks of the launch before have left.
__device__ uint32_t draw(Target target, const Word* sums, int slices, Word uniform, Word* scratch,
                         uint32_t* found, Word* place) {
  constexpr int kSums = kMaxVocab / kSlice / kThreads;  // sums of one thread
  Word mine[kSums], sum = 0, total;
  for (int i = 0; i < kSums; ++i) {
    const int slice = static_cast<int>(threadIdx.x) * kSums + i;
    sum += mine[i] = slice < slices ? sums[slice] : 0;
  }
  Word before = block_exclusive_sum(sum, scratch, &total);
  __syncthreads();  // scratch is read by everyone before it is used again
  if (total == 0) {
    // q > p where the draft fell, so p > q elsewhere; by less than a rounding, though: draw from p.
    target.is_residual = false;
    Word point = scale_uniform(uniform, target.p.distribution->total);
    for (int slice = 0; slice < slices; ++slice) {
      const Word here = slice_sum(target, slice, scratch);
      __syncthreads();  // scratch is read by everyone before it is used again
      if (point < here) {
        find_in_slice(target, slice, point, scratch, found);
        return *found;
      }
      point -= here;
    }
    return 0;  // not reached: the weights add up to the total
  }
  const Word point = scale_uniform(uniform, total);
  for (int i = 0; i < kSums; ++i) {
    if (point >= before && point < before + mine[i]) {
      place[0] = static_cast<Word>(static_cast<int>(threadIdx.x) * kSums + i);
      place[1] = point - before;
    }
    before += mine[i];
  }
  __syncthreads();  // the one thread that covers the point has told
  find_in_slice(target, static_cast<int>(place[0]), place[1], scratch, found);
  return *found;
}

__global__ void __launch_bounds__(kThreads) accept_sums_kernel(Round r, Word* sums) {  // [slices]
  __shared__ Word scratch[kThreads / kWarpSize];
  __shared__ Verdict verdict;
  begin_kernel();
  if (r.state->is_done) return;
  const Target target = target_of(r, judge(r, &verdict));
  const Word total = slice_sum(target, static_cast<int>(blockIdx.x), scratch);
  if (threadIdx.x == 0) sums[blockIdx.x] = total;
}

__global__ void __launch_bounds__(kThreads)
    accept_pick_kernel(Round r, RoundResult out, const Word* sums, int slices) {  // [slices]
  __shared__ Word scratch[kThreads / kWarpSize];
  __shared__ Word place[2];
  __shared__ uint32_t found;
  __shared__ Verdict shared;
  begin_kernel();
  if (!r.state->is_done) {
    const Verdict verdict = judge(r, &shared);
    const Target target = target_of(r, verdict);
    const bool is_valid = target.p.distribution->is_valid;
    uint32_t token = 0;
    if (is_valid) {
      const Word uniform =
          uniform62(r.params->seed, static_cast<Word>(r.state->draws), 0, kDrawResidual);
      token = draw(target, sums, slices, uniform, scratch, &found, place);
    }
    __syncthreads();  // everyone has read the state before it moves on
    if (threadIdx.x < kWarpSize) {
      const int64_t drafted = r.drafted(static_cast<int>(threadIdx.x));
      publish_round(r.state, out, Stops(*r.params), verdict, drafted, is_valid, token);
    }
  }
  if (threadIdx.x == 0) set_lengths(*r.state, out);
}

// ---- the draw of a drafted token -------------------------------------------------------------

__global__ void __launch_bounds__(kThreads) draft_sums_kernel(Row q, Word* sums) {  // [slices]
  __shared__ Word scratch[kThreads / kWarpSize];
  begin_kernel();
  const Target target = {q, false, false, {}, 0};
  const Word total = slice_sum(target, static_cast<int>(blockIdx.x), scratch);
  if (threadIdx.x == 0) sums[blockIdx.x] = total;
}

__global__ void __launch_bounds__(kThreads)
    draft_pick_kernel(const SampleParams* params, const RoundState* state, Row q, const Word* sums,
                      int slices, int64_t* token, int index) {
  __shared__ Word scratch[kThreads / kWarpSize];
  __shared__ Word place[2];
  __shared__ uint32_t found;
  begin_kernel();
  const Target target = {q, false, false, {}, 0};
  uint32_t drawn = 0;
  if (q.distribution->is_valid) {
    const Word uniform = uniform62(params->seed, static_cast<Word>(state->draws),
                                   static_cast<uint32_t>(index), kDrawDraft);
    drawn = draw(target, sums, slices, uniform, scratch, &found, place);
  }
  if (threadIdx.x == 0) *token = drawn;
}

int slices_of(int64_t vocab_size) {
  return static_cast<int>(ceil_div<int64_t>(vocab_size, kSlice));
}

}  // namespace
}  // namespace td

int64_t td_accept_workspace(int64_t vocab_size) {
  return td::slices_of(vocab_size) * static_cast<int64_t>(sizeof(td::Word));
}

int td_accept(const void* params, void* state, const void* p, const void* q, const int64_t* draft,
              int32_t* history, int64_t* next, int32_t* seq_lens, int32_t* draft_lens,
              int64_t* draft_input, void* ring, void* workspace, int64_t k, int64_t vocab_size,
              int64_t draft_vocab_size, int64_t q_stride, int64_t draft_rows, int64_t has_proposed,
              int64_t slots, int dtype, int device, void* stream) {
  if (dtype != TD_FLOAT32 || k < 0 || k > td::kMaxDraft || vocab_size <= 0 ||
      vocab_size > td::kMaxVocab || (q != nullptr && draft_vocab_size > vocab_size)) {
    return cudaErrorInvalidValue;
  }
  const td::Rows rows_p = {static_cast<const char*>(p), 0, k + 1, static_cast<int>(vocab_size)};
  const td::Rows rows_q = {static_cast<const char*>(q), q_stride, 1,
                           static_cast<int>(draft_vocab_size)};
  const td::Round round = {static_cast<const td::SampleParams*>(params),
                           static_cast<td::RoundState*>(state),
                           rows_p,
                           rows_q,
                           draft,
                           static_cast<int>(k),
                           static_cast<int>(has_proposed)};
  const td::RoundResult result = {history,
                                  next,
                                  seq_lens,
                                  draft_lens,
                                  draft_input,
                                  draft_rows,
                                  static_cast<td::Word*>(ring),
                                  static_cast<int>(slots)};
  const int slices = td::slices_of(vocab_size);
  auto* sums = static_cast<td::Word*>(workspace);
  td::Launcher launcher(device, stream);
  launcher.run(td::accept_sums_kernel, dim3(static_cast<unsigned>(slices)), td::kThreads, round,
               sums);
  launcher.run(td::accept_pick_kernel, dim3(1), td::kThreads, round, result, sums, slices);
  return launcher.status();
}

int td_draft_token(const void* params, const void* state, const void* q, int64_t* token,
                   void* workspace, int64_t vocab_size, int64_t index, int dtype, int device,
                   void* stream) {
  if (dtype != TD_FLOAT32 || vocab_size <= 0 || vocab_size > td::kMaxVocab) {
    return cudaErrorInvalidValue;
  }
  const auto* distribution = static_cast<const td::Distribution*>(q);
  const td::Row row = {distribution, reinterpret_cast<const float*>(distribution + 1),
                       static_cast<int>(vocab_size)};
  const int slices = td::slices_of(vocab_size);
  auto* sums = static_cast<td::Word*>(workspace);
  td::Launcher launcher(device, stream);
  launcher.run(td::draft_sums_kernel, dim3(static_cast<unsigned>(slices)), td::kThreads, row, sums);
  launcher.run(
      td::draft_pick_kernel, dim3(1), td::kThreads, static_cast<const td::SampleParams*>(params),
      static_cast<const td::RoundState*>(state), row, sums, slices, token, static_cast<int>(index));
  return launcher.status();
}
