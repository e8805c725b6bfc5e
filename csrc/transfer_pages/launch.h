#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace bicl {

// Copies `count` pieces between device memory and page-locked host memory by the copy engines, in any order.
void transfer_pages(const int64_t* sources, const int64_t* targets, const int64_t* bytes, size_t count,
                    cudaStream_t stream);

}  // namespace bicl
