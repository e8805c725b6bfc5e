#include "launch.h"

#include "../common/launch.h"
#include "kernel.cuh"

namespace bicl {

void stage_step(const StageStepParams& p, cudaStream_t stream) {
  if (p.rows == 0) return;
  LaunchConfig config;
  config.grid = dim3(p.rows);
  config.block = dim3(kStageThreads);
  config.stream = stream;
  launch<stage_step_kernel>(config, p);
}

}  // namespace bicl
