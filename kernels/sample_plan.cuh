// From the histogram of a row's weights: which bins hold a cut or the drawn token.
#pragma once

#include "sample.cuh"

namespace td {

// Weight that the nucleus must reach, of `total`: at least 1, so that the best token stays.
__device__ __forceinline__ Word nucleus_weight(double top_p, Word total) {
  const Word needed = static_cast<Word>(ceil(top_p * static_cast<double>(total)));
  return max(min(needed, total), Word{1});
}

// Bins from first to last; none if last comes before first.
struct Bins {
  int first = kBins, last = -1;

  __device__ bool has(int bin) const { return bin >= first && bin <= last; }
};

struct Plan {
  static constexpr int kRanges = 4;
  int k_bin = -1;       // holds the last token of top-k, somewhere inside it
  int m_bin = -1;       // holds the min-p edge
  Bins nucleus, drawn;  // hold the edge of the nucleus and the drawn point
  Bins lone_k, lone_m;  // k_bin and m_bin, unless they are among the others
  Word k_total;         // weight left by top-k, unless k_bin has to tell
  uint32_t listed = 0;  // tokens in all these bins

  // The bins that matter, as disjoint ranges.
  __device__ Bins range(int i) const {
    return i == 0 ? nucleus : i == 1 ? drawn : i == 2 ? lone_k : lone_m;
  }
};

// Every bound is exact up to one bin; what one leaves open widens the next. Called by whole warps.
__device__ __forceinline__ Plan make_plan(const Prefixes& in, const SampleParams& params,
                                          bool is_draw, Word uniform) {
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
    plan.nucleus.first = find_bin(in.mass, first - 1);
    plan.nucleus.last = find_bin(in.mass, nucleus_weight(params.top_p, high) - 1);
    low = first;
    high = min(high, in.mass[plan.nucleus.last + 1]);
  }
  if (params.log_min_p > -INFINITY) {
    const int bin = bin_at(params.log_min_p);
    if (in.mass[bin] < high) {  // else the others cut before it
      if (in.count[bin] != in.count[bin + 1]) plan.m_bin = bin;
      low = max(min(low, in.mass[bin]), Word{1});
      high = min(high, in.mass[bin + 1]);
    }
  }
  if (is_draw) {
    plan.drawn.first = find_bin(in.mass, scale_uniform(uniform, low));
    plan.drawn.last = find_bin(in.mass, scale_uniform(uniform, high));
  }
  // Disjoint, so that no token is listed twice.
  Bins &p = plan.nucleus, &d = plan.drawn;
  if (p.first <= d.last && d.first <= p.last) {
    p = {min(p.first, d.first), max(p.last, d.last)};
    d = {};
  }
  const auto is_ranged = [&](int bin) { return p.has(bin) || d.has(bin); };
  if (plan.k_bin >= 0 && !is_ranged(plan.k_bin)) plan.lone_k = {plan.k_bin, plan.k_bin};
  if (plan.m_bin >= 0 && plan.m_bin != plan.k_bin && !is_ranged(plan.m_bin)) {
    plan.lone_m = {plan.m_bin, plan.m_bin};
  }
#pragma unroll
  for (int i = 0; i < Plan::kRanges; ++i) {
    const Bins bins = plan.range(i);
    if (bins.first <= bins.last) plan.listed += in.count[bins.last + 1] - in.count[bins.first];
  }
  return plan;
}

}  // namespace td
