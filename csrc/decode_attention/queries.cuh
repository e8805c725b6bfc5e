// The queries of the next segments, copied into shared memory ahead: memory that is busy with pages answers late.
#pragma once

#include "cta.cuh"
#include "share.cuh"

namespace bicl::decode {

template <typename T>
class Queries : protected Cta<T> {
 protected:
  using Base = Cta<T>;
  using Base::k_;
  using Base::p_;
  using Base::heads_of;
  using Base::query_slot;
  using Base::Base;

  // The next head whose query is to be copied.
  struct UpcomingQuery {
    static constexpr int kSplit = -(1 << 30);  // the position of a head that goes first

    int pair;  // sequence * heads + head: one register
    int x;     // its first position
  };

  // Calls f(row, dim, address) for the 16-byte chunks of a slot that are this thread's.
  template <typename F>
  __device__ __forceinline__ void for_query_chunks(int slot, F&& f) const {
    constexpr int kRowChunks = T::kHeadDim / 8, kChunks = T::kHeads * kRowChunks;
#pragma unroll
    for (int i = 0; i < (kChunks + T::kConsumers - 1) / T::kConsumers; ++i) {
      const int chunk = threadIdx.x + i * T::kConsumers;
      if (kChunks % T::kConsumers != 0 && chunk >= kChunks) break;
      const int row = chunk / kRowChunks, dim = chunk % kRowChunks * 8;
      f(row, dim, query_slot(slot) + (row * T::kQueryStride + dim) * 2);
    }
  }

  // Into a slot. Rows and dims that do not exist become zeros.
  __device__ __forceinline__ void copy_query(int sequence, const Heads& heads, int slot) const {
    const auto* rows = static_cast<const uint16_t*>(p_.query) + sequence * p_.query_token_stride +
                       heads.first_query * p_.query_head_stride;
    for_query_chunks(slot, [&](int row, int dim, char* target) {
      const bool exists = row < heads.active && dim < p_.head_dim;
      ptx::cp_async_16(ptx::smem_address(target), exists ? rows + row * p_.query_head_stride + dim : rows, exists);
    });
  }

  // Always commits, so that a fixed count of younger copies may be on their way while one is awaited.
  __device__ __forceinline__ void copy_next_query(UpcomingQuery& next, const Line& line, const Share& share,
                                                  int slot) const {
    if (next.x < share.end) {
      uint32_t pair_head;
      const int sequence = k_.heads.divide(next.pair, pair_head);
      copy_query(sequence, heads_of(pair_head), slot);
      move_on(next, line, share);
    }
    ptx::cp_async_commit();
  }

  __device__ __forceinline__ void move_on(UpcomingQuery& next, const Line& line, const Share& share) const {
    if (next.x == UpcomingQuery::kSplit) {
      const Place place = line.place(share.begin, 0);
      next = {place.sequence * static_cast<int>(k_.heads.divisor) + place.head,
              share.begin + share.split - place.block};
      return;
    }
    uint32_t pair_head;
    int sequence = k_.heads.divide(next.pair, pair_head), head = pair_head;
    next.x = share.cluster() ? share.end : next.x + line.blocks(sequence);
    if (next.x >= share.end) return;
    line.advance(sequence, head);
    next.pair = sequence * k_.heads.divisor + head;
  }

  // A barrier must follow. fp8 pages are multiplied as fp16: each thread converts what it copied.
  __device__ __forceinline__ void await_query(int slot) const {
    ptx::cp_async_wait<T::kQuerySlots - 1>();
    if (!T::kFp8 || p_.query_dtype == DType::kFloat16) return;
    const auto convert = [](uint32_t bits) {
      const auto clamp = [](uint32_t b) { return fminf(fmaxf(__uint_as_float(b), -65504.f), 65504.f); };
      return ptx::pack(clamp(bits << 16), clamp(bits & 0xffff0000u), __half{});
    };
    for_query_chunks(slot, [&](int, int, char* at) {
      auto* chunk = reinterpret_cast<uint4*>(at);
      const uint4 v = *chunk;
      *chunk = make_uint4(convert(v.x), convert(v.y), convert(v.z), convert(v.w));
    });
  }
};

}  // namespace bicl::decode
