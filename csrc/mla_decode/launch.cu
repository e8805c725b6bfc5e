#include "launch.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "../common/launch.h"
#include "registry.h"

namespace bicl {
namespace mla {
namespace {

std::vector<Kernel>& kernels() {
  static std::vector<Kernel> all;  // filled while the library loads
  return all;
}

constexpr int kMaxGrid = 256;

// Heads that one CTA serves; more are blocks, whose CTAs read the same pages side by side.
int cta_heads(int num_heads) { return num_heads <= 16 ? 16 : num_heads <= 32 ? 32 : 64; }
int head_blocks(int num_heads) { return (num_heads + cta_heads(num_heads) - 1) / cta_heads(num_heads); }

// How many teams share the tiles. As in decode_attention/schedule.h: a number that the batch divides, where it is not
// much smaller, so that sequences of equal length are cut less often.
int teams(int batch, int most) {
  const int even = std::max(most / 32 * 32, std::min(most, 32));
  if (batch <= most) {
    const int aligned = most / batch * batch;
    if (aligned * 20 >= even * 17) return aligned;
  }
  return even;
}

int most_teams(int num_heads, int num_sms) {
  return std::max(std::min(num_sms, kMaxGrid) / head_blocks(num_heads), 1);
}

int64_t workspace_bytes(int num_heads, int num_teams) {
  const int64_t heads = cta_heads(num_heads);
  return int64_t{2} * num_teams * head_blocks(num_heads) * heads * (kValueDim + 2) * sizeof(float);
}

const Kernel& find(DType dtype, int heads) {
  for (const Kernel& kernel : kernels())
    if (kernel.dtype == dtype && kernel.heads == heads) return kernel;
  throw std::runtime_error("mla_decode is not compiled in; build the kernels for 90a (csrc/build.py --arch 90a)");
}

}  // namespace

void register_kernel(const Kernel& kernel) { kernels().push_back(kernel); }

}  // namespace mla

int64_t mla_workspace_bytes(int num_heads, int num_sms) {
  return mla::workspace_bytes(num_heads, mla::most_teams(num_heads, num_sms));
}

int64_t mla_num_counters(int batch, int num_heads) { return int64_t{batch} * mla::head_blocks(num_heads); }

void mla_decode(const MlaDecodeParams& p, int device, cudaStream_t stream) {
  if (p.sequences.batch == 0) return;
  const DeviceInfo& info = device_info(device);
  if (info.major != 9) throw std::runtime_error("mla_decode runs on compute capability 9.0 only");
  const int blocks = mla::head_blocks(p.num_heads);
  const int teams = mla::teams(p.sequences.batch, mla::most_teams(p.num_heads, info.num_sms));
  if (teams * blocks > info.num_sms)
    throw std::runtime_error(std::to_string(p.num_heads) + " heads take " + std::to_string(blocks) +
                             " CTAs at once; the card has " + std::to_string(info.num_sms) + " SMs");
  const int64_t bytes = mla::workspace_bytes(p.num_heads, teams);
  const int64_t counters = mla_num_counters(p.sequences.batch, p.num_heads);
  if (p.workspace_bytes < bytes || p.num_counters < counters)
    throw std::runtime_error("mla_decode needs a workspace of " + std::to_string(bytes) + " bytes and " +
                             std::to_string(counters) + " counters; it has " + std::to_string(p.workspace_bytes) +
                             " and " + std::to_string(p.num_counters));
  const mla::Kernel& kernel = mla::find(p.dtype, mla::cta_heads(p.num_heads));
  const void* function = runnable(kernel.function);
  BICL_CUDA_CHECK(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, kernel.shared_bytes));
  // CTAs wait for each other's parts: the launch is cooperative, so that all of them run at once.
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeCooperative;
  attributes[0].val.cooperative = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks, teams);
  config.blockDim = dim3(kernel.threads);
  config.dynamicSmemBytes = kernel.shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = p.pdl ? 2 : 1;
  MlaDecodeParams params = p;
  void* arguments[] = {&params};
  BICL_CUDA_CHECK(cudaLaunchKernelExC(&config, function, arguments));
}

}  // namespace bicl
