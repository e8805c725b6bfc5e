// What the library says about itself; none of it needs a GPU.
#pragma once

#include <tvm/ffi/string.h>

#include <utility>

#include "check.h"
#include "kernel_source.h"
#include "layout.cuh"

namespace bicl {

// The cards this library was compiled for, as given to build.py --arch.
inline tvm::ffi::String built_archs() { return BICL_ARCHS; }

// From now on every kernel is what `compile` makes of it: given the spelled-out KernelTag it returns
// "symbol \0 image". For a card that this library has no code for; before the first launch.
inline void set_kernel_compiler(tvm::ffi::Function compile) {
  kernel_compiler = new KernelCompiler([compile = std::move(compile)](const std::string& tag) {
    const std::string made = compile(tag).cast<tvm::ffi::Bytes>();
    const size_t end = made.find('\0');
    if (end == std::string::npos) throw std::runtime_error("no symbol came with the image of " + tag);
    return KernelImage{made.substr(0, end), made.substr(end + 1)};
  });
}

// Fills out (int64 [page_size, padded_head_dim], CPU) with the element offset of (token, dim) inside a
// plane, for comparison with PageLayout.plane_offsets.
inline void layout_offsets(TensorView out, int64_t page_size, int64_t tile, int64_t bytes) {
  BICL_CHECK(out.device().device_type == kDLCPU) << "out must be on the CPU";
  check_shape(out, "out", {page_size, -1});
  check_int(out, "out", 64);
  check_contiguous(out, "out");
  const int64_t dims = out.size(1);
  const int64_t per_chunk = kChunkBytes / bytes;
  auto* offsets = static_cast<int64_t*>(out.data_ptr());
  for (int64_t token = 0; token < page_size; ++token)
    for (int64_t dim = 0; dim < dims; ++dim)
      offsets[token * dims + dim] =
          plane_chunk_offset(int(token), int(dim / per_chunk), int(page_size), int(tile), int(dims), int(bytes)) /
              bytes +
          dim % per_chunk;
}

}  // namespace bicl
