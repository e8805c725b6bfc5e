// The multiplying warpgroups, 64 rows each.
//
// S = Q K^T of one block is issued together with O += P V of the block before it, and the two warpgroups take
// turns, so that the exponentials of one run under the products of the other. This goes on from tile to tile:
// the first scores of a tile are issued together with the last output product of the tile before, whose
// result is stored while the products of the other warpgroup run.
#pragma once

#include "../../common/wgmma.cuh"
#include "partials.cuh"

namespace bicl::prefill::sm90 {

// Of a block: a tile's first one; one with keys that some rows do not see; any other.
enum class Scores { kFirst, kMasked, kPlain };

// Rows that see no key at all.
template <typename E, int D>
__device__ __forceinline__ void store_nothing_seen(const PrefillParams& p, const Assignment& a, int row) {
  const float zero[2] = {0.f, 0.f};
#pragma unroll 1
  for (int column = 0; column < D; column += 32) {
    float o[16] = {};
    store_rows<E>(p, a.tile, a.head, row, column, o, zero);
  }
  const float lse[2] = {-INFINITY, -INFINITY};
  store_lse(p, a.tile, a.head, row, lse);
}

template <typename E, typename C, bool kLocal, bool kCap>
struct Consumer {
  using Operand = typename C::template Operand<E>;
  static constexpr int D = C::kHeadDim, kKeys = C::kKeys;
  // Capping needs the registers of the old probabilities: its products are waited for first.
  static constexpr bool kTight = kCap && D > 64;
  // With another loop, ptxas finds too few registers and serialises every product.
  static constexpr bool kMaskAll = kLocal && kCap && D > 64;
  // A block's softmax goes in two parts, so that exponentials of one are under way while the other is scaled; in one
  // part where ptxas serialises products otherwise.
  static constexpr int kHeld = kKeys / 2;  // scores of a thread
  static constexpr int kSplit = C::kWiden ? kHeld : kHeld / 2;
  static constexpr bool kHalfPartials = !kLocal && !kCap && !C::kWiden;
  const PrefillParams& p;
  Control& control;
  int consumer, lane;
  ScoreScale scale;
  uint32_t query_base, key_base, value_base;  // descriptors of stage 0
  uint32_t query_count, count;                // tiles and blocks of K multiplied so far
  float s[kHeld], o[D / 2];
  uint32_t probabilities[kKeys / 4];
  RunningSoftmax softmax;

  using KeyPlace = Place<C::kStages>;

  __device__ __forceinline__ void release(uint64_t& barrier) {
    ptx::mbarrier_arrive_warp(ptx::smem_address(&barrier), lane);
  }

  // s = Q K^T over the first N keys of a block.
  template <int N>
  __device__ __forceinline__ void issue_qk(KeyPlace keys) {
    const uint32_t q = uniform(query_base + query_count % C::kQueryBuffers * (C::kQueryBytes / 16));
    const uint32_t k = key_base + keys.stage * (C::kStageBytes / 16);
    auto& out = reinterpret_cast<float(&)[N / 2]>(s);
    wgmma::fence();
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
      constexpr int kSteps = C::kRowBytes / 32;  // of 16 dims in a tile
      wgmma::multiply<C::kRowBytes>(out, q + (i / 4 * (64 * 128) + i % 4 * 32) / 16,
                                    k + (i / kSteps * (kKeys * C::kRowBytes) + i % kSteps * 32) / 16, i > 0, Operand{});
    }
    wgmma::commit();
  }

  // o += P V over the first N keys of a block.
  template <int N>
  __device__ __forceinline__ void issue_pv(KeyPlace values) {
    const uint32_t v = value_base + values.stage * (C::kStageBytes / 16);
    wgmma::fence();
#pragma unroll
    for (int i = 0; i < N / 16; ++i) {
      constexpr int kSteps = C::kPageKeys / 16;  // of 16 keys in a page
      wgmma::multiply<C::kRowBytes>(o, probabilities + 4 * i,
                                    v + (i / kSteps * C::kPageBytes + i % kSteps * (16 * C::kRowBytes)) / 16, 1,
                                    Operand{});
    }
    wgmma::commit();
  }

  __device__ __forceinline__ void await_values(KeyPlace values) {
    ptx::mbarrier_wait(ptx::smem_address(&control.value_full[values.stage]), values.parity);
  }

  __device__ __forceinline__ void await_keys(KeyPlace keys) {
    ptx::mbarrier_wait(ptx::smem_address(&control.key_full[keys.stage]), keys.parity);
  }

  template <Scores kScores, int kFirst, int kLast>
  __device__ __forceinline__ bool exponents(float (&factor)[2]) {
    if constexpr (kScores == Scores::kPlain) {
      return softmax.template update<kFirst, kLast>(s, scale.log2_scale, factor);
    } else {
      return softmax.template update_masked<kFirst, kLast>(s, scale.log2_scale, factor);
    }
  }

  // Scores to probabilities. The output product in flight still reads the older ones: the exponentials of the first
  // part run under it, the others after it. More under it is slower, less too.
  template <Scores kScores>
  __device__ __forceinline__ void exponentiate(const RowKeys& visible, int block, KeyPlace keys, KeyPlace values,
                                               bool output = true) {
    constexpr bool kFirst = kScores == Scores::kFirst, kParts = kSplit < kHeld;
    constexpr int kEarly = kParts && !kFirst ? kSplit : kHeld / 4;
    float factor[2];
    release(control.key_empty[keys.stage]);
    if (kTight && output) release(control.value_empty[values.stage]);
    if constexpr (kCap) cap_scores(s, scale.cap_scale);
    if constexpr (kScores != Scores::kPlain) mask_scores<kLocal>(s, visible, block * kKeys + 2 * (lane % 4));
    bool rises = false;
    if constexpr (kParts && kFirst) {
      softmax.template begin<kSplit>(s, scale.log2_scale);
    } else {
      rises = exponents<kScores, 0, kSplit>(factor);
    }
    softmax.template exponentiate<0, kEarly>(s);
    if constexpr (kParts && !kFirst) rises |= exponents<kScores, kSplit, kHeld>(factor);
    // This branch is also what keeps ptxas from waiting before the exponentials above.
    if (!kFirst && rises) {
      if constexpr (!kTight) {
        wgmma::wait<0>();
        wgmma::hold(o);
      }
#pragma unroll
      for (int i = 0; i < D / 2; ++i) o[i] *= factor[i / 2 % 2];
    }
    if constexpr (!kTight) {
      wgmma::wait<0>();
      wgmma::hold(o);
      if (output) release(control.value_empty[values.stage]);
    }
    softmax.template exponentiate<kEarly, kHeld>(s);
    pack_probabilities<Operand>(probabilities, s);
  }

  // One block: its scores under the output product of the block before it, of N keys.
  template <bool kMask, int N>
  __device__ __forceinline__ void step(const RowKeys& visible, int block) {
    const uint32_t now = uniform(count);
    const KeyPlace keys(now), values(now - 1);
    // Consumer 0 waits for both: its turns come first.
    if (consumer == 0) await_keys(keys);
    await_turn(consumer);
    issue_qk<kKeys>(keys);
    if (consumer == 0) await_values(values);
    issue_pv<N>(values);
    pass_turn(consumer);
    wgmma::wait<kTight ? 0 : 1>();
    wgmma::hold(s);
    if constexpr (kTight) wgmma::hold(o);
    exponentiate<kMask ? Scores::kMasked : Scores::kPlain>(visible, block, keys, values);
    ++count;
  }

  // A tile's last block (the first half of it if kHalf), with which each tile begins, together with the output product
  // of the tile before, with which that one ends. Nothing pending: a product of whatever lies there, for nobody.
  template <bool kHalf>
  __device__ __forceinline__ void first_step(const RowKeys& visible, int block, bool pending) {
    const uint32_t now = uniform(count);
    const KeyPlace keys(now), values(now - 1);
    await_keys(keys);
    await_turn(consumer);
    issue_qk<kHalf ? 64 : kKeys>(keys);
    if (pending) await_values(values);
    issue_pv<kKeys>(values);
    pass_turn(consumer);
    wgmma::wait<kTight ? 0 : 1>();
    wgmma::hold(s);
    if constexpr (kTight) wgmma::hold(o);
    if constexpr (kHalf) {
#pragma unroll
      for (int i = 32; i < kKeys / 2; ++i) s[i] = -INFINITY;
    }
    softmax = RunningSoftmax();
    exponentiate<Scores::kFirst>(visible, block, keys, values, pending);
    ++count;
  }

  __device__ __forceinline__ void last_step() {
    const KeyPlace values(uniform(count) - 1);
    await_values(values);
    issue_pv<kKeys>(values);
    wgmma::wait<0>();
    wgmma::hold(o);
    release(control.value_empty[values.stage]);
  }

  // Stores the result of assignment `slot` and gives the slot back.
  __device__ __forceinline__ void end_tile(int slot, int local_row, RunningSoftmax& result) {
    const Assignment& a = control.assignments[slot];
    result.finish();
    if (a.tile.split >= 0) {
      store_partial<D, kHalfPartials>(p, a, threadIdx.x - 128, o, result);
    } else {
      const int row = a.tile.row + local_row;
      const float inverse[2] = {result.inverse(0, p.pages.v_scale), result.inverse(1, p.pages.v_scale)};
      store_rows<E>(p, a.tile, a.head, row, 0, o, inverse);
      const float lse[2] = {result.lse(0), result.lse(1)};
      store_lse(p, a.tile, a.head, row, lse);
    }
    __syncwarp();
    release(control.taken[slot]);
  }

  __device__ __forceinline__ const Assignment& await_assignment(uint32_t i) {
    const Place<kAssignments> place(i);
    ptx::mbarrier_wait(ptx::smem_address(&control.assigned[place.stage]), place.parity);
    return control.assignments[place.stage];
  }

  __device__ __forceinline__ void begin_tile(const Assignment& a, int local_row, bool pending) {
    const Blocks<C> blocks(p, a.tile);
    const RowKeys visible(p, a.tile, a.tile.row + local_row);
    ptx::mbarrier_wait(ptx::smem_address(&control.query_full[query_count % C::kQueryBuffers]),
                       query_count / C::kQueryBuffers & 1);
    if (blocks.last_is_half()) {
      first_step<true>(visible, blocks.end - 1, pending);
    } else {
      first_step<false>(visible, blocks.end - 1, pending);
    }
  }

  // All blocks of a tile but the last, with which it began. The output product of the lowest remains to be done.
  __device__ __forceinline__ void go_through(const Assignment& a, int local_row) {
    const Blocks<C> blocks(p, a.tile);
    const RowKeys visible(p, a.tile, a.tile.row + local_row);
#pragma unroll
    for (int j = 0; j < D / 2; ++j) o[j] = 0.f;
    int block = blocks.end - 2;
    if (blocks.last_is_half() && block >= blocks.begin) {
      if (kMaskAll || kLocal || C::kWiden || blocks.needs_end_mask(block)) {  // kWiden: as for kMaskAll
        step<true, 64>(visible, block--);
      } else {
        step<false, 64>(visible, block--);
      }
    }
    for (; block >= blocks.begin && blocks.needs_end_mask(block); --block) step<true, kKeys>(visible, block);
    if constexpr (!kMaskAll) {
      const int lowest = kLocal ? max(blocks.begin, blocks.first_without_begin_mask()) : blocks.begin;
      for (; block >= lowest; --block) step<false, kKeys>(visible, block);
    }
    if constexpr (kLocal)
      for (; block >= blocks.begin; --block) step<true, kKeys>(visible, block);
    release(control.query_empty[query_count % C::kQueryBuffers]);
    ++query_count;
  }

  __device__ __forceinline__ void run() {
    const int thread = threadIdx.x - 128;
    const int local_row = thread / 32 * 16 + lane / 4;
    if (consumer == 1) pass_turn(1);  // consumer 0 goes first
#pragma unroll
    for (int j = 0; j < kKeys / 4; ++j) probabilities[j] = 0;
    bool pending = false;  // the last output product of the assignment before is still to come
    for (uint32_t i = 0;; ++i) {
      const Assignment& a = await_assignment(i);
      if (has_keys(a)) {
        RunningSoftmax ended = softmax;
        begin_tile(a, local_row, pending);
        if (pending) end_tile((i - 1) % kAssignments, local_row, ended);
        go_through(a, local_row);
        pending = true;
        continue;
      }
      if (pending) {
        last_step();
        end_tile((i - 1) % kAssignments, local_row, softmax);
        pending = false;
      }
      if (a.task == Task::kEnd) return;
      if (a.task == Task::kCombine) {
        combine<E, D, kHalfPartials>(p, a, thread);
      } else {
        store_nothing_seen<E, D>(p, a, a.tile.row + local_row);
      }
      __syncwarp();
      release(control.taken[i % kAssignments]);
    }
  }
};

}  // namespace bicl::prefill::sm90
