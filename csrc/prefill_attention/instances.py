"""The prefill kernels that are compiled: one unit a (kernel family, dtypes, head_dim).

``mma`` is built for every card, Hopper included: it also serves there what the wgmma kernels do not
(fp8 pages, 32-wide tiles, head dims padded to 32, 96 or 160).
"""

from collections.abc import Iterator

QUERY = {"bf16": ("__nv_bfloat16", "kBFloat16"), "fp16": ("__half", "kFloat16")}
FP8 = (("__nv_fp8_e4m3", "kFloat8E4M3"), ("__nv_fp8_e5m2", "kFloat8E5M2"))
SM90_HEAD_DIMS = (64, 128, 192, 256)
MMA_HEAD_DIMS = (32, 64, 96, 128, 160, 192, 256)


def instances() -> Iterator[tuple[str, str]]:
    """File name and text of each generated unit."""
    for name, (query, dtype) in QUERY.items():
        for head_dim in SM90_HEAD_DIMS:
            yield (
                f"sm90_{name}_d{head_dim}_t64.cu",
                '#include "prefill_attention/sm90/instantiate.cuh"\n\n'
                f"BICL_PREFILL_SM90({query}, {dtype}, {head_dim})\n",
            )
        for head_dim in MMA_HEAD_DIMS:
            lines = [
                f"BICL_PREFILL_MMA({query}, {dtype}, {stored}, {stored_dtype}, {head_dim})\n"
                for stored, stored_dtype in ((query, dtype), *FP8)
            ]
            yield (
                f"mma_{name}_d{head_dim}.cu",
                '#include "prefill_attention/mma/instantiate.cuh"\n\n' + "".join(lines),
            )
