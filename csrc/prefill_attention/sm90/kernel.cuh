// Prefill with wgmma, fed by plain bulk copies: a page's tiles are wgmma operands as they are stored.
//
// Persistent CTAs draw tickets (tile, KV head), longest first. Warpgroup 0 loads (loader.cuh), warpgroups 1 and
// 2 multiply (consumer.cuh). Blocks go from the last key to the first at absolute multiples of the block,
// hence a row's bits do not depend on where chunks or prefixes were cut, nor on its batch mates (as long as
// its keys are not split).
#pragma once

#include "consumer.cuh"
#include "loader.cuh"

namespace bicl::prefill::sm90 {

template <typename E, typename KV, int D, int kTile, bool kLocal, bool kCap>
__global__ void __launch_bounds__(kThreads, 1) kernel(const __grid_constant__ PrefillParams p) {
#ifndef BICL_NO_DEVICE_CODE  // a card outside the build; NVRTC makes it there
  using C = Config<KV, D, kTile>;
  extern __shared__ __align__(1024) char shared[];
  Control& control = *reinterpret_cast<Control*>(shared + C::kControlOffset);
  static_assert(sizeof(Control) <= C::kControlBytes);
  const uint32_t base = ptx::smem_address(shared);
  if (threadIdx.x == 0) {
    auto init = [](uint64_t& barrier, int count) { ptx::mbarrier_init(ptx::smem_address(&barrier), count); };
    constexpr int kConsumers = kConsumerWarps * ptx::kWarpArrivals;
    constexpr int kGatherers = kQueryThreads / 32 * ptx::kWarpArrivals;
    for (int i = 0; i < 2; ++i) {
      init(control.query_full[i], kQueryThreads);
      init(control.query_empty[i], kConsumers);
    }
    for (int i = 0; i < kAssignments; ++i) {
      init(control.assigned[i], ptx::kWarpArrivals);
      init(control.taken[i], kConsumers + kGatherers);
    }
    constexpr int kWriters = C::kWiden ? kGatherers : 1;  // of operands: the widening warps or the copies
    for (int i = 0; i < C::kStages; ++i) {
      init(control.key_full[i], kWriters);
      init(control.key_empty[i], kConsumers);
      init(control.value_full[i], kWriters);
      init(control.value_empty[i], kConsumers);
    }
    for (int i = 0; i < C::kRawStages; ++i) {
      init(control.raw_full[i], 1);
      init(control.raw_empty[i], kWriters);
    }
    ptx::fence_barrier_init();
  }
  constexpr bool kAsks = !kLocal && !kCap;  // in some of the others, ptxas then serialises products
  constexpr int kFirstQueryThread = 128 - kQueryThreads;
  if (kAsks && threadIdx.x >= kFirstQueryThread && threadIdx.x < 128)
    ask_for_page_table(p, threadIdx.x - kFirstQueryThread);
  __syncthreads();
  ptx::grid_dependency_wait();

  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    shrink_registers<C::kLoaderRegisters>();
    if (threadIdx.x < 32) {
      KeyLoader<C>{p, control, base, static_cast<int>(threadIdx.x), 0, 0, 0}.run();
    } else {
      if constexpr (kAsks) ask_for_query(p, threadIdx.x - kFirstQueryThread);
      load_queries<E, C>(p, control, base);
    }
  } else {
    grow_registers<C::kConsumerRegisters>();
    const ScoreScale scale(p);
    const int consumer = warpgroup - 1;
    Consumer<E, C, kLocal, kCap> work{
        p,
        control,
        consumer,
        static_cast<int>(threadIdx.x % 32),
        scale,
        uniform(wgmma::descriptor(base + consumer * C::kConsumerQueryBytes)),
        uniform(wgmma::descriptor(base + C::kKeyOffset)),
        uniform(wgmma::descriptor(base + C::kValueOffset, C::kPageKeys * C::kRowBytes)),
        0,
        0};
    work.run();
  }
#endif
}

}  // namespace bicl::prefill::sm90
