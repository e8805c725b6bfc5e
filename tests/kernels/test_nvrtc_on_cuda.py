"""Kernels compiled by NVRTC on the card pass the tests that the built ones pass.

A process takes all its kernels from one place, so each group of tests runs in a process of its own,
with an empty kernel cache. The whole suite runs that way, too: ``--kernels-from nvrtc``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bicl.ops.cuda import library

pytestmark = pytest.mark.gpu

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DECODE = "test_decode_steps.py::test_one_captured_graph_serves_all_lengths"
PREFILL = "test_prefill_attention.py::test_fp8_and_wide_heads_on_the_path_of_this_card"
SPARSE = "test_sparse_decode.py::test_the_sparse_backend_indexes_what_it_stores_and_selects"
# kernels, as their symbols spell them: tests that cannot pass without them
CASES = {
    (
        "store_kv_kernel",
        "gather_kernel",
        "copy_pages_kernel",
        "compact_tokens_kernel",
        "widen_pages_kernel",
        "stage_step_kernel",
        "rotate_kernel",
        "rotate_and_store_kernel",
        "small_copies_kernel",
        "swiglu_kernel",
        "rms_norm_kernel",
        "few_rows_linear_kernel",
    ): [
        "test_store_kv.py::test_a_row_can_be_rewritten_without_touching_its_neighbours",
        "test_pages.py::test_pages_are_copied_in_every_layer",
        "test_compact_tokens.py::test_compacted_tokens_lie_side_by_side[page_and_tile0-bf16]",
        "test_widen_pages.py::test_a_captured_graph_widens_other_lengths",
        "test_stage_step.py::test_rows_are_copied_and_the_rest_is_empty",
        "test_rotary.py::test_every_replay_of_a_graph_turns_once",
        "test_rotate_and_store.py::test_it_equals_rotation_and_store",
        "test_small_copies.py::test_pieces_of_any_size_are_copied_both_ways",
        "test_swiglu.py::test_products_equal_the_twin_but_for_a_rounding",
        "test_rms_norm.py::test_rows_equal_the_twin_but_for_a_rounding",
        "test_few_rows_linear.py::test_both_forms_take_any_number_of_rows",
    ],
    ("decode_kernel", "6decode11plan_kernel"): [
        "test_decode_attention.py::test_empty_sequences_give_zeros",
        f"{DECODE}[5-False-True-False]",
        f"{DECODE}[5-True-False-True]",
    ],
    ("3mla13decode_kernel", "store_latent_kernel"): [
        "test_mla_decode.py::test_a_graph_is_right_for_other_lengths[16]",
        "test_mla_decode.py::test_any_number_of_heads[100-torch.float16]",
    ],
    ("prefill4sm90", "plan_kernel"): [
        f"{PREFILL}[torch.bfloat16-128-chunk on a long prefix-pages of 64]"
    ],
    ("prefill4sm90", "Li128ELi32E"): [f"{PREFILL}[torch.bfloat16-128-ragged-pages of 32]"],
    ("prefill4sm90", "__nv_fp8_e4m3"): [f"{PREFILL}[torch.float8_e4m3fn-128-ragged-pages of 64]"],
    ("prefill3mma", "__nv_fp8_e5m2"): [f"{PREFILL}[torch.float8_e5m2-64-ragged-pages of 64]"],
    (
        "index_pages_kernel",
        "29rotate_store_and_index_kernel",
        "22store_and_index_kernel",
        "tiles_kernel",
    ): [SPARSE, "test_rotate_and_store.py::test_it_also_indexes_the_pages_that_it_completes"],
}


@pytest.mark.parametrize("kernels", CASES, ids=" ".join)
def test_kernels_compiled_on_the_card_are_right(kernels: tuple[str, ...], tmp_path: Path) -> None:
    """(A46)"""
    pytest.importorskip("cupy", reason="CuPy is not installed; it brings NVRTC's binding")
    if {"prefill4sm90", "3mla13decode_kernel"} & set(
        kernels
    ) and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("wgmma kernels are for compute capability 9.0")
    sources = library.library_path().with_name("kernel_sources.json")
    if not sources.exists():
        pytest.skip(f"{sources} is missing: run `make kernels`")
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "server" / "pyproject.toml")]
    command += ["-W", "default", "-p", "no:cacheprovider", "--kernels-from", "nvrtc"]
    done = subprocess.run(
        [*command, *(str(HERE / test) for test in CASES[kernels])],
        cwd=ROOT,
        env=os.environ | {"CUPY_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d+ passed", done.stdout)
    assert "skipped" not in done.stdout
    kept = [path.read_bytes().partition(b"\0")[0].decode() for path in tmp_path.glob("bicl_*")]
    for kernel in kernels:
        assert any(kernel in symbol for symbol in kept), kept
