// wgmma with few columns: c[64 x N] (+)= a[64 x 16] b[16 x N], float32 accumulators of one warpgroup. Both operands lie
// in shared memory as 128-byte-swizzled images of 64-wide tiles; b is K-major, a K-major or, if kTransA, M-major.
// Descriptors: see common/wgmma.cuh.
#pragma once

#include "../common/wgmma.cuh"

namespace bicl::mla {

#define BICL_MLA_ACC4(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define BICL_MLA_ACC8(i) BICL_MLA_ACC4(i), BICL_MLA_ACC4(i + 4)
#define BICL_MLA_ACC16(i) BICL_MLA_ACC8(i), BICL_MLA_ACC8(i + 8)
#define BICL_MLA_REGS4 "%0, %1, %2, %3"
#define BICL_MLA_REGS8 BICL_MLA_REGS4 ", %4, %5, %6, %7"
#define BICL_MLA_REGS16 BICL_MLA_REGS8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define BICL_MLA_REGS32 \
  BICL_MLA_REGS16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"

#define BICL_MLA_MULTIPLY(N, REGS, ACCUMULATORS, A, B, ADD, TRANS, TYPE, E)                                        \
  template <int kTransA>                                                                                           \
  __device__ __forceinline__ void multiply(float (&c)[N / 2], uint32_t a, uint32_t b, int add, E) {                \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #ADD ", 0;\n"                                                \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" REGS "}, %" #A ", %" #B      \
                 ", p, 1, 1, %" #TRANS ", 0;\n}"                                                                   \
                 : ACCUMULATORS                                                                                    \
                 : "l"(wgmma::whole(a)), "l"(wgmma::whole(b)), "r"(add), "n"(kTransA));                            \
  }

#define BICL_MLA_BOTH(N, REGS, A, B, ADD, TRANS, ...)                                   \
  BICL_MLA_MULTIPLY(N, REGS, BICL_MLA_LIST(__VA_ARGS__), A, B, ADD, TRANS, "bf16", __nv_bfloat16) \
  BICL_MLA_MULTIPLY(N, REGS, BICL_MLA_LIST(__VA_ARGS__), A, B, ADD, TRANS, "f16", __half)
#define BICL_MLA_LIST(...) __VA_ARGS__

BICL_MLA_BOTH(8, BICL_MLA_REGS4, 4, 5, 6, 7, BICL_MLA_ACC4(0))
BICL_MLA_BOTH(16, BICL_MLA_REGS8, 8, 9, 10, 11, BICL_MLA_ACC8(0))
BICL_MLA_BOTH(32, BICL_MLA_REGS16, 16, 17, 18, 19, BICL_MLA_ACC16(0))
BICL_MLA_BOTH(64, BICL_MLA_REGS32, 32, 33, 34, 35, BICL_MLA_ACC16(0), BICL_MLA_ACC16(16))

#undef BICL_MLA_BOTH
#undef BICL_MLA_LIST
#undef BICL_MLA_MULTIPLY
#undef BICL_MLA_REGS32
#undef BICL_MLA_REGS16
#undef BICL_MLA_REGS8
#undef BICL_MLA_REGS4
#undef BICL_MLA_ACC16
#undef BICL_MLA_ACC8
#undef BICL_MLA_ACC4

}  // namespace bicl::mla
