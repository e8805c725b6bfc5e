"""The prefill kernels that are compiled: one unit a (kernel family, dtypes, head_dim).

``mma`` is built for every card, Hopper included: it also serves there what the wgmma kernels do not
(fp8 pages, 32-wide tiles, head dims padded to 96 or 160).
"""

from collections.abc import Iterator

QUERY = {"bf16": "__nv_bfloat16", "fp16": "__half"}
STORED = {"e4m3": "__nv_fp8_e4m3", "e5m2": "__nv_fp8_e5m2"}
SM90_HEAD_DIMS = (64, 128, 192, 256)
MMA_HEAD_DIMS = (32, 64, 96, 128, 160, 192, 256)


def instances() -> Iterator[tuple[str, str]]:
    """File name and text of each generated unit."""
    for query, element in QUERY.items():
        for head_dim in SM90_HEAD_DIMS:
            yield (
                f"sm90_{query}_d{head_dim}.cu",
                '#include "prefill_attention/sm90/instantiate.cuh"\n\n'
                f"template void bicl::prefill::sm90::run<{element}, {head_dim}>"
                "(const PrefillParams&, int, cudaStream_t);\n",
            )
        for head_dim in MMA_HEAD_DIMS:
            lines = [
                f"template void bicl::prefill::mma::run<{element}, {stored}, {head_dim}>"
                "(const PrefillParams&, cudaStream_t);\n"
                for stored in (element, *STORED.values())
            ]
            yield (
                f"mma_{query}_d{head_dim}.cu",
                '#include "prefill_attention/mma/instantiate.cuh"\n\n' + "".join(lines),
            )
