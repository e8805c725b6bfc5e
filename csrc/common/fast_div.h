// Division by a number that the host knows, without the device's slow integer divide.
#pragma once

#include <cstdint>

#include "layout.cuh"

namespace bicl {

// Valid for dividends below 2^31 and divisors from 1 to 2^31 - 1.
struct FastDiv {
  uint32_t divisor = 1;
  uint32_t multiplier = 0;
  uint32_t shift = 0;

  FastDiv() = default;
  explicit FastDiv(uint32_t d) : divisor(d) {
    while ((1u << shift) < d) ++shift;
    multiplier = static_cast<uint32_t>(((1ull << 32) * ((1ull << shift) - d)) / d + 1);
  }

#if defined(__CUDACC__)
  __device__ __forceinline__ uint32_t divide(uint32_t n) const {
    return (__umulhi(n, multiplier) + n) >> shift;
  }
  __device__ __forceinline__ uint32_t divide(uint32_t n, uint32_t& remainder) const {
    const uint32_t quotient = divide(n);
    remainder = n - quotient * divisor;
    return quotient;
  }
#endif
};

}  // namespace bicl
