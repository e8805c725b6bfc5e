#include "launch.h"

#include <stdexcept>

#include "../common/launch.h"
#include "kernel.cuh"

namespace bicl {

void compact_tokens(const CompactTokensParams& p, cudaStream_t stream) {
  if (p.num_tokens == 0) return;
  const int chunks = p.source.padded_head_dim * element_bytes(p.source.dtype) / kChunkBytes;
  const int64_t threads = static_cast<int64_t>(p.num_tokens) * chunks;
  if (threads >= (int64_t{1} << 31)) throw std::runtime_error("compact_tokens: too many tokens in one call");
  LaunchConfig config;
  config.grid = dim3(static_cast<unsigned>((threads + kCompactThreads - 1) / kCompactThreads), p.source.num_kv_heads);
  config.block = dim3(kCompactThreads);
  config.stream = stream;
  launch<compact_tokens_kernel>(config, p, FastDiv(chunks));
}

}  // namespace bicl
