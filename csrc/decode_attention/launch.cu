#include "launch.h"

#include <mutex>
#include <set>
#include <sstream>
#include <stdexcept>
#include <vector>

#include "../common/launch.h"
#include "kernel_params.h"
#include "registry.h"
#include "schedule.cuh"
#include "schedule.h"

namespace bicl {
namespace decode {
namespace {

std::vector<Kernel>& kernels() {
  static std::vector<Kernel> all;  // filled while the library loads
  return all;
}

constexpr int kMaxRingBytes = 192 * 1024;  // more depth gains nothing
constexpr int kMaxStages = 16;

int ring_stages(const Kernel& kernel, int entry_bytes, int max_shared_bytes) {
  const int room = std::min(max_shared_bytes - kernel.fixed_bytes - entry_bytes, kMaxRingBytes);
  const int stages = std::min(std::max(room, 0) / kernel.stage_bytes, kMaxStages);
  return stages / kernel.groups * kernel.groups;
}

// Raises the kernel's limit of dynamic shared memory, once a kernel and card.
void allow_shared(const Kernel& kernel, int device, int bytes) {
  static std::mutex mutex;
  static std::set<std::pair<const void*, int>> done;
  const std::lock_guard<std::mutex> lock(mutex);
  if (!done.insert({kernel.function.stub, device}).second) return;
  BICL_CUDA_CHECK(
      cudaFuncSetAttribute(runnable(kernel.function), cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
}

// How many clusters fit at once, asked once a kernel, card and size.
int active_clusters(const Kernel& kernel, const LaunchConfig& config, int device) {
  static std::mutex mutex;
  static std::vector<std::tuple<const void*, int, int, int>> known;
  const std::lock_guard<std::mutex> lock(mutex);
  for (const auto& [function, d, size, count] : known)
    if (function == kernel.function.stub && d == device && size == config.cluster) return count;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = config.cluster;
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t c = {};
  c.gridDim = config.grid;
  c.blockDim = config.block;
  c.dynamicSmemBytes = config.shared_bytes;
  c.attrs = &attribute;
  c.numAttrs = 1;
  int count = 0;
  BICL_CUDA_CHECK(cudaOccupancyMaxActiveClusters(&count, runnable(kernel.function), &c));
  known.emplace_back(kernel.function.stub, device, config.cluster, count);
  return count;
}

std::string describe(const Variant& v) {
  static const char* names[] = {"float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"};
  std::ostringstream text;
  text << names[static_cast<int>(v.stored)] << " pages, padded head_dim " << v.head_dim << ", tile " << v.tile
       << ", " << v.family;
  return text.str();
}

}  // namespace

void register_kernel(const Kernel& kernel) { kernels().push_back(kernel); }

const Kernel* find_kernel(const Variant& v) {
  for (const Kernel& k : kernels())
    if (std::string_view(k.variant.family) == v.family && k.variant.stored == v.stored &&
        k.variant.head_dim == v.head_dim && k.variant.tile == v.tile && k.variant.head_blocks == v.head_blocks)
      return &k;
  return nullptr;
}

}  // namespace decode

using namespace decode;

int64_t decode_workspace_bytes(int padded_head_dim, int group, bool deterministic, int num_sms) {
  const int heads = group <= 8 ? 8 : 16;
  const int64_t slots = deterministic ? kMaxUnits + 1 : 2;
  const int64_t grid = std::min(std::max(num_sms, 1), kMaxGrid);
  return grid * slots * (heads * padded_head_dim + 2 * heads) * static_cast<int64_t>(sizeof(float));
}

void decode_attention(const DecodeParams& p, int device, cudaStream_t stream) {
  if (p.sequences.batch == 0) return;
  const DeviceInfo& info = device_info(device);
  const bool hopper = info.major == 9 && !p.force_sm80;
  const int group = p.num_q_heads / p.pages.num_kv_heads;
  const Variant variant{hopper ? "sm90" : "sm80", p.pages.dtype, p.pages.padded_head_dim, p.pages.tile,
                        cta_head_blocks(group, p.pages.padded_head_dim)};
  const Kernel* kernel = find_kernel(variant);
  if (kernel == nullptr)
    throw std::runtime_error("decode_attention is not built for " + describe(variant) +
                             "; rebuild the kernels with this combination");

  KernelParams k;
  k.p = p;
  k.p.pdl = p.pdl && info.major >= 9;
  k.group = group;
  const int head_blocks = (group + 8 * variant.head_blocks - 1) / (8 * variant.head_blocks);
  const int heads = p.pages.num_kv_heads * head_blocks;
  k.head_blocks = FastDiv(head_blocks);
  k.heads = FastDiv(heads);
  const int entry_bytes = (p.sequences.batch + 1) * static_cast<int>(sizeof(Entry));
  k.stages = ring_stages(*kernel, entry_bytes, info.max_shared_bytes);
  if (k.stages == 0)
    throw std::runtime_error("decode_attention: " + describe(variant) + " needs more shared memory than this card's " +
                             std::to_string(info.max_shared_bytes) + " bytes a block");
  LaunchConfig config;
  config.block = dim3(kernel->threads);
  config.shared_bytes = k.stages * kernel->stage_bytes + kernel->fixed_bytes + entry_bytes;
  config.pdl = p.pdl && info.major >= 9;
  config.stream = stream;
  allow_shared(*kernel, device, info.max_shared_bytes);
  k.cluster_log2 = 0;
  const int pairs = p.sequences.batch * heads;
  if (hopper) {
    int size = cluster_size(pairs, p.sequences.batch, p.num_sms, p.deterministic);
    if (p.force_cluster && p.sequences.batch <= 32) size = p.force_cluster;
    config.cluster = size;
    config.grid = dim3(size * pairs);
    if (size > 1 && (p.force_cluster || active_clusters(*kernel, config, device) >= pairs))
      k.cluster_log2 = size == 8 ? 3 : size == 4 ? 2 : 1;
  }
  config.cluster = 1 << k.cluster_log2;
  if (config.cluster == 1)
    config.grid = dim3(std::min(p.force_grid ? p.force_grid : stream_k_grid(pairs, p.num_sms), kMaxGrid));
  k.grid = FastDiv(config.grid.x);
  const int64_t workspace = static_cast<int64_t>(config.grid.x) * (p.deterministic ? kMaxUnits + 1 : 2) *
                            (8 * variant.head_blocks * (p.pages.padded_head_dim + 2)) * sizeof(float);
  if (p.workspace_bytes < workspace || p.num_counters < pairs)
    throw std::runtime_error("decode_attention needs a workspace of " + std::to_string(workspace) + " bytes and " +
                             std::to_string(pairs) + " counters; it has " + std::to_string(p.workspace_bytes) +
                             " and " + std::to_string(p.num_counters));
  launch_function<KernelParams>(runnable(kernel->function), config, k);
}

}  // namespace bicl
