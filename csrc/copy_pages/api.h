#pragma once

#include "../common/check.h"
#include "launch.h"

namespace bicl {

// layers, page_bytes int64 [num_layers] on the device: addresses of the layers' pages, bytes of one page in each.
// source, target int64 [num_pairs]: page ids; no page may be in both.
inline void copy_pages_api(TensorView layers, TensorView page_bytes, TensorView source, TensorView target) {
  const int device = layers.device().device_id;
  CopyPagesParams p;
  const int64_t num_layers = layers.numel(), num_pairs = source.numel();
  for (const auto& [tensor, name, count] : {std::tuple<const TensorView&, const char*, int64_t>
                                                {layers, "layers", num_layers},
                                            {page_bytes, "page_bytes", num_layers},
                                            {source, "source", num_pairs},
                                            {target, "target", num_pairs}}) {
    check_cuda(tensor, name, device);
    check_int(tensor, name, 64);
    check_shape(tensor, name, {count});
    check_contiguous(tensor, name);
  }
  p.layers = static_cast<const int64_t*>(layers.data_ptr());
  p.page_bytes = static_cast<const int64_t*>(page_bytes.data_ptr());
  p.source = static_cast<const int64_t*>(source.data_ptr());
  p.target = static_cast<const int64_t*>(target.data_ptr());
  p.num_layers = static_cast<int>(num_layers);
  p.num_pairs = static_cast<int>(num_pairs);
  DeviceGuard guard(device);
  copy_pages(p, current_stream(device));
}

}  // namespace bicl
