// Attention on tensor cores, for float16 and bfloat16 from sm_80 on.
//
// The keys of a kv head are dealt out to 16 blocks, 16 keys to a warp and step: block p has the
// keys n p .. n p + n - 1 of every 16 n, n being 64 or 128. So a few hundred keys already occupy
// several blocks, and a long context all of them evenly. A block works for up to 8 or 16 query
// rows: the G query heads of the group, token by token, all read the keys once. Its warps go their
// own ways until their keys are used up. Everything stays in registers: keys and values go from
// global memory straight into the fragments of m16n8k16, because which dimensions meet in a product
// is free as long as both operands agree, so that a lane's 16 bytes of a row serve two products.
//   1. scores [rows, keys] = Q K^T: query rows are A, keys are B
//   2. softmax: a lane has four keys of rows g (and g + 8), where 1 left them
//   3. values [dims, rows] += V^T P^T: values are A, pairs of keys put together by byte permutes;
//      probabilities are B, and already lie where B wants them. A probability is multiplied as a
//      high and a low 16-bit part, so that it keeps 16 bits (bfloat16) or 22 (float16).
// The keys of the next step are on their way from 1 on, its values from 3 on; the first ones before
// the predecessor has ended, for only the newest keys come from it.
//
// At the end the warps of a block meet in its shared memory, and the blocks of a kv head, a
// cluster, in each other's: every block sends its part of the outputs to the block that will finish
// them. Where clusters are not to be had (before sm_90, many rows, many heads), parts go through
// the workspace and a second launch adds them up, with the same arithmetic.
//
// Bytes moved: keys and values once, 2 D elements a key and kv head. In flight: 16 keys and values
// a warp, 64 KB an SM at D 128.

#include "attention_parts.cuh"
#include "fragments.cuh"

namespace td {
namespace {

// Steps whose keys and values are on their way to L2, beyond the one on its way to registers.
template <int kDim>
constexpr int kPrefetched = kDim > 64 ? 0 : 2;

// Query rows of a block, in tiles of 8.
template <int kDim, bool kManyRows>
constexpr int kRows = kManyRows && kDim < 256 ? 16 : 8;

// Blocks that fit on an SM: at 64 dimensions and few rows beside one of the step's products.
template <int kDim, bool kManyRows>
constexpr int kBlocksPerSm = kDim > 64   ? 1
                             : kManyRows ? 3
                                         : 4;

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800

// ---- the kernel ------------------------------------------------------------------------------

template <typename T, int kDim, bool kManyRows>
__global__ void __launch_bounds__((kThreads<kDim>), (kBlocksPerSm<kDim, kManyRows>))
    attention_kernel(const T* q,        // [B, T, H, D]
                     const T* k_cache,  // [B, K, S, D]
                     const T* v_cache,  // [B, K, S, D]
                     T* out,            // [B, T, H, D]
                     bool q_aligned, bool clustered, const __grid_constant__ AttentionArgs a) {
  constexpr int kTiles = kRows<kDim, kManyRows> / 8;  // of rows
  constexpr bool kAhead = kDim <= 128;  // registers for the next step's keys and values
  using Quarter = Share<T, kDim, 4>;
  using Eighth = Share<T, kDim, 8>;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int g = lane / 4, t = lane % 4;  // of the fragments
  const int part = blockIdx.x;
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

  pdl_trigger();
  // The length, and all keys but the newest, are as they will be before the predecessor has ended.
  const int cached = cached_length(a, batch);
  const int keys = visible_keys(a, cached, last_token);
  const int seen_by_all = visible_keys(a, cached, first_token);
  const int parts = part_count<kDim>(keys);
  if (part >= parts) return;
  Meeting<kDim> meeting(dynamic_shared(), rows);
  if constexpr (kMayCluster<kDim>) {
    if (clustered) {
      if (threadIdx.x == 0) {
        mbarrier_init(meeting.arrived, 1);
        mbarrier_init_fence();
        const int parcels = ceil_div(rows * (kDim / 4) - part, parts);
        mbarrier_expect(meeting.arrived,
                        parts * (parcels * sizeof(float4) + rows * sizeof(float2)));
      }
      cluster_arrive();  // this block has begun: others may write to its memory
    }
  }

  // Loads 16 keys or values. Those past the end are read as the last key: nothing out there is
  // looked at.
  const CachePolicy policy = evict_first();
  const Quarter keys_of_lane(k_cache, t);
  const Eighth values_of_lane(v_cache, g);
  uint32_t key_words[2][Quarter::kWords], value_words[4][Eighth::kWords];
  const auto load_keys = [&](int first) {
    if (first + kTileKeys <= keys) {
#pragma unroll
      for (int n = 0; n < 2; ++n) keys_of_lane.load(key_words[n], first + g, policy, n * 8);
    } else {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int key = first + n * 8 + g;
        keys_of_lane.load(key_words[n], key < keys ? key : keys - 1, policy);
      }
    }
  };
  const auto value_key = [](int i) { return i % 2 + i / 2 * 8; };  // beyond 2t
  const auto load_values = [&](int first) {
    if (first + kTileKeys <= keys) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        values_of_lane.load(value_words[i], first + t * 2, policy, value_key(i));
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = first + t * 2 + value_key(i);
        values_of_lane.load(value_words[i], key < keys ? key : keys - 1, policy);
      }
    }
  };
  const auto prefetch = [&](int first) {
    if (lane >= 2 || first >= keys) return;
    const int left = keys - first;
    bulk_prefetch_l2((lane == 0 ? k_cache : v_cache) + static_cast<int64_t>(first) * kDim,
                     (left < kTileKeys ? left : kTileKeys) * kDim * sizeof(T), policy);
  };
  int first_key = part * kPartKeys<kDim> + warp * kTileKeys;
  const bool starts_with_new = first_key + kTileKeys > cached;
  if (starts_with_new) pdl_wait();
  if (kAhead && first_key < keys) {
    load_keys(first_key);
    load_values(first_key);
  }
  for (int i = 1; i <= kPrefetched<kDim>; ++i) prefetch(first_key + i * kStride<kDim>);
  if (!starts_with_new) pdl_wait();

  // A row of Q for each tile; rows that are not there are zero.
  uint32_t query[kTiles][Quarter::kWords];
  int visible[kTiles];  // keys that row g of the tile sees; rows that are not there see all
#pragma unroll
  for (int h = 0; h < kTiles; ++h) {
    const int row = h * 8 + g, token = (first_row + row) / group_size;
    const int head = kv_head * group_size + (first_row + row) % group_size;
    const T* source =
        q + batch * a.q_batch_stride + token * a.q_token_stride + static_cast<int64_t>(head) * kDim;
    visible[h] = row < rows ? visible_keys(a, cached, token) : keys;
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

  float maximum[kTiles], sum[kTiles];              // of row g; the sum over this lane's keys
  float weighted[kTiles][Eighth::kWords][4] = {};  // a word's two dimensions by rows 2t and 2t + 1
#pragma unroll
  for (int h = 0; h < kTiles; ++h) {
    maximum[h] = -INFINITY;
    sum[h] = 0.0f;
  }
#pragma unroll 1
  for (; first_key < keys; first_key += kStride<kDim>) {
    const bool more = first_key + kStride<kDim> < keys;
    if constexpr (kPrefetched<kDim> > 0)
      prefetch(first_key + (kPrefetched<kDim> + 1) * kStride<kDim>);
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
      if (more) load_keys(first_key + kStride<kDim>);
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
          if (first_key + t * 2 + value_key(i) < seen) continue;
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
      if (more) load_values(first_key + kStride<kDim>);
    }
  }

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
  if constexpr (kMayCluster<kDim>) {
    if (clustered) cluster_wait();  // every block of the cluster has begun
  }
  __syncthreads();  // every warp's sums are there

  join_block(a, meeting, out, batch, kv_head, first_row, part, parts, clustered);
}

#else

template <typename T, int kDim, bool kManyRows>
__global__ void attention_kernel(const T*, const T*, const T*, T*, bool, bool,
                                 const __grid_constant__ AttentionArgs) {}  // never launched

#endif

// ---- host side -------------------------------------------------------------------------------

template <typename T, int kDim, bool kManyRows>
int launch_attention(Launcher& launcher, const void* q, const void* k_cache, const void* v_cache,
                     void* out, int64_t batch, AttentionArgs& a) {
  constexpr int kBlockRows = kRows<kDim, kManyRows>;
  const auto kernel = attention_kernel<T, kDim, kManyRows>;
  const int rows = a.tokens * (a.heads / a.kv_heads);
  const int row_blocks = ceil_div(rows, kBlockRows);
  a.chunks = part_count<kDim>(a.slots);
  a.stats = reinterpret_cast<float2*>(a.weighted + batch * a.tokens * a.heads * a.chunks * kDim);
  int parts = 1;  // cluster sizes are powers of two
  while (parts < a.chunks) parts *= 2;
  const dim3 grid(static_cast<unsigned>(parts), static_cast<unsigned>(a.kv_heads * row_blocks),
                  static_cast<unsigned>(batch));
  const T* query = static_cast<const T*>(q);
  const bool q_aligned =
      packs_fit<T>(a.q_batch_stride, query) && packs_fit<T>(a.q_token_stride, query);
  // Clusters that must wait for others' blocks to end would cost more than the second launch. One
  // block alone is no cluster: its instructions would be illegal.
  static ClusterRoom room;
  const bool clustered =
      kDim == 64 && row_blocks == 1 && parts > 1 &&
      batch * a.kv_heads <= room.find(launcher, reinterpret_cast<const void*>(kernel),
                                      kThreads<kDim>, Meeting<kDim>::bytes(kBlockRows), parts);
  const int shared = Meeting<kDim>::bytes(rows < kBlockRows ? rows : kBlockRows);
  launcher.run_in_clusters(kernel, grid, kThreads<kDim>, shared, clustered ? parts : 1, query,
                           static_cast<const T*>(k_cache), static_cast<const T*>(v_cache),
                           static_cast<T*>(out), q_aligned, clustered, a);
  if (!clustered) {
    const int all_rows = static_cast<int>(batch) * a.tokens * a.heads;
    launcher.run(attention_join_kernel<T, kDim>,
                 dim3(static_cast<unsigned>(ceil_div(all_rows, kJoinRows<kDim>))),
                 kJoinThreads<kDim>, static_cast<T*>(out), all_rows, a);
  }
  return launcher.status();
}

}  // namespace

int attention_tensor(Launcher& launcher, const void* q, const void* k_cache, const void* v_cache,
                     void* out, int64_t batch, int64_t head_dim, int dtype, AttentionArgs& a) {
  return with_head_dim(head_dim, [&](auto dim) -> int {
    const auto with_type = [&](auto tag) -> int {
      using T = typename decltype(tag)::T;
      constexpr int kDim = decltype(dim)::kValue;
      if constexpr (kDim < 256) {
        if (a.tokens * (a.heads / a.kv_heads) > 8) {
          return launch_attention<T, kDim, true>(launcher, q, k_cache, v_cache, out, batch, a);
        }
      }
      return launch_attention<T, kDim, false>(launcher, q, k_cache, v_cache, out, batch, a);
    };
    if (dtype == TD_FLOAT16) return with_type(Tag<__half>{});
    return dtype == TD_BFLOAT16 ? with_type(Tag<__nv_bfloat16>{}) : cudaErrorInvalidValue;
  });
}

}  // namespace td
