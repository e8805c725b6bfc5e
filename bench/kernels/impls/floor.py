"""The floor: one cold read of the same bytes by the best of a few plain kernels.

Two ways to read are tried, because neither wins at every size: 16-byte loads by many threads, and
bulk copies into shared memory issued by one warp a CTA.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from bench.kernels.arena import Arena
from bench.timing import num_rotations

__all__ = ["NAME", "reads"]

NAME = "floor"

_SOURCE = r"""
extern "C" __global__ void __launch_bounds__(512) read_loads(
    const uint4* __restrict__ data, unsigned long long num_vectors, unsigned* sink) {
  constexpr int kUnroll = 8;
  unsigned folded = 0;
  const unsigned long long tile = (unsigned long long)blockDim.x * kUnroll;
  const unsigned long long step = gridDim.x * tile;
  for (unsigned long long first = blockIdx.x * tile; first < num_vectors; first += step) {
    uint4 value[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const unsigned long long at = first + (unsigned long long)i * blockDim.x + threadIdx.x;
      value[i] = at < num_vectors ? __ldcs(data + at) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) folded ^= value[i].x ^ value[i].y ^ value[i].z ^ value[i].w;
  }
  if (folded == 0x9e3779b9u) *sink = folded;  // never optimised away, practically never written
}

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return (unsigned)__cvta_generic_to_shared(pointer);
}

__device__ __forceinline__ void wait(unsigned long long* barrier, unsigned parity) {
  asm volatile(
      "{\n.reg .pred done;\nretry:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra retry;\n}" ::"r"(shared_address(barrier)), "r"(parity) : "memory");
}

extern "C" __global__ void __launch_bounds__(32) read_bulk(
    const char* __restrict__ data, unsigned long long num_bytes, int stage_bytes, int num_stages) {
  extern __shared__ __align__(128) char memory[];
  unsigned long long* full = (unsigned long long*)memory;
  char* stages = memory + 256;
  if (threadIdx.x != 0) return;
  for (int stage = 0; stage < num_stages; ++stage) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(full + stage)));
  }
  asm volatile("fence.mbarrier_init.release.cluster;");
  const unsigned long long step = (unsigned long long)gridDim.x * stage_bytes;
  int round = 0;
  for (unsigned long long at = (unsigned long long)blockIdx.x * stage_bytes; at < num_bytes;
       at += step, ++round) {
    const int stage = round % num_stages;
    if (round >= num_stages) wait(full + stage, (round / num_stages - 1) & 1);
    const unsigned long long rest = num_bytes - at;
    const unsigned size = rest < stage_bytes ? (unsigned)rest : stage_bytes;
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                     shared_address(full + stage)), "r"(size) : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
        ::"r"(shared_address(stages + stage * stage_bytes)), "l"(data + at), "r"(size),
          "r"(shared_address(full + stage)) : "memory");
  }
  for (int last = round > num_stages ? round - num_stages : 0; last < round; ++last) {
    wait(full + last % num_stages, (last / num_stages) & 1);
  }
}
"""

_BULK_SHAPES = ((32768, 6, 1), (16384, 4, 3), (8192, 6, 4))
"""Bytes a stage, stages, CTAs an SM."""
_LOAD_CTAS = (2, 4, 8)


@cache
def _module() -> Any:
    import cupy

    module = cupy.RawModule(code=_SOURCE, options=("--std=c++17",))
    for stage_bytes, stages, _ in _BULK_SHAPES:
        kernel = module.get_function("read_bulk")
        kernel.max_dynamic_shared_size_bytes = max(
            kernel.max_dynamic_shared_size_bytes, 256 + stage_bytes * stages
        )
    return module


@cache
def _sink(device: torch.device) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int32, device=device)


def _launch(kernel: Any, grid: int, block: int, args: tuple, shared: int) -> None:
    import cupy

    stream = cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)
    with stream:
        kernel((grid,), (block,), args, shared_mem=shared)


def reads(arena: Arena, num_bytes: int) -> dict[str, list[Callable[[], None]]]:
    """Ways to read ``num_bytes`` (a multiple of 16), each as calls over disjoint memory."""
    properties = torch.cuda.get_device_properties(arena.device)
    sms = properties.multi_processor_count
    base = arena.flat.data_ptr()
    starts = [base + i * num_bytes for i in range(num_rotations(num_bytes, arena.num_bytes))]
    sink = _sink(arena.device)
    loads = _module().get_function("read_loads")
    result: dict[str, list[Callable[[], None]]] = {}
    for ctas in _LOAD_CTAS:
        result[f"loads x{ctas}"] = [
            partial(
                _launch,
                loads,
                sms * ctas,
                512,
                (start, np.uint64(num_bytes // 16), sink.data_ptr()),
                0,
            )
            for start in starts
        ]
    if properties.major < 9:
        return result
    bulk = _module().get_function("read_bulk")
    for stage_bytes, stages, ctas in _BULK_SHAPES:
        result[f"bulk {stage_bytes >> 10}K x{stages} x{ctas}"] = [
            partial(
                _launch,
                bulk,
                sms * ctas,
                32,
                (start, np.uint64(num_bytes), np.int32(stage_bytes), np.int32(stages)),
                256 + stage_bytes * stages,
            )
            for start in starts
        ]
    return result
