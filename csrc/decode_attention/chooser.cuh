// Sparse decode: the pages of a CTA's share, chosen by warps of the same CTA, a stratum after the other, while those
// chosen before are on their way. What a stratum takes depends on nothing outside it and the sequence's first pages
// (sparse_select/), so CTAs that share a head need not agree. Strata at the ends of a share are scored by both.
#pragma once

#include "../sparse_select/pick.cuh"
#include "../sparse_select/score.cuh"
#include "kernel_params.h"

namespace bicl::decode {

struct SparseKernelParams {
  KernelParams decode;
  sparse::TilesKernelParams choice;
  int choice_offset;  // of what choosing needs in shared memory
};

// Tokens that a sequence reads.
struct KeptLengths {
  const sparse::TilesKernelParams& k;
  int stratum;

  __device__ __forceinline__ int operator()(int sequence) const {
    const TilesParams& p = k.p;
    const sparse::TilesRow row =
        sparse::tiles_row(p.sequences.cache_seqlens[sequence], __fmul_rn(p.sparsity[sequence], p.share), p.rule,
                          k.page_log2, p.max_pages, stratum);
    return row.length - ((row.count - row.keep) << k.page_log2);
  }
};

// Page ids on their way from the warps that choose to the one that copies, in the order of the share's blocks.
class PageQueue {
 public:
  static constexpr int kSlots = 2048;
  static constexpr int kBytes = (kSlots + 4) * 4;

  __device__ __forceinline__ explicit PageQueue(char* base) : base_(ptx::smem_address(base)) {}

  __device__ __forceinline__ void clear() const { publish(kReady, 0), publish(kTaken, 0); }
  __device__ __forceinline__ void put(int slot, int32_t page) const {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(address(slot)), "r"(page) : "memory");
  }
  __device__ __forceinline__ int32_t get(int slot) const {
    int32_t page;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(page) : "r"(address(slot)) : "memory");
    return page;
  }
  // All slots up to `end` are there.
  __device__ __forceinline__ void set_ready(int end) const { publish(kReady, end); }
  __device__ __forceinline__ void wait_ready(int end) const { wait(kReady, end); }
  // All slots up to `end` may be put again, a round later.
  __device__ __forceinline__ void set_taken(int end) const { publish(kTaken, end); }
  __device__ __forceinline__ void wait_room(int end) const { wait(kTaken, end - kSlots); }

 private:
  static constexpr int kReady = kSlots * 4, kTaken = kReady + 4;

  __device__ __forceinline__ uint32_t address(int slot) const { return base_ + slot % kSlots * 4; }
  __device__ __forceinline__ void publish(int what, int value) const {
    asm volatile("st.release.cta.shared.b32 [%0], %1;" ::"r"(base_ + what), "r"(value) : "memory");
  }
  __device__ __forceinline__ void wait(int what, int value) const {
    int now;
    do {
      asm volatile("ld.acquire.cta.shared.b32 %0, [%1];" : "=r"(now) : "r"(base_ + what) : "memory");
    } while (now < value);
  }

  const uint32_t base_;
};

template <int kCentroids>
class Chooser {
  using Shape = sparse::ShareShape<kCentroids>;
  using Context = sparse::TilesContext<Shape>;

 public:
  // warp: among those that choose. `shared` is theirs.
  __device__ __forceinline__ Chooser(const sparse::TilesKernelParams& k, char* shared, const PageQueue& queue, int warp)
      : c_(k, shared, warp), queue_(queue) {
    sparse::RowRing<kCentroids, Context>(c_).start();
  }

  // The next segment of the share: pages [from, to) of the list that a KV head of a sequence reads, in `slots` slots.
  __device__ __forceinline__ void choose(int sequence, int head, int from, int to, int slots) {
    c_.sequence = sequence;
    c_.head = head;
    const TilesParams& p = c_.p;
    c_.row = sparse::tiles_row(p.sequences.cache_seqlens[sequence], __fmul_rn(p.sparsity[sequence], p.share), p.rule,
                               c_.k.page_log2, p.max_pages, Shape::kStratum);
    if (c_.row.keep == c_.row.count) copy(from, to);
    else choose_strata(from, to);
    slot_ += slots;
    publish(slot_);
  }

 private:
  // A whole sequence: pages as they stand in its table.
  __device__ __forceinline__ void copy(int from, int to) const {
#pragma unroll 1
    for (int first = from; first < to; first += Shape::kThreads) {
      const int end = min(first + Shape::kThreads, to), i = first + c_.thread();
      queue_.wait_room(slot_ + end - from);
      if (i < end) queue_.put(slot_ + i - from, c_.table()[i]);
      publish(slot_ + end - from);
    }
  }

  __device__ __forceinline__ void choose_strata(int from, int to) {
    const sparse::TilesRow& row = c_.row;
    const int begin = max(from, row.begin), end = min(to, row.begin + row.need);  // of the list, what is to be chosen
    const int first = begin < end ? stratum_of(begin) : 0, turns = begin < end ? stratum_of(end - 1) + 1 - first : 0;
    const int firsts = c_.warp == 0 && turns > 0 ? (row.begin + sparse::kOctet - 1) / sparse::kOctet : 0;
    const auto page_at = [&](int octet, int place) {
      if (octet < firsts) {
        const int page = sparse::kOctet * octet + place;
        return page < row.begin ? page : -1;
      }
      const int turn = (octet - firsts) / Shape::kTurnOctets, part = (octet - firsts) % Shape::kTurnOctets;
      return row.page(first + turn, sparse::kOctet * (c_.warp + Shape::kScorers * part) + place);
    };
    const int octets = firsts + turns * Shape::kTurnOctets;
    sparse::Scorer<kCentroids, false, Context, decltype(page_at)> scorer(c_, octets, page_at, octets_);
    const sparse::Picker<Context> picker(c_);
    if (turns > 0) {
      if (c_.warp == 0) picker.clear_firsts();
      scorer.begin();
      scorer.load(0);
      scorer.refill(0);
      scorer.prepare();
    }
    put_ends(0, row.begin, from, to);
    int octet = 0;
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn) {
      const int stratum = first + turn, before = row.begin + row.before(stratum), quota = row.quota(stratum);
      const auto candidate = picker.candidate(stratum);
#pragma unroll 1
      for (const int last = firsts + (turn + 1) * Shape::kTurnOctets; octet < last; ++octet) {
        scorer.score(octet, [&](int query_head, int place, int page, float score) {
          const float own = page < 0 ? -INFINITY : score;
          const int part = (octet - firsts) % Shape::kTurnOctets;
          if (octet < firsts) picker.put_firsts(query_head, place, own);
          else picker.put(turn, c_.warp + Shape::kScorers * part, query_head, place, own);
        });
        if (octet > 0) scorer.refill(octet);
        scorer.load(octet + 1);
      }
      c_.sync();  // the stratum's scores are there
      queue_.wait_room(slot_ + min(before + quota, to) - from);
      picker.pick(turn, candidate, quota, [&](int own, int, int32_t page) {
        if (before + own >= from && before + own < to) queue_.put(slot_ + before + own - from, page);
      });
      publish(slot_ + min(before + quota, end) - from);
    }
    put_ends(row.begin + row.need, row.keep, from, to);
    octets_ += octets;
  }

  // The stratum that takes the list's page i.
  __device__ __forceinline__ int stratum_of(int i) const {
    const sparse::TilesRow& row = c_.row;
    const int own = i - row.begin, larger = row.more * (row.each + 1);
    return own < larger ? own / (row.each + 1) : row.more + (own - larger) / row.each;
  }

  // Of the list's pages [begin, end), which do not compete, those of the segment; published with others.
  __device__ __forceinline__ void put_ends(int begin, int end, int from, int to) const {
    const sparse::TilesRow& row = c_.row;
#pragma unroll 1
    for (int i = max(begin, from) + c_.thread(); i < min(end, to); i += Shape::kThreads) {
      queue_.wait_room(slot_ + i + 1 - from);
      queue_.put(slot_ + i - from, c_.table()[i < row.begin ? i : row.count - row.keep + i]);
    }
  }

  // When all warps have put theirs.
  __device__ __forceinline__ void publish(int end) const {
    c_.sync();
    if (c_.thread() == 0) queue_.set_ready(end);
  }

  Context c_;
  const PageQueue queue_;
  int slot_ = 0;    // of the segment's first page
  int octets_ = 0;  // that the warp's ring has seen
};

}  // namespace bicl::decode
