// What lies between the projection and attention in one launch: query and key are turned (half split, in float32,
// rounded once), and K and V go from the projection's rows into their tiles.
//
// One thread moves two 16-byte chunks of a head: those that turn together, or two that do not turn.
#pragma once

#include "../common/fast_div.h"
#include "../common/layout.cuh"
#include "../common/ptx.cuh"
#include "../rotary/turn.cuh"

namespace bicl {

constexpr int kRotateThreads = 128;

struct RotateAndStoreIndex {
  FastDiv pairs;  // of chunks, in a head
  FastDiv heads;  // of query, key and value
};

// Pair `pair` of a head's chunks; heads of the query, of K and of V in one row. tile: the pages'.
template <typename T>
__device__ __forceinline__ void rotate_and_store_pair(const RotateAndStoreParams& p, int64_t token, int head, int pair,
                                                      int tile) {
  constexpr int kElements = kChunkBytes / sizeof(T);
  using Chunk = Elements<T, kElements>;
  const StoreKvParams& s = p.store;
  int plane = -1;  // a query's, K's, V's
  const T* row;
  if (head < p.num_q_heads) {
    row = static_cast<const T*>(p.query) + token * p.query_token_stride + head * p.query_head_stride;
  } else if ((head -= p.num_q_heads) < s.pages.num_kv_heads) {
    plane = 0;
    row = static_cast<const T*>(s.key) + token * s.key_token_stride + head * s.key_head_stride;
  } else {
    plane = 1;
    head -= s.pages.num_kv_heads;
    row = static_cast<const T*>(s.value) + token * s.value_token_stride + head * s.value_head_stride;
  }
  const int half = p.rotary_dim / 2, turned = half / kElements;
  const bool turns = pair < turned;
  if (plane < 0 && !turns) return;
  const int first = turns ? pair * kElements : p.rotary_dim + (pair - turned) * kElements;
  const int second = first + (turns ? half : (s.head_dim - p.rotary_dim) / 2);
  const int64_t slot = plane < 0 ? 0 : s.slots[token];
  Chunk x = *reinterpret_cast<const Chunk*>(row + first), y = *reinterpret_cast<const Chunk*>(row + second);
  if (turns && plane <= 0)
    turn<T>(x, y, static_cast<const T*>(p.cos) + token * p.cos_stride + first,
            static_cast<const T*>(p.sin) + token * p.sin_stride + first, half);
  if (plane < 0) {
    *reinterpret_cast<Chunk*>(const_cast<T*>(row) + first) = x;
    *reinterpret_cast<Chunk*>(const_cast<T*>(row) + second) = y;
    return;
  }
  if (slot < 0) return;
  const int page_log2 = s.pages.page_size == 64 ? 6 : 5;
  const int token_of_page = static_cast<int>(slot) & (s.pages.page_size - 1);
  char* target = static_cast<char*>(s.pages.data) + head_page_offset(s.pages, slot >> page_log2, head) +
                 plane * s.pages.page_size * s.head_dim * static_cast<int>(sizeof(T));
  const auto place = [&](int element) {
    return reinterpret_cast<Chunk*>(
        target + plane_chunk_offset(token_of_page, element / kElements, s.pages.page_size, tile, s.head_dim, sizeof(T)));
  };
  *place(first) = x;
  *place(second) = y;
}

template <typename T, int kTile>
__global__ void __launch_bounds__(kRotateThreads)
    rotate_and_store_kernel(const __grid_constant__ RotateAndStoreParams p, const RotateAndStoreIndex index) {
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();  // as in store_kv_kernel
  uint32_t pair, head;
  const uint32_t i = blockIdx.x * kRotateThreads + threadIdx.x;
  const int64_t token = index.heads.divide(index.pairs.divide(i, pair), head);
  if (token < p.store.num_tokens) rotate_and_store_pair<T>(p, token, head, pair, kTile);
}

}  // namespace bicl
