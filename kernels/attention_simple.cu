// Attention on CUDA cores, a split and a merge launch: for float32, and for the GPUs before sm_80,
// whose tensor cores take no bfloat16.
//
// A work item is one chunk of kChunk keys of one kv head of one row of the batch; all G query heads
// of the group and all T tokens read the keys while they are in shared memory, so the cache is read
// once whatever G and T are. A block of four warps owns an item at a time:
//   1. scores: a thread owns one key and half of the head; the query is broadcast
//   2. softmax: a warp owns a query row; two keys a lane
//   3. values: a thread owns two dimensions and every kGroups-th key; groups are summed in order
// and writes a float32 partial (maximum, sum, weighted values) per query row. The keys of the next
// item are on their way during 2 and 3, its values during 1. All shared memory is below 48 KB.
// Merge launch: a block owns 16 dimensions of one query row.
//
// Limits: D in {64, 80, 96, 128, 256}; keys of more than 256 bytes
// (float32 from D = 80, D = 256) are read from global memory in place, through L1, which is correct
// on every GPU but not fast.

#include <type_traits>

#include "attention.cuh"

namespace td {
namespace {

constexpr int kThreads = 2 * kChunk;  // two per key in the score phase
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kBlocksPerSm = 4;
static_assert(kChunk == 2 * kWarpSize, "the softmax phase holds two keys a lane");

// Whether this pass of the compiler makes the kernel: 16-bit types have a better one from sm_80.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ < 800
constexpr bool kOnlyFloat32 = false;
#else
constexpr bool kOnlyFloat32 = true;
#endif

template <typename T, int kDim, int kRows>
struct SplitShared {
  static constexpr int kKeyPacks = kDim / kPack<T>;
  static constexpr bool kStaged = kKeyPacks * kPackBytes <= 256;
  static constexpr int kStagedKeys = kStaged ? kChunk : 1;
  // An odd number of packs between keys: 8 threads that read the same pack of 8 neighbouring keys
  // then cover all banks.
  static constexpr int kKeyStride = kKeyPacks | 1;
  static constexpr int kGroups = kThreads / (kDim / 2);  // of threads in the value phase
  static_assert(kGroups >= 1, "head_dim is at most 256");

  uint4 keys[kStagedKeys][kKeyStride];
  uint4 values[kStagedKeys][kKeyPacks];
  float query[kRows][kDim];      // times scale and log2(e)
  float weights[kChunk][kRows];  // exp(score - maximum)
  int visible[kRows];            // keys that the row sees in all; 0 for a row that is not there
  int64_t partial[kRows];        // index of the row's first partial
  union {
    float scores[2][kRows][kChunk];                          // by half of the head; phase 1 to 2
    float sums[kGroups > 1 ? kGroups - 1 : 1][kRows][kDim];  // of groups 1 and up; phase 3
  };
};

template <typename T, int kDim, int kRows>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 4 ? 3 : kBlocksPerSm)
    attention_split_kernel(const T* q,        // [B, T, H, D]
                           const T* k_cache,  // [B, K, S, D]
                           const T* v_cache,  // [B, K, S, D]
                           const AttentionArgs a) {
  if constexpr (kOnlyFloat32 && sizeof(T) == 2) return;  // never launched
  using Shared = SplitShared<T, kDim, kRows>;
  constexpr int kKeyPacks = Shared::kKeyPacks, kGroups = Shared::kGroups;
  constexpr int kHalfDim = kDim / 2, kThreadsPerRow = kThreads / kRows;
  __shared__ Shared s;
  const int thread = threadIdx.x, lane = thread % kWarpSize, warp = thread / kWarpSize;
  const int kv_head = blockIdx.y, group_size = a.heads / a.kv_heads;
  const int64_t batch = blockIdx.z;
  const int rows = a.tokens * group_size;  // query rows, token by token
  const int64_t head_offset = (batch * a.kv_heads + kv_head) * a.slots * kDim;
  begin_kernel();

  const int cached = a.seq_lens[batch];
  const int keys = visible_keys(a, cached, a.tokens - 1);
  const int chunks = ceil_div(keys, kChunk);

  // Starts the copies of a chunk's keys or values, and closes their group. A thread owns one pack
  // of every kKeysPerPass-th key; the few threads left over own none.
  constexpr int kKeysPerPass = kThreads / kKeyPacks;
  const CachePolicy policy = evict_first();
  const int copy_key = thread / kKeyPacks, copy_pack = thread % kKeyPacks;
  const auto stage = [&](uint4* tile, int stride, const T* cache, int chunk) {
    if constexpr (Shared::kStaged) {
      const int left = copy_key < kKeysPerPass ? keys - chunk * kChunk : 0;
      const T* source = cache + head_offset + static_cast<int64_t>(chunk) * kChunk * kDim +
                        copy_key * kDim + copy_pack * kPack<T>;
      tile += copy_key * stride + copy_pack;
#pragma unroll
      for (int i = 0; i < kChunk; i += kKeysPerPass) {
        const int key = copy_key + i;
        if (key < left && key < kChunk) cp_async16(tile + i * stride, source + i * kDim, policy);
      }
      cp_async_commit();
    }
  };

  // Loads the query rows of one pass over the keys.
  const auto load_rows = [&](int first_row) {
    const int r = thread / kThreadsPerRow, row = first_row + r;
    const bool present = row < rows;
    const int token = present ? row / group_size : 0;
    const int head = kv_head * group_size + (present ? row % group_size : 0);
    const T* source =
        q + batch * a.q_batch_stride + token * a.q_token_stride + static_cast<int64_t>(head) * kDim;
    for (int d = thread % kThreadsPerRow; d < kDim; d += kThreadsPerRow) {
      s.query[r][d] = present ? to_float(source[d]) * a.scale : 0.0f;
    }
    if (thread % kThreadsPerRow == 0) {
      s.visible[r] = present ? visible_keys(a, cached, token) : 0;
      s.partial[r] = ((batch * a.tokens + token) * a.heads + head) * a.chunks;
    }
  };

  if (static_cast<int>(blockIdx.x) >= chunks) return;
  stage(&s.keys[0][0], Shared::kKeyStride, k_cache, blockIdx.x);
  stage(&s.values[0][0], kKeyPacks, v_cache, blockIdx.x);
  if (rows <= kRows) load_rows(0);

  for (int chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
    const int first_key = chunk * kChunk;
    const int count = keys - first_key < kChunk ? keys - first_key : kChunk;
    const int64_t chunk_offset = head_offset + static_cast<int64_t>(first_key) * kDim;
    cp_async_wait<1>();  // the keys; the values may still be under way

    for (int first_row = 0; first_row < rows; first_row += kRows) {
      if (rows > kRows) {
        __syncthreads();  // the previous rows are done with
        load_rows(first_row);
      }
      __syncthreads();  // keys and query are there; the previous sums and weights are used up

      // 1. Scores. Warps 0 and 1 take the lower half of the head, warps 2 and 3 the upper.
      {
        const int key = thread % kChunk, half = thread / kChunk;
        if (key < count) {
          const T* key_row = Shared::kStaged
                                 ? reinterpret_cast<const T*>(s.keys[key % Shared::kStagedKeys])
                                 : k_cache + chunk_offset + static_cast<int64_t>(key) * kDim;
          key_row += half * kHalfDim;
          const float* query = s.query[0] + half * kHalfDim;
          float dot[kRows] = {};
#pragma unroll 4
          for (int d = 0; d < kHalfDim; d += kPack<T>) {
            float x[kPack<T>];
            load_aligned_pack(key_row + d, x);
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
#pragma unroll
              for (int i = 0; i < kPack<T>; i += 4) {
                const float4 y = *reinterpret_cast<const float4*>(query + r * kDim + d + i);
                dot[r] = fmaf(y.x, x[i], dot[r]);
                dot[r] = fmaf(y.y, x[i + 1], dot[r]);
                dot[r] = fmaf(y.z, x[i + 2], dot[r]);
                dot[r] = fmaf(y.w, x[i + 3], dot[r]);
              }
            }
          }
#pragma unroll
          for (int r = 0; r < kRows; ++r) s.scores[half][r][key] = dot[r];
        }
      }
      __syncthreads();  // scores are there; keys are used up if these were the last rows
      const bool last_rows = first_row + kRows >= rows;
      stage(&s.keys[0][0], Shared::kKeyStride, k_cache,
            last_rows ? chunk + static_cast<int>(gridDim.x) : chunks);

      // 2. Softmax within the chunk. A row that sees none of these keys gets weights of 0.
      for (int r = warp; r < kRows; r += kWarps) {
        const int visible = s.visible[r] - first_key;
        float score[2], maximum = -INFINITY, sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int key = lane + i * kWarpSize;
          score[i] = key < visible ? s.scores[0][r][key] + s.scores[1][r][key] : -INFINITY;
          maximum = score[i] > maximum ? score[i] : maximum;
        }
        maximum = warp_reduce(maximum, Max());
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int key = lane + i * kWarpSize;
          const float weight = key < visible ? exp2f(score[i] - maximum) : 0.0f;
          s.weights[key][r] = weight;
          sum += weight;
        }
        sum = warp_reduce(sum, Add());
        if (lane == 0 && visible > 0) a.stats[s.partial[r] + chunk] = make_float2(maximum, sum);
      }
      cp_async_wait<1>();  // the values; the next keys may still be under way
      __syncthreads();     // weights and values are there; scores are used up

      // 3. Weighted values. Only a chunk with the newest keys can hold some that not every row
      // sees.
      const int group = thread / kHalfDim, d = thread % kHalfDim * 2;
      float2 sum[kRows] = {};
      const auto add_values = [&](auto some_unseen) {
        const T* value_rows =
            Shared::kStaged ? reinterpret_cast<const T*>(s.values) : v_cache + chunk_offset;
#pragma unroll 4
        for (int key = group; key < count; key += kGroups) {
          const float2 value = load_pair(value_rows + key * kDim + d);
#pragma unroll
          for (int r = 0; r < kRows; ++r) {
            // Skipped, not multiplied by a weight of 0: the value may be infinite.
            if (some_unseen.value && first_key + key >= s.visible[r]) continue;
            sum[r].x = fmaf(s.weights[key][r], value.x, sum[r].x);
            sum[r].y = fmaf(s.weights[key][r], value.y, sum[r].y);
          }
        }
      };
      if (group < kGroups) {
        if (visible_keys(a, cached, 0) >= first_key + count) {
          add_values(std::false_type());
        } else {
          add_values(std::true_type());
        }
        if (group > 0) {
#pragma unroll
          for (int r = 0; r < kRows; ++r) {
            *reinterpret_cast<float2*>(&s.sums[group - 1][r][d]) = sum[r];
          }
        }
      }
      __syncthreads();  // sums are there; values are used up if these were the last rows
      if (last_rows) {
        stage(&s.values[0][0], kKeyPacks, v_cache, chunk + static_cast<int>(gridDim.x));
      }
      if (group == 0) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          if (s.visible[r] <= first_key) continue;
          for (int other = 0; other < kGroups - 1; ++other) {
            const float2 more = *reinterpret_cast<const float2*>(&s.sums[other][r][d]);
            sum[r].x += more.x;
            sum[r].y += more.y;
          }
          float* weighted = a.weighted + (s.partial[r] + chunk) * kDim;
          *reinterpret_cast<float2*>(weighted + d) = sum[r];
        }
      }
    }
  }
  cp_async_wait<0>();  // of empty groups; nothing is under way when the block leaves
}

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
  pdl_trigger();
  const int chunks = ceil_div(visible_keys(a, cached_length(a, batch), token), kChunk);
  pdl_wait();

  const float2* stats = a.stats + row * a.chunks;
  const float* weighted = a.weighted + row * a.chunks * head_dim + first_dim + lane * 4;
  const auto load = [&](int i) {
    return *reinterpret_cast<const float4*>(weighted + static_cast<int64_t>(i) * head_dim);
  };
  // The first of a thread's partials is under way while the maximum is found, by every warp for
  // itself.
  float4 first_values = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  float2 first_stat = make_float2(-INFINITY, 0.0f);
  float maximum = -INFINITY;
  if (thread % kWarpSize < chunks) maximum = stats[thread % kWarpSize].x;
  if (group < chunks) {
    first_values = load(group);
    first_stat = stats[group];
  }
  for (int i = thread % kWarpSize + kWarpSize; i < chunks; i += kWarpSize) {
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

}  // namespace

int attention_simple(Launcher& launcher, const void* q, const void* k_cache, const void* v_cache,
                     void* out, int64_t batch, int64_t head_dim, int dtype, AttentionArgs& a) {
  a.chunks = ceil_div(a.slots, kChunk);
  a.stats =
      reinterpret_cast<float2*>(a.weighted + batch * a.tokens * a.heads * a.chunks * head_dim);
  return with_head_dim(head_dim, [&](auto dim) -> int {
    return with_dtype(dtype, [&](auto tag) -> int {
      constexpr int kDim = decltype(dim)::kValue;
      using T = typename decltype(tag)::T;
      // Blocks walk over the chunks: enough to fill the GPU once, so that a large capacity costs a
      // short context nothing. Which block does a chunk does not change its bits.
      const int64_t resident = launcher.multiprocessors() * kBlocksPerSm;
      const int64_t per_head = ceil_div<int64_t>(resident, batch * a.kv_heads);
      const dim3 grid(static_cast<unsigned>(a.chunks < per_head ? a.chunks : per_head),
                      static_cast<unsigned>(a.kv_heads), static_cast<unsigned>(batch));
      constexpr int kMostRows = sizeof(T) == 4 ? 4 : 8;  // float32 would need too many registers
      launcher.run(a.tokens * (a.heads / a.kv_heads) <= 4
                       ? attention_split_kernel<T, kDim, 4>
                       : attention_split_kernel<T, kDim, kMostRows>,
                   grid, kThreads, static_cast<const T*>(q), static_cast<const T*>(k_cache),
                   static_cast<const T*>(v_cache), a);
      launcher.run(attention_merge_kernel<T>,
                   dim3(static_cast<unsigned>(batch * a.tokens * a.heads),
                        static_cast<unsigned>(kDim / kMergeDims)),
                   kMergeThreads, static_cast<T*>(out), kDim, a);
      return launcher.status();
    });
  });
}

}  // namespace td
