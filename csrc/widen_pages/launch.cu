#include "launch.h"

#include "../common/launch.h"
#include "kernel.cuh"

namespace bicl {
namespace {

template <typename Stored, typename Wide>
void run(const WidenPagesParams& p, cudaStream_t stream) {
  LaunchConfig config;
  config.grid = dim3(p.target.num_kv_heads, p.pages_per_sequence, p.sequences.batch);
  config.block = dim3(kWidenThreads);
  config.pdl = p.pdl;
  config.stream = stream;
  if (p.source.tile == 64) launch<widen_pages_kernel<Stored, Wide, 64>>(config, p);
  else launch<widen_pages_kernel<Stored, Wide, 32>>(config, p);
}

template <typename Stored>
void run(const WidenPagesParams& p, cudaStream_t stream) {
  if (p.target.dtype == DType::kFloat16) run<Stored, __half>(p, stream);
  else run<Stored, __nv_bfloat16>(p, stream);
}

}  // namespace

void widen_pages(const WidenPagesParams& p, cudaStream_t stream) {
  if (p.sequences.batch == 0 || p.pages_per_sequence == 0) return;
  if (p.source.dtype == DType::kFloat8E4M3) run<__nv_fp8_e4m3>(p, stream);
  else run<__nv_fp8_e5m2>(p, stream);
}

}  // namespace bicl
