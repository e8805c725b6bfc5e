// How the warps of a wgmma CTA talk: barriers, turns, what a ticket means, which blocks a tile has.
#pragma once

#include "../rows.cuh"
#include "config.h"

namespace bicl::prefill::sm90 {

enum class Task : int { kTile, kCombine, kEnd };

// What warp 0 tells the others about one ticket.
struct Assignment {
  PrefillTile tile;
  int head;
  Task task;
  int column;  // kCombine: first head dim to merge
  int shift;   // from the slots and counters of the first head with split tiles to this head's
};

constexpr int kTileWords = sizeof(PrefillTile) / sizeof(int);

__device__ __forceinline__ bool has_keys(const Assignment& a) {
  return a.task == Task::kTile && a.tile.block_begin < a.tile.block_end;
}

struct Control {
  uint64_t query_full[2], query_empty[2];
  uint64_t key_full[4], key_empty[4];
  uint64_t value_full[4], value_empty[4];
  uint64_t raw_full[2], raw_empty[2];  // fp8 as it was stored
  uint64_t assigned[kAssignments], taken[kAssignments];
  Assignment assignments[kAssignments];
  PrefillHeader header;
};

// Where use number `count` of a ring lies, and the parity that its barriers complete.
template <int kStages>
struct Place {
  uint32_t stage, parity;
  __device__ __forceinline__ explicit Place(uint32_t count) : stage(count % kStages), parity(count / kStages & 1) {}
};

__device__ __forceinline__ void bulk_copy(uint32_t target, const void* source, uint32_t bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}

// True in one lane of a converged warp. ptxas knows it for one: copies behind it are issued straight from uniform
// registers, where others go through a loop over the lanes.
__device__ __forceinline__ bool elect_one() {
  uint32_t one;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(one));
  return one;
}

__device__ __forceinline__ uint4 load_shared(uint32_t address) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(address)
               : "memory");
  return x;
}

__device__ __forceinline__ void store_shared(uint32_t address, const uint4& x) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}

// Two elements; beyond 65504 fp16 has infinity.
__device__ __forceinline__ uint32_t bf16_to_fp16(uint32_t two) {
  return ptx::pack(__uint_as_float(two << 16), __uint_as_float(two & 0xffff0000u), __half{});
}

template <int kRegisters>
__device__ __forceinline__ void shrink_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void grow_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// The same in all lanes, and ptxas may know it: descriptors then live in uniform registers.
__device__ __forceinline__ uint32_t uniform(uint32_t x) { return __shfl_sync(~0u, x, 0); }

__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Turns among the consumer warpgroups: barrier 1 + w opens when the other has issued its products.
__device__ __forceinline__ void await_turn(int consumer) {
  asm volatile("bar.sync %0, 256;" ::"r"(1 + consumer) : "memory");
}
__device__ __forceinline__ void pass_turn(int consumer) {
  asm volatile("bar.arrive %0, 256;" ::"r"(2 - consumer) : "memory");
}

// --- blocks of a tile ----------------------------------------------------------------------------------
// In units of Config::kKeys, [begin, end). `pages` is the number of pages that some row sees, so the last
// block may hold fewer than the others; half as many or fewer are multiplied as half a block.
template <typename C>
struct Blocks {
  int begin, end, pages;
  TileKeys keys;

  __device__ __forceinline__ Blocks(const PrefillParams& p, const PrefillTile& tile)
      : keys(p, tile, kPrefillRows) {
    constexpr int kPerEntry = kPrefillKeys / C::kKeys;
    pages = (keys.end + C::kPageKeys - 1) / C::kPageKeys;
    begin = tile.block_begin * kPerEntry;
    end = min(tile.block_end * kPerEntry, (pages + C::kPages - 1) / C::kPages);
  }
  __device__ __forceinline__ bool last_is_half() const {
    constexpr int kHalfPages = 64 / C::kPageKeys;
    return C::kKeys == 128 && end * 2 > (pages + kHalfPages - 1) / kHalfPages;
  }
  __device__ __forceinline__ bool needs_end_mask(int block) const {
    return (block + 1) * C::kKeys >= keys.all_end;
  }
  __device__ __forceinline__ int first_without_begin_mask() const {
    return (keys.all_begin + C::kKeys - 1) / C::kKeys;
  }
};

}  // namespace bicl::prefill::sm90
