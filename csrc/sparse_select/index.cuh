// The index of the pages that the last store completed.
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

constexpr int kMaxCentroids = 8, kMaxHeadDim = 256, kMaxPageSize = 64;

struct ClusterScratch {
  float centre[kMaxHeadDim];
  uint32_t distances[kIndexThreads / 32];  // of each warp's farthest key
  int keys[kIndexThreads / 32];
  int picked[kMaxCentroids];
  uint8_t nearest[kMaxPageSize];  // of the picked keys, by key
};

// A page's keys of one head as clusters: farthest-first picks, every key to its nearest pick, means. The whole CTA.
template <typename Stored>
class KeyClusters {
  static constexpr int kElements = kChunkBytes / sizeof(Stored);

 public:
  __device__ __forceinline__ KeyClusters(const Pages& pages, int64_t page, int head, ClusterScratch& scratch)
      : pages_(pages),
        keys_(static_cast<const char*>(pages.data) + head_page_offset(pages, page, head)),
        lanes_(kIndexThreads / pages.page_size),
        key_(threadIdx.x / lanes_),
        scratch_(scratch) {}

  // Of equal distances the earlier key and the earlier pick win. Ends with a barrier.
  __device__ __forceinline__ void find(int count) {
    for_dims([&](int dim) {
      float sum = 0.f;
#pragma unroll 8
      for (int key = 0; key < pages_.page_size; ++key) sum += value(key, dim);
      scratch_.centre[dim] = sum / pages_.page_size;
    });
    float nearest = distance();
    int pick = 0;
#pragma unroll 1
    for (int next = 0; next < count; ++next) {
      const int key = farthest(nearest);
      for_dims([&](int dim) { scratch_.centre[dim] = value(key, dim); });
      if (threadIdx.x == 0) scratch_.picked[next] = key;
      const float here = distance();
      if (next == 0 || here < nearest) nearest = here, pick = next;
    }
    if (threadIdx.x % lanes_ == 0) scratch_.nearest[key_] = pick;
    __syncthreads();
  }

  // Into the page's record. A pick that no key is nearest to, being equal to an earlier one, stays as it is.
  __device__ __forceinline__ void put(const PageIndex& index, uint8_t* record, int head) const {
    auto* rows = reinterpret_cast<__nv_fp8_e4m3*>(record + head * index.centroids * index.row_bytes);
    uint8_t* counts = record + pages_.num_kv_heads * index.centroids * index.row_bytes + head * index.centroids;
    for (int dim = threadIdx.x; dim < index.row_bytes; dim += kIndexThreads) {
      float sums[kMaxCentroids] = {};
      int members[kMaxCentroids] = {};
#pragma unroll 4
      for (int key = 0; key < pages_.page_size; ++key) {
        const int own = scratch_.nearest[key];
        const float x = value(key, dim);
#pragma unroll
        for (int c = 0; c < kMaxCentroids; ++c)
          if (c == own) sums[c] += x, ++members[c];
      }
#pragma unroll
      for (int c = 0; c < kMaxCentroids; ++c) {
        if (c >= index.centroids) break;
        const float mean = members[c] == 0 ? value(scratch_.picked[c], dim) : sums[c] / members[c];
        rows[c * index.row_bytes + dim] = from_float<__nv_fp8_e4m3>(mean * pages_.k_scale);
        if (dim == 0) counts[c] = members[c];
      }
    }
    __syncthreads();  // the scratch may be used again
  }

 private:
  template <typename F>
  __device__ __forceinline__ void for_dims(F&& f) const {
    for (int dim = threadIdx.x; dim < pages_.padded_head_dim; dim += kIndexThreads) f(dim);
  }
  __device__ __forceinline__ const char* chunk_of(int key, int chunk) const {
    return keys_ +
           plane_chunk_offset(key, chunk, pages_.page_size, pages_.tile, pages_.padded_head_dim, sizeof(Stored));
  }
  __device__ __forceinline__ float value(int key, int dim) const {
    return to_float(reinterpret_cast<const Stored*>(chunk_of(key, dim / kElements))[dim % kElements]);
  }

  // Squared, from the lane's key to the centre.
  __device__ __forceinline__ float distance() const {
    __syncthreads();
    const int chunks = pages_.padded_head_dim / kElements;
    float sum = 0.f;
#pragma unroll 4
    for (int chunk = threadIdx.x % lanes_; chunk < chunks; chunk += lanes_) {
      const uint4 data = *reinterpret_cast<const uint4*>(chunk_of(key_, chunk));
      const auto* values = reinterpret_cast<const Stored*>(&data);
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        const float off = to_float(values[i]) - scratch_.centre[chunk * kElements + i];
        sum = fmaf(off, off, sum);
      }
    }
    for (int step = 1; step < lanes_; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
    return sum;
  }

  // The key with the greatest distance. Distances are not negative: they order as their bits do.
  __device__ __forceinline__ int farthest(float distance) const {
    const uint32_t bits = __float_as_uint(distance);
    const uint32_t most = __reduce_max_sync(~0u, bits);
    const int first = __shfl_sync(~0u, key_, __ffs(__ballot_sync(~0u, bits == most)) - 1);
    if (threadIdx.x % 32 == 0) {
      scratch_.distances[threadIdx.x / 32] = most;
      scratch_.keys[threadIdx.x / 32] = first;
    }
    __syncthreads();  // the centre has been read, too
    int best = 0;
#pragma unroll
    for (int warp = 1; warp < kIndexThreads / 32; ++warp)
      if (scratch_.distances[warp] > scratch_.distances[best]) best = warp;
    return scratch_.keys[best];
  }

  const Pages& pages_;
  const char* keys_;
  const int lanes_;  // that share a key
  const int key_;
  ClusterScratch& scratch_;
};

// The record of a page, one head's part. The whole CTA; ends with a barrier.
template <typename Stored>
__device__ __forceinline__ void index_page(const Pages& pages, const PageIndex& index, int64_t page, int head,
                                           ClusterScratch& scratch) {
  KeyClusters<Stored> clusters(pages, page, head, scratch);
  clusters.find(index.centroids);
  clusters.put(index, index.records + page * index.record_bytes, head);
}

// Grid: (groups of `tokens` tokens, KV heads).
template <typename Stored>
__global__ void __launch_bounds__(kIndexThreads)
    index_pages_kernel(const __grid_constant__ IndexPagesParams p, int tokens) {
  ptx::grid_dependency_wait();
  // Only now: what is launched behind this one may read all that this one's predecessors wrote.
  ptx::grid_launch_dependents();
  __shared__ ClusterScratch scratch;
  for_completed(p, blockIdx.x * tokens, tokens,
                [&](int64_t page) { index_page<Stored>(p.pages, p.index, page, blockIdx.y, scratch); });
}

// A decode step's store and index in one launch: a page that a token completes has its other tokens already.
// Grid: (tokens, KV heads).
template <typename In, typename Stored>
__global__ void __launch_bounds__(kIndexThreads)
    store_and_index_kernel(const __grid_constant__ StoreKvParams p, const PageIndex index, bool vectors) {
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();  // as in store_kv_kernel
  __shared__ ClusterScratch scratch;
  const int token = blockIdx.x, head = blockIdx.y;
  const int64_t slot = p.slots[token];
  if (slot < 0) return;
  const int64_t page = slot / p.pages.page_size;
  const int row = static_cast<int>(slot - page * p.pages.page_size);
  constexpr int kElements = kChunkBytes / sizeof(Stored);
  const int chunks = p.pages.padded_head_dim / kElements;
  const int plane = threadIdx.x / chunks, chunk = threadIdx.x % chunks;
  if (plane < 2) {
    const auto* source = static_cast<const In*>(plane == 0 ? p.key : p.value) +
                         token * (plane == 0 ? p.key_token_stride : p.value_token_stride) +
                         head * (plane == 0 ? p.key_head_stride : p.value_head_stride);
    *reinterpret_cast<uint4*>(static_cast<char*>(p.pages.data) + chunk_offset(p.pages, page, row, head, plane, chunk)) =
        load_chunk<In, Stored>(source, chunk * kElements, p.head_dim,
                                  plane == 0 ? p.pages.k_scale : p.pages.v_scale, vectors);
  }
  if (row != p.pages.page_size - 1) return;
  __syncthreads();
  index_page<Stored>(p.pages, index, page, head, scratch);
}

}  // namespace bicl::sparse
