#include "launch.h"

#include <map>
#include <mutex>
#include <numeric>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string_view>
#include <unordered_map>

#include "../common/launch.h"
#include "plan_kernel.cuh"
#include "registry.h"
#include "schedule.h"

namespace bicl {
namespace decode {
namespace {

std::unordered_map<int, Kernel>& kernels() {
  static std::unordered_map<int, Kernel> all;  // filled while the library loads
  return all;
}

int key_of(const Variant& v) {
  const int family = std::string_view(v.family) == "sm90";
  return (((family * 8 + static_cast<int>(v.stored)) * 512 + v.head_dim) * 128 + v.tile) * 4 + v.head_blocks;
}

constexpr int kMaxRingBytes = 192 * 1024;  // more depth gains nothing
// Of clusters of 2 and 4, which fill the card with short shares: what queues up in a deeper ring comes late together.
constexpr int kPairsRingBytes = 128 * 1024;
constexpr int kPairsStages = 4;  // at least
constexpr int kMaxStages = 16;

int ring_stages(const Kernel& kernel, int entry_bytes, int max_shared_bytes, int cluster_log2) {
  const int room = std::min(max_shared_bytes - kernel.fixed_bytes - entry_bytes, kMaxRingBytes);
  int stages = std::min(std::max(room, 0) / kernel.stage_bytes, kMaxStages);
  if (cluster_log2 == 1 || cluster_log2 == 2)
    stages = std::min(stages, std::max(kPairsRingBytes / kernel.stage_bytes, kPairsStages));
  return stages / kernel.groups * kernel.groups;
}

// How many clusters of 1 << i CTAs fit on the card at once; 0 where it has none.
struct ActiveClusters {
  int count[4] = {};
};

ActiveClusters ask_active_clusters(const Kernel& kernel, int shared_bytes) {
  ActiveClusters active;
  for (int log2 = 1; log2 < 4; ++log2) {
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = 1 << log2;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(1 << log2);
    config.blockDim = dim3(kernel.threads);
    config.dynamicSmemBytes = shared_bytes;
    config.attrs = &attribute;
    config.numAttrs = 1;
    BICL_CUDA_CHECK(cudaOccupancyMaxActiveClusters(&active.count[log2], runnable(kernel.function), &config));
  }
  return active;
}

// What the driver is told and asked once a kernel and card.
const ActiveClusters& prepare(const Kernel& kernel, int device, bool clusters) {
  static std::mutex mutex;
  static std::map<std::pair<const Kernel*, int>, ActiveClusters> known;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = known.find({&kernel, device});
  if (found != known.end()) return found->second;
  const int shared_bytes = device_info(device).max_shared_bytes;
  BICL_CUDA_CHECK(cudaFuncSetAttribute(runnable(kernel.function), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       shared_bytes));
  return known[{&kernel, device}] = clusters ? ask_active_clusters(kernel, shared_bytes) : ActiveClusters{};
}

std::string describe(const Variant& v) {
  static const char* names[] = {"float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"};
  std::ostringstream text;
  text << names[static_cast<int>(v.stored)] << " pages, padded head_dim " << v.head_dim << ", tile " << v.tile
       << ", " << v.family;
  return text.str();
}

std::string built_head_dims(const Variant& wanted) {
  std::set<int> dims;
  for (const auto& [key, kernel] : kernels()) {
    const Variant& v = kernel.variant;
    if (std::string_view(v.family) == wanted.family && v.stored == wanted.stored && v.tile == wanted.tile)
      dims.insert(v.head_dim);
  }
  std::string text;
  for (const int dim : dims) text += (text.empty() ? "" : ", ") + std::to_string(dim);
  return text.empty() ? "none" : text;
}

}  // namespace

void register_kernel(const Kernel& kernel) { kernels().emplace(key_of(kernel.variant), kernel); }

const Kernel* find_kernel(const Variant& v) {
  const auto found = kernels().find(key_of(v));
  return found == kernels().end() ? nullptr : &found->second;
}

}  // namespace decode

using namespace decode;

int64_t decode_workspace_bytes(int padded_head_dim, int group, bool deterministic, int num_sms) {
  const int heads = group <= 8 ? 8 : 16;
  const int64_t slots = deterministic ? kMaxUnits + 1 : 2;
  const int64_t grid = std::min(std::max(num_sms, 1), kMaxGrid);
  return grid * slots * (heads * padded_head_dim + 2 * heads) * static_cast<int64_t>(sizeof(float));
}

namespace {

// A kernel and how it is launched; the same for the plan and for the layers that follow it.
struct Call {
  const Kernel* kernel;
  LaunchConfig config;
  KernelParams params;
  int entry_bytes;  // shared memory of the sequences' entries
};

int round_up_16(int bytes) { return (bytes + 15) & ~15; }

Call prepare_call(const DecodeParams& p, int device, cudaStream_t stream) {
  const DeviceInfo& info = device_info(device);
  const bool hopper = info.major == 9 && !p.force_sm80;
  const int group = p.num_q_heads / p.pages.num_kv_heads;
  const Variant variant{hopper ? "sm90" : "sm80", p.pages.dtype, p.pages.padded_head_dim, p.pages.tile,
                        cta_head_blocks(group, p.pages.padded_head_dim)};
  const Kernel* kernel = find_kernel(variant);
  if (kernel == nullptr)
    throw std::runtime_error("decode_attention is not built for " + describe(variant) + " (head_dims that are: " +
                             built_head_dims(variant) + "); " +
                             (variant.tile < 64 ? "use pages and tiles of 64 tokens (--block-size 64), or " : "") +
                             "rebuild the kernels with this combination");

  Call call;
  call.kernel = kernel;
  KernelParams& k = call.params;
  k.plan = nullptr;
  k.p = p;
  k.p.pdl = p.pdl && info.major >= 9;
  k.group = group;
  const int head_blocks = (group + 8 * variant.head_blocks - 1) / (8 * variant.head_blocks);
  const int heads = p.pages.num_kv_heads * head_blocks;
  k.head_blocks = FastDiv(head_blocks);
  k.heads = FastDiv(heads);
  call.entry_bytes = round_up_16((p.sequences.batch + 1) * static_cast<int>(sizeof(Entry)));
  LaunchConfig& config = call.config;
  config.block = dim3(kernel->threads);
  config.pdl = k.p.pdl;
  config.stream = stream;
  const ActiveClusters& active = prepare(*kernel, device, hopper);
  const int pairs = p.sequences.batch * heads;
  k.cluster_log2 = 0;
  k.most_cluster_blocks = most_cluster_blocks(pairs);
  if (hopper && p.force_cluster && p.sequences.batch <= 32) {
    const int size = p.force_cluster;
    k.cluster_log2 = size == 8 ? 3 : size == 4 ? 2 : size == 2 ? 1 : 0;
    k.most_cluster_blocks = INT_MAX;
  } else if (hopper && !p.force_cluster) {
    k.cluster_log2 = cluster_log2(pairs, p.sequences.batch, p.num_sms, active.count);
  }
  k.stages = ring_stages(*kernel, call.entry_bytes, info.max_shared_bytes, k.cluster_log2);
  if (k.stages == 0)
    throw std::runtime_error("decode_attention: " + describe(variant) + " needs more shared memory than this card's " +
                             std::to_string(info.max_shared_bytes) + " bytes a block");
  config.shared_bytes = k.stages * kernel->stage_bytes + kernel->fixed_bytes + call.entry_bytes;
  config.cluster = 1 << k.cluster_log2;
  int grid = std::min(p.force_grid ? p.force_grid : stream_k_grid(pairs, p.num_sms), kMaxGrid);
  if (k.cluster_log2 > 0) {
    // Uneven lengths leave the work to stream-K, which wants all SMs; a single sequence does so where its units find
    // no room or it is too long for few clusters.
    const bool maybe_line = p.sequences.batch > 1 || p.deterministic || k.most_cluster_blocks < INT_MAX;
    const int spare = maybe_line ? std::min(active.count[k.cluster_log2], grid / config.cluster) : 0;
    grid = config.cluster * std::max(pairs, spare);
  }
  config.grid = dim3(grid);
  const int team = std::gcd(heads, grid);
  k.teams.size = FastDiv(team);
  k.teams.count = FastDiv(grid / team);
  k.teams.heads = heads / team;
  k.multiple = p.deterministic ? kernel->groups : 1;
  k.charge = kernel->charge;
  k.max_units = kernel->results / ((kernel->vectors + config.cluster - 1) / config.cluster);
  return call;
}

int64_t plan_bytes(const Call& call) {
  return static_cast<int64_t>(call.config.grid.x) * (sizeof(Share) + 32 * sizeof(BlockSource)) + call.entry_bytes;
}

void check_plan(const Call& call, int64_t bytes) {
  if (bytes < plan_bytes(call))
    throw std::runtime_error("the plan of this decode step takes " + std::to_string(plan_bytes(call)) +
                             " bytes; it has " + std::to_string(bytes));
}

}  // namespace

int64_t decode_plan_bytes(int batch) {
  return kMaxGrid * static_cast<int64_t>(sizeof(Share) + 32 * sizeof(BlockSource)) +
         round_up_16((batch + 1) * static_cast<int>(sizeof(Entry)));
}

void plan_decode(const DecodeParams& p, void* plan, int64_t bytes, int device, cudaStream_t stream) {
  if (p.sequences.batch == 0) return;
  Call call = prepare_call(p, device, stream);
  check_plan(call, bytes);
  call.params.plan = static_cast<const char*>(plan);
  LaunchConfig config;
  config.grid = call.config.grid;
  config.block = dim3(32);
  config.shared_bytes = call.entry_bytes;
  config.pdl = call.config.pdl;
  config.stream = stream;
  if (call.entry_bytes > 48 * 1024) allow_shared_bytes<plan_kernel>(call.entry_bytes);
  launch<plan_kernel>(config, call.params);
}

void decode_attention(const DecodeParams& p, const void* plan, int64_t bytes, int device, cudaStream_t stream) {
  if (p.sequences.batch == 0) return;
  Call call = prepare_call(p, device, stream);
  if (plan != nullptr) check_plan(call, bytes);
  call.params.plan = static_cast<const char*>(plan);
  const int64_t workspace = static_cast<int64_t>(call.config.grid.x) * (p.deterministic ? kMaxUnits + 1 : 2) *
                            (8 * call.kernel->variant.head_blocks * (p.pages.padded_head_dim + 2)) * sizeof(float);
  const int pairs = p.sequences.batch * static_cast<int>(call.params.heads.divisor);
  if (p.workspace_bytes < workspace || p.num_counters < pairs)
    throw std::runtime_error("decode_attention needs a workspace of " + std::to_string(workspace) + " bytes and " +
                             std::to_string(pairs) + " counters; it has " + std::to_string(p.workspace_bytes) +
                             " and " + std::to_string(p.num_counters));
  launch_function<KernelParams>(runnable(call.kernel->function), call.config, call.params);
}

}  // namespace bicl
