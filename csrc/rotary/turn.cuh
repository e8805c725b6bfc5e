// Rotary embedding, half split: dims i and i + R / 2 of a head turn together. In float32, rounded once.
#pragma once

#include "../common/numeric.cuh"

namespace bicl {

// Dims `first` and on of a head, and those half the rotated ones behind. cos, sin: from `first` on.
template <typename T, int kCount>
__device__ __forceinline__ void turn(Elements<T, kCount>& x, Elements<T, kCount>& y, const T* cos, const T* sin,
                                     int half) {
  const auto read = [](const T* at) { return *reinterpret_cast<const Elements<T, kCount>*>(at); };
  const auto cos_x = read(cos), cos_y = read(cos + half), sin_x = read(sin), sin_y = read(sin + half);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float a = to_float(x.at[i]), b = to_float(y.at[i]);
    x.at[i] = from_float<T>(a * to_float(cos_x.at[i]) - b * to_float(sin_x.at[i]));
    y.at[i] = from_float<T>(b * to_float(cos_y.at[i]) + a * to_float(sin_y.at[i]));
  }
}

}  // namespace bicl
