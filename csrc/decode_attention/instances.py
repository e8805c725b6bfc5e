"""The decode kernels that are compiled: one unit a (card family, dtype, head_dim, tile)."""

from collections.abc import Iterator

LOADERS = {"sm90": "Sm90Loader", "sm80": "Sm80Loader"}
STORED = {
    "bf16": ("__nv_bfloat16", "kBFloat16"),
    "fp16": ("__half", "kFloat16"),
    "e4m3": ("__nv_fp8_e4m3", "kFloat8E4M3"),
    "e5m2": ("__nv_fp8_e5m2", "kFloat8E5M2"),
}
HEAD_DIMS = {64: (64, 128, 192, 256), 32: (32, 64, 96, 128, 160, 192, 256)}  # padded, by tile
# Blocks of 8 query heads a CTA serves; see cta_head_blocks() in schedule.h.
HEAD_BLOCKS = {32: (1, 2), 64: (1, 2), 96: (1, 2), 128: (1, 2), 160: (1,), 192: (1,), 256: (1,)}


def instances() -> Iterator[tuple[str, str]]:
    """File name and text of each generated unit."""
    for family, loader in LOADERS.items():
        for dtype, (stored, name) in STORED.items():
            for tile, head_dims in HEAD_DIMS.items():
                for head_dim in head_dims:
                    shape = f"{family}, {loader}, {stored}, {name}, {head_dim}, {tile}"
                    lines = [f"BICL_DECODE({shape}, {n})" for n in HEAD_BLOCKS[head_dim]]
                    text = (
                        '#include "decode_attention/instantiate.cuh"\n\n' + "\n".join(lines) + "\n"
                    )
                    yield f"{family}_{dtype}_d{head_dim}_t{tile}.cu", text
