// Prefill with wgmma, fed by plain bulk copies: a page's tiles are wgmma operands as they are stored.
//
// Persistent CTAs draw tickets (tile, KV head), longest first. Warpgroup 0 loads: warp 0 draws tickets and
// streams K and V through two rings, warps 1 to 3 gather the rows of Q. Warpgroups 1 and 2 own 64 rows each:
// S = Q K^T of one block is issued together with O += P V of the block before it, and the two warpgroups take
// turns, so that the exponentials of one run under the products of the other. Blocks go from the last key to
// the first at absolute multiples of the block, hence a row's bits do not depend on where chunks or prefixes
// were cut, nor on its batch mates (as long as its keys are not split).
//
// When keys are split, pieces leave unnormalised partials; the last tickets merge them.
#pragma once

#include "../../common/wgmma.cuh"
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
  int unused;
};

template <int D>
struct Control {
  uint64_t query_full[2], query_empty[2];
  uint64_t key_full[4], key_empty[4];
  uint64_t value_full[4], value_empty[4];
  uint64_t assigned[2], taken[2];
  Assignment assignments[2];
  PrefillHeader header;
};

template <int kStages>
struct Ring {
  uint32_t count = 0;
  __device__ __forceinline__ uint32_t stage() const { return count % kStages; }
  __device__ __forceinline__ uint32_t parity() const { return count / kStages & 1; }
  __device__ __forceinline__ uint32_t free_parity() const { return parity() ^ 1; }
};

// A ring place whose stage the compiler knows: its addresses and descriptors become constants.
template <int kStages, int kStage>
struct RingAt {
  uint32_t count;
  static constexpr uint32_t stage() { return kStage; }
  __device__ __forceinline__ uint32_t parity() const { return count / kStages & 1; }
};

__device__ __forceinline__ void bulk_copy(uint32_t target, const void* source, uint32_t bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
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

// Turns among the consumer warpgroups: barrier 1 + w opens when the other has issued its products.
__device__ __forceinline__ void await_turn(int consumer) {
  asm volatile("bar.sync %0, 256;" ::"r"(1 + consumer) : "memory");
}
__device__ __forceinline__ void pass_turn(int consumer) {
  asm volatile("bar.arrive %0, 256;" ::"r"(2 - consumer) : "memory");
}

// --- blocks of a tile ----------------------------------------------------------------------------------
// In units of Config::kKeys, [begin, end). `pages` is the number of pages that some row sees, so the last
// block may hold one page instead of two.
template <int D>
struct Blocks {
  int begin, end, pages;
  TileKeys keys;

  __device__ __forceinline__ Blocks(const PrefillParams& p, const PrefillTile& tile)
      : keys(p, tile, kPrefillRows) {
    constexpr int kPerEntry = kPrefillKeys / Config<D>::kKeys;
    pages = (keys.end + kPageKeys - 1) / kPageKeys;
    begin = tile.block_begin * kPerEntry;
    end = min(tile.block_end * kPerEntry, (pages + Config<D>::kPages - 1) / Config<D>::kPages);
  }
  __device__ __forceinline__ bool last_is_half() const { return Config<D>::kPages == 2 && end * 2 > pages; }
  __device__ __forceinline__ bool needs_end_mask(int block) const {
    return (block + 1) * Config<D>::kKeys > keys.all_end;
  }
  __device__ __forceinline__ int first_without_begin_mask() const {
    return (keys.all_begin + Config<D>::kKeys - 1) / Config<D>::kKeys;
  }
};

// --- warp 0: tickets, K and V --------------------------------------------------------------------------
template <int D>
struct KeyLoader {
  using C = Config<D>;
  static constexpr int kTileBytes = kPageKeys * 128;  // 64 tokens of 64 dims
  const PrefillParams& p;
  Control<D>& control;
  uint32_t base;
  Ring<C::kStages> ring;  // of K; V follows one block behind
  uint32_t assigned;
  int lane;

  // Copies one block of K (plane 0) or V (plane 1). Each lane issues one 64-dim tile of one page, whose id it
  // holds; lanes beyond the block's tiles only help to clear.
  template <int kPlane>
  __device__ __forceinline__ void load(int head, int num_keys, int block, int page_id, Ring<C::kStages> ring) {
    const int stage = ring.stage();
    const uint32_t full = ptx::smem_address(kPlane == 0 ? &control.key_full[stage] : &control.value_full[stage]);
    const uint32_t empty = ptx::smem_address(kPlane == 0 ? &control.key_empty[stage] : &control.value_empty[stage]);
    const uint32_t target = base + (kPlane == 0 ? C::kKeyOffset : C::kValueOffset) + stage * C::kStageBytes;
    ptx::mbarrier_wait(empty, ring.free_parity());
    const int rows_left = num_keys - block * C::kKeys;
    if (kPlane == 1 && num_keys % kPageKeys != 0 && rows_left < C::kKeys)
      clear_rows(target + rows_left / kPageKeys * C::kPageBytes, rows_left % kPageKeys);
    if (lane == 0) ptx::mbarrier_expect_tx(full, min(rows_left, C::kKeys) * (C::kDimTiles * 128));
    __syncwarp();
    const int page = lane / C::kDimTiles, dim_tile = lane % C::kDimTiles;
    const int rows = min(rows_left - page * kPageKeys, kPageKeys);
    if (lane >= C::kPages * C::kDimTiles || rows <= 0) return;
    const char* source = static_cast<const char*>(p.pages.data) +
                         ((static_cast<int64_t>(page_id) * p.pages.num_kv_heads + head) * 2 + kPlane) * C::kPageBytes +
                         dim_tile * kTileBytes;
    // K: the pages' tiles of one dim range side by side, so that one wgmma spans both pages.
    const uint32_t offset = kPlane == 0 ? (dim_tile * C::kPages + page) * kTileBytes : lane * kTileBytes;
    bulk_copy(target + offset, source, rows * 128, full);
  }

  // Rows that nobody wrote would reach the product as 0 * NaN.
  __device__ __forceinline__ void clear_rows(uint32_t page, int first) {
#pragma unroll 1
    for (int i = first * 8 + lane; i < kPageKeys * 8; i += 32)
#pragma unroll 1
      for (int t = 0; t < C::kDimTiles; ++t)
        asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(page + t * kTileBytes + i * 16), "r"(0)
                     : "memory");
    ptx::fence_proxy_async();
  }

  // Order of use: K of the last block, then K of the next and V of the one before. Once the rings are full,
  // and this warp would wait anyway, it finds out what comes after this tile.
  __device__ __forceinline__ void load_tile(const Assignment& a) {
    const PrefillTile& tile = a.tile;
    const Blocks<D> blocks(p, tile);
    const int num_keys = min(blocks.pages * kPageKeys, tile.key_len);
    const int32_t* table = p.sequences.page_table + tile.sequence * p.sequences.page_table_stride;
    auto page_of = [&](int block) {
      const int page = block * C::kPages + lane / C::kDimTiles;
      return page >= 0 && page < blocks.pages ? __ldg(table + page) : 0;
    };
    int before = 0, now = page_of(blocks.end - 1);
#pragma unroll 1
    for (int block = blocks.end - 1; block >= blocks.begin; --block) {
      const int next = page_of(block - 1);
      load<0>(a.head, num_keys, block, now, ring);
      if (block + 1 < blocks.end) load<1>(a.head, num_keys, block + 1, before, {ring.count - 1});
      ++ring.count;
      if (block == blocks.end - 2) assign_next();
      before = now;
      now = next;
    }
    load<1>(a.head, num_keys, blocks.begin, before, {ring.count - 1});
    if (blocks.end - blocks.begin == 1) assign_next();
  }

  // Tells the others what `ticket` means; each lane copies one word of the tile.
  __device__ __forceinline__ void assign(int ticket) {
    const int slot = assigned & 1;
    Assignment& a = control.assignments[slot];
    const PrefillHeader& header = control.header;
    const int work = header.work_tickets, total = header.total_tickets;
    int entry = 0, head = 0, column = 0;
    if (ticket < work) {
      split_ticket(ticket, header.num_tiles, header.heads_per_section, entry, head);
    } else if (ticket < total) {
      constexpr int kSlices = D / kCombineDims;
      const int index = (ticket - work) / kSlices;
      column = (ticket - work) % kSlices * kCombineDims;
      head = index % p.pages.num_kv_heads;
      entry = p.plan.splits[index / p.pages.num_kv_heads].entry;
    }
    ptx::mbarrier_wait(ptx::smem_address(&control.taken[slot]), (assigned >> 1 & 1) ^ 1);
    constexpr int kWords = sizeof(PrefillTile) / sizeof(int);
    if (ticket < total && lane < kWords)
      reinterpret_cast<int*>(&a.tile)[lane] = __ldg(reinterpret_cast<const int*>(p.plan.tiles + entry) + lane);
    if (lane == 0) {
      a.head = head;
      a.column = column;
      a.task = ticket < work ? Task::kTile : ticket < total ? Task::kCombine : Task::kEnd;
      // The last of all tickets is drawn: ready for the next launch.
      if (ticket == total + static_cast<int>(gridDim.x) - 1) p.plan.header->next_ticket = 0;
    }
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(ptx::smem_address(&control.assigned[slot]));
    ++assigned;
  }

  __device__ __forceinline__ void assign_next() {
    int ticket = 0;
    if (lane == 0) ticket = gridDim.x + atomicAdd(&p.plan.header->next_ticket, 1);
    assign(__shfl_sync(~0u, ticket, 0));
  }

  __device__ __forceinline__ void run() {
    constexpr int kWords = sizeof(PrefillHeader) / sizeof(int);
    if (lane < kWords)
      reinterpret_cast<int*>(&control.header)[lane] = reinterpret_cast<const int*>(p.plan.header)[lane];
    __syncwarp();
    assign(blockIdx.x);
    for (uint32_t i = 0;; ++i) {
      const Assignment& a = control.assignments[i & 1];
      if (a.task == Task::kEnd) return;
      if (a.task == Task::kTile && a.tile.block_begin < a.tile.block_end) {
        load_tile(a);
      } else {
        assign_next();
      }
    }
  }
};

// --- warps 1 to 3: Q -------------------------------------------------------------------------------------
template <typename E, int D>
__device__ __forceinline__ void gather_query(const PrefillParams& p, const PrefillTile& tile, int head,
                                             uint32_t target, int thread) {
  constexpr int kChunks = D / 8;
  const E* heads = static_cast<const E*>(p.query) +
                   head * static_cast<int64_t>(p.group.divisor) * p.query_head_stride;
  for (int i = thread; i < kPrefillRows * kChunks; i += kQueryThreads) {
    const int row = i / kChunks, chunk = i % kChunks;
    const RowPlace place = row_place(p, tile.row + row);
    const bool valid = place.token < tile.query_len && chunk * 8 < p.head_dim;
    const E* source = heads;
    if (valid)
      source += (tile.query_start + place.token) * p.query_token_stride + place.head * p.query_head_stride + chunk * 8;
    const uint32_t offset = (row / 64 * Config<D>::kDimTiles + chunk / 8) * (64 * 128) + row % 64 * 128 +
                            ((chunk ^ row) & 7) * 16;
    ptx::cp_async_16(target + offset, source, valid);
  }
}

template <typename E, int D>
__device__ __forceinline__ void load_queries(const PrefillParams& p, Control<D>& control, uint32_t base) {
  using C = Config<D>;
  Ring<C::kQueryBuffers> ring;
  const int thread = threadIdx.x - 32;
  for (int i = 0;; ++i) {
    const int slot = i & 1;
    ptx::mbarrier_wait(ptx::smem_address(&control.assigned[slot]), i >> 1 & 1);
    const Assignment a = control.assignments[slot];
    __syncwarp();
    if (thread % 32 == 0) ptx::mbarrier_arrive(ptx::smem_address(&control.taken[slot]));
    if (a.task == Task::kEnd) return;
    if (a.task == Task::kCombine || a.tile.block_begin == a.tile.block_end) continue;
    ptx::mbarrier_wait(ptx::smem_address(&control.query_empty[ring.stage()]), ring.free_parity());
    gather_query<E, D>(p, a.tile, a.head, base + ring.stage() * C::kQueryBytes, thread);
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    ptx::fence_proxy_async();
    ptx::mbarrier_arrive(ptx::smem_address(&control.query_full[ring.stage()]));
    ++ring.count;
  }
}

// --- consumers -------------------------------------------------------------------------------------------
// A partial lies as the threads hold it: [D / 8][256 threads][4], so that loads and stores coalesce.
__device__ __forceinline__ int64_t partial_slot(const PrefillParams& p, int split, int piece, int head) {
  return static_cast<int64_t>(p.plan.splits[split].slot + piece) * p.pages.num_kv_heads + head;
}

template <int D>
__device__ __forceinline__ void store_partial(const PrefillParams& p, const Assignment& a, int thread,
                                              const float (&o)[D / 2], const Softmax& softmax) {
  const int split = a.tile.split & 0xffff;
  const int64_t slot = partial_slot(p, split, a.tile.split >> 16, a.head);
  float4* out = reinterpret_cast<float4*>(p.plan.partials + slot * (kPrefillRows * D)) + thread;
#pragma unroll
  for (int n = 0; n < D / 8; ++n)
    __stcg(out + n * 256, make_float4(o[4 * n], o[4 * n + 1], o[4 * n + 2], o[4 * n + 3]));
  if (thread % 4 == 0) {
    float2* rows = p.plan.partial_rows + slot * kPrefillRows + thread / 32 * 16 + thread % 32 / 4;
    __stcg(rows, make_float2(softmax.max[0], softmax.sum[0]));
    __stcg(rows + 8, make_float2(softmax.max[1], softmax.sum[1]));
  }
  __threadfence();
  __syncwarp();
  if (thread % 32 == 0) ptx::atomic_add_acq_rel(&p.plan.arrived[split * p.pages.num_kv_heads + a.head], 1);
}

// Merges kCombineDims columns of a split tile once all its pieces are stored. Every piece's ticket was drawn
// before this one, by a CTA that is running: the wait ends.
template <typename E, int D>
__device__ __forceinline__ void combine(const PrefillParams& p, const Assignment& a, int thread,
                                        const ScoreScale& scale) {
  constexpr int kColumns = kCombineDims / 8;
  const int split = a.tile.split & 0xffff;
  const int pieces = p.plan.splits[split].pieces;
  const int counter = split * p.pages.num_kv_heads + a.head;
  if (thread % 32 == 0) {
    int arrived;
    do {
      asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(arrived) : "l"(p.plan.arrived + counter) : "memory");
    } while (arrived != pieces * kConsumerWarps);
  }
  __syncwarp();

  const int local_row = thread / 32 * 16 + thread % 32 / 4;
  const int64_t first = partial_slot(p, split, 0, a.head);
  const int64_t step = p.pages.num_kv_heads;
  const float2* rows = p.plan.partial_rows + first * kPrefillRows + local_row;
  const float4* in = reinterpret_cast<const float4*>(p.plan.partials + first * (kPrefillRows * D)) + thread +
                     a.column / 8 * 256;
  Softmax merged;
#pragma unroll 4
  for (int i = 0; i < pieces; ++i) {
    merged.max[0] = fmaxf(merged.max[0], __ldcg(rows + i * step * kPrefillRows).x);
    merged.max[1] = fmaxf(merged.max[1], __ldcg(rows + i * step * kPrefillRows + 8).x);
  }
  float o[kColumns * 4] = {};
  constexpr int kInFlight = 4;  // pieces; each load waits for L2
  for (int base = 0; base < pieces; base += kInFlight) {
    float4 v[kInFlight][kColumns];
    float2 row[kInFlight][2];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int piece = min(base + i, pieces - 1);
      row[i][0] = __ldcg(rows + piece * step * kPrefillRows);
      row[i][1] = __ldcg(rows + piece * step * kPrefillRows + 8);
#pragma unroll
      for (int n = 0; n < kColumns; ++n)
        v[i][n] = __ldcg(in + piece * step * (kPrefillRows * D / 4) + n * 256);
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (base + i >= pieces) break;
      const float weight[2] = {exp2_fast((row[i][0].x - merged.max[0]) * scale.log2_scale),
                               exp2_fast((row[i][1].x - merged.max[1]) * scale.log2_scale)};
      merged.sum[0] = __fmaf_rn(row[i][0].y, weight[0], merged.sum[0]);
      merged.sum[1] = __fmaf_rn(row[i][1].y, weight[1], merged.sum[1]);
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
        o[4 * n] = __fmaf_rn(v[i][n].x, weight[0], o[4 * n]);
        o[4 * n + 1] = __fmaf_rn(v[i][n].y, weight[0], o[4 * n + 1]);
        o[4 * n + 2] = __fmaf_rn(v[i][n].z, weight[1], o[4 * n + 2]);
        o[4 * n + 3] = __fmaf_rn(v[i][n].w, weight[1], o[4 * n + 3]);
      }
    }
  }
  const float inverse[2] = {merged.inverse(0, p.pages.v_scale), merged.inverse(1, p.pages.v_scale)};
  store_rows<E>(p, a.tile, a.head, a.tile.row + local_row, a.column, o, inverse);
  if (a.column == 0) store_lse(p, a.tile, a.head, a.tile.row + local_row, merged, scale.log2_scale);
  __syncwarp();
  if (thread % 32 == 0) {
    constexpr int kReaders = kConsumerWarps * (D / kCombineDims);
    if (ptx::atomic_add_acq_rel(&p.plan.combined[counter], 1) == kReaders - 1)
      p.plan.arrived[counter] = p.plan.combined[counter] = 0;
  }
}

// Rows that see no key at all.
template <typename E, int D>
__device__ __forceinline__ void store_nothing_seen(const PrefillParams& p, const Assignment& a, int row) {
  const float zero[2] = {0.f, 0.f};
#pragma unroll 1
  for (int column = 0; column < D; column += 32) {
    float o[16] = {};
    store_rows<E>(p, a.tile, a.head, row, column, o, zero);
  }
  store_lse(p, a.tile, a.head, row, Softmax(), 1.f);
}

template <typename E, int D, bool kLocal, bool kCap>
struct Consumer {
  using C = Config<D>;
  using Ring = sm90::Ring<C::kStages>;
  static constexpr int kKeys = C::kKeys;
  // Capping needs the registers of the old probabilities: its products are waited for first.
  static constexpr bool kTight = kCap;
  // Two blocks an iteration know their stages: no shuffle and no address arithmetic before the products.
  static constexpr bool kPairs = C::kStages == 2 && !kCap && !kLocal;  // there ptxas runs out of registers
  // With another loop, ptxas finds too few registers at D = 128 and serialises every product.
  static constexpr bool kMaskAll = kLocal && kCap;
  const PrefillParams& p;
  Control<D>& control;
  uint32_t base;
  int consumer, lane;
  ScoreScale scale;
  float lazy;
  sm90::Ring<C::kQueryBuffers> query;
  uint32_t count;  // K blocks multiplied so far
  float s[kKeys / 2], o[D / 2];
  uint32_t probabilities[kKeys / 4];
  Softmax softmax;

  __device__ __forceinline__ void release(uint64_t& barrier) {
    if (lane == 0) ptx::mbarrier_arrive(ptx::smem_address(&barrier));
  }

  // s = Q K^T over the first N keys of the block in the ring.
  template <int N, typename Place>
  __device__ __forceinline__ void issue_qk(Place keys) {
    const uint32_t q = uniform(wgmma::descriptor(base + query.stage() * C::kQueryBytes + consumer * C::kPageBytes));
    const uint32_t k = wgmma::descriptor(base + C::kKeyOffset + keys.stage() * C::kStageBytes);
    auto& out = reinterpret_cast<float(&)[N / 2]>(s);
    wgmma::fence();
#pragma unroll
    for (int i = 0; i < D / 16; ++i)
      wgmma::multiply(out, q + (i / 4 * (64 * 128) + i % 4 * 32) / 16, k + (i / 4 * (kKeys * 128) + i % 4 * 32) / 16,
                      i > 0, E{});
    wgmma::commit();
  }

  // o (+)= P V over the first kPages pages of the block in the ring.
  template <int kPages, typename Place>
  __device__ __forceinline__ void issue_pv(Place values, int add) {
    ptx::mbarrier_wait(ptx::smem_address(&control.value_full[values.stage()]), values.parity());
    const uint32_t v =
        wgmma::descriptor(base + C::kValueOffset + values.stage() * C::kStageBytes, kPageKeys * 128);
    wgmma::fence();
#pragma unroll
    for (int i = 0; i < kPages * 4; ++i)
      wgmma::multiply(o, probabilities + 4 * i, v + (i / 4 * C::kPageBytes + i % 4 * 2048) / 16, i > 0 ? 1 : add, E{});
    wgmma::commit();
  }

  template <typename Place>
  __device__ __forceinline__ void await_keys(Place keys) {
    ptx::mbarrier_wait(ptx::smem_address(&control.key_full[keys.stage()]), keys.parity());
  }

  template <bool kMask>
  __device__ __forceinline__ void exponentiate(const RowKeys& visible, int block, float (&factor)[2]) {
    if constexpr (kCap) cap_scores(s, scale.cap_scale);
    if constexpr (kMask) mask_scores<kLocal>(s, visible, block * kKeys + 2 * (lane % 4));
    softmax.update(s, scale.log2_scale, lazy, factor);
  }

  // One block: its scores under the output product of the block before it, which has kPages pages.
  template <bool kMask, int kPages>
  __device__ __forceinline__ void step(const RowKeys& visible, int block, int add) {
    const Ring keys{uniform(count)}, values{keys.count - 1};
    step_at<kMask, kPages>(visible, block, add, keys, values);
  }

  // The same where `count` is known to be kStage modulo the stages.
  template <int kStage>
  __device__ __forceinline__ void plain_step(const RowKeys& visible, int block, int add) {
    constexpr int kBefore = (kStage + C::kStages - 1) % C::kStages;
    step_at<false, C::kPages>(visible, block, add, RingAt<C::kStages, kStage>{count},
                              RingAt<C::kStages, kBefore>{count - 1});
  }

  template <bool kMask, int kPages, typename KeyPlace, typename ValuePlace>
  __device__ __forceinline__ void step_at(const RowKeys& visible, int block, int add, KeyPlace keys,
                                          ValuePlace values) {
    float factor[2];
    await_keys(keys);
    await_turn(consumer);
    issue_qk<kKeys>(keys);
    issue_pv<kPages>(values, add);
    pass_turn(consumer);
    wgmma::wait<kTight ? 0 : 1>();
    wgmma::hold(s);
    if constexpr (kTight) wgmma::hold(o);
    release(control.key_empty[keys.stage()]);
    exponentiate<kMask>(visible, block, factor);
    if constexpr (!kTight) wgmma::wait<0>();
    wgmma::hold(o);
    release(control.value_empty[values.stage()]);
    pack_probabilities<E>(probabilities, s);
    rescale(o, factor);  // last: its branch would part the packing from the exponentials
    ++count;
  }

  // The tile's last block: scores only.
  __device__ __forceinline__ void first_step(const RowKeys& visible, int block, bool half) {
    float factor[2];
    const Ring keys{uniform(count)};
    await_keys(keys);
    if (half) {
      issue_qk<64>(keys);
      wgmma::wait<0>();
      wgmma::hold(s);
#pragma unroll
      for (int i = 32; i < kKeys / 2; ++i) s[i] = -INFINITY;
    } else {
      issue_qk<kKeys>(keys);
      wgmma::wait<0>();
      wgmma::hold(s);
    }
    release(control.key_empty[keys.stage()]);
    exponentiate<true>(visible, block, factor);
    pack_probabilities<E>(probabilities, s);
    ++count;
  }

  template <int kPages>
  __device__ __forceinline__ void last_step(int add) {
    const Ring values{uniform(count) - 1};
    issue_pv<kPages>(values, add);
    wgmma::wait<0>();
    wgmma::hold(o);
    release(control.value_empty[values.stage()]);
  }

  __device__ __forceinline__ void run_tile(const Assignment& a, int row) {
    const Blocks<D> blocks(p, a.tile);
    const RowKeys visible(p, a.tile, row);
    const bool half = blocks.last_is_half();
    int block = blocks.end - 1;
    softmax = Softmax();

    ptx::mbarrier_wait(ptx::smem_address(&control.query_full[query.stage()]), query.parity());
    first_step(visible, block, half);
    const int last = block--;
    if (half && block >= blocks.begin) step<true, 1>(visible, block--, 0);
    for (; block >= blocks.begin && blocks.needs_end_mask(block); --block)
      step<true, C::kPages>(visible, block, block + 1 < last);
    if constexpr (!kMaskAll) {
      const int lowest = kLocal ? max(blocks.begin, blocks.first_without_begin_mask()) : blocks.begin;
      if constexpr (kPairs) {
        if (count % 2 != 0 && block >= lowest) step<false, C::kPages>(visible, block, block + 1 < last), --block;
        for (; block > lowest; block -= 2) {
          plain_step<0>(visible, block, block + 1 < last);
          plain_step<1>(visible, block - 1, 1);
        }
      }
      for (; block >= lowest; --block) step<false, C::kPages>(visible, block, block + 1 < last);
    }
    if constexpr (kLocal)
      for (; block >= blocks.begin; --block) step<true, C::kPages>(visible, block, block + 1 < last);

    release(control.query_empty[query.stage()]);
    ++query.count;
    // Two calls that each wait: ptxas serialises wgmma whose pipeline crosses a join.
    if (half && last == blocks.begin) {
      last_step<1>(0);
    } else {
      last_step<C::kPages>(blocks.begin < last);
    }
    softmax.finish();
  }

  __device__ __forceinline__ void run() {
    const int thread = threadIdx.x - 128;
    const int local_row = thread / 32 * 16 + lane / 4;
    if (consumer == 1) pass_turn(1);  // consumer 0 goes first
    for (int i = 0;; ++i) {
      const int slot = i & 1;
      ptx::mbarrier_wait(ptx::smem_address(&control.assigned[slot]), i >> 1 & 1);
      const Assignment a = control.assignments[slot];
      __syncwarp();
      release(control.taken[slot]);
      if (a.task == Task::kEnd) return;
      if (a.task == Task::kCombine) {
        combine<E, D>(p, a, thread, scale);
        continue;
      }
      const int row = a.tile.row + local_row;
      if (a.tile.block_begin == a.tile.block_end) {
        store_nothing_seen<E, D>(p, a, row);
        continue;
      }
      run_tile(a, row);
      if (a.tile.split >= 0) {
        store_partial<D>(p, a, thread, o, softmax);
      } else {
        const float inverse[2] = {softmax.inverse(0, p.pages.v_scale), softmax.inverse(1, p.pages.v_scale)};
        store_rows<E>(p, a.tile, a.head, row, 0, o, inverse);
        store_lse(p, a.tile, a.head, row, softmax, scale.log2_scale);
      }
    }
  }
};

template <typename E, int D, bool kLocal, bool kCap>
__global__ void __launch_bounds__(kThreads, 1) kernel(const __grid_constant__ PrefillParams p) {
  using C = Config<D>;
  extern __shared__ __align__(1024) char shared[];
  Control<D>& control = *reinterpret_cast<Control<D>*>(shared + C::kControlOffset);
  static_assert(sizeof(Control<D>) <= C::kControlBytes);
  const uint32_t base = ptx::smem_address(shared);
  if (threadIdx.x == 0) {
    auto init = [](uint64_t& barrier, int count) { ptx::mbarrier_init(ptx::smem_address(&barrier), count); };
    for (int i = 0; i < 2; ++i) {
      init(control.query_full[i], kQueryThreads);
      init(control.query_empty[i], kConsumerWarps);
      init(control.assigned[i], 1);
      init(control.taken[i], kConsumerWarps + kQueryThreads / 32);
    }
    for (int i = 0; i < C::kStages; ++i) {
      init(control.key_full[i], 1);
      init(control.key_empty[i], kConsumerWarps);
      init(control.value_full[i], 1);
      init(control.value_empty[i], kConsumerWarps);
    }
    ptx::fence_barrier_init();
  }
  __syncthreads();
  ptx::grid_dependency_wait();

  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    shrink_registers<kLoaderRegisters>();
    if (threadIdx.x < 32) {
      KeyLoader<D>{p, control, base, {}, 0, static_cast<int>(threadIdx.x)}.run();
    } else {
      load_queries<E, D>(p, control, base);
    }
  } else {
    grow_registers<kConsumerRegisters>();
    const ScoreScale scale(p);
    Consumer<E, D, kLocal, kCap> consumer{
        p, control, base, warpgroup - 1, static_cast<int>(threadIdx.x % 32), scale, kLazyLog2 / scale.log2_scale,
        {}, 0};
    consumer.run();
  }
}

}  // namespace bicl::prefill::sm90
