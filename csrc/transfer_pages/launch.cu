#include "launch.h"

#include "../common/launch.h"

namespace bicl {

namespace {

// One call of the driver for all pieces: a call each costs the host about as long as the copy of 64 KiB.
bool transfer_in_one_call(const int64_t* sources, const int64_t* targets, const int64_t* bytes, size_t count,
                          cudaStream_t stream) {
#if CUDART_VERSION >= 13000
  cudaMemcpyAttributes attributes = {};
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
  size_t first = 0;
  static_assert(sizeof(int64_t) == sizeof(void*) && sizeof(int64_t) == sizeof(size_t));
  const cudaError_t status = cudaMemcpyBatchAsync(
      reinterpret_cast<const void**>(const_cast<int64_t*>(targets)),
      reinterpret_cast<const void**>(const_cast<int64_t*>(sources)),
      reinterpret_cast<const size_t*>(bytes), count, &attributes, &first, 1, stream);
  if (status == cudaErrorNotSupported || status == cudaErrorCallRequiresNewerDriver) {
    (void)cudaGetLastError();
    return false;
  }
  cuda_check(status, "cudaMemcpyBatchAsync");
  return true;
#else
  return false;
#endif
}

}  // namespace

void transfer_pages(const int64_t* sources, const int64_t* targets, const int64_t* bytes, size_t count,
                    cudaStream_t stream) {
  if (count == 0 || transfer_in_one_call(sources, targets, bytes, count, stream)) return;
  for (size_t i = 0; i < count; ++i)
    BICL_CUDA_CHECK(cudaMemcpyAsync(reinterpret_cast<void*>(targets[i]), reinterpret_cast<const void*>(sources[i]),
                                    static_cast<size_t>(bytes[i]), cudaMemcpyDefault, stream));
}

}  // namespace bicl
