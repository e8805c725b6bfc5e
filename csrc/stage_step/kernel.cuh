// A decode step's inputs to where a captured graph reads them. Rows past the batch become empty sequences that
// store into slot 0, whose page nobody owns.
#pragma once

#include "../params.h"

namespace bicl {

constexpr int kStageThreads = 128;

// Grid: rows of the graph.
__global__ void __launch_bounds__(kStageThreads) stage_step_kernel(const __grid_constant__ StageStepParams p) {
  const int row = blockIdx.x;
  const StepInputs &from = p.source, &to = p.target;
  const bool real = row < p.batch;
  if (threadIdx.x == 0) {
    to.slots[row] = real ? from.slots[p.slot_places[row]] : 0;
    to.input_lengths[row] = real ? from.input_lengths[row] : 0;
    to.cache_lengths[row] = real ? from.cache_lengths[row] : 0;
  } else if (threadIdx.x == 32 && real) {
    to.input_ids[row] = from.input_ids[row];
    to.positions[row] = from.positions[row];
  }
  if (!real) return;
  const int32_t* table = from.page_table + row * from.page_table_stride;
  for (int page = threadIdx.x; page < p.num_pages; page += kStageThreads)
    to.page_table[row * to.page_table_stride + page] = table[page];
}

}  // namespace bicl
