// Latent rows (MLA) to tiles, one thread a 16-byte chunk of the pool; see store_kv.
#pragma once

#include "../common/layout.cuh"
#include "../common/ptx.cuh"
#include "../mla_decode/params.h"

namespace bicl {

constexpr int kLatentChunks = kLatentDim * 2 / kChunkBytes;

__global__ void __launch_bounds__(256) store_latent_kernel(const __grid_constant__ StoreLatentParams p) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  const int token = i / kLatentChunks, chunk = i % kLatentChunks;
  if (token >= p.num_tokens) return;
  const auto* row = static_cast<const uint16_t*>(p.latent) + token * p.token_stride;
  const uint4 v = ptx::load_now(row + chunk * (kChunkBytes / 2));
  const int64_t slot = p.slots[token];
  if (slot < 0) return;
  constexpr int kPage = 64;
  const int64_t page = slot / kPage;
  const int offset = plane_chunk_offset(static_cast<int>(slot % kPage), chunk, kPage, 64, kLatentDim, 2);
  *reinterpret_cast<uint4*>(static_cast<char*>(p.pages) + page * (kPage * kLatentDim * 2) + offset) = v;
}

}  // namespace bicl
