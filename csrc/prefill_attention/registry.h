// Every kernel instance is compiled in a unit of its own, see instances.py.
#pragma once

#include "params.h"

namespace bicl::prefill {

namespace sm90 {
template <typename E, int D>
void run(const PrefillParams& params, int num_ctas, cudaStream_t stream);
}

namespace mma {
template <typename E, typename KV, int D>
void run(const PrefillParams& params, cudaStream_t stream);
}

}  // namespace bicl::prefill
