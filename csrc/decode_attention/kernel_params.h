// What the launcher adds to a call's parameters.
#pragma once

#include "../common/fast_div.h"
#include "../params.h"

namespace bicl::decode {

// What a head counts when work is divided, in blocks: those it has and `end` more, `least` at least.
struct Charge {
  int end, least;
};

// How CTAs share the heads of a sequence. A team's CTAs walk the same keys side by side, and each takes every size-th
// head: what lies together in a page is read together.
struct Teams {
  FastDiv size;   // CTAs of one; divides the heads
  FastDiv count;
  int heads;      // of a sequence that one CTA takes
};

struct KernelParams {
  const char* plan;     // of the step, or null: each CTA finds its share itself; see plan.cuh
  FastDiv heads;        // (KV head, block of query heads) pairs of one sequence
  FastDiv head_blocks;  // blocks of query heads of one KV head
  Teams teams;          // of all CTAs
  int group;            // query heads of one KV head
  int stages;
  int cluster_log2;     // of the CTAs a cluster; 0: stream-K only
  int most_cluster_blocks;  // of a head that clusters work on
  int multiple;         // blocks of a sequence are counted in multiples of this: the ring's groups, or 1
  Charge charge;
  int max_units;        // of one head that a cluster has room for in deterministic mode
  DecodeParams p;
};

}  // namespace bicl::decode
