// The last wave of a step whose tiles cost about the same, chunks on long prefixes: of 448 on 132 SMs, 52 are left
// after three rounds, and 80 SMs would have nothing to do while they are worked on. The keys of these last tiles, which
// belong to the last section of KV heads, are laid in a row and cut anew, a CTA's share a piece.
#pragma once

#include "plan_shared.cuh"

namespace bicl::prefill {

constexpr int kTailGain = 16;  // blocks that it must save: pieces and their merge cost some ten to fourteen

struct Tail {
  int begin;   // the first list entry that pieces replace
  int splits;  // how many entries they replace
  int pieces;  // behind the list, longest first; 0: nothing is cut
};

// Called by all threads, with the list written. `min_cost` and `max_cost` are of all its `tiles`.
__device__ Tail plan_tail(const PrefillPlanParams& p, PlanShared& s, int tiles, int section, int min_cost,
                          int max_cost) {
  const PrefillPlan& plan = p.plan;
  const int thread = threadIdx.x;
  const Tail none = {tiles, 0, 0};
  const int tickets = tiles * p.num_kv_heads, rest = tickets % p.num_ctas;
  const int entries = (rest + section - 1) / section, ctas = p.num_ctas / section;  // of one KV head
  if (tickets < p.num_ctas || rest == 0 || ctas == 0 || entries > min(tiles, kPlanThreads)) return none;
  if (min_cost < max_cost - max_cost / 8) return none;

  PrefillTile tile = {};
  if (thread < entries) tile = plan.tiles[tiles - entries + thread];
  int total;
  const int begin = block_exclusive_sum(tile.block_end - tile.block_begin, s, total);
  const int end = begin + tile.block_end - tile.block_begin;
  const int share = (total + ctas - 1) / ctas;
  if (share > min_cost - kTailGain) return none;  // so every tile is cut

  const int cut = begin / share;  // pieces end at multiples of the share
  const int pieces = thread < entries ? (end - 1) / share - cut + 1 : 0;
  int count;
  const int slot = block_exclusive_sum(pieces, s, count);
  if (count * section > plan.max_partials) return none;
  int* lengths = s.counts;
  int* ranks = s.counts + count;
  auto piece_begin = [&](int i) { return max(begin, (cut + i) * share); };
  auto piece_end = [&](int i) { return min(end, (cut + i + 1) * share); };
  for (int i = 0; i < pieces; ++i) lengths[slot + i] = piece_end(i) - piece_begin(i);
  __syncthreads();
  for (int i = thread; i < count; i += kPlanThreads) {
    int rank = 0;
    for (int j = 0; j < count; ++j) rank += lengths[j] > lengths[i] || (lengths[j] == lengths[i] && j < i);
    ranks[i] = rank;
  }
  __syncthreads();
  for (int i = 0; i < pieces; ++i) {
    PrefillTile part = tile;
    part.block_begin = tile.block_begin + piece_begin(i) - begin;
    part.block_end = tile.block_begin + piece_end(i) - begin;
    part.split = SplitPlace{slot + i, thread, pieces}.pack();
    const int entry = tiles + ranks[slot + i];
    plan.tiles[entry] = part;
    if (i == 0) plan.split_entries[thread] = entry;
  }
  return {tiles - entries, entries, count};
}

}  // namespace bicl::prefill
