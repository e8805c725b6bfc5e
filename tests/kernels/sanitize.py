"""Every kernel under compute-sanitizer, on small shapes: ``make sanitize``.

The kernels are built for it (``-DBICL_RACECHECK``: see ``mbarrier_arrive_warp`` in ``csrc``), with
source lines. One process a tool and group of kernels, several side by side; one table at the end.
The group ``canary`` is a kernel full of faults: a run in which its faults go unseen proves nothing
and fails. torch's own kernels are left alone, and every tensor is an allocation of its own, so that
an access past one tensor does not land in its neighbour.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from support.cases import Step
from support.device import DEVICE, decode_step, stored_step
from support.latent import latent_step

from bench.kernels.machine import commit, sources
from bicl.attention.cuda import CudaBackend
from bicl.attention.mla import LatentAttention
from bicl.attention.pool import LayerCache
from bicl.attention.results import ResultCopies
from bicl.attention.rotary import Rotary
from bicl.cache.layout import PageLayout
from bicl.ops.cuda import library, sparse
from bicl.ops.cuda.compact_tokens import compact_tokens
from bicl.ops.cuda.decode_attention import decode_attention
from bicl.ops.cuda.linear import add_linear, linear
from bicl.ops.cuda.prefill_attention import plan_prefill, prefill_attention, workspace_bytes
from bicl.ops.cuda.rms_norm import rms_norm
from bicl.ops.cuda.rotary import rotate
from bicl.ops.cuda.small_copies import small_copies
from bicl.ops.cuda.stage_step import bind_stage_step
from bicl.ops.cuda.swiglu import swiglu
from bicl.ops.cuda.widen_pages import widen_pages
from bicl.ops.cuda.workspace import Workspace
from bicl.sparse.backend import SparseBackend
from bicl.sparse.config import HySparseConfig
from bicl.sparse.index import make_indexes
from bicl.sparse.selection import SelectionRule

LIBRARY = Path(__file__).resolve().parents[2] / "build" / "sanitize" / "libbicl_kernels.so"
TOOLS = ("memcheck", "racecheck", "initcheck")
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")
SECONDS_LIMIT = 300
PREFILL_LENGTHS = [(1, 1), (5, 70), (0, 50), (130, 200), (64, 0), (64, 700)]
LAST_WAVE = [(64, 2304)] * 34  # of 136 equal tiles 132 are one wave; the keys of the rest are cut

BF16 = PageLayout(2, 128, torch.bfloat16), 4, torch.bfloat16
NARROW_TILES = PageLayout(1, 96, torch.float16, 32, 32), 12, torch.float16
PAGES_OF_32 = PageLayout(2, 128, torch.bfloat16, 32, 32), 4, torch.bfloat16
FP8 = PageLayout(2, 128, torch.float8_e4m3fn), 4, torch.bfloat16
Shape = tuple[PageLayout, int, torch.dtype]


def pages(shape: Shape) -> None:
    layout, group, dtype = shape
    backend = CudaBackend()
    step = decode_step(backend, [1, 65, 0, 300], layout, group=group, dtype=dtype)
    wide = torch.randn(9, layout.num_kv_heads, layout.head_dim + 1, device=DEVICE).to(dtype)
    slots = torch.tensor([0, 0, -1, 3, 4, 70, 5, -1, 2], device=DEVICE)
    backend.store(step.layer, wide[..., 1:], wide[..., :-1], slots)
    backend.gather(step.layer, step.meta.page_table, step.meta.cache_seqlens)
    ids = torch.arange(2, device=DEVICE)
    backend.copy_pages([step.layer], ids, ids + 2)
    positions = torch.arange(0, 300, 5, dtype=torch.int32, device=DEVICE)
    positions = positions.expand(layout.num_kv_heads, -1).contiguous()
    target = LayerCache(torch.empty_like(step.layer.pages), layout)
    fresh = torch.arange(layout.pages_for(60), dtype=torch.int32, device=DEVICE)
    compact_tokens(step.layer, step.meta.page_table[3], positions, target, fresh)
    if layout.element_bytes == 1:
        wide = replace(layout, dtype=dtype)
        room = torch.empty(wide.shape(20), dtype=dtype, device=DEVICE)
        widen_pages(
            step.layer,
            LayerCache(room, wide),
            step.meta.page_table,
            step.meta.cache_seqlens,
            first_head=0,
            pages_per_sequence=5,
        )


def decode(shape: Shape, *schedules: dict[str, object]) -> None:
    layout, group, dtype = shape
    backend = CudaBackend()
    workspace = Workspace(DEVICE, 128, 16, 1 << 12, deterministic=True)
    step = decode_step(backend, [1, 65, 0, 700], layout, group=group, dtype=dtype)
    out = torch.empty_like(step.query)
    lse = torch.empty(step.query.shape[1], 4, device=DEVICE)
    arguments = (step.query, step.layer, step.meta.page_table, step.meta.cache_seqlens, workspace)
    for schedule in schedules:
        for window in (-1, 70):
            decode_attention(
                *arguments, out=out, lse=lse, scale=0.1, window_left=window, **schedule
            )  # type: ignore[arg-type]
    newest = torch.tensor([0, 65, 765], device=DEVICE)  # rows of the sequences' last tokens
    slots = step.meta.slot_mapping
    backend.plan(step.meta)
    for _ in range(2):  # as a server does: attention starts while the store still runs
        rows = newest[[0, 1, 1, 2]]
        backend.store(step.layer, step.key[rows], step.value[rows], slots)
        backend.run(step.query, step.layer, step.meta, scale=0.1)


def prefill(
    shape: Shape,
    *variants: dict[str, bool],
    lengths: Sequence[tuple[int, int]] = PREFILL_LENGTHS,
) -> None:
    layout, group, dtype = shape
    step = stored_step(CudaBackend(), lengths, layout, group=group, dtype=dtype)
    query, meta = step.query, step.meta
    tokens, batch = query.shape[0], meta.batch_size
    size = workspace_bytes(tokens, batch, group, layout.padded_head_dim, DEVICE)
    out = torch.empty_like(query)
    lse = torch.empty(query.shape[1], tokens, device=DEVICE)
    for variant in variants:
        for window in (-1, 40):
            plan = plan_prefill(
                torch.empty(size, dtype=torch.uint8, device=DEVICE),
                step.layer,
                meta.cu_seqlens_q,
                meta.cache_seqlens,
                num_tokens=tokens,
                num_q_heads=query.shape[1],
                window_left=window,
                **variant,
            )  # type: ignore[arg-type]
            for _ in range(2):  # a plan serves every layer
                prefill_attention(
                    *(query, step.layer, meta.page_table, meta.cache_seqlens, plan),
                    out=out,
                    lse=lse,
                    scale=0.1,
                )


def choose(shape: Shape) -> None:
    layout, group, dtype = shape
    backend = CudaBackend()
    lengths = [1, 65, 0, 700, 200 * layout.page_size - 7]  # one CTA alone, and whole clusters
    step: Step = decode_step(backend, lengths, layout, group=group, dtype=dtype)
    meta, layer, size = step.meta, step.layer, layout.page_size
    index = make_indexes({0: layer}, "centroids", dtype)[0]
    sparse.index_pages(layer, index, step.slots)
    newest = torch.tensor([0, 65, 765], device=DEVICE)
    rows = (step.key[newest], step.value[newest], step.slots[newest])
    backend.store(layer, *rows, records=index.vectors)
    rule = SelectionRule(page_size=size, max_k=512, first=1, recent=1, floor=0)
    sparsity = torch.tensor([0.65, 0.65, 0.65, 0.5, 0.65], device=DEVICE)
    place = (meta.page_table, meta.cache_seqlens)
    for combine in ("max", "sum", "softmax"):
        scores = sparse.score_tiles(step.query, layer, index, *place, 0.1)
        sparse.select_tiles(scores, *place, sparsity, rule, layout.num_kv_heads, combine)
        for cluster in (0, 1, 4, 8):
            sparse.choose_tiles(
                *(step.query, layer, index, *place, sparsity, rule, combine),
                scale=0.1,
                after_store=True,
                force_cluster=cluster,
            )  # type: ignore[misc]
    wrapped = SparseBackend(backend, HySparseConfig(floor_tokens=0), {0: index})
    planned = replace(meta, sparsity=sparsity)
    wrapped.plan(planned)
    for _ in range(2):  # the second layer knows how many tokens it reads while it chooses them
        wrapped.run(step.query, layer, planned, scale=0.1)


def latent(heads: int) -> None:
    attention = LatentAttention(DEVICE, max_batch=5, num_heads=heads)
    # Parts of one sequence in many CTAs, whole ones beside parts, and none.
    for lengths in ([3000], [1, 65, 0, 700, 64], [9000, 9000, 200, 130, 64]):
        step = latent_step(attention, lengths, torch.bfloat16, heads=heads)
        for _ in range(2):
            attention.decode(
                *(step.query, step.layer, step.page_table, step.cache_seqlens),
                scale=0.1,
                return_lse=True,
            )


def stage() -> None:
    def ids(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.ones(shape, dtype=dtype, device=DEVICE)

    long = torch.int64
    inputs = {"input_ids": ids(4, dtype=long), "positions": ids(4), "slots": ids(4, dtype=long)}
    lengths = {"input_lengths": ids(4), "cache_lengths": ids(4), "page_table": ids(4, 200)}
    copy = bind_stage_step(**inputs, **lengths)
    step = (ids(3, dtype=long), ids(3), ids(3, dtype=long), torch.arange(3, device=DEVICE))
    copy(*step, ids(3), ids(3), ids(3, 150))
    copies = ResultCopies(DEVICE)
    assert copies.begin(ids(5, dtype=long), ids(7)[1:]).lists() == [[1] * 5, [1] * 6]


def layers() -> None:
    for dim, extra in ((128, 0), (80, 0), (64, 1)):  # the last one without vectors
        rows = torch.randn(33, 6, dim + extra, device=DEVICE).bfloat16()[..., extra:]
        angle = torch.rand(33, dim, device=DEVICE)
        rotate(rows[:, :4], rows[:, 4:], angle.cos().bfloat16(), angle.sin().bfloat16())
    layer = LayerCache(torch.zeros(BF16[0].shape(2), dtype=torch.bfloat16, device=DEVICE), BF16[0])
    for turned in (128, 64):
        rows = torch.randn(33, 8, 128, device=DEVICE).bfloat16()
        angle = torch.rand(33, turned, device=DEVICE)
        rotary = Rotary(rows[:, :4], angle.cos().bfloat16(), angle.sin().bfloat16())
        slots = torch.arange(-1, 32, device=DEVICE) * 3
        CudaBackend().store(layer, rows[:, 4:6], rows[:, 6:], slots, rotary=rotary)
    for width in (96, 75):
        swiglu(torch.randn(33, 2 * width, device=DEVICE).bfloat16())
        rms_norm(
            torch.randn(33, width, device=DEVICE).bfloat16(),
            torch.ones(width).bfloat16().to(DEVICE),
            1e-5,
        )
    for rows in (3, 8):
        x, weight = torch.randn(rows, 192, device=DEVICE), torch.randn(48, 192, device=DEVICE)
        add_linear(linear(x.half(), weight.half()), x.half(), weight.half())


def results() -> None:
    here = torch.arange(301, dtype=torch.uint8, device=DEVICE)
    there = torch.empty(301, dtype=torch.uint8).pin_memory()
    small_copies([(here, there), (here[3:40], there[5:42])], here.device)


def canary() -> None:
    """Reads memory that nobody wrote, races in shared memory, writes past the end."""
    import cupy

    source = r"""
    extern "C" __global__ void bicl_canary(int* data, int size) {
      __shared__ int turned[64];
      turned[threadIdx.x] = data[threadIdx.x];
      data[size + 64 + threadIdx.x] = turned[63 - threadIdx.x];
    }"""
    data = torch.empty(64, dtype=torch.int32, device=DEVICE)
    cupy.RawKernel(source, "bicl_canary")((1,), (64,), (data.data_ptr(), 64))
    torch.cuda.synchronize()


STREAM_K, CLUSTERS = {"force_cluster": 1, "force_grid": 5}, {"force_cluster": 8}
PAIRS, CUT_BY_KEYS, SM80 = {"force_cluster": 2}, {"deterministic": True}, {"force_sm80": True}
GROUPS: dict[str, tuple[Callable[[], None], ...]] = {
    "canary": (canary,),
    "pages": tuple(partial(pages, shape) for shape in (BF16, NARROW_TILES, FP8)),
    "decode": (partial(decode, BF16, {}, STREAM_K, PAIRS, CLUSTERS, CUT_BY_KEYS),),
    "decode, tiles of 32": (partial(decode, NARROW_TILES, STREAM_K, CLUSTERS),),
    "decode, fp8": (partial(decode, FP8, STREAM_K, CLUSTERS, CUT_BY_KEYS),),
    "decode, sm_80": (partial(decode, BF16, SM80),),
    "prefill": (partial(prefill, BF16, {}, CUT_BY_KEYS),),
    "prefill, pages of 32": (
        partial(prefill, PAGES_OF_32, {}, CUT_BY_KEYS),
        partial(prefill, NARROW_TILES, {}),
    ),
    "prefill, last wave": (partial(prefill, BF16, {}, lengths=LAST_WAVE),),
    "prefill, fp8": (partial(prefill, FP8, {}),),
    "prefill, mma": tuple(partial(prefill, shape, SM80) for shape in (BF16, NARROW_TILES, FP8)),
    "choice of pages": (partial(choose, BF16),),
    "latent attention": tuple(partial(latent, heads) for heads in (16, 20, 100)),
    "inputs of a step": (stage,),
    "results of a step": (results,),
    "parts of a layer": (layers,),
}


@dataclass(frozen=True)
class Verdict:
    tool: str
    group: str
    faults: int | None  # None: the tool gave no summary
    seconds: float
    report: str

    @property
    def as_wished(self) -> bool:
        if self.group == "canary":
            return bool(self.faults)
        return self.faults == 0 and f"ran {self.group}" in self.report


def examine(tool: str, group: str, kernels: Path, limit: float) -> Verdict:
    # initcheck must see what torch's kernels write.
    ours = () if tool == "initcheck" else ("--kernel-name", "kns=bicl")
    command = ["compute-sanitizer", "--tool", tool, *ours, sys.executable, __file__]
    command += ["--library", str(kernels)]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    start = time.monotonic()
    process = subprocess.Popen(
        [*command, "--group", group],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        report, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the tool runs its target as a child
        report = f"stopped after {limit:.0f} s\n{process.communicate()[0]}"
    found = SUMMARY.search(report)
    seconds = time.monotonic() - start
    return Verdict(tool, group, int(found[1]) if found else None, seconds, report)


def heading(tools: str) -> str:
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes")
    version = subprocess.run(["compute-sanitizer", "--version"], capture_output=True, text=True)
    return (
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {now}, commit {commit()}, "
        f"git's id of csrc {sources()['csrc']}\n"
        f"{version.stdout.strip().splitlines()[-1]}\n"
        f"$ python tests/kernels/sanitize.py --tools {tools}\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tools", default=",".join(TOOLS), help="default: all three")
    parser.add_argument("--library", type=Path, default=LIBRARY, help="the kernels")
    parser.add_argument("--jobs", type=int, default=8, help="processes side by side")
    parser.add_argument("--limit", type=float, default=SECONDS_LIMIT, help="seconds a process")
    parser.add_argument("--out", type=Path, help="the table")
    parser.add_argument("--reports", type=Path, help="folder for what the tool says in full")
    parser.add_argument("--group", help=argparse.SUPPRESS)
    options = parser.parse_args()
    library.library_path = lambda: options.library
    if options.group:
        for run in GROUPS[options.group]:
            run()
        torch.cuda.synchronize()
        print(f"ran {options.group}")
        return 0
    pairs = itertools.product(options.tools.split(","), GROUPS)
    check = partial(examine, kernels=options.library, limit=options.limit)
    with ThreadPoolExecutor(options.jobs) as pool:
        verdicts = list(pool.map(lambda pair: check(*pair), pairs))
    lines = [heading(options.tools)]
    for verdict in verdicts:
        if options.reports:
            name = re.sub(r"\W+", "-", f"{verdict.tool} {verdict.group}")
            (options.reports / f"{name}.txt").write_text(verdict.report)
        faults = "no summary" if verdict.faults is None else f"{verdict.faults} found"
        wish = "" if verdict.as_wished else "  <- not as it should be"
        lines.append(
            f"{verdict.tool:10} {verdict.group:20} {faults:>12} {verdict.seconds:6.1f} s{wish}"
        )
    table = "\n".join(lines)
    print(table)
    if options.out:
        options.out.write_text(table + "\n")
    return 0 if all(verdict.as_wished for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
