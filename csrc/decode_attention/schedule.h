// Grid and cluster size from what the host knows. Pure arithmetic; measured on an H200 (132 SMs).
#pragma once

#include <algorithm>
#include <climits>

namespace bicl::decode {

constexpr int kMaxGrid = 256;

// Blocks of 8 query heads that one CTA serves; larger groups are worked on in turns, their K and V read again (from
// L2 mostly). Wide heads leave no registers for two.
inline int cta_head_blocks(int group, int padded_head_dim) { return group <= 8 || padded_head_dim > 128 ? 1 : 2; }

// CTAs of stream-K. 128 of 132 SMs beat 132 wherever the number of (sequence, head) pairs divides it, because
// no CTA then straddles two heads (each straddle costs a second merge); another such grid wins elsewhere.
inline int stream_k_grid(int pairs, int num_sms) {
  const int even = std::max(num_sms / 32 * 32, std::min(num_sms, 32));
  if (pairs <= num_sms) {
    const int aligned = num_sms / pairs * pairs;
    if (aligned * 20 >= even * 17) return aligned;
  }
  return std::min(even, kMaxGrid);
}

// CTAs a cluster, as a power of two: few pairs share each among a cluster and combine through distributed shared
// memory, as long as all clusters fit at once (a second wave costs more than it saves). 0: stream-K.
// `active[i]`: clusters of 1 << i that the card holds.
inline int cluster_log2(int pairs, int batch, int num_sms, const int (&active)[4]) {
  if (num_sms < 128 || batch > 32) return 0;  // a warp reads all lengths
  for (int log2 = 3; log2 > 0; --log2)
    if (active[log2] >= pairs) return log2;
  return 0;
}

// Blocks of a head beyond which clusters leave the work to stream-K: the CTAs of a few do not draw the full bandwidth,
// and clusters of many leave SMs without work. A single pair's parts are so many in stream-K that clusters win for
// longer.
inline int most_cluster_blocks(int pairs) {
  if (pairs == 1) return 768;
  return pairs < 5 || pairs > 16 ? 256 : INT_MAX;
}

}  // namespace bicl::decode
