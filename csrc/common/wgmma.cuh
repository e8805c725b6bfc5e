// wgmma (sm_90a): c[64 x N] (+)= a[64 x 16] b[16 x N], float32 accumulators of one warpgroup, and the
// shared-memory descriptors of its operands: images of tiles of 64 or 32 columns, whose rows of 128 or 64 bytes are
// swizzled as layout.cuh says.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace bicl::wgmma {

// Low word of the descriptor of an operand at `address` (tiles aligned to 8 rows); add bytes / 16 to move
// within it. `lead` separates the tiles of an operand whose contiguous dimension is M or N, and means nothing
// for K-major ones. Groups of 8 rows lie one behind the other.
__device__ __forceinline__ uint32_t descriptor(uint32_t address, uint32_t lead = 16) {
  return (lead >> 4) << 16 | (address >> 4 & 0x3fff);
}

// Kept apart until here so that steps are 32-bit adds.
template <int kRowBytes = 128>
__device__ __forceinline__ uint64_t whole(uint32_t descriptor) {
  static_assert(kRowBytes == 128 || kRowBytes == 64);
  constexpr uint64_t kSwizzle = uint64_t(kRowBytes == 128 ? 1 : 2) << 62;
  constexpr uint64_t kRowGroups = uint64_t(8 * kRowBytes >> 4) << 32;
  return kSwizzle | kRowGroups | descriptor;
}

// Orders register and shared-memory accesses of the warpgroup before its next wgmma.
__device__ __forceinline__ void fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most N committed groups are unfinished.
template <int N>
__device__ __forceinline__ void wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// Keeps the compiler from moving uses of accumulators across a fence or a wait.
template <int N>
__device__ __forceinline__ void hold(float (&c)[N]) {
#pragma unroll
  for (float& x : c) asm volatile("" : "+f"(x)::"memory");
}

#define BICL_ACC8(i) \
  "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), \
      "+f"(c[i + 6]), "+f"(c[i + 7])
#define BICL_ACC_STEP(i) BICL_ACC8(i), BICL_ACC8(i + 8), BICL_ACC8(i + 16), BICL_ACC8(i + 24)
#define BICL_ACC_HALF(i) BICL_ACC8(i), BICL_ACC8(i + 8)
#define BICL_ACC32 BICL_ACC_STEP(0)
#define BICL_ACC48 BICL_ACC32, BICL_ACC_HALF(32)
#define BICL_ACC64 BICL_ACC32, BICL_ACC_STEP(32)
#define BICL_ACC80 BICL_ACC64, BICL_ACC_HALF(64)
#define BICL_ACC96 BICL_ACC64, BICL_ACC_STEP(64)
#define BICL_ACC128 BICL_ACC96, BICL_ACC_STEP(96)
#define BICL_REGS32 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15" \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define BICL_REGS48 \
  BICL_REGS32 \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define BICL_REGS64 \
  BICL_REGS48 \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define BICL_REGS80 \
  BICL_REGS64 \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define BICL_REGS96 \
  BICL_REGS80 \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define BICL_REGS128 \
  BICL_REGS96 \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// Both operands in shared memory, both K-major; A in tiles of 128-byte rows, B in those of kRowBytes.
#define BICL_WGMMA_SS(N, R, A, B, S, E, TYPE)                                                  \
  template <int kRowBytes>                                                                     \
  __device__ __forceinline__ void multiply(float (&c)[N / 2], uint32_t a, uint32_t b, int add, E) {    \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #S ", 0;\n"                                      \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" BICL_REGS##R "}, %" #A   \
                 ", %" #B ", p, 1, 1, 0, 0;\n}"                                                        \
                 : BICL_ACC##R                                                                                 \
                 : "l"(whole<128>(a)), "l"(whole<kRowBytes>(b)), "r"(add));                                          \
  }

// A in registers, B in shared memory with N contiguous, in tiles of kRowBytes.
#define BICL_WGMMA_RS(N, R, A0, A1, A2, A3, B, S, E, TYPE)                                     \
  template <int kRowBytes>                                                                     \
  __device__ __forceinline__ void multiply(float (&c)[N / 2], const uint32_t* a, uint32_t b, int add,  \
                                           E) {                                                        \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #S ", 0;\n"                                      \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" BICL_REGS##R "}, {%" #A0 \
                 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", p, 1, 1, 1;\n}"                            \
                 : BICL_ACC##R                                                                                 \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(whole<kRowBytes>(b)), "r"(add));           \
  }

#define BICL_WGMMA(N, R, I0, I1, I2, I3, I4, I5)                                \
  BICL_WGMMA_SS(N, R, I0, I1, I2, __nv_bfloat16, "bf16")                        \
  BICL_WGMMA_SS(N, R, I0, I1, I2, __half, "f16")                                \
  BICL_WGMMA_RS(N, R, I0, I1, I2, I3, I4, I5, __nv_bfloat16, "bf16")            \
  BICL_WGMMA_RS(N, R, I0, I1, I2, I3, I4, I5, __half, "f16")

BICL_WGMMA(64, 32, 32, 33, 34, 35, 36, 37)
BICL_WGMMA(96, 48, 48, 49, 50, 51, 52, 53)
BICL_WGMMA(128, 64, 64, 65, 66, 67, 68, 69)
BICL_WGMMA(160, 80, 80, 81, 82, 83, 84, 85)
BICL_WGMMA(192, 96, 96, 97, 98, 99, 100, 101)
BICL_WGMMA(256, 128, 128, 129, 130, 131, 132, 133)

#undef BICL_WGMMA
#undef BICL_WGMMA_RS
#undef BICL_WGMMA_SS
#undef BICL_REGS128
#undef BICL_REGS96
#undef BICL_REGS80
#undef BICL_REGS64
#undef BICL_REGS48
#undef BICL_REGS32
#undef BICL_ACC128
#undef BICL_ACC96
#undef BICL_ACC80
#undef BICL_ACC64
#undef BICL_ACC48
#undef BICL_ACC32
#undef BICL_ACC_HALF
#undef BICL_ACC_STEP
#undef BICL_ACC8

}  // namespace bicl::wgmma
