"""The prefill kernels that are compiled: one unit a (kernel family, dtypes, head_dim, tile).

``mma`` is built for every card, Hopper included: it also serves there what the wgmma kernels do not
(pages of 64 in tiles of 32, head dims padded to 32, fp8 on pages of 32, e4m3 with wide heads,
e5m2).
"""

from collections.abc import Iterator

QUERY = {"bf16": ("__nv_bfloat16", "kBFloat16"), "fp16": ("__half", "kFloat16")}
FP8 = {"e4m3": ("__nv_fp8_e4m3", "kFloat8E4M3"), "e5m2": ("__nv_fp8_e5m2", "kFloat8E5M2")}
SM90_HEAD_DIMS = {64: (64, 128, 192, 256), 32: (64, 96, 128, 160, 192, 256)}  # by tile
SM90_FP8_HEAD_DIMS = (64, 128)
MMA_HEAD_DIMS = (32, 64, 96, 128, 160, 192, 256)


def instances() -> Iterator[tuple[str, str]]:
    """File name and text of each generated unit."""
    for name, (query, dtype) in QUERY.items():
        own = (name, query, dtype)
        units = [(*own, dim, tile) for tile, dims in SM90_HEAD_DIMS.items() for dim in dims]
        units += [("e4m3", *FP8["e4m3"], dim, 64) for dim in SM90_FP8_HEAD_DIMS]
        for stored_name, stored, stored_dtype, dim, tile in units:
            arguments = f"{query}, {dtype}, {stored}, {stored_dtype}, {dim}, {tile}"
            yield (
                f"sm90_{name}_{stored_name}_d{dim}_t{tile}.cu",
                '#include "prefill_attention/sm90/instantiate.cuh"\n\n'
                f"BICL_PREFILL_SM90({arguments})\n",
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
