// The kernels that were compiled in: each instantiation registers itself.
#pragma once

#include "../common/kernel_source.h"
#include "../params.h"

namespace bicl::mla {

struct Kernel {
  DType dtype;
  int heads;  // of a CTA
  KernelRef function;
  int threads, shared_bytes;
};

void register_kernel(const Kernel& kernel);

struct Registration {
  explicit Registration(const Kernel& kernel) { register_kernel(kernel); }
};

}  // namespace bicl::mla
