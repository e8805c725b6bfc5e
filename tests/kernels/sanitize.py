"""A small set of every kernel's paths, for compute-sanitizer (`make sanitize`)."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.device import decode_step

from bicl.attention.cuda import CudaBackend
from bicl.cache.layout import PageLayout
from bicl.ops.cuda.decode_attention import decode_attention
from bicl.ops.cuda.workspace import Workspace

SCHEDULES = (
    {},
    {"force_cluster": 1, "force_grid": 5},
    {"force_cluster": 2},
    {"force_cluster": 8},
    {"deterministic": True},
    {"force_sm80": True},
)
LAYOUTS = (
    (PageLayout(2, 128, torch.bfloat16), 4, torch.bfloat16),
    (PageLayout(1, 96, torch.float16, 32, 32), 12, torch.float16),
    (PageLayout(2, 128, torch.float8_e4m3fn), 4, torch.bfloat16),
)


def main() -> None:
    backend = CudaBackend()
    workspace = Workspace("cuda", 128, 16, 1 << 12, deterministic=True)
    for layout, group, dtype in LAYOUTS:
        step = decode_step(backend, [1, 65, 0, 700], layout, group=group, dtype=dtype)
        meta = step.meta
        for schedule in SCHEDULES:
            for window in (-1, 70):
                out = torch.empty_like(step.query)
                decode_attention(
                    step.query,
                    step.layer,
                    meta.page_table,
                    meta.cache_seqlens,
                    workspace,
                    out=out,
                    scale=0.1,
                    window_left=window,
                    **schedule,
                )  # type: ignore[arg-type]
        backend.gather(step.layer, meta.page_table, meta.cache_seqlens)
        pages = torch.arange(2, device="cuda")
        backend.copy_pages([step.layer], pages, pages + 2)
    torch.cuda.synchronize()
    print("all kernels ran")


if __name__ == "__main__":
    main()
