// Our decode kernel on token-major pages [page][K, V][64 tokens][heads][head_dim]: what the tiles themselves
// are worth. Schedule, ring, arithmetic and combine are the product's; only the copy into shared memory differs.
//
// A row of one head is 256 bytes, too short for the copy engine (4x slower, measured), and has to be permuted on
// the way. So the producer warp copies 16 bytes a thread with cp.async. The pages are as cold and the cache hint is
// the same as for tiles.
#include "decode_attention/api.h"
#include "decode_attention/instantiate.cuh"
#include "decode_attention/launch.cu"

namespace bicl::decode {

struct TokenMajorLoader {
  static constexpr int kFullArrivals = 32;
  static constexpr bool kClusters = true;
  static constexpr bool kLaneCopies = false;

  uint64_t policy;

  __device__ TokenMajorLoader() : policy(ptx::evict_first_policy()) {}

  // Called by the whole warp; the block is lane `turn`'s. Pages hold kBlockKeys tokens.
  template <typename T>
  __device__ __forceinline__ void load(const BlockSource& block, int turn, int lane, const Pages& pages,
                                       uint32_t stage, uint32_t full, uint32_t empty, uint32_t parity) {
    constexpr int kHeadBytes = T::kHeadDim * T::kBytes;  // one token of one head
    constexpr int kChunks = kHeadBytes / kChunkBytes;  // of a token
    const int rows = __shfl_sync(~0u, block.rows, turn);
    const int head = __shfl_sync(~0u, block.head, turn);
    const int64_t page = __shfl_sync(~0u, block.page[0], turn);
    ptx::mbarrier_wait(empty, parity);
    if (rows > 0) {
      const int token_bytes = pages.num_kv_heads * kHeadBytes;
      const int chunk = lane % kChunks, first = lane / kChunks;
      const char* source = static_cast<const char*>(pages.data) +
                           page * (2 * kBlockKeys) * token_bytes + first * token_bytes + head * kHeadBytes +
                           chunk * kChunkBytes;
      if (rows == kBlockKeys) copy_planes<T, true>(stage, source, token_bytes, first, chunk, rows);
      else copy_planes<T, false>(stage, source, token_bytes, first, chunk, rows);
    }
    ptx::cp_async_arrive(full);
    __syncwarp();
  }

 private:
  // The permutation repeats every 8 tokens: the places of kStep tokens serve the whole plane.
  template <typename T, bool kFull>
  __device__ __forceinline__ void copy_planes(uint32_t stage, const char* source, int token_bytes, int first,
                                              int chunk, int rows) {
    constexpr int kTokens = 32 * kChunkBytes / (T::kHeadDim * T::kBytes);  // that the warp copies at a time
    constexpr int kStep = 16;
    uint32_t places[kStep / kTokens];
    const char* sources[kStep / kTokens];
#pragma unroll
    for (int i = 0; i < kStep / kTokens; ++i) {
      const int row = first + i * kTokens;
      places[i] = stage + plane_chunk_offset(row, chunk, kBlockKeys, T::kTile, T::kHeadDim, T::kBytes);
      sources[i] = source + static_cast<int64_t>(i * kTokens) * token_bytes;
    }
    const int64_t step_bytes = static_cast<int64_t>(kStep) * token_bytes;
#pragma unroll
    for (int token = 0; token < 2 * kBlockKeys; token += kStep) {  // V follows K
      constexpr int kPlaneBytes = kBlockKeys * T::kHeadDim * T::kBytes;
      const int target = token / kBlockKeys * kPlaneBytes + token % kBlockKeys * T::kRowBytes;
#pragma unroll
      for (int i = 0; i < kStep / kTokens; ++i) {
        if (kFull || first + i * kTokens + token % kBlockKeys < rows) copy(places[i] + target, sources[i]);
        sources[i] += step_bytes;
      }
    }
  }

  __device__ __forceinline__ void copy(uint32_t target, const char* source) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "l"(policy)
                 : "memory");
  }
};

}  // namespace bicl::decode

BICL_DECODE(sm90, TokenMajorLoader, __nv_bfloat16, kBFloat16, 128, 64, 1)

TVM_FFI_DLL_EXPORT_TYPED_FUNC(bind_decode_attention, bicl::bind_decode_attention);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(plan_decode, bicl::plan_decode_api);
