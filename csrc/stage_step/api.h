#pragma once

#include "../common/check.h"
#include "launch.h"

namespace bicl {

// Of `rows` sequences: input_ids int64, positions, input_lengths and cache_lengths int32, each [rows]; slots int64 of
// any number; page_table int32 [rows, max_pages].
inline StepInputs step_inputs(const TensorView& input_ids, const TensorView& positions, const TensorView& slots,
                              const TensorView& input_lengths, const TensorView& cache_lengths,
                              const TensorView& page_table, int64_t rows, int device) {
  for (const auto& [tensor, name, bits] : {std::tuple<const TensorView&, const char*, int>
                                               {input_ids, "input_ids", 64},
                                           {positions, "positions", 32},
                                           {input_lengths, "input_lengths", 32},
                                           {cache_lengths, "cache_lengths", 32}}) {
    check_cuda(tensor, name, device);
    check_int(tensor, name, bits);
    check_shape(tensor, name, {rows});
    check_contiguous(tensor, name);
  }
  check_cuda(slots, "slots", device);
  check_int(slots, "slots", 64);
  check_shape(slots, "slots", {-1});
  check_contiguous(slots, "slots");
  check_cuda(page_table, "page_table", device);
  check_int(page_table, "page_table", 32);
  check_shape(page_table, "page_table", {rows, -1});
  check_rows(page_table, "page_table");
  StepInputs s;
  s.input_ids = static_cast<int64_t*>(input_ids.data_ptr());
  s.positions = static_cast<int32_t*>(positions.data_ptr());
  s.slots = static_cast<int64_t*>(slots.data_ptr());
  s.input_lengths = static_cast<int32_t*>(input_lengths.data_ptr());
  s.cache_lengths = static_cast<int32_t*>(cache_lengths.data_ptr());
  s.page_table = static_cast<int32_t*>(page_table.data_ptr());
  s.page_table_stride = page_table.stride(0);
  return s;
}

// A function that copies a step's inputs to these tensors, which must outlive it. Its own arguments: the same of the
// step, of as many sequences or fewer, and slot_places int64 [batch]: where each sequence's slot stands in slots.
inline tvm::ffi::Function bind_stage_step(TensorView input_ids, TensorView positions, TensorView slots,
                                          TensorView input_lengths, TensorView cache_lengths, TensorView page_table) {
  StageStepParams fixed;
  const int device = input_ids.device().device_id;
  const int64_t rows = input_ids.size(0), columns = page_table.size(1);
  fixed.target = step_inputs(input_ids, positions, slots, input_lengths, cache_lengths, page_table, rows, device);
  check_shape(slots, "slots", {rows});
  fixed.rows = static_cast<int>(rows);
  return tvm::ffi::Function::FromTyped(
      [fixed, device, columns](TensorView input_ids, TensorView positions, TensorView slots, TensorView slot_places,
                               TensorView input_lengths, TensorView cache_lengths, TensorView page_table) {
        StageStepParams p = fixed;
        const int64_t batch = input_ids.size(0);
        p.source = step_inputs(input_ids, positions, slots, input_lengths, cache_lengths, page_table, batch, device);
        check_cuda(slot_places, "slot_places", device);
        check_int(slot_places, "slot_places", 64);
        check_shape(slot_places, "slot_places", {batch});
        check_contiguous(slot_places, "slot_places");
        BICL_CHECK(batch <= p.rows) << "a step of " << batch << " sequences for a graph of " << p.rows;
        BICL_CHECK(page_table.size(1) <= columns)
            << "a page table of " << page_table.size(1) << " columns for a graph of " << columns;
        p.slot_places = static_cast<const int64_t*>(slot_places.data_ptr());
        p.batch = static_cast<int>(batch);
        p.num_pages = static_cast<int>(page_table.size(1));
        DeviceGuard guard(device);
        stage_step(p, current_stream(device));
      });
}

}  // namespace bicl
