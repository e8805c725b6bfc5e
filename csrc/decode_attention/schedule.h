// Grid and cluster size from what the host knows. Pure arithmetic; measured on an H200 (132 SMs).
#pragma once

#include <algorithm>

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

// CTAs a cluster: few pairs share each among a cluster and combine through distributed shared memory, as long
// as all clusters fit at once (a second wave costs more than it saves). 1: stream-K.
inline int cluster_size(int pairs, int batch, int num_sms) {
  if (num_sms < 128 || batch > 32) return 1;  // a warp reads all lengths
  if (pairs < 5) return 1;                    // too few CTAs to draw the full bandwidth
  if (pairs <= 8) return 8;
  if (pairs <= 16) return 4;
  if (pairs <= 64) return 2;
  return 1;
}

}  // namespace bicl::decode
