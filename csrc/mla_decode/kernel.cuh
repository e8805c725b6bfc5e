// Decode attention over latent pages on Hopper: a producer warp, two warpgroups that multiply.
//
// Products are transposed: keys are the 64 rows of S^T = K Q^T, and value dims those of O^T = V^T P^T, so that 16 heads
// fill a wgmma of 16 columns, and a page's tiles are its operands as they lie. Each warpgroup sums the scores over half
// of the dims, adds what the other has for half of the heads, and computes their softmax; through shared memory both get
// all probabilities, and each computes half of the value dims.
#pragma once

#include "attend.cuh"

namespace bicl::mla {

template <typename T>
class DecodeCta : Attender<T> {
  using Base = Attender<T>;
  using typename Base::Cursor;
  using typename Base::State;
  using Base::entries_;
  using Base::p_;
  using Base::attend;
  using Base::clear_empty_sequences;
  using Base::combine_ends;
  using Base::copy_query;
  using Base::finish;
  using Base::init_barriers;
  using Base::produce;
  using Base::publish_ends;
  using Base::team;
  using Base::touch_table;

 public:
  using Base::Base;

  __device__ __forceinline__ void run() {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (p_.pdl) {
      ptx::grid_dependency_wait();
      ptx::grid_launch_dependents();
    }
    if (warp == kConsumers / 32) {
      touch_table(lane);
      entries_.build(p_.sequences.cache_seqlens, lane);
    } else if (threadIdx.x == 0) init_barriers();
    __syncthreads();
    const Teams teams = this->teams();
    const int begin = teams.begin(team()), end = teams.begin(team() + 1);
    if (warp >= kConsumers / 32) {
      if constexpr (T::kMoveRegisters) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;" ::: "memory");
      if (warp == kConsumers / 32) produce(begin, end, lane);
      else if (warp == kConsumers / 32 + 1 && begin < end) publish_ends();
    } else {
      if constexpr (T::kMoveRegisters) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;" ::: "memory");
      if (begin < end) {
        consume(begin, end);
        combine_ends();
      }
      clear_empty_sequences();
    }
  }

 private:
  __device__ __forceinline__ void consume(int begin, int end) const {
    Cursor cursor;
    State state;
    int sequence = entries_.sequence_of(begin);
    copy_query(sequence);
#pragma unroll 1
    for (int x = begin; x < end;) {
      const bool from_start = x == entries_.first_tile(sequence);
      const int stop = min(end, entries_.first_tile(sequence + 1));
      state.reset();
      ptx::cp_async_wait<0>();
      ptx::fence_proxy_async();
      ptx::named_barrier(kAll, kConsumers);
#pragma unroll 1
      for (bool start = true; x < stop; ++x, start = false) {
        const bool ends = x + 1 == stop;
        attend(cursor, ends ? entries_.keys(sequence, x) : kTileKeys, start, state, [&] {
          if (ends && stop < end) copy_query(entries_.next(sequence));
        });
      }
      finish(state, sequence, from_start && stop == entries_.first_tile(sequence + 1), from_start);
      if (x < end) sequence = entries_.next(sequence);
    }
  }
};

template <typename Element, int kHeads>
__global__ void __launch_bounds__(Traits<Element, kHeads>::kThreads, 1)
    decode_kernel(const __grid_constant__ MlaDecodeParams params) {
#ifndef BICL_NO_DEVICE_CODE  // a card outside the build; NVRTC makes it there
  extern __shared__ __align__(1024) char shared[];
  DecodeCta<Traits<Element, kHeads>>(params, shared).run();
#endif
}

}  // namespace bicl::mla
