#include "launch.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <stdexcept>
#include <tuple>
#include <type_traits>

#include "../common/launch.h"
#include "index.cuh"
#include "tiles.cuh"

namespace bicl {
namespace sparse {
namespace {

// CTAs that a card holds at once; the kernel's limit of shared memory is raised before the first question.
int resident_ctas(const KernelRef& kernel, const LaunchConfig& config, int device, const DeviceInfo& info) {
  static std::mutex mutex;
  static std::map<std::tuple<const void*, int, int, int>, int> known;
  const std::lock_guard<std::mutex> lock(mutex);
  const void* function = runnable(kernel);
  const int threads = static_cast<int>(config.block.x);
  const auto [entry, is_new] = known.insert({{function, device, threads, config.shared_bytes}, 0});
  if (!is_new) return entry->second;
  BICL_CUDA_CHECK(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, info.max_shared_bytes));
  int an_sm = 0;
  BICL_CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&an_sm, function, threads, config.shared_bytes));
  return entry->second = an_sm * info.num_sms;
}

int divide_up(int value, int by) { return (value + by - 1) / by; }

template <int kCentroids, Work kWork>
void run(const TilesParams& p, int device, cudaStream_t stream) {
  using Shape = TilesShape<kCentroids, kWork>;
  const DeviceInfo& info = device_info(device);
  TilesKernelParams k;
  k.p = p;
  k.p.pdl = p.pdl && info.major >= 9;
  set_shape(k);
  // With eight centroids the plain form finds no registers.
  const bool plain = kCentroids == 4 && k.blocks == 1 && k.steps == 1;
  const KernelRef kernel = plain ? kernel_ref<tiles_kernel<kCentroids, kWork, kCentroids == 4>>()
                                 : kernel_ref<tiles_kernel<kCentroids, kWork, false>>();
  LaunchConfig config;
  config.pdl = k.p.pdl;
  config.stream = stream;
  config.block = dim3(Shape::kThreads);
  const int pairs = p.sequences.batch * p.num_kv_heads;
  config.shared_bytes = TilesShared<Shape>::bytes(k);
  const int ctas = config.shared_bytes > info.max_shared_bytes ? 0 : resident_ctas(kernel, config, device, info);
  // Where it chooses, a stratum a CTA where all of them run at once, else some in turns.
  int splits = std::min(divide_up(p.max_pages, kOctet * 2 * Shape::kScorers), 2 * p.num_sms / pairs);
  if (kWork == Work::kChoose) {
    const int strata = divide_up(p.max_pages, Shape::kStratum);
    splits = divide_up(strata, divide_up(strata, std::max(1, ctas / pairs)));
  }
  splits = std::max(1, splits);
  if (ctas == 0)
    throw std::runtime_error("sparse_select: " + std::to_string(k.group) + " query heads a KV head of head_dim " +
                             std::to_string(p.head_dim) + " need " + std::to_string(config.shared_bytes) +
                             " bytes of shared memory; this card has " + std::to_string(info.max_shared_bytes) +
                             " a block: start without --enable-hysparse");
  k.splits = FastDiv(splits);
  config.grid = dim3(pairs * splits);
  launch_function<TilesKernelParams>(runnable(kernel), config, k);
}

template <Work kWork>
void run(const TilesParams& p, int device, cudaStream_t stream) {
  if (p.sequences.batch == 0) return;
  if (p.index.centroids == 4) run<4, kWork>(p, device, stream);
  else run<8, kWork>(p, device, stream);
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
  run<Work::kScore>(p, device, stream);
}

void choose_tiles(const TilesParams& p, int device, cudaStream_t stream) {
  run<Work::kChoose>(p, device, stream);
}

}  // namespace bicl
