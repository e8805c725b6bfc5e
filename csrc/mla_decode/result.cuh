// The ends of segments, and what a CTA does about sequences that it shares with others.
#pragma once

#include "combine.cuh"
#include "producer.cuh"

namespace bicl::mla {

template <typename T>
class Results : protected Producer<T> {
 protected:
  using Base = Producer<T>;
  using Element = typename T::Element;
  using Base::entries_;
  using Base::p_;
  using Base::shared_;
  using Base::head_block;
  using Base::references;
  using Base::sums;
  using Base::team;
  using Base::warpgroup;
  using Base::Base;

  // What a thread knows about the tiles of one segment so far. Accumulators: row = value dim, column = head.
  struct State {
    float out[kValueTiles][T::kBlocks * 4];
    float reference[T::kOwnBlocks][2];  // of its columns' exponents, in log2
    float sum[T::kOwnBlocks][2];        // of probabilities of its rows

    __device__ __forceinline__ void reset() {
#pragma unroll
      for (int j = 0; j < T::kOwnBlocks; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) reference[j][e] = -INFINITY, sum[j][e] = 0.f;
    }
  };

  __device__ __forceinline__ float* part(int of_team, bool from_start) const {
    return p_.workspace + (static_cast<int64_t>(of_team * gridDim.x + head_block()) * 2 + from_start) * T::kPartFloats;
  }

  // The end of a segment: its result if it is the whole sequence, else a part for combine_parts().
  __device__ __forceinline__ void finish(State& state, int sequence, bool whole, bool from_start) const {
    const int group = warpgroup(), warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < T::kOwnBlocks; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float sum = state.sum[j][e];
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2) sum += __shfl_xor_sync(~0u, sum, distance);
        const int head = group * T::kOwnHeads + j * 8 + lane % 4 * 2 + e;
        if (lane < 4) sums()[warp * T::kHeads + head] = sum;
        if (lane < 4 && warp == 0) references()[head] = state.reference[j][e];
      }
    ptx::named_barrier(kAll, kConsumers);
    const auto sum_of = [&](int head) {
      return sums()[head] + sums()[T::kHeads + head] + sums()[2 * T::kHeads + head] + sums()[3 * T::kHeads + head];
    };
    float* const target = part(team(), from_start);
    if (static_cast<int>(threadIdx.x) < T::kHeads) {
      const int head = threadIdx.x;
      const float sum = sum_of(head), reference = references()[head];
      if (!whole)
        reinterpret_cast<float2*>(target + T::kHeads * kValueDim)[head] = make_float2(reference, sum);
      else if (p_.lse != nullptr && head_block() * T::kHeads + head < p_.num_heads)
        p_.lse[static_cast<int64_t>(head_block() * T::kHeads + head) * p_.sequences.batch + sequence] =
            (reference + log2f(sum)) * kLn2;
    }
    if (whole) {
#pragma unroll
      for (int j = 0; j < T::kBlocks; ++j) {
        const int column = j * 8 + lane % 4 * 2;
        const float inverse0 = 1.f / sum_of(column), inverse1 = 1.f / sum_of(column + 1);
        const int head = head_block() * T::kHeads + j * 8 + lane / 4;
        Element* out = static_cast<Element*>(p_.out) + sequence * p_.out_token_stride + head * p_.out_head_stride;
#pragma unroll
        for (int i = 0; i < kValueTiles; ++i)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const uint32_t pair = ptx::movmatrix_trans(ptx::pack(state.out[i][j * 4 + half * 2] * inverse0,
                                                                 state.out[i][j * 4 + half * 2 + 1] * inverse1,
                                                                 Element{}));
            const int dim = (group * kValueTiles + i) * 64 + warp * 16 + half * 8 + lane % 4 * 2;
            if (head < p_.num_heads) *reinterpret_cast<uint32_t*>(out + dim) = pair;
          }
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kValueTiles; ++i)
#pragma unroll
      for (int j = 0; j < T::kBlocks; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int head = j * 8 + lane % 4 * 2 + e % 2;
          const int dim = (group * kValueTiles + i) * 64 + warp * 16 + e / 2 * 8 + lane / 4;
          target[head * kValueDim + dim] = state.out[i][j * 4 + e];
        }
    ptx::named_barrier_arrive(kPublish + from_start, kConsumers + 32);
  }

  __device__ __forceinline__ int32_t* counter(int sequence) const {
    return p_.counters + sequence * gridDim.x + head_block();
  }

  // Slices of the sequences at this CTA's ends that it shares with others. Only when it has read all of its tiles: the
  // parts of the others are ready at about the same time.
  __device__ __forceinline__ void combine_ends() const {
    for_shared_ends([&](int sequence, bool, int first_team, int parts) {
      const Slice<T> slice{p_, sequence, head_block(), parts, team() - first_team};
      const Parts<T> all(part(first_team, true), gridDim.x * 2 * T::kPartFloats);
      combine(slice, all, counter(sequence), shared_ + T::kRing);
    });
  }

  // By a warp of its own, as the fence takes long: what the consumers wrote.
  __device__ __forceinline__ void publish_ends() const {
    for_shared_ends([&](int sequence, bool from_start, int, int) {
      ptx::named_barrier(kPublish + from_start, kConsumers + 32);
      if (threadIdx.x % 32 == 0) publish_part(counter(sequence));
    });
  }

  // The sequences at this CTA's ends that it shares with others:
  // visit(sequence, whether its start is here, first team, teams).
  template <typename Visit>
  __device__ __forceinline__ void for_shared_ends(const Visit& visit) const {
    const Teams teams = this->teams();
    const int begin = teams.begin(team()), end = teams.begin(team() + 1);
    const int last_sequence = entries_.sequence_of(end - 1);
    int sequence = entries_.sequence_of(begin);
#pragma unroll 1
    while (true) {
      const int first = entries_.first_tile(sequence), last = entries_.first_tile(sequence + 1);
      if (first < begin || end < last) {
        const int first_team = teams.owner(first);
        visit(sequence, begin <= first, first_team, teams.owner(last - 1) - first_team + 1);
      }
      if (sequence == last_sequence) return;
      sequence = last_sequence;
    }
  }

  // Sequences without keys get no work: zeros, and -inf for their LSE.
  __device__ __forceinline__ void clear_empty_sequences() const {
#pragma unroll 1
    for (int b = team(); b < p_.sequences.batch; b += gridDim.y) {
      if (!entries_.empty(b)) continue;
      const int first = head_block() * T::kHeads, heads = min(T::kHeads, p_.num_heads - first);
#pragma unroll 1
      for (int i = threadIdx.x; i < heads * (kValueDim / 4); i += kConsumers) {
        const int head = first + i / (kValueDim / 4);
        Element* out = static_cast<Element*>(p_.out) + b * p_.out_token_stride + head * p_.out_head_stride;
        *reinterpret_cast<uint2*>(out + i % (kValueDim / 4) * 4) = make_uint2(0, 0);
        if (p_.lse != nullptr && i % (kValueDim / 4) == 0)
          p_.lse[static_cast<int64_t>(head) * p_.sequences.batch + b] = -INFINITY;
      }
    }
  }
};

}  // namespace bicl::mla
