// A product with few rows: the weight is read once, and its bytes are the floor.
//
// A CTA has 16 outputs, and its warps every eighth block of 128 of the depth. Rows of the weight go from memory into
// mma.m16n8k16 as they lie: the order of a product's terms is free, so each thread takes 16-byte pieces, and the rows of
// x are cut alike. The next block is on its way while one is multiplied; the first one before the kernel ahead has ended.
#pragma once

#include "../common/numeric.cuh"
#include "../common/ptx.cuh"

namespace bicl {

constexpr int kLinearWarps = 8;
constexpr int kLinearThreads = 32 * kLinearWarps;
constexpr int kLinearOutputs = 16;  // of a CTA
constexpr int kLinearBlock = 128;   // of the depth
constexpr int kLinearPieces = kLinearBlock / 32;  // of a row, a thread's

// kTiles: of 8 rows.
template <typename T, int kTiles>
class FewRowsProduct {
 public:
  __device__ __forceinline__ explicit FewRowsProduct(const FewRowsLinearParams& p)
      : p_(p), warp_(threadIdx.x / 32), group_(threadIdx.x % 32 / 4), offset_(threadIdx.x % 4 * 8),
        output_(blockIdx.x * kLinearOutputs) {}

  __device__ __forceinline__ void run(float* sums) {
    const int blocks = (p_.depth + kLinearBlock - 1) / kLinearBlock;
    uint4 rows[2][kLinearPieces], next[2][kLinearPieces];
    if (warp_ < blocks) load(rows, warp_);
    ptx::grid_dependency_wait();
    ptx::grid_launch_dependents();
    float acc[kTiles][4] = {};
#pragma unroll 1
    for (int block = warp_; block < blocks; block += kLinearWarps) {
      if (block + kLinearWarps < blocks) load(next, block + kLinearWarps);
      multiply(acc, rows, block);
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int piece = 0; piece < kLinearPieces; ++piece) rows[i][piece] = next[i][piece];
    }
    put_sums(acc, sums);
    __syncthreads();
    store(sums);
  }

 private:
  __device__ __forceinline__ bool is_there(int block, int piece) const {
    return block * kLinearBlock + 32 * piece < p_.depth;
  }

  // Of outputs group and group + 8.
  __device__ __forceinline__ void load(uint4 (&rows)[2][kLinearPieces], int block) const {
    const T* weight = static_cast<const T*>(p_.weight) + block * kLinearBlock + offset_;
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int piece = 0; piece < kLinearPieces; ++piece)
        rows[i][piece] = is_there(block, piece)
                             ? ptx::load_once(weight + (output_ + group_ + 8 * i) * p_.weight_stride + 32 * piece)
                             : make_uint4(0, 0, 0, 0);
  }

  __device__ __forceinline__ void multiply(float (&acc)[kTiles][4], const uint4 (&rows)[2][kLinearPieces],
                                           int block) const {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const int row = 8 * tile + group_;
      const T* x = static_cast<const T*>(p_.x) + row * p_.x_stride + block * kLinearBlock + offset_;
#pragma unroll
      for (int piece = 0; piece < kLinearPieces; ++piece) {
        const uint4 own = row < p_.num_rows && is_there(block, piece) ? *reinterpret_cast<const uint4*>(x + 32 * piece)
                                                                      : make_uint4(0, 0, 0, 0);
        const uint4 &upper = rows[0][piece], &lower = rows[1][piece];
        ptx::mma_16816(acc[tile], {upper.x, lower.x, upper.y, lower.y}, {own.x, own.y}, T{});
        ptx::mma_16816(acc[tile], {upper.z, lower.z, upper.w, lower.w}, {own.z, own.w}, T{});
      }
    }
  }

  // sums: [warp][row][kLinearOutputs + 1].
  __device__ __forceinline__ float* sum_of(float* sums, int warp, int row) const {
    return sums + (warp * 8 * kTiles + row) * (kLinearOutputs + 1);
  }
  __device__ __forceinline__ void put_sums(const float (&acc)[kTiles][4], float* sums) const {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        sum_of(sums, warp_, 8 * tile + threadIdx.x % 4 * 2 + i % 2)[group_ + i / 2 * 8] = acc[tile][i];
  }

  __device__ __forceinline__ void store(float* sums) const {
    const int place = threadIdx.x % kLinearOutputs, row = threadIdx.x / kLinearOutputs;
    if (row >= p_.num_rows) return;
    float sum = p_.bias == nullptr ? 0.f : to_float(static_cast<const T*>(p_.bias)[output_ + place]);
#pragma unroll
    for (int warp = 0; warp < kLinearWarps; ++warp) sum += sum_of(sums, warp, row)[place];
    T* out = static_cast<T*>(p_.out) + row * p_.out_stride + output_ + place;
    *out = from_float<T>(p_.add ? sum + to_float(*out) : sum);
  }

  const FewRowsLinearParams& p_;
  const int warp_, group_, offset_;
  const int64_t output_;
};

template <typename T, int kTiles>
__global__ void __launch_bounds__(kLinearThreads, 2)
    few_rows_linear_kernel(const __grid_constant__ FewRowsLinearParams p) {
  __shared__ float sums[kLinearWarps * 8 * kTiles * (kLinearOutputs + 1)];
  FewRowsProduct<T, kTiles>(p).run(sums);
}

}  // namespace bicl
