#include "instantiate.cuh"

template void bicl::prefill::sm90::run<__half, 192>(const PrefillParams&, int, cudaStream_t);
