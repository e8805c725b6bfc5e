"""The prefill kernels that are compiled: one unit a (kernel family, dtypes, head_dim).

``mma`` is built for every card, Hopper included: it also serves there what the wgmma kernels do not
(32-wide tiles, head dims padded to 32, 96 or 160, e4m3 with wide heads, e5m2).
"""

from collections.abc import Iterator

QUERY = {"bf16": ("__nv_bfloat16", "kBFloat16"), "fp16": ("__half", "kFloat16")}
FP8 = {"e4m3": ("__nv_fp8_e4m3", "kFloat8E4M3"), "e5m2": ("__nv_fp8_e5m2", "kFloat8E5M2")}
SM90_HEAD_DIMS = (64, 128, 192, 256)
SM90_FP8_HEAD_DIMS = (64, 128)
MMA_HEAD_DIMS = (32, 64, 96, 128, 160, 192, 256)


def instances() -> Iterator[tuple[str, str]]:
    """File name and text of each generated unit."""
    for name, (query, dtype) in QUERY.items():
        wgmma = ((name, query, dtype, SM90_HEAD_DIMS), ("e4m3", *FP8["e4m3"], SM90_FP8_HEAD_DIMS))
        for stored_name, stored, stored_dtype, head_dims in wgmma:
            for head_dim in head_dims:
                yield (
                    f"sm90_{name}_{stored_name}_d{head_dim}_t64.cu",
                    '#include "prefill_attention/sm90/instantiate.cuh"\n\n'
                    f"BICL_PREFILL_SM90({query}, {dtype}, {stored}, {stored_dtype}, {head_dim})\n",
                )
        for head_dim in MMA_HEAD_DIMS:
            lines = [
                f"BICL_PREFILL_MMA({query}, {dtype}, {stored}, {stored_dtype}, {head_dim})\n"
                for stored, stored_dtype in ((query, dtype), *FP8.values())
            ]
            yield (
                f"mma_{name}_d{head_dim}.cu",
                '#include "prefill_attention/mma/instantiate.cuh"\n\n' + "".join(lines),
            )
