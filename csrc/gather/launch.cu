#include "launch.h"

#include "../common/launch.h"
#include "kernel.cuh"

namespace bicl {
namespace {

template <typename Stored, typename Out>
void run(const GatherParams& p, cudaStream_t stream) {
  const int chunks = p.pages.padded_head_dim * static_cast<int>(sizeof(Stored)) / kChunkBytes;
  const int threads = p.pages.page_size * p.pages.num_kv_heads * chunks;
  LaunchConfig config;
  config.grid = dim3((threads + kGatherThreads - 1) / kGatherThreads,
                     (p.max_tokens + p.pages.page_size - 1) / p.pages.page_size, p.sequences.batch);
  config.block = dim3(kGatherThreads);
  config.stream = stream;
  launch<gather_kernel<Stored, Out>>(config, p, FastDiv(chunks), FastDiv(p.pages.num_kv_heads));
}

template <typename Stored>
void run_dequantised(const GatherParams& p, cudaStream_t stream) {
  switch (p.output_dtype) {
    case DType::kFloat32: return run<Stored, float>(p, stream);
    case DType::kFloat16: return run<Stored, __half>(p, stream);
    case DType::kBFloat16: return run<Stored, __nv_bfloat16>(p, stream);
    default: return run<Stored, Stored>(p, stream);
  }
}

}  // namespace

void gather(const GatherParams& p, cudaStream_t stream) {
  if (p.sequences.batch == 0 || p.max_tokens == 0) return;
  switch (p.pages.dtype) {
    case DType::kFloat8E4M3: return run_dequantised<__nv_fp8_e4m3>(p, stream);
    case DType::kFloat8E5M2: return run_dequantised<__nv_fp8_e5m2>(p, stream);
    case DType::kFloat32: return run<float, float>(p, stream);
    default: return run<__half, __half>(p, stream);  // 16 bits copied as they are
  }
}

}  // namespace bicl
