// The loading warpgroup's warp 0: it draws tickets and streams K and V by bulk copies.
#pragma once

#include "pipeline.cuh"

namespace bicl::prefill::sm90 {

// What comes after the tile that is being loaded, as far as it is known.
struct Upcoming {
  int ticket;  // at first in lane 0 only
  Task task;
  int head, column;
  int word;  // the lane's word of the tile
};

template <typename C>
struct KeyLoader {
  static constexpr int kPageKeys = C::kPageKeys;
  static constexpr int kRowBytes = kPageKeys * sizeof(typename C::Stored);  // of a tile
  static constexpr int kTileBytes = kPageKeys * kRowBytes;
  static constexpr int kPlaneBytes = C::kDimTiles * kTileBytes;
  static constexpr bool kOneIssues = kPageKeys == 32;
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

  // Copies one block. A lane holds the id of the page of its tile, or, where one lane issues all, of its page; lanes
  // beyond the block's tiles only help to clear.
  template <int kPlane>
  __device__ __forceinline__ void load(int head, int num_keys, int block, int page_id) {
    const Target target = next_target<kPlane>();
    const int rows_left = num_keys - block * C::kKeys;
    if constexpr (kOneIssues) return load_by_one<kPlane>(target, rows_left, plane_of<kPlane>(head, page_id));
    ptx::mbarrier_wait(target.empty, target.parity ^ 1);
    begin_some<kPlane>(target, rows_left);
    const int page = lane / C::kDimTiles, dim_tile = lane % C::kDimTiles;
    const int rows = min(rows_left - page * kPageKeys, kPageKeys);
    if (lane >= C::kPages * C::kDimTiles || rows <= 0) return;
    const char* source = plane_of<kPlane>(head, page_id) + dim_tile * kTileBytes;
    bulk_copy(target.address + place_of<kPlane>(page, dim_tile), source, rows * kRowBytes, target.full);
  }

  // The same with one lane that issues all copies from uniform registers, as soon as the place is empty. Copies of several
  // lanes are issued one after the other, which is felt where a block has 16 of K: pages of 32 were a quarter slower.
  template <int kPlane>
  __device__ __forceinline__ void load_by_one(const Target& target, int rows_left, const char* plane) {
    const char* sources[C::kPages];
#pragma unroll
    for (int page = 0; page < C::kPages; ++page) sources[page] = from_lane(plane, page);
    ptx::mbarrier_wait(target.empty, target.parity ^ 1);
    if (rows_left < C::kKeys) {  // a sequence's last block
      begin_some<kPlane>(target, rows_left);
      const int rows = min(rows_left - lane * kPageKeys, kPageKeys);
      if (rows <= 0) return;
#pragma unroll 1
      for (int t = 0; t < C::kDimTiles; ++t)
        bulk_copy(target.address + place_of<kPlane>(lane, t), plane + t * kTileBytes, rows * kRowBytes, target.full);
      return;
    }
    if (!elect_one()) return;
    ptx::mbarrier_expect_tx(target.full, C::kPages * kPlaneBytes);
#pragma unroll
    for (int page = 0; page < C::kPages; ++page) {
      if (kPlane == 1) {
        bulk_copy(target.address + place_of<kPlane>(page, 0), sources[page], kPlaneBytes, target.full);
        continue;
      }
#pragma unroll
      for (int t = 0; t < C::kDimTiles; ++t)
        bulk_copy(target.address + place_of<kPlane>(page, t), sources[page] + t * kTileBytes, kTileBytes, target.full);
    }
  }

  // Before the copies of a block that may have fewer rows than others.
  template <int kPlane>
  __device__ __forceinline__ void begin_some(const Target& target, int rows_left) {
    if (!C::kWiden && kPlane == 1 && rows_left < C::kKeys) clear_rows(target.address, rows_left);
    if (lane == 0) ptx::mbarrier_expect_tx(target.full, min(rows_left, C::kKeys) * (C::kDimTiles * kRowBytes));
    __syncwarp();
  }

  template <int kPlane>
  __device__ __forceinline__ const char* plane_of(int head, int page_id) const {
    const int64_t plane = (static_cast<int64_t>(page_id) * p.pages.num_kv_heads + head) * 2 + kPlane;
    return static_cast<const char*>(p.pages.data) + plane * kPlaneBytes;
  }

  // Of a tile within a block. V lies as in the page; of K the pages' tiles of one dim range lie side by side, so that one
  // wgmma spans all pages.
  template <int kPlane>
  __device__ __forceinline__ static int place_of(int page, int dim_tile) {
    constexpr bool kByDims = kPlane == 0 && !C::kWiden;
    return (kByDims ? dim_tile * C::kPages + page : page * C::kDimTiles + dim_tile) * kTileBytes;
  }

  __device__ __forceinline__ static const char* from_lane(const char* pointer, int lane) {
    const auto bits = reinterpret_cast<uint64_t>(pointer);
    const uint32_t low = __shfl_sync(~0u, static_cast<uint32_t>(bits), lane);
    const uint32_t high = __shfl_sync(~0u, static_cast<uint32_t>(bits >> 32), lane);
    return reinterpret_cast<const char*>(static_cast<uint64_t>(high) << 32 | low);
  }

  // Rows that nobody wrote would reach the product as 0 * NaN.
  __device__ __forceinline__ void clear_rows(uint32_t block, int first) {
    constexpr int kChunks = C::kRowBytes / 16, kTileChunks = kPageKeys * kChunks;
#pragma unroll 1
    for (int i = first * kChunks + lane; i < C::kKeys * kChunks; i += 32)
#pragma unroll 1
      for (int t = 0; t < C::kDimTiles; ++t)
        store_shared(block + i / kTileChunks * C::kPageBytes + t * (kTileChunks * 16) + i % kTileChunks * 16,
                     make_uint4(0, 0, 0, 0));
    ptx::fence_proxy_async();
  }

  // Order of use: K of the last block, then K of the next and V of the one before. What comes after this tile
  // is found out meanwhile, in three steps none of which waits for memory, from PrefillHeader::ahead blocks before its
  // end.
  __device__ __forceinline__ void load_tile(const PrefillTile& tile, int head) {
    const Blocks<C> blocks(p, tile);
    const int num_keys = min(blocks.pages * C::kPageKeys, tile.key_len);
    const int32_t* table = p.sequences.page_table + tile.sequence * p.sequences.page_table_stride;
    auto page_of = [&](int block) {
      const int page = block * C::kPages + lane / (kOneIssues ? 1 : C::kDimTiles);
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
      constexpr int kSlices = C::kHeadDim / kCombineDims;
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

}  // namespace bicl::prefill::sm90
