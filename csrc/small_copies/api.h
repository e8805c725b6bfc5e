#pragma once

#include "../common/check.h"
#include "launch.h"

namespace bicl {

// pieces int64 [n, 3] on the CPU: where from, where to, bytes. One side is memory of cuda:device, the other
// page-locked memory of the host. stream: a cudaStream_t of cuda:device. At most kSmallCopies pieces.
inline void small_copies_api(TensorView pieces, int64_t device, int64_t stream) {
  BICL_CHECK(pieces.device().device_type == kDLCPU) << "pieces must be on the CPU";
  check_int(pieces, "pieces", 64);
  check_shape(pieces, "pieces", {-1, 3});
  check_contiguous(pieces, "pieces");
  BICL_CHECK(pieces.size(0) <= kSmallCopies)
      << pieces.size(0) << " pieces at once; at most " << kSmallCopies << " are possible";
  SmallCopiesParams p;
  p.count = static_cast<int>(pieces.size(0));
  const auto* piece = static_cast<const int64_t*>(pieces.data_ptr());
  for (int i = 0; i < p.count; ++i, piece += 3) {
    BICL_CHECK(piece[2] >= 0 && piece[2] < (int64_t{1} << 31)) << "a piece of " << piece[2] << " bytes";
    p.sources[i] = reinterpret_cast<const char*>(piece[0]);
    p.targets[i] = reinterpret_cast<char*>(piece[1]);
    p.bytes[i] = static_cast<int>(piece[2]);
  }
  DeviceGuard guard(static_cast<int>(device));
  small_copies(p, reinterpret_cast<cudaStream_t>(stream));
}

}  // namespace bicl
