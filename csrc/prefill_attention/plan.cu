#include <algorithm>
#include <type_traits>

#include "../common/launch.h"
#include "launch.h"
#include "plan_kernel.cuh"

namespace bicl {
namespace {

int max_tiles(int num_tokens, int batch, int group_size, int num_ctas) {
  const int64_t rows = static_cast<int64_t>(num_tokens) * group_size;
  return static_cast<int>((rows + kPrefillRows - 1) / kPrefillRows) + batch + 2 * num_ctas;
}

int64_t align(int64_t bytes) { return (bytes + 255) / 256 * 256; }

// Lays the views out one behind the other; returns the end.
int64_t lay_out(PrefillPlan& plan, char* base, int num_tokens, int batch, int group_size, int padded_head_dim,
                int num_ctas) {
  plan.max_tiles = max_tiles(num_tokens, batch, group_size, num_ctas);
  plan.max_partials = std::min(2 * num_ctas, kMaxPartials);
  plan.piece_step = 1;
  int64_t offset = 0;
  auto take = [&](auto*& pointer, int64_t count) {
    pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(base + offset);
    offset = align(offset + count * static_cast<int64_t>(sizeof(*pointer)));
  };
  take(plan.header, 1);
  take(plan.split_entries, plan.max_partials);
  take(plan.arrived, plan.max_partials);
  take(plan.combined, plan.max_partials);
  take(plan.tiles, plan.max_tiles);
  take(plan.starts, num_ctas);
  take(plan.partial_rows, int64_t{plan.max_partials} * kPrefillRows);
  take(plan.partials, int64_t{plan.max_partials} * kPrefillRows * padded_head_dim);
  return offset;
}

}  // namespace

int64_t prefill_workspace_bytes(int num_tokens, int batch, int group_size, int padded_head_dim, int num_ctas) {
  PrefillPlan plan;
  return lay_out(plan, nullptr, num_tokens, batch, group_size, padded_head_dim, num_ctas);
}

PrefillPlan plan_view(void* workspace, int num_tokens, int batch, int group_size, int padded_head_dim, int num_ctas) {
  PrefillPlan plan;
  lay_out(plan, static_cast<char*>(workspace), num_tokens, batch, group_size, padded_head_dim, num_ctas);
  return plan;
}

void plan_prefill(const PrefillPlanParams& p, cudaStream_t stream) {
  const int bytes = static_cast<int>(sizeof(prefill::PlanShared) + sizeof(int) * p.batch);
  allow_shared_bytes<prefill::plan_kernel>(bytes);
  LaunchConfig config;
  config.grid = dim3(1);
  config.block = dim3(prefill::kPlanThreads);
  config.shared_bytes = bytes;
  config.stream = stream;
  launch<prefill::plan_kernel>(config, p);
}

}  // namespace bicl
