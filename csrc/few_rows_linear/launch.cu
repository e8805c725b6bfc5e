#include "launch.h"

#include "../common/launch.h"
#include "kernel.cuh"

namespace bicl {
namespace {

template <typename T>
void run(const FewRowsLinearParams& p, cudaStream_t stream) {
  LaunchConfig config;
  config.grid = dim3(p.num_outputs / kLinearOutputs);
  config.block = dim3(kLinearThreads);
  config.pdl = p.pdl;
  config.stream = stream;
  if (p.num_rows <= 8) launch<few_rows_linear_kernel<T, 1>>(config, p);
  else launch<few_rows_linear_kernel<T, 2>>(config, p);
}

}  // namespace

void few_rows_linear(const FewRowsLinearParams& p, cudaStream_t stream) {
  if (p.num_rows == 0 || p.num_outputs == 0) return;
  if (p.dtype == DType::kFloat16) run<__half>(p, stream);
  else run<__nv_bfloat16>(p, stream);
}

}  // namespace bicl
