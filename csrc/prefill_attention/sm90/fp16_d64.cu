#include "instantiate.cuh"

template void bicl::prefill::sm90::run<__half, 64>(const PrefillParams&, int, cudaStream_t);
