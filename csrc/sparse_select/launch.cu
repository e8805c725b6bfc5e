#include "launch.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <stdexcept>
#include <tuple>

#include "../common/launch.h"
#include "index.cuh"
#include "tiles.cuh"

namespace bicl {
namespace sparse {
namespace {

template <int kCentroids>
KernelRef scoring_kernel(Work work, bool plain) {
  if (work == Work::kScore) return kernel_ref<tiles_kernel<kCentroids, Work::kScore, false>>();
  return plain ? kernel_ref<tiles_kernel<kCentroids, Work::kChoose, true>>()
               : kernel_ref<tiles_kernel<kCentroids, Work::kChoose, false>>();
}

KernelRef tiles_kernel_for(Work work, int centroids, bool plain) {
  if (work == Work::kSelect) return kernel_ref<tiles_kernel<2, Work::kSelect, false>>();
  return centroids == 2   ? scoring_kernel<2>(work, plain)
         : centroids == 4 ? scoring_kernel<4>(work, plain)
                          : scoring_kernel<8>(work, plain);
}

// Raises the kernel's limit of dynamic shared memory, once a kernel and card.
void allow(const KernelRef& kernel, int device, const DeviceInfo& info) {
  static std::mutex mutex;
  static std::set<std::pair<const void*, int>> done;
  const std::lock_guard<std::mutex> lock(mutex);
  const void* function = runnable(kernel);
  if (!done.insert({function, device}).second) return;
  cudaFuncAttributes attributes;
  BICL_CUDA_CHECK(cudaFuncGetAttributes(&attributes, function));
  BICL_CUDA_CHECK(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       info.max_shared_bytes - static_cast<int>(attributes.sharedSizeBytes)));
}

// How many clusters fit at once, asked once a kernel, card, size and shared memory.
int active_clusters(const KernelRef& kernel, const LaunchConfig& config, int device) {
  static std::mutex mutex;
  static std::map<std::tuple<const void*, int, int, int>, int> known;
  const std::lock_guard<std::mutex> lock(mutex);
  const void* function = runnable(kernel);
  const auto [entry, is_new] = known.insert({{function, device, config.cluster, config.shared_bytes}, 0});
  if (!is_new) return entry->second;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = config.cluster;
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t c = {};
  c.gridDim = dim3(config.cluster);
  c.blockDim = config.block;
  c.dynamicSmemBytes = config.shared_bytes;
  c.attrs = &attribute;
  c.numAttrs = 1;
  if (cudaOccupancyMaxActiveClusters(&entry->second, function, &c) != cudaSuccess) {
    (void)cudaGetLastError();  // a size this card does not know
    entry->second = 0;
  }
  return entry->second;
}

void run(Work work, const TilesParams& p, int device, cudaStream_t stream) {
  const DeviceInfo& info = device_info(device);
  TilesKernelParams k;
  k.p = p;
  k.p.pdl = p.pdl && info.major >= 9;
  k.group = p.num_q_heads / p.num_kv_heads;
  k.blocks = (k.group + 3) / 4;
  k.steps = (p.index.row_bytes + 4 * kPieceBytes - 1) / (4 * kPieceBytes);
  k.heads = FastDiv(p.num_kv_heads);
  k.page_log2 = p.page_size == 64 ? 6 : 5;
  const KernelRef kernel = tiles_kernel_for(work, p.index.centroids, k.blocks == 1 && k.steps == 1);
  allow(kernel, device, info);
  LaunchConfig config;
  config.pdl = k.p.pdl;
  config.stream = stream;
  const int pairs = p.sequences.batch * p.num_kv_heads;
  const int octets = (p.max_pages + kOctet - 1) / kOctet;
  // Four pages of the ring lie in all banks.
  const int chunks = p.index.centroids * p.index.row_bytes / kPieceBytes;
  k.page_stride = (chunks + (12 - chunks % 8) % 8) * kPieceBytes;
  const auto split = [&](int splits, int warps = kMaxWarps) {
    k.splits = FastDiv(splits);
    k.warps = warps;
    config.block = dim3(32 * warps);
    const auto turns = [&](int workers) { return (octets + workers - 1) / workers; };
    // A CTA that chooses alone among few pages has two turns at most.
    k.warp_pages = kOctet * std::max(turns(splits * warps), std::min(2, turns(warps)));
    config.cluster = work == Work::kChoose ? splits : 1;
    config.grid = dim3(pairs * splits);
    k.stages_log2 = info.major < 9 ? -1 : 2;  // as many stages as fit
    const int most = info.max_shared_bytes - 1024 - static_cast<int>(sizeof(TopKScratch));
    while (k.stages_log2 > 0 && TilesShared::bytes(k, work) > most) --k.stages_log2;
    config.shared_bytes = TilesShared::bytes(k, work);
    return config.shared_bytes + static_cast<int>(sizeof(TopKScratch)) + 1024 <= info.max_shared_bytes;
  };
  bool fits = false;
  if (work == Work::kScore) {
    const int most = (octets + 2 * kMaxWarps - 1) / (2 * kMaxWarps);
    fits = split(std::max(1, std::min(most, 2 * p.num_sms / pairs)));
  } else if (work == Work::kSelect || info.major != 9) {
    fits = split(1);
  } else if (p.force_cluster) {
    fits = split(p.force_cluster);
  } else {
    const auto runs_at_once = [&](int splits, int warps) {
      return split(splits, warps) && active_clusters(kernel, config, device) >= pairs;
    };
    // Small CTAs are quicker where there are enough of them for all octets.
    int splits = 1;
    while (splits < kMaxCluster && splits * kMinWarps < octets) splits *= 2;
    fits = splits * kMinWarps >= octets && runs_at_once(splits, kMinWarps);
    // Else as many CTAs a cluster as run at once and have an octet for each warp. A long sequence's scores may need more.
    if (!fits) {
      splits = kMaxCluster;
      while (splits > 1 && splits * kMaxWarps > octets) splits /= 2;
      while (splits > 1 && !runs_at_once(splits, kMaxWarps)) splits /= 2;
      while (!(fits = split(splits)) && splits < kMaxCluster) splits *= 2;
    }
  }
  if (!fits)
    throw std::runtime_error("sparse_select: page tables of " + std::to_string(p.max_pages) + " pages with " +
                             std::to_string(k.group) + " query heads a KV head need " +
                             std::to_string(config.shared_bytes) + " bytes of shared memory; this card has " +
                             std::to_string(info.max_shared_bytes) + " a block: lower the maximum length");
  launch_function<TilesKernelParams>(runnable(kernel), config, k);
}

template <typename In, typename Stored>
void run_store_and_index(const StoreKvParams& p, const PageIndex& index, bool choice_follows, const LaunchConfig& config) {
  const auto aligned = [](const void* data, int64_t token_stride, int64_t head_stride) {
    return reinterpret_cast<uintptr_t>(data) % 16 == 0 && token_stride % 8 == 0 && head_stride % 8 == 0;
  };
  const bool vectors = aligned(p.key, p.key_token_stride, p.key_head_stride) &&
                       aligned(p.value, p.value_token_stride, p.value_head_stride);
  launch<store_and_index_kernel<In, Stored>>(config, p, index, vectors, choice_follows);
}

}  // namespace
}  // namespace sparse

using namespace sparse;

void index_pages(const IndexPagesParams& p, cudaStream_t stream) {
  if (p.num_tokens == 0) return;
  // In decode several sequences may complete a page at once; in prefill at most every page_size-th token does.
  const int tokens = p.num_tokens <= 1024 ? 2 : 32;
  LaunchConfig config;
  config.grid = dim3((p.num_tokens + tokens - 1) / tokens, p.pages.num_kv_heads);
  config.block = dim3(kIndexThreads);
  config.shared_bytes = key_bytes(p.pages);
  config.pdl = p.pdl;
  config.stream = stream;
  switch (p.pages.dtype) {
    case DType::kFloat16: return launch<index_pages_kernel<__half>>(config, p, tokens);
    case DType::kBFloat16: return launch<index_pages_kernel<__nv_bfloat16>>(config, p, tokens);
    case DType::kFloat8E4M3: return launch<index_pages_kernel<__nv_fp8_e4m3>>(config, p, tokens);
    case DType::kFloat8E5M2: return launch<index_pages_kernel<__nv_fp8_e5m2>>(config, p, tokens);
    default: throw std::runtime_error("index_pages: pages must be float16, bfloat16 or fp8");
  }
}

void store_and_index(const StoreKvParams& p, const PageIndex& index, bool choice_follows, cudaStream_t stream) {
  if (p.num_tokens == 0) return;
  LaunchConfig config;
  config.grid = dim3(p.num_tokens, p.pages.num_kv_heads);
  config.block = dim3(kIndexThreads);
  config.shared_bytes = key_bytes(p.pages);
  config.pdl = p.pdl;
  config.stream = stream;
  const bool bf16 = p.input_dtype == DType::kBFloat16;
  switch (p.pages.dtype) {
    case DType::kFloat16: return run_store_and_index<__half, __half>(p, index, choice_follows, config);
    case DType::kBFloat16: return run_store_and_index<__nv_bfloat16, __nv_bfloat16>(p, index, choice_follows, config);
    case DType::kFloat8E4M3:
      return bf16 ? run_store_and_index<__nv_bfloat16, __nv_fp8_e4m3>(p, index, choice_follows, config)
                  : run_store_and_index<__half, __nv_fp8_e4m3>(p, index, choice_follows, config);
    case DType::kFloat8E5M2:
      return bf16 ? run_store_and_index<__nv_bfloat16, __nv_fp8_e5m2>(p, index, choice_follows, config)
                  : run_store_and_index<__half, __nv_fp8_e5m2>(p, index, choice_follows, config);
    default: throw std::runtime_error("store_and_index: pages must be float16, bfloat16 or fp8");
  }
}

void rotate_store_and_index(const RotateAndStoreParams& p, const PageIndex& index, bool choice_follows,
                            cudaStream_t stream) {
  const StoreKvParams& s = p.store;
  if (s.num_tokens == 0) return;
  LaunchConfig config;
  config.grid = dim3(s.num_tokens, s.pages.num_kv_heads);
  config.block = dim3(kIndexThreads);
  config.shared_bytes = key_bytes(s.pages);
  config.pdl = s.pdl;
  config.stream = stream;
  const FastDiv pairs(s.head_dim * element_bytes(s.pages.dtype) / (2 * kChunkBytes));
  if (s.pages.dtype == DType::kFloat16)
    launch<rotate_store_and_index_kernel<__half>>(config, p, index, pairs, choice_follows);
  else
    launch<rotate_store_and_index_kernel<__nv_bfloat16>>(config, p, index, pairs, choice_follows);
}

void score_tiles(const TilesParams& p, int device, cudaStream_t stream) {
  if (p.sequences.batch > 0) run(Work::kScore, p, device, stream);
}

void select_tiles(const TilesParams& p, int device, cudaStream_t stream) {
  if (p.sequences.batch > 0) run(Work::kSelect, p, device, stream);
}

void choose_tiles(const TilesParams& p, int device, cudaStream_t stream) {
  if (p.sequences.batch > 0) run(Work::kChoose, p, device, stream);
}

}  // namespace bicl
