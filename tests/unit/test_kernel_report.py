"""What the compiler says of the built kernels: registers, spills, instructions. Needs no GPU."""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from bicl.ops.cuda import library

REPORT = library.library_path().with_suffix(".json")
pytestmark = pytest.mark.skipif(
    not REPORT.exists(), reason="kernels are not built: run `make kernels`"
)
SMS = ("sm_80", "sm_90")


def kernels(name: str, arch: str) -> list[dict[str, object]]:
    found = [
        k
        for k in json.loads(REPORT.read_text())["kernels"]
        if name in str(k["kernel"]) and k["arch"] == arch
    ]
    if not found:
        pytest.skip(f"this build has no {name} for {arch}")
    return found


def cuobjdump() -> str:
    """From the CUDA toolkit, or from PyPI's nvidia-cuda-cuobjdump."""
    if found := shutil.which("cuobjdump"):
        return found
    spec = find_spec("nvidia.cu13") if find_spec("nvidia") else None
    for folder in spec.submodule_search_locations or [] if spec else []:
        if (path := Path(folder) / "bin" / "cuobjdump").exists():
            return str(path)
    pytest.skip("no cuobjdump: install the CUDA toolkit or nvidia-cuda-cuobjdump")


def test_hopper_decode_kernels_do_not_spill() -> None:
    assert [k["kernel"] for k in kernels("decode_kernel", "sm_90a") if k["spill_stores"]] == []


@pytest.mark.parametrize("arch", SMS)
def test_store_kv_leaves_room_for_full_occupancy(arch: str) -> None:
    assert all(int(str(k["registers"])) <= 40 for k in kernels("store_kv_kernel", arch))


@pytest.mark.parametrize("arch", SMS)
def test_a_cta_of_sixteen_warps_that_choose_tiles_fits_an_sm(arch: str) -> None:
    found = kernels("tiles_kernel", arch)
    assert [k["kernel"] for k in found if k["spill_stores"]] == []
    assert all(int(str(k["registers"])) * 32 * 16 <= 65536 for k in found)


def instructions(kernel: str, mangled: str, arch: str = "sm_90a") -> str:
    """The listing of the first Hopper kernel of that name."""
    unit = kernels(kernel, arch)[0]

    def dump(*options: str) -> str:
        command = [cuobjdump(), *options, "-arch", arch, str(library.library_path())]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    symbols = (line.split()[-1] for line in dump("-symbols").splitlines() if mangled in line)
    symbol = next(symbols, None)
    assert symbol is not None, f"{unit['kernel']} is reported but not in the library"
    listing = dump("-sass", "-fun", symbol)
    return listing[listing.index("Function : ") :]


def test_the_decode_kernel_is_made_of_bulk_copies_and_tensor_core_products() -> None:
    decode = instructions("decode::decode_kernel", "6decode13decode_kernel")
    for instruction in ("UBLKCP", "HMMA.16816.F32", "LDSM.16.M88.4", "LDSM.16.MT88.4", "MOVM.16"):
        assert instruction in decode
    assert "STL" not in decode, "a register array went to local memory"


@pytest.mark.parametrize("tile", [64, 32])
def test_the_hopper_prefill_kernel_is_made_of_bulk_copies_and_warpgroup_products(tile: int) -> None:
    mangled = f"prefill4sm906kernelI13__nv_bfloat16S3_Li128ELi{tile}E"
    prefill = instructions("prefill::sm90::kernel", mangled)
    for instruction in ("UBLKCP", "HGMMA", "USETMAXREG"):
        assert instruction in prefill
    assert "STL" not in prefill, "a register array went to local memory"


@pytest.mark.parametrize("heads", [16, 32, 64])
def test_latents_are_multiplied_as_they_lie(heads: int) -> None:
    """Values are the transposed operand, read from shared memory; nothing is padded to 64 heads."""
    mangled = f"3mla13decode_kernelI13__nv_bfloat16Li{heads}E"
    latent = instructions("mla::decode_kernel", mangled)
    for instruction in ("UBLKCP", f"HGMMA.64x{heads}x16", ".tnspA", "STSM.16.MT88.2", "BAR.RED.OR"):
        assert instruction in latent
    assert "STL" not in latent, "a register array went to local memory"


def test_scores_are_bulk_copies_and_tensor_core_products() -> None:
    """The copy engine brings the index, products take its bytes; clusters meet at barriers
    (``WorkE2E`` is ``Work::kChoose``)."""
    choose = instructions("tiles_kernel", "tiles_kernelILi8ELNS0_4WorkE2E", "sm_90")
    for instruction in ("UBLKCP", "IMMA.16832.U8.S8", "UCGABAR_ARV", "ATOMS"):
        assert instruction in choose
    assert "STL" not in choose, "a register array went to local memory"
