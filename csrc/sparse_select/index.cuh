// Index rows of the pages that the last store completed.
#pragma once

#include "../common/layout.cuh"
#include "../common/numeric.cuh"
#include "../common/ptx.cuh"

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

// Minimum and maximum of each dim over a page's keys. Grid: (groups of `tokens` tokens, KV heads).
template <typename Stored, typename Index>
__global__ void __launch_bounds__(kIndexThreads)
    index_bounds_kernel(const __grid_constant__ IndexPagesParams p, int tokens) {
  ptx::grid_dependency_wait();
  // Only now: what is launched behind this one may read all that this one's predecessors wrote.
  ptx::grid_launch_dependents();
  constexpr int kElements = kChunkBytes / sizeof(Stored);
  __shared__ float2 parts[kIndexThreads * (kElements + 1)];
  const int head = blockIdx.y;
  const int chunks = p.pages.padded_head_dim / kElements, lanes = kIndexThreads / chunks;
  const int chunk = threadIdx.x % chunks, first_row = threadIdx.x / chunks;
  for_completed(p, blockIdx.x * tokens, tokens, [&](int64_t page) {
    float low[kElements], high[kElements];
#pragma unroll
    for (int i = 0; i < kElements; ++i) low[i] = INFINITY, high[i] = -INFINITY;
    if (first_row < lanes) {
      const char* keys = static_cast<const char*>(p.pages.data) + head_page_offset(p.pages, page, head);
#pragma unroll 4
      for (int row = first_row; row < p.pages.page_size; row += lanes) {
        const uint4 data = *reinterpret_cast<const uint4*>(
            keys + plane_chunk_offset(row, chunk, p.pages.page_size, p.pages.tile, p.pages.padded_head_dim,
                                      sizeof(Stored)));
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
    auto* target = static_cast<Index*>(p.index.vectors) +
                   (page * p.pages.num_kv_heads + head) * static_cast<int64_t>(2 * p.index.dims);
    for (int dim = threadIdx.x; dim < p.index.dims; dim += kIndexThreads) {
      float2 all = make_float2(INFINITY, -INFINITY);
      for (int lane = 0; lane < lanes; ++lane) {
        const float2 part = parts[(lane * chunks + dim / kElements) * (kElements + 1) + dim % kElements];
        all = make_float2(fminf(all.x, part.x), fmaxf(all.y, part.y));
      }
      target[dim] = from_float<Index>(all.x * p.pages.k_scale);
      target[p.index.dims + dim] = from_float<Index>(all.y * p.pages.k_scale);
    }
    __syncthreads();
  });
}

}  // namespace bicl::sparse
