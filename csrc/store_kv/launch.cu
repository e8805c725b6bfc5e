#include "launch.h"

#include <stdexcept>

#include "../common/launch.h"
#include "kernel.cuh"

namespace bicl {
namespace {

constexpr int64_t kFewChunks = 1 << 15;

bool aligned_rows(const void* data, int64_t token_stride, int64_t head_stride, int bytes) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && token_stride * bytes % 16 == 0 &&
         head_stride * bytes % 16 == 0;
}

template <typename In, typename Out, int kTile>
void run_tile(const StoreKvParams& p, cudaStream_t stream) {
  const int chunks = p.pages.padded_head_dim * static_cast<int>(sizeof(Out)) / kChunkBytes;
  const int64_t total = static_cast<int64_t>(p.num_tokens) * p.pages.num_kv_heads * chunks;
  if (total >= (int64_t{1} << 31)) throw std::runtime_error("store_kv: too many tokens in one call");
  const bool vectors = aligned_rows(p.key, p.key_token_stride, p.key_head_stride, sizeof(In)) &&
                       aligned_rows(p.value, p.value_token_stride, p.value_head_stride, sizeof(In));
  // A decode step has few rows: small CTAs spread them over more SMs.
  const int threads = total <= kFewChunks ? 64 : 256;
  LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>((total + threads - 1) / threads));
  config.block = dim3(threads);
  config.pdl = p.pdl;
  config.stream = stream;
  const StoreKvIndex index{FastDiv(chunks), FastDiv(p.pages.num_kv_heads), p.pages.page_size == 64 ? 6 : 5};
  launch<store_kv_kernel<In, Out, kTile>>(config, p, index, vectors);
}

template <typename In, typename Out>
void run(const StoreKvParams& p, cudaStream_t stream) {
  if (p.pages.tile == 64) run_tile<In, Out, 64>(p, stream);
  else run_tile<In, Out, 32>(p, stream);
}

template <typename Out>
void run_quantised(const StoreKvParams& p, cudaStream_t stream) {
  switch (p.input_dtype) {
    case DType::kFloat32: return run<float, Out>(p, stream);
    case DType::kFloat16: return run<__half, Out>(p, stream);
    default: return run<__nv_bfloat16, Out>(p, stream);
  }
}

}  // namespace

void store_kv(const StoreKvParams& p, cudaStream_t stream) {
  if (p.num_tokens == 0) return;
  switch (p.pages.dtype) {
    case DType::kFloat8E4M3: return run_quantised<__nv_fp8_e4m3>(p, stream);
    case DType::kFloat8E5M2: return run_quantised<__nv_fp8_e5m2>(p, stream);
    case DType::kFloat32: return run<float, float>(p, stream);
    default: return run<__half, __half>(p, stream);  // 16 bits copied as they are
  }
}

}  // namespace bicl
