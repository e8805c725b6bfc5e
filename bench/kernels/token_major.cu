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

  uint64_t policy;

  __device__ TokenMajorLoader() : policy(ptx::evict_first_policy()) {}

  // Called by the whole warp; the block is lane `turn`'s. Pages hold kBlockKeys tokens.
  template <typename T>
  __device__ __forceinline__ void load(const BlockSource& block, int turn, int lane, const Pages& pages,
                                       uint32_t stage, uint32_t full, uint32_t empty, uint32_t parity) {
    constexpr int kHeadBytes = T::kHeadDim * T::kBytes;  // one token of one head
    constexpr int kPlaneBytes = kBlockKeys * kHeadBytes;
    constexpr int kChunks = kHeadBytes / kChunkBytes;  // of a token
    constexpr int kTokens = 32 / kChunks;  // that the warp copies at a time
    constexpr int kStep = 16;
    const int rows = __shfl_sync(~0u, block.rows, turn);
    const auto place = __shfl_sync(~0u, reinterpret_cast<unsigned long long>(block.page[0]), turn);
    ptx::mbarrier_wait(empty, parity);
    if (rows > 0) {
      // The place of a head-page names page and head.
      const auto start = reinterpret_cast<unsigned long long>(pages.data);
      const int index = static_cast<int>((place - start) / (2 * kPlaneBytes));
      const int page = index / pages.num_kv_heads, head = index % pages.num_kv_heads;
      const int token_bytes = pages.num_kv_heads * kHeadBytes;
      const int chunk = lane % kChunks, first = lane / kChunks;
      const char* source = static_cast<const char*>(pages.data) +
                           2ll * page * pages.num_kv_heads * kPlaneBytes + first * token_bytes + head * kHeadBytes +
                           chunk * kChunkBytes;
      // The permutation repeats every 8 tokens: addresses of 16 serve the whole plane.
#pragma unroll 1
      for (int token = 0; token < 2 * kBlockKeys; token += kStep) {
        const uint32_t target = stage + token / kBlockKeys * kPlaneBytes + token % kBlockKeys * T::kRowBytes;
        const int left = rows - token % kBlockKeys - first;
#pragma unroll
        for (int i = 0; i < kStep / kTokens; ++i) {
          const int row = first + i * kTokens;
          const int offset = plane_chunk_offset(row, chunk, kBlockKeys, T::kTile, T::kHeadDim, T::kBytes);
          if (i * kTokens < left) copy(target + offset, source + i * kTokens * token_bytes);
        }
        source += kStep * token_bytes;  // V follows K
      }
    }
    ptx::cp_async_arrive(full);
    __syncwarp();
  }

 private:
  __device__ __forceinline__ void copy(uint32_t target, const char* source) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "l"(policy)
                 : "memory");
  }
};

}  // namespace bicl::decode

BICL_DECODE(sm90, TokenMajorLoader, __nv_bfloat16, kBFloat16, 128, 64, 1)

TVM_FFI_DLL_EXPORT_TYPED_FUNC(decode_attention, bicl::decode_attention_api);
