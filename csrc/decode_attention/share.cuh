// A CTA's share of the work, and where its blocks lie: from the lengths and the page table, or from the step's plan.
#pragma once

#include "block_source.cuh"
#include "kernel_params.h"
#include "schedule.cuh"

namespace bicl::decode {

// Blocks [begin, end): blocks of `first`'s head in a cluster, else positions in the line. There, a head that another
// CTA ends goes first, so that its results meet while copies are under way.
struct alignas(16) Share {
  static constexpr int kNone = -1;  // first.sequence of a cluster without work
  static constexpr int kCluster = -1;

  int begin = 0, end = 0;
  Place first = {kNone, 0, 0, 0, 0};  // of the first block; undefined in the line where there is none
  int split = 0;                      // how many of the last blocks go first, or kCluster

  __device__ __forceinline__ bool cluster() const { return split == kCluster; }
  // A sequence not behind any of its blocks.
  __device__ __forceinline__ int hint() const { return split > 0 ? 0 : first.sequence; }
  // The position of the block that is the x-th of the line but for that order.
  __device__ __forceinline__ int position(int x) const {
    return x < begin + split ? x + end - begin - split : x - split;
  }
};
static_assert(sizeof(Share) == 32);  // two loads

class Divider {
 public:
  __device__ __forceinline__ explicit Divider(const KernelParams& k)
      : k_(k), p_(k.p), lane_(static_cast<int>(threadIdx.x % 32)) {}

  // The lane's sequence, where clusters may work (a batch of at most 32).
  __device__ __forceinline__ int lane_length() const {
    return k_.cluster_log2 > 0 && lane_ < p_.sequences.batch ? p_.sequences.cache_seqlens[lane_] : 0;
  }

  // Whether clusters work on a (sequence, head) each, in equal shares. There is no balancing: lengths must be even.
  // From registers alone, for a quick start.
  __device__ __forceinline__ bool cluster_share(Share& share, int length) const {
    if (k_.cluster_log2 == 0) return false;
    const int blocks = visible_span(length, p_.window_left, k_.multiple).num_blocks;
    const int longest = __reduce_max_sync(~0u, blocks);
    if (longest > k_.most_cluster_blocks) return false;
    const int batch = p_.sequences.batch;
    if (batch > 1 && 4 * longest * batch > 5 * __reduce_add_sync(~0u, blocks)) return false;
    if (p_.deterministic && num_units(longest, k_.multiple) > k_.max_units) return false;  // parts need room
    share = {};
    share.split = Share::kCluster;
    uint32_t head;
    const int sequence = k_.heads.divide(blockIdx.x >> k_.cluster_log2, head);
    if (sequence >= batch) return true;  // there are enough clusters for stream-K, which some lengths need
    const int count = __shfl_sync(~0u, blocks, sequence);
    // Shares are whole units in deterministic mode, blocks else.
    const int step = p_.deterministic ? unit_blocks(count, k_.multiple) : 1;
    const int steps = p_.deterministic ? num_units(count, k_.multiple) : count;
    const int rank = blockIdx.x & ((1 << k_.cluster_log2) - 1);
    share.begin = min((rank * steps >> k_.cluster_log2) * step, count);
    share.end = min(((rank + 1) * steps >> k_.cluster_log2) * step, count);
    share.first = {sequence, static_cast<int>(head), share.begin, count, __shfl_sync(~0u, length, sequence)};
    return true;
  }

  __device__ __forceinline__ void build_entries(Entry* entries) const {
    decode::build_entries(entries, p_.sequences, p_.window_left, k_.multiple, k_.charge);
  }

  __device__ __forceinline__ Line line(const Entry* entries) const {
    return Line(entries, p_.sequences.batch, k_.teams, blockIdx.x, p_.deterministic, k_.multiple, k_.charge);
  }

  __device__ __forceinline__ Share line_share(const Line& line) const {
    const Bounds bounds = line.share();
    Share share;
    share.begin = bounds.begin;
    share.end = bounds.end;
    if (bounds.split < share.end - share.begin) share.split = bounds.split;
    if (share.begin < share.end) share.first = line.place(share.position(share.begin), bounds.sequence);
    return share;
  }

  // This lane's block of the 32 from x on. `sequence`: not behind it; then the block's own, but for a head that goes
  // first.
  __device__ __forceinline__ BlockSource block_of_lane(const Line& line, const Share& share, int x,
                                                       int& sequence) const {
    x += lane_;
    if (x >= share.end) return {};
    Place place = share.first;
    if (share.cluster()) place.block = x;
    else place = line.place(share.position(x), sequence);
    if (x >= share.begin + share.split) sequence = place.sequence;
    return resolve(place);
  }

 private:
  __device__ __forceinline__ BlockSource resolve(const Place& place) const {
    const Span span = visible_span(place.length, p_.window_left, 1);
    const int key = (span.first_block + place.block) * kBlockKeys;
    const int left = place.length - key;
    BlockSource block = {};
    block.head = k_.head_blocks.divide(place.head);
    block.rows = max(0, min(left, kBlockKeys));
    block.newest = left > 0 && left <= kBlockKeys;
    const int32_t* table = p_.sequences.page_table + place.sequence * p_.sequences.page_table_stride +
                           block.head * p_.sequences.page_table_head_stride;
    if (p_.pages.page_size == kBlockKeys) {
      block.page[0] = left > 0 ? table[key / kBlockKeys] : 0;
    } else {
      block.page[0] = left > 0 ? table[key / 32] : 0;
      block.page[1] = left > 32 ? table[key / 32 + 1] : 0;
    }
    return block;
  }

  const KernelParams& k_;
  const DecodeParams& p_;
  const int lane_;
};

}  // namespace bicl::decode
