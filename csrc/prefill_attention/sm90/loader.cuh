// The loading warpgroup. Warp 0 draws tickets and streams K and V by bulk copies. Warps 1 to 3 gather the rows
// of Q; of fp8 pages they also make the operands: fp16, which holds every fp8 number.
#pragma once

#include "key_loader.cuh"

namespace bicl::prefill::sm90 {

// --- asked for early -------------------------------------------------------------------------------------
// The rows of a CTA's first Q come to L2 as soon as its start is read: behind the first K and V they come late, and the
// first products wait for them. A word of each row is read, for nobody, and 256 bytes come with it; prefetches by the
// bulk copies' engine held these warps up for 3,500 cycles.
__device__ __forceinline__ void ask_for_query(const PrefillParams& p, int thread) {
  const PrefillStart& start = p.plan.starts[blockIdx.x];
  const int row = start.tile.row, first = start.tile.query_start, count = start.tile.query_len, head = start.head;
  if (static_cast<int>(blockIdx.x) >= p.plan.header->work_tickets) return;
#pragma unroll 1
  for (int i = thread; i < kPrefillRows; i += kQueryThreads) {
    const RowPlace place = row_place(p, row + i);
    if (place.token >= count) return;
    const int64_t at = (first + place.token) * p.query_token_stride +
                       (head * static_cast<int64_t>(p.group.divisor) + place.head) * p.query_head_stride;
    uint32_t word;
    asm volatile("ld.global.L2::256B.b32 %0, [%1];"
                 : "=r"(word)
                 : "l"(static_cast<const char*>(p.query) + at * 2)
                 : "memory");
  }
}

// The page table, each line by one CTA, while a CTA still learns what to do. L2 is where kernels meet, so a line that
// the kernel before has yet to write is not stale.
__device__ __forceinline__ void ask_for_page_table(const PrefillParams& p, int thread) {
  // No further than to the first entry of the last row: what lies behind may be nobody's.
  const int64_t last = p.sequences.page_table_stride * (p.sequences.batch - 1) * static_cast<int64_t>(sizeof(int32_t));
  const int64_t first = (static_cast<int64_t>(thread) * gridDim.x + blockIdx.x) * 128;
  if (first <= last)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(reinterpret_cast<const char*>(p.sequences.page_table) + first));
}

// --- warps 1 to 3: Q -------------------------------------------------------------------------------------
// A CTA's first products wait for this, so a chunk takes few instructions: each lane finds one row in 32, and those that
// copy a row's chunks ask the lane that found it.
template <typename E, typename C>
__device__ __forceinline__ void gather_query(const PrefillParams& p, const PrefillTile& tile, int head,
                                             uint32_t target, uint32_t thread) {
  constexpr int D = C::kHeadDim;
  constexpr bool kConvert = !std::is_same_v<E, typename C::template Operand<E>>;
  constexpr uint32_t kChunks = D / 8, kWarps = kQueryThreads / 32, kTurns = (kChunks + kWarps - 1) / kWarps;
  constexpr uint32_t kUnroll = D <= 128 ? kTurns : 1;  // what registers allow
  const uint32_t warp = thread / 32, lane = thread % 32;
  const int first = row_place(p, tile.row).token;
  const E* base = static_cast<const E*>(p.query) + (tile.query_start + first) * p.query_token_stride +
                  head * static_cast<int64_t>(p.group.divisor) * p.query_head_stride;
  const int token_chunks = static_cast<int>(p.query_token_stride / 8);  // rows are aligned
  const int head_chunks = static_cast<int>(p.query_head_stride / 8);
#pragma unroll 1
  for (uint32_t rows = 0; rows < kPrefillRows; rows += 32) {
    const RowPlace place = row_place(p, tile.row + rows + lane);
    const int own = place.token < tile.query_len ? (place.token - first) * token_chunks + place.head * head_chunks : -1;
    const uint32_t half = target + (rows / 64 * C::kQueryTiles * 64 + rows % 64) * 128;
#pragma unroll kUnroll
    for (uint32_t turn = 0; turn < kTurns; ++turn) {
      const uint32_t i = (turn * kWarps + warp) * 32 + lane, row = i / kChunks, chunk = i % kChunks;
      if (turn * kWarps + warp >= kChunks) break;
      const int offset = __shfl_sync(~0u, own, row);
      const bool valid = offset >= 0 && chunk * 8 < static_cast<uint32_t>(p.head_dim);
      const E* source = base + (valid ? static_cast<int64_t>(offset + static_cast<int>(chunk)) * 8 : 0);
      const uint32_t address = half + chunk / 8 * (64 * 128) + row * 128 + ((chunk ^ row) & 7) * 16;
      if constexpr (kConvert) {
        uint4 x = valid ? __ldg(reinterpret_cast<const uint4*>(source)) : make_uint4(0, 0, 0, 0);
        x.x = bf16_to_fp16(x.x), x.y = bf16_to_fp16(x.y), x.z = bf16_to_fp16(x.z), x.w = bf16_to_fp16(x.w);
        store_shared(address, x);
      } else {
        ptx::cp_async_16(address, source, valid);
      }
    }
  }
}

// A block of fp8 as it was stored to wgmma operands; rows beyond the keys become zeros.
template <typename C>
__device__ __forceinline__ void widen_block(int plane, uint32_t raw, uint32_t target, int rows_left, int thread) {
  constexpr int kPageKeys = C::kPageKeys;
  constexpr auto kKind = std::is_same_v<typename C::Stored, __nv_fp8_e4m3> ? __NV_E4M3 : __NV_E5M2;
  constexpr int kTileChunks = kPageKeys * 64 / 16;
#pragma unroll 1
  for (int i = thread; i < C::kPages * C::kDimTiles * kTileChunks; i += kQueryThreads) {
    const int tile = i / kTileChunks, row = i % kTileChunks / 4;
    const int page = tile / C::kDimTiles, dim_tile = tile % C::kDimTiles;
    const int chunk = 2 * ((i ^ (row >> 1)) & 3);
    uint4 x = load_shared(raw + i * 16);
    if (page * kPageKeys + row >= rows_left) x = make_uint4(0, 0, 0, 0);
    const uint32_t words[4] = {x.x, x.y, x.z, x.w};
    uint32_t wide[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const __half2_raw two =
          __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(words[j / 2] >> (16 * (j & 1))), kKind);
      wide[j] = two.x | static_cast<uint32_t>(two.y) << 16;
    }
    const int position = plane == 0 ? dim_tile * C::kPages + page : tile;
    const uint32_t address = target + position * (kPageKeys * 128) + row * 128;
    store_shared(address + ((chunk ^ row) & 7) * 16, make_uint4(wide[0], wide[1], wide[2], wide[3]));
    store_shared(address + (((chunk + 1) ^ row) & 7) * 16, make_uint4(wide[4], wide[5], wide[6], wide[7]));
  }
}

// Widens all blocks of a tile in the order in which they are loaded.
template <typename C>
struct Widener {
  Control& control;
  uint32_t base;
  int thread;
  uint32_t count, copies;

  __device__ __forceinline__ void widen(int plane, uint32_t number, int rows_left) {
    const Place<C::kRawStages> from(copies++);
    const Place<C::kStages> to(number);
    uint64_t& full = plane == 0 ? control.key_full[to.stage] : control.value_full[to.stage];
    uint64_t& empty = plane == 0 ? control.key_empty[to.stage] : control.value_empty[to.stage];
    ptx::mbarrier_wait(ptx::smem_address(&control.raw_full[from.stage]), from.parity);
    ptx::mbarrier_wait(ptx::smem_address(&empty), to.parity ^ 1);
    widen_block<C>(plane, base + C::kRawOffset + from.stage * C::kRawBytes,
                   base + (plane == 0 ? C::kKeyOffset : C::kValueOffset) + to.stage * C::kStageBytes, rows_left,
                   thread);
    ptx::fence_proxy_async();
    __syncwarp();
    ptx::mbarrier_arrive_warp(ptx::smem_address(&full), thread % 32);
    ptx::mbarrier_arrive_warp(ptx::smem_address(&control.raw_empty[from.stage]), thread % 32);
  }

  __device__ __forceinline__ void run(const PrefillParams& p, const PrefillTile& tile) {
    const Blocks<C> blocks(p, tile);
    const int num_keys = min(blocks.pages * C::kPageKeys, tile.key_len);
    for (int block = blocks.end - 1; block >= blocks.begin; --block) {
      widen(0, count, num_keys - block * C::kKeys);
      if (block + 1 < blocks.end) widen(1, count - 1, num_keys - (block + 1) * C::kKeys);
      ++count;
    }
    widen(1, count - 1, num_keys - blocks.begin * C::kKeys);
  }
};

template <typename E, typename C>
__device__ __forceinline__ void load_queries(const PrefillParams& p, Control& control, uint32_t base) {
  uint32_t count = 0;
  const int thread = threadIdx.x - 32;
  Widener<C> widener{control, base, thread, 0, 0};
  for (uint32_t i = 0;; ++i) {
    const Place<kAssignments> slot(i);
    // Sleeps here, as who waits at an mbarrier does not.
    ptx::named_barrier(kQueryBarrier + slot.stage, 32 + kQueryThreads);
    const Assignment a = control.assignments[slot.stage];
    __syncwarp();
    ptx::mbarrier_arrive_warp(ptx::smem_address(&control.taken[slot.stage]), thread % 32);
    if (a.task == Task::kEnd) return;
    if (!has_keys(a)) continue;
    const Place<C::kQueryBuffers> place(count++);
    ptx::mbarrier_wait(ptx::smem_address(&control.query_empty[place.stage]), place.parity ^ 1);
    gather_query<E, C>(p, a.tile, a.head, base + place.stage * C::kQueryBytes, thread);
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    ptx::fence_proxy_async();
    ptx::mbarrier_arrive(ptx::smem_address(&control.query_full[place.stage]));
    if constexpr (C::kWiden) widener.run(p, a.tile);
  }
}

}  // namespace bicl::prefill::sm90
