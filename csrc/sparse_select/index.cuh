// Index rows of the pages that the last store completed.
#pragma once

#include "../common/layout.cuh"
#include "../common/numeric.cuh"
#include "../common/ptx.cuh"
#include "../store_kv/kernel.cuh"

namespace bicl::sparse {

constexpr int kIndexThreads = 128;

// Calls f(page) for each page that the slots of this CTA's tokens complete. The whole CTA.
template <typename F>
__device__ __forceinline__ void for_completed(const IndexPagesParams& p, int first, int tokens, F&& f) {
  const int lane = threadIdx.x % 32, size = p.pages.page_size;
  const int64_t slot = lane < tokens && first + lane < p.num_tokens ? p.slots[first + lane] : -1;
  uint32_t left = __ballot_sync(~0u, slot >= 0 && (slot & (size - 1)) == size - 1);
  while (left != 0) {
    f(__shfl_sync(~0u, slot, __ffs(left) - 1) / size);
    left &= left - 1;
  }
}

template <typename Stored>
using BoundParts = float2[kIndexThreads * (kChunkBytes / sizeof(Stored) + 1)];

// Minimum and maximum of each dim over a page's keys. The whole CTA; ends with a barrier.
template <typename Stored, typename Index>
__device__ __forceinline__ void index_bounds(const Pages& pages, const PageIndex& index, int64_t page, int head,
                                             BoundParts<Stored>& parts) {
  constexpr int kElements = kChunkBytes / sizeof(Stored);
  const int chunks = pages.padded_head_dim / kElements, lanes = kIndexThreads / chunks;
  const int chunk = threadIdx.x % chunks, first_row = threadIdx.x / chunks;
  float low[kElements], high[kElements];
#pragma unroll
  for (int i = 0; i < kElements; ++i) low[i] = INFINITY, high[i] = -INFINITY;
  if (first_row < lanes) {
    const char* keys = static_cast<const char*>(pages.data) + head_page_offset(pages, page, head);
#pragma unroll 4
    for (int row = first_row; row < pages.page_size; row += lanes) {
      const uint4 data = *reinterpret_cast<const uint4*>(
          keys +
          plane_chunk_offset(row, chunk, pages.page_size, pages.tile, pages.padded_head_dim, sizeof(Stored)));
      const auto* values = reinterpret_cast<const Stored*>(&data);
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        const float value = to_float(values[i]);
        low[i] = fminf(low[i], value);
        high[i] = fmaxf(high[i], value);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kElements; ++i) parts[threadIdx.x * (kElements + 1) + i] = make_float2(low[i], high[i]);
  __syncthreads();
  auto* target =
      static_cast<Index*>(index.vectors) + (page * pages.num_kv_heads + head) * static_cast<int64_t>(2 * index.dims);
  for (int dim = threadIdx.x; dim < index.dims; dim += kIndexThreads) {
    float2 all = make_float2(INFINITY, -INFINITY);
    for (int lane = 0; lane < lanes; ++lane) {
      const float2 part = parts[(lane * chunks + dim / kElements) * (kElements + 1) + dim % kElements];
      all = make_float2(fminf(all.x, part.x), fmaxf(all.y, part.y));
    }
    target[dim] = from_float<Index>(all.x * pages.k_scale);
    target[index.dims + dim] = from_float<Index>(all.y * pages.k_scale);
  }
  __syncthreads();
}

// Grid: (groups of `tokens` tokens, KV heads).
template <typename Stored, typename Index>
__global__ void __launch_bounds__(kIndexThreads)
    index_bounds_kernel(const __grid_constant__ IndexPagesParams p, int tokens) {
  ptx::grid_dependency_wait();
  // Only now: what is launched behind this one may read all that this one's predecessors wrote.
  ptx::grid_launch_dependents();
  __shared__ BoundParts<Stored> parts;
  for_completed(p, blockIdx.x * tokens, tokens, [&](int64_t page) {
    index_bounds<Stored, Index>(p.pages, p.index, page, blockIdx.y, parts);
  });
}

// A decode step's store and index in one launch: a page that a token completes has its other tokens already.
// Grid: (tokens, KV heads).
template <typename Stored, typename Index>
__global__ void __launch_bounds__(kIndexThreads)
    store_and_index_kernel(const __grid_constant__ StoreKvParams p, const PageIndex index, bool vectors) {
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();  // as in store_kv_kernel
  __shared__ BoundParts<Stored> parts;
  const int token = blockIdx.x, head = blockIdx.y;
  const int64_t slot = p.slots[token];
  if (slot < 0) return;
  const int64_t page = slot / p.pages.page_size;
  const int row = static_cast<int>(slot - page * p.pages.page_size);
  constexpr int kElements = kChunkBytes / sizeof(Stored);
  const int chunks = p.pages.padded_head_dim / kElements;
  const int plane = threadIdx.x / chunks, chunk = threadIdx.x % chunks;
  if (plane < 2) {
    const auto* source = static_cast<const Index*>(plane == 0 ? p.key : p.value) +
                         token * (plane == 0 ? p.key_token_stride : p.value_token_stride) +
                         head * (plane == 0 ? p.key_head_stride : p.value_head_stride);
    *reinterpret_cast<uint4*>(static_cast<char*>(p.pages.data) + chunk_offset(p.pages, page, row, head, plane, chunk)) =
        load_chunk<Index, Stored>(source, chunk * kElements, p.head_dim,
                                  plane == 0 ? p.pages.k_scale : p.pages.v_scale, vectors);
  }
  if (row != p.pages.page_size - 1) return;
  __syncthreads();
  index_bounds<Stored, Index>(p.pages, index, page, head, parts);
}

}  // namespace bicl::sparse
