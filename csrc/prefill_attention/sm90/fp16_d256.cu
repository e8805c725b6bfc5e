#include "instantiate.cuh"

template void bicl::prefill::sm90::run<__half, 256>(const PrefillParams&, int, cudaStream_t);
