// Makes the plan: a warp a CTA of the kernels to come does what that CTA would do at its start.
#pragma once

#include "plan.cuh"

namespace bicl::decode {

__global__ void __launch_bounds__(32) plan_kernel(const __grid_constant__ KernelParams k) {
#ifndef BICL_NO_DEVICE_CODE
  if (k.p.pdl) {
    ptx::grid_dependency_wait();
    ptx::grid_launch_dependents();  // they wait for this kernel to end before they read anything
  }
  extern __shared__ __align__(16) char memory[];
  auto* entries = reinterpret_cast<Entry*>(memory);
  const Divider divider(k);
  const Plan plan(k);
  Share share;
  if (!divider.cluster_share(share, divider.lane_length())) {
    divider.build_entries(entries);
    __syncwarp();
  }
  const Line line = divider.line(entries);
  if (!share.cluster()) share = divider.line_share(line);
  int sequence = share.hint();
  plan.block_of_lane() = divider.block_of_lane(line, share, share.begin, sequence);
  if (threadIdx.x == 0) plan.share() = share;
  if (blockIdx.x != 0) return;
  // Copied in whole vectors, and by clusters, too, which do not look at it.
  const int words = (k.p.sequences.batch + 1) * static_cast<int>(sizeof(Entry) / sizeof(int));
  for (int i = threadIdx.x; i < (words + 3) / 4 * 4; i += 32)
    reinterpret_cast<int*>(plan.entries())[i] =
        i < words && !share.cluster() ? reinterpret_cast<const int*>(entries)[i] : 0;
#endif
}

}  // namespace bicl::decode
