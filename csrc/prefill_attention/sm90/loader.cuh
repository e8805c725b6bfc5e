// The loading warpgroup. Warp 0 draws tickets and streams K and V by bulk copies. Warps 1 to 3 gather the rows
// of Q; of fp8 pages they also make the operands: fp16, which holds every fp8 number.
#pragma once

#include "pipeline.cuh"

namespace bicl::prefill::sm90 {

// --- warp 0: tickets, K and V --------------------------------------------------------------------------
// What comes after the tile that is being loaded, as far as it is known.
struct Upcoming {
  int ticket;  // at first in lane 0 only
  Task task;
  int head, column;
  int word;  // the lane's word of the tile
};

template <typename KV, int D>
struct KeyLoader {
  using C = Config<KV, D>;
  static constexpr int kRowBytes = 64 * sizeof(KV);  // of a tile of 64 x 64
  static constexpr int kTileBytes = kPageKeys * kRowBytes;
  static constexpr int kPlaneBytes = kPageKeys * D * sizeof(KV);
  const PrefillParams& p;
  Control& control;
  uint32_t base;
  int lane;
  uint32_t count, copies;  // blocks of K loaded (V follows one behind); blocks of either
  uint32_t assigned;
  Upcoming next;

  struct Target {
    uint32_t full, empty, parity, address;
  };

  // Where the next block of K (plane 0) or V (plane 1) goes.
  template <int kPlane>
  __device__ __forceinline__ Target next_target() {
    if constexpr (C::kWiden) {
      const Place<C::kRawStages> place(copies++);
      return {ptx::smem_address(&control.raw_full[place.stage]), ptx::smem_address(&control.raw_empty[place.stage]),
              place.parity, base + C::kRawOffset + place.stage * C::kRawBytes};
    }
    const Place<C::kStages> place(kPlane == 0 ? count : count - 1);
    return {ptx::smem_address(kPlane == 0 ? &control.key_full[place.stage] : &control.value_full[place.stage]),
            ptx::smem_address(kPlane == 0 ? &control.key_empty[place.stage] : &control.value_empty[place.stage]),
            place.parity, base + (kPlane == 0 ? C::kKeyOffset : C::kValueOffset) + place.stage * C::kStageBytes};
  }

  // Copies one block. Each lane issues one 64-dim tile of one page, whose id it holds; lanes beyond the block's
  // tiles only help to clear.
  template <int kPlane>
  __device__ __forceinline__ void load(int head, int num_keys, int block, int page_id) {
    const Target target = next_target<kPlane>();
    ptx::mbarrier_wait(target.empty, target.parity ^ 1);
    const int rows_left = num_keys - block * C::kKeys;
    if (!C::kWiden && kPlane == 1 && rows_left < C::kKeys) clear_rows(target.address, rows_left);
    if (lane == 0) ptx::mbarrier_expect_tx(target.full, min(rows_left, C::kKeys) * (C::kDimTiles * kRowBytes));
    __syncwarp();
    const int page = lane / C::kDimTiles, dim_tile = lane % C::kDimTiles;
    const int rows = min(rows_left - page * kPageKeys, kPageKeys);
    if (lane >= C::kPages * C::kDimTiles || rows <= 0) return;
    const int64_t plane = (static_cast<int64_t>(page_id) * p.pages.num_kv_heads + head) * 2 + kPlane;
    const char* source = static_cast<const char*>(p.pages.data) + plane * kPlaneBytes + dim_tile * kTileBytes;
    // K: the pages' tiles of one dim range side by side, so that one wgmma spans both pages.
    const int position = kPlane == 0 && !C::kWiden ? dim_tile * C::kPages + page : lane;
    bulk_copy(target.address + position * kTileBytes, source, rows * kRowBytes, target.full);
  }

  // Rows that nobody wrote would reach the product as 0 * NaN.
  __device__ __forceinline__ void clear_rows(uint32_t block, int first) {
#pragma unroll 1
    for (int i = first * 8 + lane; i < C::kKeys * 8; i += 32)
#pragma unroll 1
      for (int t = 0; t < C::kDimTiles; ++t)
        store_shared(block + i / (kPageKeys * 8) * C::kPageBytes + t * (kPageKeys * 128) + i % (kPageKeys * 8) * 16,
                     make_uint4(0, 0, 0, 0));
    ptx::fence_proxy_async();
  }

  // Order of use: K of the last block, then K of the next and V of the one before. What comes after this tile
  // is found out meanwhile, in three steps none of which waits for memory, from PrefillHeader::ahead blocks before its
  // end.
  __device__ __forceinline__ void load_tile(const PrefillTile& tile, int head) {
    const Blocks<KV, D> blocks(p, tile);
    const int num_keys = min(blocks.pages * kPageKeys, tile.key_len);
    const int32_t* table = p.sequences.page_table + tile.sequence * p.sequences.page_table_stride;
    auto page_of = [&](int block) {
      const int page = block * C::kPages + lane / C::kDimTiles;
      return page >= 0 && page < blocks.pages ? __ldg(table + page) : 0;
    };
    const int ask = max(blocks.end - blocks.begin - control.header.ahead, 0);
    if (ask == 0) draw();
    int before = 0, current = page_of(blocks.end - 1), done = 0;
#pragma unroll 1
    for (int block = blocks.end - 1; block >= blocks.begin; --block, ++done) {
      if (done > 0 && done == ask) draw();
      const int next = page_of(block - 1);
      load<0>(head, num_keys, block, current);
      if (done > 0) load<1>(head, num_keys, block + 1, before);
      ++count;
      if (done == ask) look_up();
      if (done == ask + 1) publish();
      before = current;
      current = next;
    }
    load<1>(head, num_keys, blocks.begin, before);
    if (done == ask + 1) publish();
  }

  __device__ __forceinline__ void draw() {
    if (lane == 0) next.ticket = gridDim.x + atomicAdd(&p.plan.header->next_ticket, 1);
  }

  // What the ticket means; each lane fetches one word of its tile.
  __device__ __forceinline__ void look_up() {
    const int ticket = __shfl_sync(~0u, next.ticket, 0);
    const PrefillHeader& header = control.header;
    const int work = header.work_tickets, total = header.total_tickets;
    int entry = 0;
    next = {ticket, Task::kEnd, 0, 0, 0};
    if (ticket < work) {
      next.task = Task::kTile;
      split_ticket(ticket, header, p.pages.num_kv_heads, entry, next.head);
    } else if (ticket < total) {
      constexpr int kSlices = D / kCombineDims;
      const int index = (ticket - work) / kSlices;
      next.task = Task::kCombine;
      next.column = (ticket - work) % kSlices * kCombineDims;
      next.head = p.pages.num_kv_heads - header.split_heads + index % header.split_heads;
      entry = p.plan.split_entries[index / header.split_heads];
    } else if (lane == 0 && ticket == total + static_cast<int>(gridDim.x) - 1) {
      p.plan.header->next_ticket = 0;  // the last of all tickets is drawn: ready for the next launch
    }
    if (ticket < total && lane < kTileWords)
      next.word = __ldg(reinterpret_cast<const int*>(p.plan.tiles + entry) + lane);
  }

  // Tells the others.
  __device__ __forceinline__ void publish() {
    const Place<kAssignments> slot(assigned++);
    Assignment& a = control.assignments[slot.stage];
    ptx::mbarrier_wait(ptx::smem_address(&control.taken[slot.stage]), slot.parity ^ 1);
    if (lane < kTileWords) reinterpret_cast<int*>(&a.tile)[lane] = next.word;
    if (lane == 0) {
      const PrefillHeader& header = control.header;
      a.head = next.head;
      a.shift = (next.head - (p.pages.num_kv_heads - header.split_heads)) * header.head_partials;
      a.column = next.column;
      a.task = next.task;
    }
    __syncwarp();
    ptx::mbarrier_arrive_warp(ptx::smem_address(&control.assigned[slot.stage]), lane);
    named_barrier_arrive(kQueryBarrier + slot.stage, 32 + kQueryThreads);
  }

  __device__ __forceinline__ void run() {
    constexpr int kWords = sizeof(PrefillHeader) / sizeof(int);
    if (lane < kWords)
      reinterpret_cast<int*>(&control.header)[lane] = reinterpret_cast<const int*>(p.plan.header)[lane];
    const int word = lane <= kTileWords ? reinterpret_cast<const int*>(p.plan.starts + blockIdx.x)[lane] : 0;
    __syncwarp();
    next = {static_cast<int>(blockIdx.x), Task::kTile, __shfl_sync(~0u, word, kTileWords), 0, word};
    if (next.ticket >= control.header.work_tickets) look_up();
    publish();
    for (uint32_t i = 0;; ++i) {
      const Assignment& a = control.assignments[i % kAssignments];
      if (a.task == Task::kEnd) return;
      if (has_keys(a)) {
        load_tile(a.tile, a.head);
      } else {
        draw();
        look_up();
        publish();
      }
    }
  }
};

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
template <typename E, typename KV, int D>
__device__ __forceinline__ void gather_query(const PrefillParams& p, const PrefillTile& tile, int head,
                                             uint32_t target, uint32_t thread) {
  using C = Config<KV, D>;
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
    const uint32_t half = target + (rows / 64 * C::kDimTiles * 64 + rows % 64) * 128;
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
template <typename KV, int D>
__device__ __forceinline__ void widen_block(int plane, uint32_t raw, uint32_t target, int rows_left, int thread) {
  using C = Config<KV, D>;
  constexpr auto kKind = std::is_same_v<KV, __nv_fp8_e4m3> ? __NV_E4M3 : __NV_E5M2;
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
template <typename KV, int D>
struct Widener {
  using C = Config<KV, D>;
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
    widen_block<KV, D>(plane, base + C::kRawOffset + from.stage * C::kRawBytes,
                       base + (plane == 0 ? C::kKeyOffset : C::kValueOffset) + to.stage * C::kStageBytes, rows_left,
                       thread);
    ptx::fence_proxy_async();
    __syncwarp();
    ptx::mbarrier_arrive_warp(ptx::smem_address(&full), thread % 32);
    ptx::mbarrier_arrive_warp(ptx::smem_address(&control.raw_empty[from.stage]), thread % 32);
  }

  __device__ __forceinline__ void run(const PrefillParams& p, const PrefillTile& tile) {
    const Blocks<KV, D> blocks(p, tile);
    const int num_keys = min(blocks.pages * kPageKeys, tile.key_len);
    for (int block = blocks.end - 1; block >= blocks.begin; --block) {
      widen(0, count, num_keys - block * C::kKeys);
      if (block + 1 < blocks.end) widen(1, count - 1, num_keys - (block + 1) * C::kKeys);
      ++count;
    }
    widen(1, count - 1, num_keys - blocks.begin * C::kKeys);
  }
};

template <typename E, typename KV, int D>
__device__ __forceinline__ void load_queries(const PrefillParams& p, Control& control, uint32_t base) {
  using C = Config<KV, D>;
  uint32_t count = 0;
  const int thread = threadIdx.x - 32;
  Widener<KV, D> widener{control, base, thread, 0, 0};
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
    gather_query<E, KV, D>(p, a.tile, a.head, base + place.stage * C::kQueryBytes, thread);
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    ptx::fence_proxy_async();
    ptx::mbarrier_arrive(ptx::smem_address(&control.query_full[place.stage]));
    if constexpr (C::kWiden) widener.run(p, a.tile);
  }
}

}  // namespace bicl::prefill::sm90
