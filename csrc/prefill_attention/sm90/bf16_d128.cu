#include "instantiate.cuh"

template void bicl::prefill::sm90::run<__nv_bfloat16, 128>(const PrefillParams&, int, cudaStream_t);
