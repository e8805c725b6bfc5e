// fp8 pages to 16-bit pages with the same tiles, one 16-byte chunk of the wide pages a thread and turn.
#pragma once

#include <type_traits>

#include "../common/layout.cuh"
#include "../common/numeric.cuh"
#include "../common/ptx.cuh"

namespace bicl {

constexpr int kWidenThreads = 256;
constexpr int kWidenUnroll = 4;  // loads in flight a thread

// Two stored values as they are, without their scale: fp16 and bf16 hold every fp8 number exactly.
template <typename Stored, typename Wide>
__device__ __forceinline__ uint32_t widen_two(uint32_t two) {
  constexpr auto kKind = std::is_same_v<Stored, __nv_fp8_e4m3> ? __NV_E4M3 : __NV_E5M2;
  const __half2_raw half = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(two), kKind);
  if constexpr (std::is_same_v<Wide, __half>) {
    return half.x | static_cast<uint32_t>(half.y) << 16;
  } else {
    const float2 both = __half22float2(__half2(half));
    return ptx::pack(both.x, both.y, Wide{});
  }
}

// Grid: (KV heads of the target, its pages of a sequence, sequences). A CTA makes K and V of one head of one page.
template <typename Stored, typename Wide, int kTile>
__global__ void __launch_bounds__(kWidenThreads) widen_pages_kernel(const __grid_constant__ WidenPagesParams p) {
  constexpr int kChunks = kTile / 8;  // of 8 values, in a row of a tile
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  const int head = blockIdx.x, page = blockIdx.y, sequence = blockIdx.z;
  if (page * p.source.page_size >= p.sequences.cache_seqlens[sequence]) return;
  const int64_t from = p.sequences.page_table[sequence * p.sequences.page_table_stride + page];
  const int64_t to = static_cast<int64_t>(sequence) * p.pages_per_sequence + page;
  const char* source =
      static_cast<const char*>(p.source.data) + head_page_offset(p.source, from, p.first_head + head);
  uint4* target = reinterpret_cast<uint4*>(static_cast<char*>(p.target.data) + head_page_offset(p.target, to, head));
  const int count = head_page_bytes(p.target) / kChunkBytes;
  for (int first = threadIdx.x; first < count; first += kWidenUnroll * kWidenThreads) {
    uint2 narrow[kWidenUnroll];
#pragma unroll
    for (int j = 0; j < kWidenUnroll; ++j) {
      // Tiles lie in the same order; a row's chunks are swizzled by the bytes of a row.
      const int i = first + j * kWidenThreads;
      const int row = i / kChunks, chunk = swizzle_chunk(row, i % kChunks, 2 * kTile);
      const int offset = row * kTile + swizzle_chunk(row, chunk / 2, kTile) * kChunkBytes + chunk % 2 * 8;
      if (i < count) narrow[j] = __ldg(reinterpret_cast<const uint2*>(source + offset));
    }
#pragma unroll
    for (int j = 0; j < kWidenUnroll; ++j) {
      const uint2 x = narrow[j];
      const int i = first + j * kWidenThreads;
      if (i < count)
        target[i] = make_uint4(widen_two<Stored, Wide>(x.x & 0xffff), widen_two<Stored, Wide>(x.x >> 16),
                               widen_two<Stored, Wide>(x.y & 0xffff), widen_two<Stored, Wide>(x.y >> 16));
    }
  }
}

}  // namespace bicl
