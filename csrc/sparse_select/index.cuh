// The index of the pages that the last store completed.
#pragma once

#include "../common/layout.cuh"
#include "../common/numeric.cuh"
#include "../common/ptx.cuh"
#include "../rotate_and_store/kernel.cuh"
#include "../store_kv/kernel.cuh"
#include "hadamard.cuh"

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
constexpr int kSteps = 15;                    // between a mean's least and greatest dim
constexpr int kRowPadding = 2 * kChunkBytes;  // between keys: two lanes a key, no bank conflicts

// Shared memory of one page's keys and the means of their clusters, beside ClusterScratch.
inline int key_bytes(const Pages& p) {
  return p.page_size * (p.padded_head_dim * element_bytes(p.dtype) + kRowPadding) +
         kMaxCentroids * p.padded_head_dim * static_cast<int>(sizeof(float));
}

struct ClusterScratch {
  alignas(16) float centre[kMaxHeadDim];
  uint32_t distances[kIndexThreads / 32];  // of each warp's farthest key
  int keys[kIndexThreads / 32];
  int picked[kMaxCentroids];
  int members[kMaxCentroids];
  float2 affine[kMaxCentroids];
  uint8_t nearest[kMaxPageSize];  // of the picked keys, by key
};

// A page's keys of one head as clusters: farthest-first picks, every key to its nearest pick, means. The whole CTA.
template <typename Stored>
class KeyClusters {
  static constexpr int kElements = kChunkBytes / sizeof(Stored);

 public:
  __device__ __forceinline__ KeyClusters(const Pages& pages, char* keys, ClusterScratch& scratch)
      : pages_(pages),
        keys_(keys),
        chunks_(pages.padded_head_dim / kElements),
        pitch_(chunks_ * kChunkBytes + kRowPadding),
        lanes_(kIndexThreads / pages.page_size),
        key_(threadIdx.x / lanes_),
        scratch_(scratch) {}

  // The page's keys, row by row.
  __device__ __forceinline__ void load(int64_t page, int head) const {
    const char* source = static_cast<const char*>(pages_.data) + head_page_offset(pages_, page, head);
    const int rows = kIndexThreads / chunks_, chunk = threadIdx.x % chunks_;
    if (pages_.tile == 64) load_rows<64>(source, threadIdx.x / chunks_, rows, chunk);
    else load_rows<32>(source, threadIdx.x / chunks_, rows, chunk);
    for (int c = threadIdx.x; c < kMaxCentroids; c += kIndexThreads) scratch_.members[c] = 0;
    __syncthreads();
  }

  // Of equal distances the earlier key and the earlier pick win. Ends with a barrier.
  __device__ __forceinline__ void find(int count) const {
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
    if (threadIdx.x % lanes_ == 0) {
      scratch_.nearest[key_] = pick;
      atomicAdd(&scratch_.members[pick], 1);
    }
    __syncthreads();
  }

  // Into the page's record: each mean, turned, in 16 steps between its least and its greatest dim, its keys and their
  // spread around it. A pick that no key is nearest to, being equal to an earlier one, stands for itself.
  __device__ __forceinline__ void put(const PageIndex& index, uint8_t* record, int head, int head_dim) const {
    float* means = reinterpret_cast<float*>(keys_ + pages_.page_size * pitch_);
    for (int dim = threadIdx.x; dim < head_dim; dim += kIndexThreads) {
      float sums[kMaxCentroids] = {};
#pragma unroll 8
      for (int key = 0; key < pages_.page_size; ++key) {
        const int own = scratch_.nearest[key];
        const float x = value(key, dim);
#pragma unroll
        for (int c = 0; c < kMaxCentroids; ++c)
          if (c == own) sums[c] += x;
      }
#pragma unroll
      for (int c = 0; c < kMaxCentroids; ++c) {
        if (c >= index.centroids) break;
        const int members = scratch_.members[c];
        const float mean = members == 0 ? value(scratch_.picked[c], dim) : sums[c] / members;
        means[c * pages_.padded_head_dim + dim] = mean * pages_.k_scale;
      }
    }
    __syncthreads();
    const int rows = pages_.num_kv_heads * index.centroids, own = head * index.centroids;
    uint8_t* affine = record + rows * index.row_bytes;
    uint8_t* facts = affine + rows * sizeof(__half2);
    const int lane = threadIdx.x % 32;
    const float turn_scale = __frsqrt_rn(static_cast<float>(turn_block(head_dim)));
    for (int c = threadIdx.x / 32; c < index.centroids; c += kIndexThreads / 32) {
      float* mean = means + c * pages_.padded_head_dim;
      const int members = scratch_.members[c];
      float low = INFINITY, high = -INFINITY, spread = 0.f;
      for (int key = 0; key < pages_.page_size; ++key) {
        if (scratch_.nearest[key] != c) continue;
        for (int dim = lane; dim < head_dim; dim += 32) {
          const float off = fmaf(value(key, dim), pages_.k_scale, -mean[dim]);
          spread = fmaf(off, off, spread);
        }
      }
      __syncwarp();
      turn_row(mean, head_dim, lane);
      for (int dim = lane; dim < head_dim; dim += 32) {
        const float turned = __fmul_rn(mean[dim], turn_scale);
        mean[dim] = turned;
        low = fminf(low, turned);
        high = fmaxf(high, turned);
      }
#pragma unroll
      for (int step = 16; step > 0; step /= 2) {
        low = fminf(low, __shfl_xor_sync(~0u, low, step));
        high = fmaxf(high, __shfl_xor_sync(~0u, high, step));
        spread += __shfl_xor_sync(~0u, spread, step);
      }
      const __half2 steps = __floats2half2_rn((high - low) / kSteps, low);
      if (lane == 0) {
        scratch_.affine[c] = __half22float2(steps);
        reinterpret_cast<__half2*>(affine)[own + c] = steps;
        facts[2 * (own + c)] = members;
        facts[2 * (own + c) + 1] = from_float<__nv_fp8_e5m2>(spread / (max(members, 1) * head_dim)).__x;
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < index.centroids * index.row_bytes; i += kIndexThreads) {
      const int c = i / index.row_bytes, byte = i - c * index.row_bytes;
      const float2 steps = scratch_.affine[c];
      const auto nibble = [&](int dim) {
        if (dim >= head_dim || steps.x == 0.f) return 0;
        const float n = (means[c * pages_.padded_head_dim + dim] - steps.y) / steps.x;
        return __float2int_rn(fminf(fmaxf(n, 0.f), static_cast<float>(kSteps)));
      };
      // A word holds eight dims: the low nibbles of its bytes four, the high ones the next four.
      const int dim = byte / 4 * 8 + byte % 4;
      record[own * index.row_bytes + i] = nibble(dim) | nibble(dim + 4) << 4;
    }
    __syncthreads();  // the scratch may be used again
  }

 private:
  template <int kTile>
  __device__ __forceinline__ void load_rows(const char* source, int first, int step, int chunk) const {
    if (first >= step) return;
#pragma unroll 4
    for (int row = first; row < pages_.page_size; row += step)
      *reinterpret_cast<uint4*>(keys_ + row * pitch_ + chunk * kChunkBytes) = *reinterpret_cast<const uint4*>(
          source + plane_chunk_offset(row, chunk, pages_.page_size, kTile, pages_.padded_head_dim, sizeof(Stored)));
  }

  template <typename F>
  __device__ __forceinline__ void for_dims(F&& f) const {
    for (int dim = threadIdx.x; dim < pages_.padded_head_dim; dim += kIndexThreads) f(dim);
  }
  __device__ __forceinline__ float value(int key, int dim) const {
    return to_float(reinterpret_cast<const Stored*>(keys_ + key * pitch_)[dim]);
  }

  // Squared, from the lanes' key to the centre.
  __device__ __forceinline__ float distance() const {
    __syncthreads();
    float sum = 0.f;
#pragma unroll 4
    for (int chunk = threadIdx.x % lanes_; chunk < chunks_; chunk += lanes_) {
      const uint4 data = *reinterpret_cast<const uint4*>(keys_ + key_ * pitch_ + chunk * kChunkBytes);
      const auto* values = reinterpret_cast<const Stored*>(&data);
#pragma unroll
      for (int i = 0; i < kElements; i += 4) {
        const float4 centre = *reinterpret_cast<const float4*>(scratch_.centre + chunk * kElements + i);
        const float off[4] = {to_float(values[i]) - centre.x, to_float(values[i + 1]) - centre.y,
                              to_float(values[i + 2]) - centre.z, to_float(values[i + 3]) - centre.w};
#pragma unroll
        for (int each = 0; each < 4; ++each) sum = fmaf(off[each], off[each], sum);
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
  char* keys_;
  const int chunks_, pitch_;
  const int lanes_;  // that share a key
  const int key_;
  ClusterScratch& scratch_;
};

// The record of a page, one head's part. The whole CTA; ends with a barrier.
template <typename Stored>
__device__ __forceinline__ void index_page(const Pages& pages, const PageIndex& index, int64_t page, int head,
                                           int head_dim, char* keys, ClusterScratch& scratch) {
  const KeyClusters<Stored> clusters(pages, keys, scratch);
  clusters.load(page, head);
  clusters.find(index.centroids);
  clusters.put(index, index.records + page * index.record_bytes, head, head_dim);
}

// Grid: (groups of `tokens` tokens, KV heads). Eight CTAs an SM: a prompt's pages should find place at once.
template <typename Stored>
__global__ void __launch_bounds__(kIndexThreads, 8)
    index_pages_kernel(const __grid_constant__ IndexPagesParams p, int tokens) {
  ptx::grid_dependency_wait();  // and nobody is let in sooner than this ends: a choice of pages may read the index early
  extern __shared__ __align__(16) char keys[];
  __shared__ ClusterScratch scratch;
  for_completed(p, blockIdx.x * tokens, tokens,
                [&](int64_t page) { index_page<Stored>(p.pages, p.index, page, blockIdx.y, p.head_dim, keys, scratch); });
}

// A decode step's store and index in one launch: a page that a token completes has its other tokens already.
// Grid: (tokens, KV heads).
template <typename In, typename Stored>
__global__ void __launch_bounds__(kIndexThreads)
    store_and_index_kernel(const __grid_constant__ StoreKvParams p, const PageIndex index, bool vectors, bool choice_follows) {
  if (choice_follows) ptx::grid_launch_dependents();  // which waits by itself for what this one's predecessor wrote
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();  // as in store_kv_kernel
  extern __shared__ __align__(16) char keys[];
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
  index_page<Stored>(p.pages, index, page, head, p.head_dim, keys, scratch);
}

// The same behind a rotation of query and key. Grid: (tokens, KV heads); a CTA has a KV head and its query heads.
template <typename T>
__global__ void __launch_bounds__(kIndexThreads)
    rotate_store_and_index_kernel(const __grid_constant__ RotateAndStoreParams p, const PageIndex index,
                                  const FastDiv pairs, bool choice_follows) {
  if (choice_follows) ptx::grid_launch_dependents();  // as above
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();  // as in store_kv_kernel
  extern __shared__ __align__(16) char keys[];
  __shared__ ClusterScratch scratch;
  const Pages& pages = p.store.pages;
  const int token = blockIdx.x, head = blockIdx.y, group = p.num_q_heads / pages.num_kv_heads;
#pragma unroll 1
  for (int i = threadIdx.x; i < (group + 2) * static_cast<int>(pairs.divisor); i += kIndexThreads) {
    uint32_t pair;
    const int own = pairs.divide(i, pair);
    const int stored = p.num_q_heads + (own - group) * pages.num_kv_heads;  // the first of K's or of V's
    rotate_and_store_pair<T>(p, token, own < group ? head * group + own : stored + head, pair, pages.tile);
  }
  const int64_t slot = p.store.slots[token];
  if (slot < 0 || (slot & (pages.page_size - 1)) != pages.page_size - 1) return;
  __syncthreads();
  index_page<T>(pages, index, slot / pages.page_size, head, p.store.head_dim, keys, scratch);
}

}  // namespace bicl::sparse
