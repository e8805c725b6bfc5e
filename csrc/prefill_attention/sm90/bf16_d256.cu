#include "instantiate.cuh"

template void bicl::prefill::sm90::run<__nv_bfloat16, 256>(const PrefillParams&, int, cudaStream_t);
