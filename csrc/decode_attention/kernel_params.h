// What the launcher adds to a call's parameters.
#pragma once

#include "../common/fast_div.h"
#include "../params.h"

namespace bicl::decode {

struct KernelParams {
  FastDiv heads;        // (KV head, block of query heads) pairs of one sequence
  FastDiv head_blocks;  // blocks of query heads of one KV head
  FastDiv grid;         // CTAs
  int group;            // query heads of one KV head
  int stages;
  int cluster_log2;     // of the CTAs a cluster; 0: stream-K only
  DecodeParams p;
};

}  // namespace bicl::decode
