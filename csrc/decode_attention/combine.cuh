// Results of several CTAs to one: through the workspace by the CTA that comes last (stream-K), or pushed through
// distributed shared memory (cluster).
#pragma once

#include "queries.cuh"
#include "result.cuh"

namespace bicl::decode {

template <typename T>
class Combiner : protected Queries<T> {
 protected:
  using Base = Queries<T>;
  using Base::k_;
  using Base::lane_;
  using Base::p_;
  using Base::warp_;
  using Base::for_vectors;
  using Base::heads_of;
  using Base::is_last;
  using Base::list;
  using Base::peers_done;
  using Base::result;
  using Base::result_stats;
  using Base::Base;

  // --- what one CTA keeps from unit to unit ------------------------------------------------------------
  __device__ __forceinline__ void keep(int vector, const Piece& piece) const {
    result()[vector] = piece.out;
    result_stats()[vector] = make_float2(piece.maximum, piece.sum);
  }
  __device__ __forceinline__ Piece get_kept(int vector) const {
    const float2 stat = result_stats()[vector];
    return {stat.x, stat.y, result()[vector]};
  }

  // --- combine through the workspace --------------------------------------------------------------------
  // A slot: [head][dim], then (maximum, sum) [head].
  __device__ __forceinline__ float* partial(int slot) const {
    return static_cast<float*>(p_.workspace) + static_cast<int64_t>(slot) * T::kPartialFloats;
  }

  __device__ __forceinline__ void put_partial(int slot, int row, int dim, const Piece& piece) const {
    float* target = partial(slot);
    *reinterpret_cast<float4*>(target + row * T::kHeadDim + dim) = piece.out;
    if (dim == 0)
      reinterpret_cast<float2*>(target + T::kHeads * T::kHeadDim)[row] = make_float2(piece.maximum, piece.sum);
  }

  // Counts blocks, so that it does not matter how many CTAs share a head. The counter resets itself. Returns how many
  // parts there are to the CTA that comes last, 0 to the others.
  __device__ __forceinline__ int arrive(const Line& line, const Place& place, int count, int slots) const {
    ptx::named_barrier(kConsumersOnly, T::kConsumers);  // every thread's partials are written
    if (threadIdx.x == T::kConsumers - 32) {
      int32_t* counter = p_.counters + place.sequence * k_.heads.divisor + place.head;
      const bool last = ptx::atomic_add_acq_rel(counter, count) + count == place.num_blocks;
      if (last) *counter = 0;
      is_last() = last;
    }
    __syncwarp();
    const int parts = list_slots(line, place, slots);  // while the counter answers
    ptx::named_barrier(kConsumersOnly, T::kConsumers);
    return is_last() != 0 ? parts : 0;
  }

  // Lists the slots that hold parts of this head, in order.
  __device__ __forceinline__ int list_slots(const Line& line, const Place& place, int slots) const {
    const int first = line.owner(place, 0);
    if (!p_.deterministic) {
      const int team = k_.teams.size.divisor;
      const int count = static_cast<int>(k_.teams.size.divide(line.owner(place, place.num_blocks - 1) - first)) + 1;
      for (int i = threadIdx.x; i < count; i += T::kConsumers) list()[i] = (first + i * team) * slots + (i == 0);
      return count;
    }
    const int step = unit_blocks(place.num_blocks, T::kGroups);
    const int units = (place.num_blocks + step - 1) / step;
    const int owner = lane_ < units ? line.owner(place, lane_ * step) : -1 - lane_;
    const uint32_t same = __match_any_sync(~0u, owner);
    const bool counted = lane_ < units && (owner != first || lane_ == 0);
    const uint32_t all = __ballot_sync(~0u, counted);
    if (warp_ == 0 && counted)
      list()[__popc(all & ((1u << lane_) - 1))] =
          owner * slots + (owner == first ? slots - 1 : lane_ - (__ffs(same) - 1));
    return __popc(all);
  }

  __device__ __forceinline__ void combine_line(const Place& place, const Heads& heads, int count) const {
    constexpr int kBatch = 8;  // loads in flight
    for_vectors(heads, [&](int, int row, int dim) {
      Piece all;
#pragma unroll 1
      for (int base = 0; base < count; base += kBatch) {
        float4 out[kBatch];
        float2 stat[kBatch];
#pragma unroll
        for (int j = 0; j < kBatch; ++j)
          if (base + j < count) {
            const float* source = partial(list()[base + j]);
            out[j] = __ldcg(reinterpret_cast<const float4*>(source + row * T::kHeadDim + dim));
            stat[j] = __ldcg(reinterpret_cast<const float2*>(source + T::kHeads * T::kHeadDim) + row);
          }
#pragma unroll
        for (int j = 0; j < kBatch; ++j)
          if (base + j < count) fold(all, stat[j].x, stat[j].y, out[j]);
      }
      write_final<T>(p_, place.sequence, heads.first_query + row, dim, all);
    });
    // The next merge's first barrier keeps the list until everyone has read it.
  }

  // --- combine through distributed shared memory ----------------------------------------------------------
  // A result has one part a CTA, or one a unit in deterministic mode. Vector v is finished by CTA v % cluster, which
  // finds part i at i * share + v / cluster. Parts are pushed, and counted in bytes on the receiver's barrier: no
  // barrier among the CTAs at the end.
  __device__ __forceinline__ void start_cluster() const {
    if constexpr (T::Loader::kClusters) {
      __syncwarp();
      ptx::cluster_arrive_relaxed();  // waited for before anything is pushed: the peers' barriers are ready
    }
  }

  __device__ __forceinline__ void wait_peers_started() const {
    if constexpr (T::Loader::kClusters) {
      __syncwarp();
      ptx::cluster_wait();
    }
  }

  __device__ __forceinline__ int cluster_part(int block, int step) const {
    return p_.deterministic ? block / step : ptx::cluster_rank();
  }
  __device__ __forceinline__ int cluster_parts(const Place& place) const {
    return p_.deterministic ? num_units(place.num_blocks, T::kGroups) : 1 << k_.cluster_log2;
  }
  __device__ __forceinline__ int vector_share() const {
    return (T::kVectors + (1 << k_.cluster_log2) - 1) >> k_.cluster_log2;
  }

  __device__ __forceinline__ void push(int part, int vector, const Piece& piece) const {
    if constexpr (T::Loader::kClusters) {
      const int target = vector & ((1 << k_.cluster_log2) - 1);
      const int index = part * vector_share() + (vector >> k_.cluster_log2);
      const uint32_t barrier = ptx::map_shared(peers_done(), target);
      ptx::store_async(ptx::map_shared(ptx::smem_address(result() + index), target), barrier, piece.out);
      ptx::store_async(ptx::map_shared(ptx::smem_address(result_stats() + index), target), barrier,
                       make_float2(piece.maximum, piece.sum));
    }
  }

  // A CTA whose share is empty.
  __device__ __forceinline__ void push_nothing(const Place& place) const {
    if (p_.deterministic) return;
    for_vectors(heads_of(place.head), [&](int v, int, int) { push(ptx::cluster_rank(), v, Piece{}); });
  }

  __device__ __forceinline__ void combine_cluster(const Place& place) const {
    if constexpr (T::Loader::kClusters) {
      const Heads heads = heads_of(place.head);
      const int size = 1 << k_.cluster_log2, rank = ptx::cluster_rank(), parts = cluster_parts(place);
      const int vectors = heads.active * (T::kHeadDim / 4);
      const int mine = (vectors - rank + size - 1) >> k_.cluster_log2;
      if (threadIdx.x == 0) ptx::mbarrier_expect_tx(peers_done(), mine * parts * 24);
      ptx::mbarrier_wait(peers_done(), 0);
      const auto finish = [&](int i, const Piece& piece) {
        const int v = (i << k_.cluster_log2) + rank;
        write_final<T>(p_, place.sequence, heads.first_query + v / (T::kHeadDim / 4), v % (T::kHeadDim / 4) * 4,
                       piece);
      };
      if (p_.deterministic) {
#pragma unroll 1
        for (int i = threadIdx.x; i < mine; i += T::kConsumers) {
          Piece all;
#pragma unroll 4
          for (int part = 0; part < parts; ++part) {
            const Piece piece = get_kept(part * vector_share() + i);
            fold(all, piece.maximum, piece.sum, piece.out);
          }
          finish(i, all);
        }
        return;
      }
      // A lane a part: short, because code that runs once comes from far away.
      const int part = threadIdx.x & (size - 1);
#pragma unroll 1
      for (int base = 0; base < mine; base += T::kConsumers >> k_.cluster_log2) {
        const int i = base + (threadIdx.x >> k_.cluster_log2);
        Piece piece = get_kept(part * vector_share() + min(i, mine - 1));
        float most = piece.maximum;
#pragma unroll 1
        for (int step = 1; step < size; step *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
        const float weight = ptx::exp2_approx(piece.maximum - most);
        piece.maximum = most;
        float* values[5] = {&piece.sum, &piece.out.x, &piece.out.y, &piece.out.z, &piece.out.w};
#pragma unroll
        for (float* value : values) *value *= weight;
#pragma unroll 1
        for (int step = 1; step < size; step *= 2)
#pragma unroll
          for (float* value : values) *value += __shfl_xor_sync(~0u, *value, step);
        if (part == 0 && i < mine) finish(i, piece);
      }
    }
  }
};

}  // namespace bicl::decode
