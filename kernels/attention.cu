// Attention of a few new tokens over the cache, split over the keys (flash decoding).
//
// Split launch. A block of four warps turns a chunk of keys (attention.cuh) of one kv head into a
// float32 partial (maximum, sum, weighted values) of up to 8 or 16 query rows: the G query heads of
// the group, token by token, all read the keys once. A step of a block is 16 keys a warp, and the
// warps of a chunk meet only at its end. Everything stays in registers: keys and values go from
// global memory straight into the fragments of m16n8k16, because which dimensions meet in a product
// is free as long as both operands agree, so that a lane's 16 bytes of a row serve two products.
//   1. scores [rows, keys] = Q K^T: query rows are A (rows above 8 zero if there are none), keys B
//   2. softmax: a lane has four keys of rows g (and g + 8), where 1 left them
//   3. values [dims, rows] += V^T P^T: values are A, pairs of keys put together by byte permutes;
//      probabilities are B, and already lie where B wants them. A probability is multiplied as a
//      high and a low 16-bit part, which leaves float32 sums for all purposes.
// The keys of the next step are on their way from 1, its values from 3.
// Merge launch. A block owns 16 dimensions of one query row and adds up the partials, scaled to the
// common maximum, in an order that follows from the number of chunks that the row sees.
//
// The arithmetic of a query row depends on its position alone: neither on which rows share its
// product nor on B, T, S or the grid.
//
// Bytes moved: keys and values once, 2 D elements a key and kv head, and the partials, which stay
// in L2 because the cache is read with an evict-first hint. At 32K keys, 8 kv heads, D 128 in bf16
// that is 134 MB, 29 us at the 4.6 TB/s that an H200 reads. In flight: 16 keys and values a warp,
// 8 KB at D 128, 64 KB or more an SM.
//
// Limits: D in {64, 80, 96, 128, 256}; float32 and GPUs before sm_80 take attention_simple.cu.

#include <type_traits>

#include "attention.cuh"

namespace td {
namespace {

constexpr int kTileKeys = 16;  // of a warp in a step
constexpr int kWarps = kChunk / kTileKeys;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kOldest = 80;  // compute capability

// Query rows of a block, in tiles of 8.
template <int kDim, bool kManyRows>
constexpr int kRows = kManyRows && kDim < 256 ? 16 : 8;

// Blocks that share an SM; registers are what limits them.
template <int kDim, bool kManyRows>
constexpr int kBlocksPerSm = kDim == 256 || (kManyRows && kDim == 128) ? 2
                             : kDim == 128                             ? 3
                                                                       : 4 - kManyRows;

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
constexpr bool kStartsEarly = true;  // before the predecessor has ended
#else
constexpr bool kStartsEarly = false;
#endif

// d += a b on the tensor cores; see ptx.cuh.
template <typename T>
__device__ __forceinline__ void product(float (&d)[4], const uint32_t (&a)[4],
                                        const uint32_t (&b)[2]) {
  if constexpr (std::is_same_v<T, __half>) {
    mma_m16n8k16_fp16(d, a, b);
  } else {
    mma_m16n8k16_bf16(d, a, b);
  }
}

// ---- fragments -------------------------------------------------------------------------------

// What lane t of `kLanes` holds of a row of kDim elements: 16 bytes of every 16 kLanes, then an
// even share of what is left. Word i of every lane together are 2 kLanes dimensions.
template <int kDim, int kLanes>
struct Share {
  static constexpr int kWords = kDim / 2 / kLanes;
  static constexpr int kWide = kDim / (8 * kLanes);  // loads of 16 bytes
  static constexpr int kRest = kWords - 4 * kWide;   // words of the last load, 0 to 2

  // Dimension of the lower half of word i.
  static __device__ __forceinline__ int dim(int i, int t) {
    return i < 4 * kWide ? i / 4 * 8 * kLanes + t * 8 + i % 4 * 2
                         : kWide * 8 * kLanes + t * 2 * kRest + (i - 4 * kWide) * 2;
  }

  template <typename T>
  static __device__ __forceinline__ void load(uint32_t (&x)[kWords], const T* row, int t,
                                              CachePolicy policy) {
#pragma unroll
    for (int i = 0; i < kWide; ++i) load_past_l1<4>(x + 4 * i, row + dim(4 * i, t), policy);
    if constexpr (kRest > 0) {
      load_past_l1<kRest>(x + 4 * kWide, row + dim(4 * kWide, t), policy);
    }
  }
};

__device__ __forceinline__ uint32_t lower_halves(uint32_t x, uint32_t y) {
  return (x & 0xffffu) | y << 16;
}
__device__ __forceinline__ uint32_t upper_halves(uint32_t x, uint32_t y) {
  return x >> 16 | (y & 0xffff0000u);
}

// Two floats as the sum of two packed pairs of 16-bit elements.
template <typename T>
__device__ __forceinline__ void split_pair(float x, float y, uint32_t& high, uint32_t& low) {
  const T high_x = from_float<T>(x), high_y = from_float<T>(y);
  high = bits(high_x) | bits(high_y) << 16;
  low = bits(from_float<T>(x - to_float(high_x))) | bits(from_float<T>(y - to_float(high_y))) << 16;
}

// Whether either element of a word is infinite or NaN.
template <typename T>
__device__ __forceinline__ bool is_nonfinite(uint32_t word) {
  constexpr uint32_t kLower = std::is_same_v<T, __half> ? 0x7c00u : 0x7f80u;
  constexpr uint32_t kUpper = kLower << 16;
  return (word & kLower) == kLower || (word & kUpper) == kUpper;
}

// ---- the end of a chunk: the warps' partials become one --------------------------------------

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

// ---- the kernel ------------------------------------------------------------------------------

template <typename T, int kDim, bool kManyRows>
__global__ void __launch_bounds__(kThreads, (kBlocksPerSm<kDim, kManyRows>))
    attention_split_kernel(const T* q,        // [B, T, H, D]
                           const T* k_cache,  // [B, K, S, D]
                           const T* v_cache,  // [B, K, S, D]
                           bool q_aligned, const __grid_constant__ AttentionArgs a) {
  constexpr int kTiles = kRows<kDim, kManyRows> / 8;  // of rows
  constexpr bool kAhead = kDim <= 128;  // registers for the next step's keys and values
  using Quarter = Share<kDim, 4>;
  using Eighth = Share<kDim, 8>;
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
  if constexpr (kStartsEarly) {
    // The length may be one of an earlier moment, and only decides what is brought into L2.
    const int keys = visible_keys(a, __ldcg(a.seq_lens + batch), a.tokens - 1);
    const int start = chunk_start(a, blockIdx.x), left = (keys - start) * kDim;
    constexpr int kLine = 128 / sizeof(T);
    for (int i = threadIdx.x * kLine; i < kChunk * kDim && i < left; i += kThreads * kLine) {
      prefetch_l2(k_cache + static_cast<int64_t>(start) * kDim + i);
      prefetch_l2(v_cache + static_cast<int64_t>(start) * kDim + i);
    }
  }
  pdl_wait();

  const int cached = __ldcg(a.seq_lens + batch);
  const CachePolicy policy = evict_first();
  const CachePolicy keep = evict_first();  // the query is read by many blocks, but soon

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
      Quarter::load(query[h], source, t, keep);
    } else {
#pragma unroll
      for (int i = 0; i < Quarter::kWords; ++i) {
        const T* pair = source + Quarter::dim(i, t);
        query[h][i] = bits(pair[0]) | bits(pair[1]) << 16;
      }
    }
  }

  const int keys = visible_keys(a, cached, last_token);
  const int seen_by_all = visible_keys(a, cached, first_token);
  const int chunks = chunk_count(a, keys);
  if (static_cast<int>(blockIdx.x) >= chunks) return;
  int visible[kTiles];  // keys that row g of the tile sees; rows that are not there see all
#pragma unroll
  for (int h = 0; h < kTiles; ++h) {
    const int row = h * 8 + g;
    visible[h] = row < rows ? visible_keys(a, cached, (first_row + row) / group_size) : keys;
  }

  // Loads 16 keys or values. Those past the end are read as the last key: nothing out there is
  // looked at.
  uint32_t key_words[2][Quarter::kWords], value_words[4][Eighth::kWords];
  const auto load_keys = [&](int first) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int key = first + n * 8 + g;
      const T* row = k_cache + static_cast<int64_t>(key < keys ? key : keys - 1) * kDim;
      Quarter::load(key_words[n], row, t, policy);
    }
  };
  const auto value_key = [&](int i) { return t * 2 + i % 2 + i / 2 * 8; };
  const auto load_values = [&](int first) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = first + value_key(i);
      const T* row = v_cache + static_cast<int64_t>(key < keys ? key : keys - 1) * kDim;
      Eighth::load(value_words[i], row, g, policy);
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
  if constexpr (kAhead) {
    load_keys(step + warp * kTileKeys);
    load_values(step + warp * kTileKeys);
  }
  while (true) {
    const int first_key = step + warp * kTileKeys;
    int next_step = step + kChunk, next_chunk = chunk;
    if (next_step >= keys || next_step >= chunk_start(a, chunk + 1)) {
      next_chunk = chunk + static_cast<int>(gridDim.x);
      next_step = chunk_start(a, next_chunk);
    }
    const bool more = next_chunk < chunks;
    if constexpr (!kAhead) load_keys(first_key);

    // 1. Scores: two tiles of 8 keys, and for each two chains of dependent products.
    float even[2][4] = {}, odd[2][4] = {};
#pragma unroll
    for (int i = 0; i < Quarter::kWords; i += 2) {
      const uint32_t q_words[4] = {query[0][i], kTiles > 1 ? query[kTiles - 1][i] : 0,
                                   query[0][i + 1], kTiles > 1 ? query[kTiles - 1][i + 1] : 0};
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
        score[i] = (even[n][h * 2 + i % 2] + odd[n][h * 2 + i % 2]) * a.scale;
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
    if (!chunk_begins) {
#pragma unroll
      for (int h = 0; h < kTiles; ++h) {
        const float factor[2] = {__shfl_sync(kFullWarp, rescale[h], t * 8),
                                 __shfl_sync(kFullWarp, rescale[h], t * 8 + 4)};
#pragma unroll
        for (int j = 0; j < Eighth::kWords; ++j) {
#pragma unroll
          for (int i = 0; i < 4; ++i) weighted[h][j][i] *= factor[i % 2];
        }
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
          nonfinite = nonfinite || is_nonfinite<T>(value_words[i][j]);
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

// ---- merge -----------------------------------------------------------------------------------

constexpr int kMergeThreads = 256;
constexpr int kMergeWarps = kMergeThreads / kWarpSize;
constexpr int kMergeDims = 16;                             // of one block
constexpr int kMergeLanes = kMergeDims / 4;                // threads a partial, four floats each
constexpr int kMergeGroups = kMergeThreads / kMergeLanes;  // partials read at once

template <typename T>
__global__ void __launch_bounds__(kMergeThreads)
    attention_merge_kernel(T* out,  // [B, T, H, D]
                           int head_dim, const __grid_constant__ AttentionArgs a) {
  __shared__ float sums[kMergeWarps][kMergeDims];
  __shared__ float totals[kMergeWarps];
  const int thread = threadIdx.x, warp = thread / kWarpSize;
  const int64_t row = blockIdx.x;  // over [B, T, H]
  const int token = static_cast<int>(row / a.heads % a.tokens);
  const int64_t batch = row / a.heads / a.tokens;
  const int group = thread / kMergeLanes, lane = thread % kMergeLanes;
  const int first_dim = blockIdx.y * kMergeDims;
  begin_kernel();

  const int chunks = chunk_count(a, visible_keys(a, a.seq_lens[batch], token));
  const float2* stats = a.stats + row * a.chunks;
  const float* weighted = a.weighted + row * a.chunks * head_dim + first_dim + lane * 4;
  const auto load = [&](int i) {
    return *reinterpret_cast<const float4*>(weighted + static_cast<int64_t>(i) * head_dim);
  };
  // The first of a thread's partials is under way while the maximum is found, by every warp for
  // itself.
  float4 first_values = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  float2 first_stat = make_float2(-INFINITY, 0.0f);
  if (group < chunks) {
    first_values = load(group);
    first_stat = stats[group];
  }
  float maximum = -INFINITY;
  for (int i = thread % kWarpSize; i < chunks; i += kWarpSize) {
    maximum = stats[i].x > maximum ? stats[i].x : maximum;
  }
  maximum = warp_reduce(maximum, Max());

  float sum[5] = {};  // four dimensions, and the divisor
  const auto add = [&](float4 x, float2 stat) {
    const float weight = exp2f(stat.x - maximum);
    sum[0] = fmaf(weight, x.x, sum[0]);
    sum[1] = fmaf(weight, x.y, sum[1]);
    sum[2] = fmaf(weight, x.z, sum[2]);
    sum[3] = fmaf(weight, x.w, sum[3]);
    sum[4] = fmaf(weight, stat.y, sum[4]);
  };
  if (group < chunks) add(first_values, first_stat);
#pragma unroll 4
  for (int i = group + kMergeGroups; i < chunks; i += kMergeGroups) add(load(i), stats[i]);
#pragma unroll
  for (int i = 0; i < 5; ++i) {
#pragma unroll
    for (int offset = kMergeLanes; offset < kWarpSize; offset *= 2) {
      sum[i] += __shfl_xor_sync(kFullWarp, sum[i], offset);
    }
  }
  if (thread % kWarpSize < kMergeLanes) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[warp][lane * 4 + i] = sum[i];
    totals[warp] = sum[4];  // the same from each
  }
  __syncthreads();  // every warp's sums are there

  if (thread < kMergeDims) {
    float result = 0.0f, divisor = 0.0f;
#pragma unroll
    for (int i = 0; i < kMergeWarps; ++i) {
      result += sums[i][thread];
      divisor += totals[i];
    }
    out[row * head_dim + first_dim + thread] = from_float<T>(result / divisor);
  }
}

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
}  // namespace td

int64_t td_attention_workspace(int64_t batch, int64_t tokens, int64_t heads, int64_t head_dim,
                               int64_t slots) {
  const int64_t partials = batch * tokens * heads * td::ceil_div<int64_t>(slots, td::kChunk);
  return partials *
         (head_dim * static_cast<int64_t>(sizeof(float)) + static_cast<int64_t>(sizeof(float2)));
}

int td_attention(const void* q, const void* k_cache, const void* v_cache, const int32_t* seq_lens,
                 void* out, void* workspace, int64_t batch, int64_t tokens, int64_t heads,
                 int64_t kv_heads, int64_t head_dim, int64_t slots, int64_t q_batch_stride,
                 int64_t q_token_stride, float scale, int dtype, int device, void* stream) {
  if (batch * tokens * heads == 0) return cudaSuccess;
  if (kv_heads <= 0 || heads % kv_heads != 0 || slots <= 0) return cudaErrorInvalidValue;
  td::Launcher launcher(device, stream);
  const int major = launcher.attribute(cudaDevAttrComputeCapabilityMajor);
  if (launcher.status() != cudaSuccess) return launcher.status();
  const bool simple = dtype == TD_FLOAT32 || major * 10 < td::kOldest;

  td::AttentionArgs a = {};
  a.seq_lens = seq_lens;
  a.q_batch_stride = q_batch_stride;
  a.q_token_stride = q_token_stride;
  a.scale = scale * td::kLog2e;
  a.tokens = static_cast<int>(tokens);
  a.heads = static_cast<int>(heads);
  a.kv_heads = static_cast<int>(kv_heads);
  a.slots = static_cast<int>(slots);
  a.long_from = simple ? td::ceil_div(a.slots, td::kChunk) * td::kChunk : td::kLongFrom;
  a.chunks = td::chunk_count(a, a.slots);
  a.weighted = static_cast<float*>(workspace);
  a.stats = reinterpret_cast<float2*>(a.weighted + batch * tokens * heads * a.chunks * head_dim);

  const auto split = [&]() -> int {
    if (simple) {
      return td::attention_split_simple(launcher, q, k_cache, v_cache, batch, head_dim, dtype, a);
    }
    return td::with_head_dim(head_dim, [&](auto dim) -> int {
      const auto with_type = [&](auto tag) -> int {
        using T = typename decltype(tag)::T;
        constexpr int kDim = decltype(dim)::kValue;
        if constexpr (kDim < 256) {
          if (tokens * (heads / kv_heads) > 8) {
            return td::launch_split<T, kDim, true>(launcher, q, k_cache, v_cache, batch, a);
          }
        }
        return td::launch_split<T, kDim, false>(launcher, q, k_cache, v_cache, batch, a);
      };
      if (dtype == TD_FLOAT16) return with_type(td::Tag<__half>{});
      return dtype == TD_BFLOAT16 ? with_type(td::Tag<__nv_bfloat16>{}) : cudaErrorInvalidValue;
    });
  };
  const int status = split();
  if (status != cudaSuccess) return status;
  return td::with_dtype(dtype, [&](auto tag) -> int {
    using T = typename decltype(tag)::T;
    launcher.run(td::attention_merge_kernel<T>,
                 dim3(static_cast<unsigned>(batch * tokens * heads),
                      static_cast<unsigned>(head_dim / td::kMergeDims)),
                 td::kMergeThreads, static_cast<T*>(out), static_cast<int>(head_dim), a);
    return launcher.status();
  });
}
