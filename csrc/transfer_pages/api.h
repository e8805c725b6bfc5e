#pragma once

#include "../common/check.h"
#include "launch.h"

namespace bicl {

// sources, targets, bytes int64 [num_pieces] on the CPU: addresses of device memory and of page-locked host memory, and
// the length of each piece. stream: a cudaStream_t of cuda:device. Only issues the copies.
inline void transfer_pages_api(TensorView sources, TensorView targets, TensorView bytes, int64_t device,
                               int64_t stream) {
  for (const auto& [tensor, name] : {std::pair<const TensorView&, const char*>{sources, "sources"},
                                     {targets, "targets"},
                                     {bytes, "bytes"}}) {
    BICL_CHECK(tensor.device().device_type == kDLCPU) << name << " must be on the CPU";
    check_int(tensor, name, 64);
    check_shape(tensor, name, {sources.numel()});
    check_contiguous(tensor, name);
  }
  DeviceGuard guard(static_cast<int>(device));
  transfer_pages(static_cast<const int64_t*>(sources.data_ptr()), static_cast<const int64_t*>(targets.data_ptr()),
                 static_cast<const int64_t*>(bytes.data_ptr()), static_cast<size_t>(sources.numel()),
                 reinterpret_cast<cudaStream_t>(stream));
}

}  // namespace bicl
