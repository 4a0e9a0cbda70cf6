// From the histogram of a row's weights: which bins hold a cut or the drawn token.
#pragma once

#include "sample.cuh"

namespace td {

// Weight that the nucleus must reach, of `total`: at least 1, so that the best token stays.
__device__ __forceinline__ Word nucleus_weight(double top_p, Word total) {
  const Word needed = static_cast<Word>(ceil(top_p * static_cast<double>(total)));
  return max(min(needed, total), Word{1});
}

struct Plan {
  int k_bin = -1;                    // holds the last token of top-k, somewhere inside it
  int p_first = kBins, p_last = -1;  // hold the edge of the nucleus
  int m_bin = -1;                    // holds the min-p edge
  int d_first = kBins, d_last = -1;  // hold the drawn point
  Word k_total;                      // weight left by top-k, unless k_bin has to tell
  uint32_t listed = 0;               // tokens in all these bins

  __device__ bool marks(int bin) const {
    return bin == k_bin || bin == m_bin || (bin >= p_first && bin <= p_last) ||
           (bin >= d_first && bin <= d_last);
  }
};

// The uniform of a row's next draw; `is_draw` false: nothing is to be drawn.
struct PlanUniform {
  bool is_draw;
  Word uniform;
};

__device__ __forceinline__ PlanUniform plan_uniform(const SampleParams& params,
                                                    const SampleRow* rows, int row, bool is_draw) {
  if (!is_draw) return {false, 0};
  return {true, uniform62(params.seed, rows[row].draws, row, kDrawToken)};
}

// Every bound is exact up to one bin; what one leaves open widens the next. Called by whole warps.
__device__ __forceinline__ Plan make_plan(const Prefixes& in, const SampleParams& params,
                                          PlanUniform draw) {
  Plan plan;
  const Word total = in.mass[kBins];
  Word low = total, high = total;  // bounds of the weight that is kept
  if (params.top_k > 0 && static_cast<uint32_t>(params.top_k) < in.count[kBins]) {
    const uint32_t k = static_cast<uint32_t>(params.top_k);
    const int bin = find_bin(in.count, k - 1);
    low = high = in.mass[bin + 1];
    if (in.count[bin + 1] != k) {
      plan.k_bin = bin;
      low = in.mass[bin] + 1;
    }
  }
  plan.k_total = high;
  if (params.top_p < 1.0) {
    const Word first = nucleus_weight(params.top_p, low);
    plan.p_first = find_bin(in.mass, first - 1);
    plan.p_last = find_bin(in.mass, nucleus_weight(params.top_p, high) - 1);
    low = first;
    high = min(high, in.mass[plan.p_last + 1]);
  }
  if (params.log_min_p > -INFINITY) {
    const int bin = bin_at(params.log_min_p);
    if (in.mass[bin] < high) {  // else the others cut before it
      if (in.count[bin] != in.count[bin + 1]) plan.m_bin = bin;
      low = max(min(low, in.mass[bin]), Word{1});
      high = min(high, in.mass[bin + 1]);
    }
  }
  if (draw.is_draw) {
    plan.d_first = find_bin(in.mass, scale_uniform(draw.uniform, low));
    plan.d_last = find_bin(in.mass, scale_uniform(draw.uniform, high));
  }
  // Tokens in the union of two ranges and two single bins.
  const auto tokens = [&](int first, int last) {
    return first <= last ? in.count[last + 1] - in.count[first] : 0u;
  };
  const bool is_joint = plan.p_first <= plan.d_last && plan.d_first <= plan.p_last;
  plan.listed = is_joint ? tokens(min(plan.p_first, plan.d_first), max(plan.p_last, plan.d_last))
                         : tokens(plan.p_first, plan.p_last) + tokens(plan.d_first, plan.d_last);
  const auto is_ranged = [&](int bin) {
    return (bin >= plan.p_first && bin <= plan.p_last) ||
           (bin >= plan.d_first && bin <= plan.d_last);
  };
  if (plan.k_bin >= 0 && !is_ranged(plan.k_bin)) plan.listed += tokens(plan.k_bin, plan.k_bin);
  if (plan.m_bin >= 0 && plan.m_bin != plan.k_bin && !is_ranged(plan.m_bin)) {
    plan.listed += tokens(plan.m_bin, plan.m_bin);
  }
  return plan;
}

}  // namespace td
