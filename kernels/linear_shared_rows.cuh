// Activations of more rows than registers hold: in shared memory, normed in place.
#pragma once

#include "linear_activations.cuh"

namespace td {

constexpr int kLineBytes = kWarpSize * kPackBytes;  // a warp's columns of a row, of one chunk
constexpr int kMaxSlots = 2;

struct RowsArgs : LinearArgs {
  int slots;  // chunks (the columns of a stage, of all rows) that shared memory has room for
};

// One warp's part of the activations: its own columns of every chunk, so that nobody else needs to
// be waited for. They come in by asynchronous copies, a slot for each chunk, and stay if there are
// no more chunks than slots; otherwise every group of tiles takes all of them again, and the copies
// of one are under way while others are multiplied. With a norm, its weights are one more row.
//
// A slot is [warp][row][pack of a lane]. Packs of odd rows have their halves of 64 bytes swapped
// two by two, so that a quarter warp that reads fragments meets no bank twice.
template <typename T, bool kNorm>
class SharedRows {
 public:
  __device__ __forceinline__ SharedRows(const RowsArgs& args, unsigned char* slots, float* squares)
      : a_(args),
        lane_(threadIdx.x % kWarpSize),
        warp_(threadIdx.x / kWarpSize),
        lines_(args.rows + (kNorm ? 1 : 0)),
        own_(slots + warp_ * lines_ * kLineBytes),
        squares_(squares + warp_ * kWarpSize + lane_),
        column_((lane_ / 8 * kWarps + warp_) * kPairCols + lane_ % 8 * 8),
        chunks_(ceil_div(args.inputs, kStageCols)) {}

  // The norm's part of the first chunks: weights, so it may come before the predecessor is done.
  __device__ __forceinline__ void fetch_norm() const {
    if constexpr (kNorm) {
      for (int slot = 0; slot < a_.slots; ++slot) copy_norm(slot * kStageCols, slot);
    }
  }

  __device__ __forceinline__ void fetch_first() const {
    for (int slot = 0; slot < a_.slots; ++slot) {
      copy_rows(slot * kStageCols, slot);
      close();
    }
  }

  // After the chunk that begins at column `start` has been read: the one that takes its slot.
  __device__ __forceinline__ void fetch_next(int start, bool is_last) {
    if (chunks_ > a_.slots) {  // else they stay
      int next = start + a_.slots * kStageCols;
      const bool wraps = next >= a_.inputs;
      if (wraps) next -= chunks_ * kStageCols;
      if (!wraps || !is_last) {
        if (kNorm) copy_norm(next, slot_);
        copy_rows(next, slot_);
      }
    }
    close();
    slot_ = slot_ + 1 < a_.slots ? slot_ + 1 : 0;
  }

  // Of float16, whose activations are scaled: the squares of every column beforehand.
  __device__ __forceinline__ void find_scale(Header& header) {
    if constexpr (kNorm && !kLateScale<T>) {
#pragma unroll 1
      for (int start = 0; start < a_.inputs; start += kStageCols) {
        cp_async_wait<kMaxSlots - 1>();
#pragma unroll 4
        for (int r = 0; r < a_.rows; ++r) add_squares(start, r, *pack(r));
        fetch_next(start, false);
      }
      write_squares(header);
      named_barrier(kConsumerBarrier, kConsumers);  // the squares are there
    }
  }

  // Waits for the next chunk, which begins at column `start`, and norms it if it has just come.
  __device__ __forceinline__ void await(int start, bool first, const Header& header) const {
    cp_async_wait<kMaxSlots - 1>();
    if (kNorm && (first || chunks_ > a_.slots)) {
      const uint4 norm = *line(a_.rows, slot_);
#pragma unroll 4
      for (int r = 0; r < a_.rows; ++r) {
        const uint4 raw = *pack(r);
        if (kLateScale<T> && first) add_squares(start, r, raw);
        *pack(r) = normed<T>(raw, norm, kLateScale<T> ? 1.0f : norm_scale(a_, header, r));
      }
    }
    __syncwarp();  // the packs are there
  }

  // The chunk as fragments: lane (g, t) has rows g and g + 8. Rows that are not there repeat the
  // last one, since a row's sums depend on no other row.
  __device__ __forceinline__ void read(uint4 (&low)[kBlocks], uint4 (&high)[kBlocks]) const {
    const int g = lane_ / 4, end = a_.rows - 1;
    read_row(g < end ? g : end, low);
    read_row(g + 8 < end ? g + 8 : end, high);
    __syncwarp();  // they have been read
  }

  // Adds the squares up over the lanes. A barrier must follow.
  __device__ __forceinline__ void write_squares(Header& header) const {
#pragma unroll 4
    for (int r = 0; r < a_.rows; ++r) {
      const float sum = warp_reduce(squares_[r * kConsumers], Add());
      if (lane_ == 0) header.squares[r][warp_] = sum;
    }
  }

 private:
  __device__ __forceinline__ uint4* line(int row, int slot) const {
    return reinterpret_cast<uint4*>(own_ + (slot * kWarps * lines_ + row) * kLineBytes) + lane_;
  }

  // Of row `row`: what this lane copies and norms.
  __device__ __forceinline__ uint4* pack(int row) const {
    return reinterpret_cast<uint4*>(own_ + (slot_ * kWarps * lines_ + row) * kLineBytes) +
           (lane_ ^ (row % 2 * 4));
  }

  // Closes a group of copies, and an empty one for every slot that is missing: all groups but the
  // newest kMaxSlots - 1 then have the next chunk among them.
  __device__ __forceinline__ void close() const {
    cp_async_commit();
    if (a_.slots < kMaxSlots) cp_async_commit();
  }

  __device__ __forceinline__ void copy(uint4* to, const void* from, int column) const {
    if (column < a_.inputs) {
      cp_async16(to, static_cast<const T*>(from) + column);
    } else {
      *to = make_uint4(0, 0, 0, 0);
    }
  }

  __device__ __forceinline__ void copy_norm(int start, int slot) const {
    copy(line(a_.rows, slot), a_.norm, start + column_);
  }

  __device__ __forceinline__ void copy_rows(int start, int slot) const {
    const T* from = static_cast<const T*>(a_.x);
    unsigned char* to = own_ + slot * kWarps * lines_ * kLineBytes;
#pragma unroll 2
    for (int r = 0; r < a_.rows; ++r) {
      copy(reinterpret_cast<uint4*>(to) + (lane_ ^ (r % 2 * 4)), from, start + column_);
      from += a_.inputs;
      to += kLineBytes;
    }
  }

  // Kept where this warp's sums will be: in the order of load_resident, by lane and then by chunk.
  __device__ __forceinline__ void add_squares(int start, int row, const uint4& raw) const {
    float& squares = squares_[row * kConsumers];
    squares = (start == 0 ? 0.0f : squares) + sum_of_squares<T>(raw);
  }

  __device__ __forceinline__ void read_row(int row, uint4 (&x)[kBlocks]) const {
    constexpr int kBlockBytes = 4 * kPackBytes;
    const int t = lane_ % 4, swap = row % 2 * kBlockBytes;
    const unsigned char* from =
        own_ + (slot_ * kWarps * lines_ + row) * kLineBytes + t * kPackBytes;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      x[i] = *reinterpret_cast<const uint4*>(from + i * kBlockBytes + (i % 2 ? -swap : swap));
    }
  }

  const RowsArgs& a_;
  int lane_, warp_, lines_;
  unsigned char* own_;
  float* squares_;  // of this lane: row r's at r * kConsumers
  int column_;      // of this lane's packs in a chunk
  int chunks_;
  int slot_ = 0;  // of the next chunk
};

}  // namespace td
