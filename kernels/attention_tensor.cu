// The split launch of attention on tensor cores, for float16 and bfloat16 from sm_80 on.
//
// A block of four warps turns a chunk of keys of one kv head into a partial of up to 8 or 16 query
// rows: the G query heads of the group, token by token, all read the keys once. A step of a block
// is 16 keys a warp, and the warps of a chunk meet only at its end. Everything stays in registers:
// keys and values go from global memory straight into the fragments of m16n8k16, because which
// dimensions meet in a product is free as long as both operands agree, so that a lane's 16 bytes of
// a row serve two products.
//   1. scores [rows, keys] = Q K^T: query rows are A, keys are B
//   2. softmax: a lane has four keys of rows g (and g + 8), where 1 left them
//   3. values [dims, rows] += V^T P^T: values are A, pairs of keys put together by byte permutes;
//      probabilities are B, and already lie where B wants them. A probability is multiplied as a
//      high and a low 16-bit part, so that it keeps 16 bits (bfloat16) or 22 (float16).
// The keys of the next step are on their way from 1 on, its values from 3 on.
//
// Bytes moved: keys and values once, 2 D elements a key and kv head. In flight: 16 keys and values
// a warp, 8 KB at D 128, 64 KB or more an SM. Shared memory: 4 sums of a chunk, 8.5 KB for 4 rows
// of D 128, 35 KB at most.

#include "attention.cuh"
#include "fragments.cuh"

namespace td {
namespace {

constexpr int kTileKeys = 16;  // of a warp in a step
constexpr int kWarps = kChunk / kTileKeys;
constexpr int kThreads = kWarps * kWarpSize;

// Query rows of a block, in tiles of 8.
template <int kDim, bool kManyRows>
constexpr int kRows = kManyRows && kDim < 256 ? 16 : 8;

// Blocks that share an SM. Registers would allow 3 at 128 dimensions, at the price of spills and of
// a last round of chunks for few blocks: 43 against 39 us at 32K keys (H200, 8 kv heads, 2026-11).
template <int kDim, bool kManyRows>
constexpr int kBlocksPerSm = kDim > 64   ? 2
                             : kManyRows ? 3
                                         : 4;

// The end of a chunk: the warps' partials become one, in shared memory.
template <int kDim>
struct Meeting {
  float* values;  // [kWarps][rows][kPitch]
  float2* stats;  // [kWarps][rows] (maximum, sum)
  int rows;       // of this block
  static constexpr int kPitch = kDim + 4;
  static constexpr int bytes(int rows) {
    return kWarps * rows * (kPitch * static_cast<int>(sizeof(float)) + 8);
  }
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
constexpr bool kStartsEarly = true;  // before the predecessor has ended
#else
constexpr bool kStartsEarly = false;
#endif

// ---- the kernel ------------------------------------------------------------------------------

template <typename T, int kDim, bool kManyRows>
__global__ void __launch_bounds__(kThreads, (kBlocksPerSm<kDim, kManyRows>))
    attention_split_kernel(const T* q,        // [B, T, H, D]
                           const T* k_cache,  // [B, K, S, D]
                           const T* v_cache,  // [B, K, S, D]
                           bool q_aligned, const __grid_constant__ AttentionArgs a) {
  constexpr int kTiles = kRows<kDim, kManyRows> / 8;  // of rows
  constexpr bool kAhead = kDim <= 128;  // registers for the next step's keys and values
  using Quarter = Share<T, kDim, 4>;
  using Eighth = Share<T, kDim, 8>;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int g = lane / 4, t = lane % 4;  // of the fragments
  const int group_size = a.heads / a.kv_heads, all_rows = a.tokens * group_size;
  const int row_blocks = ceil_div(all_rows, kTiles * 8);
  const int kv_head = blockIdx.y / row_blocks;
  const int first_row = blockIdx.y % row_blocks * kTiles * 8;
  const int rows = all_rows - first_row < kTiles * 8 ? all_rows - first_row : kTiles * 8;
  const int first_token = first_row / group_size, last_token = (first_row + rows - 1) / group_size;
  const int64_t batch = blockIdx.z;
  const int64_t head_offset = (batch * a.kv_heads + kv_head) * a.slots * kDim;
  k_cache += head_offset;
  v_cache += head_offset;

  Meeting<kDim> meeting;
  meeting.rows = rows;
  meeting.values = reinterpret_cast<float*>(dynamic_shared());
  meeting.stats = reinterpret_cast<float2*>(meeting.values + kWarps * rows * meeting.kPitch);

  pdl_trigger();
  // Lengths are as they will be (embed.cu sees to that), so blocks without work are out of the way
  // at once, and the others bring their first keys and values into L2. They ask again all the same.
  int cached = 0;
  if constexpr (kStartsEarly) {
    cached = likely_length(a, batch);
    const int likely_keys = visible_keys(a, cached, last_token);
    if (static_cast<int>(blockIdx.x) >= chunk_count(a, likely_keys)) return;
    const int start = chunk_start(a, blockIdx.x), left = (likely_keys - start) * kDim;
    constexpr int kLine = 128 / sizeof(T);
    for (int i = threadIdx.x * kLine; i < kChunk * kDim && i < left; i += kThreads * kLine) {
      prefetch_l2(k_cache + static_cast<int64_t>(start) * kDim + i);
      prefetch_l2(v_cache + static_cast<int64_t>(start) * kDim + i);
    }
  }
  pdl_wait();

  const int confirmed = __ldcg(a.seq_lens + batch);
  if constexpr (!kStartsEarly) cached = confirmed;
  const CachePolicy policy = evict_first();

  // A row of Q for each tile; rows that are not there are zero.
  uint32_t query[kTiles][Quarter::kWords];
#pragma unroll
  for (int h = 0; h < kTiles; ++h) {
    const int row = h * 8 + g, token = (first_row + row) / group_size;
    const int head = kv_head * group_size + (first_row + row) % group_size;
    const T* source =
        q + batch * a.q_batch_stride + token * a.q_token_stride + static_cast<int64_t>(head) * kDim;
    if (row >= rows) {
#pragma unroll
      for (int i = 0; i < Quarter::kWords; ++i) query[h][i] = 0;
    } else if (q_aligned) {
      Quarter(source, t).load(query[h], 0, policy);
    } else {
#pragma unroll
      for (int i = 0; i < Quarter::kWords; ++i) {
        const T* pair = source + Quarter::dim(i, t);
        query[h][i] = bits(pair[0]) | bits(pair[1]) << 16;
      }
    }
  }

  int keys, seen_by_all, chunks;
  int visible[kTiles];  // keys that row g of the tile sees; rows that are not there see all
  const auto look_at_length = [&] {
    keys = visible_keys(a, cached, last_token);
    seen_by_all = visible_keys(a, cached, first_token);
    chunks = chunk_count(a, keys);
#pragma unroll
    for (int h = 0; h < kTiles; ++h) {
      const int row = h * 8 + g;
      visible[h] = row < rows ? visible_keys(a, cached, (first_row + row) / group_size) : keys;
    }
  };
  look_at_length();

  // Loads 16 keys or values. Those past the end are read as the last key: nothing out there is
  // looked at.
  const Quarter keys_of_lane(k_cache, t);
  const Eighth values_of_lane(v_cache, g);
  uint32_t key_words[2][Quarter::kWords], value_words[4][Eighth::kWords];
  const auto load_keys = [&](int first) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int key = first + n * 8 + g;
      keys_of_lane.load(key_words[n], key < keys ? key : keys - 1, policy);
    }
  };
  const auto value_key = [&](int i) { return t * 2 + i % 2 + i / 2 * 8; };
  const auto load_values = [&](int first) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = first + value_key(i);
      values_of_lane.load(value_words[i], key < keys ? key : keys - 1, policy);
    }
  };

  float maximum[kTiles], sum[kTiles];         // of row g; the sum over this lane's keys
  float weighted[kTiles][Eighth::kWords][4];  // the two dimensions of a word by rows 2t and 2t + 1
  const auto begin_chunk = [&] {
#pragma unroll
    for (int h = 0; h < kTiles; ++h) {
      maximum[h] = -INFINITY;
      sum[h] = 0.0f;
#pragma unroll
      for (int j = 0; j < Eighth::kWords; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) weighted[h][j][i] = 0.0f;
      }
    }
  };
  begin_chunk();
  int chunk = blockIdx.x;
  int step = chunk_start(a, chunk);  // first key of the block's step
  bool chunk_begins = true;
  const auto load_ahead = [&] {
    if constexpr (kAhead) {
      load_keys(step + warp * kTileKeys);
      load_values(step + warp * kTileKeys);
    }
  };
  if (chunk < chunks) load_ahead();
  if (kStartsEarly && confirmed != cached) {
    cached = confirmed;
    look_at_length();
    if (chunk < chunks) load_ahead();
  }
  if (chunk >= chunks) return;
  while (true) {
    const int first_key = step + warp * kTileKeys;
    int next_step = step + kChunk, next_chunk = chunk;
    if (next_step >= keys || next_step >= chunk_start(a, chunk + 1)) {
      next_chunk = chunk + static_cast<int>(gridDim.x);
      next_step = chunk_start(a, next_chunk);
    }
    const bool more = next_chunk < chunks;
    if constexpr (!kAhead) load_keys(first_key);

    // 1. Scores: two tiles of 8 keys, and for each two chains of dependent products. With one tile
    // of rows, the lower half of A has the even and the upper half the odd words of the same row,
    // and each chain takes its half of the sums.
    float even[2][4] = {}, odd[2][4] = {};
#pragma unroll
    for (int i = 0; i < Quarter::kWords; i += 2) {
      const int first = kTiles > 1 ? i : i / 4 * 4;
      const int second = kTiles > 1 || first + 2 >= Quarter::kWords ? first : first + 2;
      const uint32_t q_words[4] = {query[0][first], query[kTiles - 1][second], query[0][first + 1],
                                   query[kTiles - 1][second + 1]};
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const uint32_t k_words[2] = {key_words[n][i], key_words[n][i + 1]};
        product<T>(i % 4 == 0 ? even[n] : odd[n], q_words, k_words);
      }
    }
    if constexpr (kAhead) {
      if (more) load_keys(next_step + warp * kTileKeys);
    } else {
      load_values(first_key);
    }

    // 2. Softmax. Only a tile with the newest keys can hold some that not every row sees.
    const bool some_unseen = first_key + kTileKeys > seen_by_all;
    uint32_t high[kTiles][2], low[kTiles][2];
    float rescale[kTiles];
#pragma unroll
    for (int h = 0; h < kTiles; ++h) {
      float score[4], largest = maximum[h];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int n = i / 2, key = first_key + n * 8 + t * 2 + i % 2;
        const int other = kTiles > 1 ? h * 2 : 2;
        score[i] = (even[n][h * 2 + i % 2] + odd[n][other + i % 2]) * a.scale;
        if (some_unseen && key >= visible[h]) score[i] = -INFINITY;
        largest = score[i] > largest ? score[i] : largest;
      }
#pragma unroll
      for (int offset = 1; offset < 4; offset *= 2) {
        const float other = __shfl_xor_sync(kFullWarp, largest, offset);
        largest = other > largest ? other : largest;
      }
      const float base = largest == -INFINITY ? 0.0f : largest;  // no key yet: weights of 0
      rescale[h] = exp2f(maximum[h] - base);
      maximum[h] = largest;
      sum[h] *= rescale[h];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        score[i] = exp2f(score[i] - base);
        sum[h] += score[i];
      }
      split_pair<T>(score[0], score[1], high[h][0], low[h][0]);
      split_pair<T>(score[2], score[3], high[h][1], low[h][1]);
    }

    // 3. Weighted values. The rows of the sums are 2t and 2t + 1, those of the scores g.
#pragma unroll
    for (int h = 0; h < kTiles; ++h) {
      const float factor[2] = {__shfl_sync(kFullWarp, rescale[h], t * 8),
                               __shfl_sync(kFullWarp, rescale[h], t * 8 + 4)};
      if (chunk_begins) continue;  // zeros
#pragma unroll
      for (int j = 0; j < Eighth::kWords; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) weighted[h][j][i] *= factor[i % 2];
      }
    }
    const auto value_fragment = [&](int j, uint32_t (&x)[4]) {
      x[0] = lower_halves(value_words[0][j], value_words[1][j]);
      x[1] = upper_halves(value_words[0][j], value_words[1][j]);
      x[2] = lower_halves(value_words[2][j], value_words[3][j]);
      x[3] = upper_halves(value_words[2][j], value_words[3][j]);
    };
    bool nonfinite = false;
    if (some_unseen) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < Eighth::kWords; ++j) {
          nonfinite |= is_nonfinite<T>(value_words[i][j]);
        }
      }
      nonfinite = __any_sync(kFullWarp, nonfinite);
    }
    if (!nonfinite) {
#pragma unroll
      for (int j = 0; j < Eighth::kWords; j += 2) {  // two at a time: independent products
        uint32_t x[2][4];
#pragma unroll
        for (int part = 0; part < 2; ++part) {
#pragma unroll
          for (int h = 0; h < kTiles; ++h) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              if (j + i >= Eighth::kWords) continue;
              if (part == 0 && h == 0) value_fragment(j + i, x[i]);
              product<T>(weighted[h][j + i], x[i], part == 0 ? high[h] : low[h]);
            }
          }
        }
      }
    } else {
      // 0 times infinity would be NaN in rows that do not see the key. So once for every number of
      // keys that a row may see, from the most to the fewest, with the others' values zeroed.
      for (int seen = keys; seen >= seen_by_all; --seen) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (first_key + value_key(i) < seen) continue;
#pragma unroll
          for (int j = 0; j < Eighth::kWords; ++j) value_words[i][j] = 0;
        }
#pragma unroll
        for (int h = 0; h < kTiles; ++h) {
          const bool sees[2] = {__shfl_sync(kFullWarp, visible[h], t * 8) == seen,
                                __shfl_sync(kFullWarp, visible[h], t * 8 + 4) == seen};
#pragma unroll
          for (int j = 0; j < Eighth::kWords; ++j) {
            uint32_t x[4];
            value_fragment(j, x);
            float more_weighted[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) more_weighted[i] = weighted[h][j][i];
            product<T>(more_weighted, x, high[h]);
            product<T>(more_weighted, x, low[h]);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              if (sees[i % 2]) weighted[h][j][i] = more_weighted[i];
            }
          }
        }
      }
    }
    if constexpr (kAhead) {
      if (more) load_values(next_step + warp * kTileKeys);
    }

    chunk_begins = next_chunk != chunk;
    if (chunk_begins) {
      // The warps' sums meet in shared memory.
#pragma unroll
      for (int h = 0; h < kTiles; ++h) {
        sum[h] += __shfl_xor_sync(kFullWarp, sum[h], 1);
        sum[h] += __shfl_xor_sync(kFullWarp, sum[h], 2);
        const int row = h * 8 + g;
        if (t == 0 && row < rows) {
          meeting.stats[warp * rows + row] = make_float2(maximum[h], sum[h]);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int out_row = h * 8 + t * 2 + i;
          if (out_row >= rows) continue;
          float* target = meeting.values + (warp * rows + out_row) * meeting.kPitch;
#pragma unroll
          for (int j = 0; j < Eighth::kWords; ++j) {
            *reinterpret_cast<float2*>(target + Eighth::dim(j, g)) =
                make_float2(weighted[h][j][i], weighted[h][j][i + 2]);
          }
        }
      }
      __syncthreads();  // every warp's sums are there
      const int chunk_first = chunk_start(a, chunk);
      for (int i = threadIdx.x; i < rows * (kDim / 4); i += kThreads) {
        const int row = i / (kDim / 4), d = i % (kDim / 4) * 4;
        const int token = (first_row + row) / group_size;
        const int head = kv_head * group_size + (first_row + row) % group_size;
        if (visible_keys(a, cached, token) <= chunk_first) continue;
        float2 stat[kWarps];
        float top = -INFINITY, total = 0.0f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
          stat[w] = meeting.stats[w * rows + row];
          top = stat[w].x > top ? stat[w].x : top;
        }
        float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
          const float4 y = *reinterpret_cast<const float4*>(meeting.values +
                                                            (w * rows + row) * meeting.kPitch + d);
          const float weight = exp2f(stat[w].x - top);
          total = fmaf(weight, stat[w].y, total);
          x.x = fmaf(weight, y.x, x.x);
          x.y = fmaf(weight, y.y, x.y);
          x.z = fmaf(weight, y.z, x.z);
          x.w = fmaf(weight, y.w, x.w);
        }
        const int64_t partial = ((batch * a.tokens + token) * a.heads + head) * a.chunks + chunk;
        *reinterpret_cast<float4*>(a.weighted + partial * kDim + d) = x;
        if (d == 0) a.stats[partial] = make_float2(top, total);
      }
      if (!more) return;
      __syncthreads();  // and may be overwritten
      begin_chunk();
    }
    chunk = next_chunk;
    step = next_step;
  }
}

#else

template <typename T, int kDim, bool kManyRows>
__global__ void attention_split_kernel(const T*, const T*, const T*, bool,
                                       const __grid_constant__ AttentionArgs) {}  // never launched

#endif

// ---- host side -------------------------------------------------------------------------------

template <typename T, int kDim, bool kManyRows>
int launch_split(Launcher& launcher, const void* q, const void* k_cache, const void* v_cache,
                 int64_t batch, const AttentionArgs& a) {
  constexpr int kBlockRows = kRows<kDim, kManyRows>;
  const int rows = a.tokens * (a.heads / a.kv_heads);
  const int row_blocks = ceil_div(rows, kBlockRows);
  // Blocks walk over the chunks: enough to fill the GPU once, so that a large capacity costs a
  // short context nothing. Which block does a chunk does not change its bits.
  const int64_t resident = launcher.multiprocessors() * kBlocksPerSm<kDim, kManyRows>;
  int64_t per_head = resident / (batch * a.kv_heads * row_blocks);
  if (per_head < 1) per_head = 1;
  const dim3 grid(static_cast<unsigned>(a.chunks < per_head ? a.chunks : per_head),
                  static_cast<unsigned>(a.kv_heads * row_blocks), static_cast<unsigned>(batch));
  const T* query = static_cast<const T*>(q);
  const bool q_aligned =
      packs_fit<T>(a.q_batch_stride, query) && packs_fit<T>(a.q_token_stride, query);
  launcher.run_with_shared(attention_split_kernel<T, kDim, kManyRows>, grid, kThreads,
                           Meeting<kDim>::bytes(rows < kBlockRows ? rows : kBlockRows), query,
                           static_cast<const T*>(k_cache), static_cast<const T*>(v_cache),
                           q_aligned, a);
  return launcher.status();
}

}  // namespace

int attention_split_tensor(Launcher& launcher, const void* q, const void* k_cache,
                           const void* v_cache, int64_t batch, int64_t head_dim, int dtype,
                           const AttentionArgs& a) {
  return with_head_dim(head_dim, [&](auto dim) -> int {
    const auto with_type = [&](auto tag) -> int {
      using T = typename decltype(tag)::T;
      constexpr int kDim = decltype(dim)::kValue;
      if constexpr (kDim < 256) {
        if (a.tokens * (a.heads / a.kv_heads) > 8) {
          return launch_split<T, kDim, true>(launcher, q, k_cache, v_cache, batch, a);
        }
      }
      return launch_split<T, kDim, false>(launcher, q, k_cache, v_cache, batch, a);
    };
    if (dtype == TD_FLOAT16) return with_type(Tag<__half>{});
    return dtype == TD_BFLOAT16 ? with_type(Tag<__nv_bfloat16>{}) : cudaErrorInvalidValue;
  });
}

}  // namespace td
