"""Builds the kernels ahead of time into ``server/bicl/lib/libbicl_kernels.so``.

Every ``*.cu`` below this folder is one translation unit; an operator's ``instances.py`` adds
generated ones (one template combination each). The folder ``sm90`` or ``sm80`` in a path decides
which cards a unit is compiled for; all others are compiled for every card. Only units whose
sources or flags changed are compiled again. What ptxas says of each kernel (registers, spills,
shared memory) is saved beside the library and checked.

    python csrc/build.py                              # release: every card, every instance
    python csrc/build.py --arch 90a --only 'd128_t64' # development: fast
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

CSRC = Path(__file__).resolve().parent
ROOT = CSRC.parent
LIBRARY = ROOT / "server" / "bicl" / "lib" / "libbicl_kernels.so"
RELEASE_ARCHS = "80,86,89,90a,ptx"
SOURCES = "kernel_sources.json"  # beside the library: what NVRTC compiles where it lacks code

# What each family of units is compiled for, out of the archs asked for. sm_80 code runs on 8.6 and
# 8.9; "90" compiles the sm_80 path natively for Hopper (tests); "ptx" lets newer cards compile it.
FAMILY_ARCHS = {
    "sm90": {"90a": "arch=compute_90a,code=sm_90a"},
    "sm80": {
        "80": "arch=compute_80,code=sm_80",
        "90": "arch=compute_90,code=sm_90",
        "ptx": "arch=compute_90,code=compute_90",
    },
    "any": {
        "80": "arch=compute_80,code=sm_80",
        "90": "arch=compute_90,code=sm_90",
        "90a": "arch=compute_90,code=sm_90",
        "ptx": "arch=compute_90,code=compute_90",
    },
}
NVCC_FLAGS = (
    "-std=c++17 -O3 -Xcompiler -fPIC -Xcompiler -fvisibility=hidden -Xptxas -v "
    "-Xfatbin -compress-all --expt-relaxed-constexpr -DNDEBUG"
)
KERNEL = re.compile(r"Compiling entry function '(\S+)' for '(\S+)'")
SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?")
SERIALISED = re.compile(r"\(C751\d\)|C751\d")


@dataclass(frozen=True)
class Unit:
    """One translation unit: its source, a unique name, and the cards' family."""

    source: Path
    name: str
    family: str


def family_of(path: Path) -> str:
    return next((part for part in path.parts if part in ("sm80", "sm90")), "any")


def generated_units(build: Path) -> Iterator[Unit]:
    """Writes what each ``instances.py`` lists, touching only files whose text changed."""
    for listing in sorted(CSRC.glob("*/instances.py")):
        spec = importlib.util.spec_from_file_location(f"{listing.parent.name}_instances", listing)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for name, text in module.instances():
            path = build / "instances" / listing.parent.name / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists() or path.read_text() != text:
                path.write_text(text)
            yield Unit(path, f"{listing.parent.name}_{path.stem}", family_of_name(path.stem))


def family_of_name(stem: str) -> str:
    return next((family for family in ("sm80", "sm90") if stem.startswith(family)), "any")


def source_units() -> Iterator[Unit]:
    for path in sorted(CSRC.rglob("*.cu")):
        relative = path.relative_to(CSRC)
        yield Unit(path, "_".join(relative.with_suffix("").parts), family_of(relative))


def tvm_ffi_config(flag: str) -> str:
    command = [sys.executable, "-m", "tvm_ffi.config", flag]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def newest(depfile: Path) -> float:
    """Modification time of the newest file a unit read when it was last compiled."""
    names = depfile.read_text().replace("\\\n", " ").split(":", 1)[1].split()
    times = [os.stat(name).st_mtime if os.path.exists(name) else float("inf") for name in names]
    return max(times, default=float("inf"))


def compile_once(command: list[str], target: Path) -> str:
    """Runs ``command`` unless ``target`` is up to date; returns the compiler's report."""
    log, depfile = target.with_suffix(".log"), target.with_suffix(".d")
    digest = hashlib.sha256(shlex.join(command).encode()).hexdigest()
    if target.exists() and log.exists() and depfile.exists():
        head, _, report = log.read_text().partition("\n")
        if head == digest and newest(depfile) <= target.stat().st_mtime:
            return report
    start = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True)
    report = done.stdout + done.stderr
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(command)}\n{report}")
    log.write_text(f"{digest}\n{report}")
    print(f"{time.monotonic() - start:6.1f} s  {target.stem}", flush=True)
    return report


def kernel_reports(unit: Unit, report: str) -> Iterator[dict[str, object]]:
    """One entry a kernel and card: registers, spills, static shared memory."""
    entry: dict[str, object] = {}
    for line in report.splitlines():
        if match := KERNEL.search(line):
            entry = {"unit": unit.name, "kernel": match[1], "arch": match[2]}
        elif match := SPILLS.search(line):
            entry |= {
                "stack": int(match[1]),
                "spill_stores": int(match[2]),
                "spill_loads": int(match[3]),
            }
        elif (match := USED.search(line)) and entry:
            yield entry | {"registers": int(match[1]), "static_smem": int(match[2] or 0)}
            entry = {}


def faults(unit: Unit, report: str) -> list[str]:
    """What makes a unit unfit to ship: spills in a Hopper kernel, serialised wgmma."""
    found = [
        f"{unit.name}: {line.strip()}" for line in report.splitlines() if SERIALISED.search(line)
    ]
    if unit.family == "sm90":
        found += [
            f"{unit.name}: {kernel['kernel']} spills {kernel['spill_stores']} bytes"
            for kernel in kernel_reports(unit, report)
            if kernel.get("spill_stores")
        ]
    return found


def demangle(names: list[str]) -> list[str]:
    try:
        done = subprocess.run(
            ["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return names
    return done.stdout.splitlines()


def build(args: argparse.Namespace) -> None:
    build_dir = Path(args.build_dir)
    archs = args.arch.split(",")
    if unknown := set(archs) - {"80", "86", "89", "90", "90a", "ptx"}:
        raise SystemExit(f"unknown --arch {sorted(unknown)}; use some of 80,86,89,90,90a,ptx")
    includes = shlex.split(tvm_ffi_config("--cxxflags"))
    nvcc = [args.nvcc, *shlex.split(NVCC_FLAGS), *(["-lineinfo"] if args.lineinfo else [])]

    def unit_command(unit: Unit) -> list[str] | None:
        codes = {FAMILY_ARCHS[unit.family][a] for a in archs if a in FAMILY_ARCHS[unit.family]}
        flags = [flag for code in sorted(codes) for flag in ("-gencode", code)]
        if not codes:
            if not args.nvrtc_rest:
                return None
            flags = ["-gencode", min(FAMILY_ARCHS["any"].values()), "-DBICL_NO_DEVICE_CODE"]
        return [*nvcc, *flags, "-I", str(CSRC), "-MD", "-MF", str(build_dir / f"{unit.name}.d"),
                "-c", str(unit.source), "-o", str(build_dir / f"{unit.name}.o")]  # fmt: skip

    build_dir.mkdir(parents=True, exist_ok=True)
    generated = [u for u in generated_units(build_dir) if re.search(args.only, u.name)]
    units = [
        u
        for u in [*source_units(), *generated]
        if not args.skip or not re.search(args.skip, u.name)
    ]
    commands = {u: c for u in units if (c := unit_command(u)) is not None}
    with ThreadPoolExecutor(args.jobs) as pool:
        reports = dict(
            zip(
                commands,
                pool.map(lambda u: compile_once(commands[u], build_dir / f"{u.name}.o"), commands),
                strict=True,
            )
        )
    bindings = build_dir / "bindings.o"
    cuda_include = Path(args.cuda_home) / "include"
    compile_once(
        [args.cxx, "-O2", "-fPIC", "-fvisibility=hidden", f'-DBICL_ARCHS="{args.arch}"',
         *includes, "-I", str(cuda_include), "-MD", "-MF", str(bindings.with_suffix(".d")),
         "-c", str(CSRC / "bindings.cpp"), "-o", str(bindings)],
        bindings,
    )  # fmt: skip
    link(args, [bindings, *(build_dir / f"{u.name}.o" for u in commands)])
    write_report(Path(args.output), archs, reports)
    write_sources(Path(args.output).with_name(SOURCES))
    if bad := [fault for unit, report in reports.items() for fault in faults(unit, report)]:
        raise SystemExit("the build has kernels unfit to ship:\n" + "\n".join(bad))


def link(args: argparse.Namespace, objects: list[Path]) -> None:
    library = Path(args.output)
    library.parent.mkdir(parents=True, exist_ok=True)
    cuda_lib = next(
        (
            p
            for p in (Path(args.cuda_home) / n for n in ("lib64", "lib"))
            if (p / "libcudart_static.a").exists()
        ),
        None,
    )
    if cuda_lib is None:
        raise SystemExit(f"no libcudart_static.a under {args.cuda_home}; pass --cuda-home")
    partial = library.with_suffix(".so.partial")
    command = [args.cxx, "-shared", "-o", str(partial), *map(str, objects), f"-L{cuda_lib}",
               "-lcudart_static", "-ldl", "-lrt", "-lpthread",
               *shlex.split(tvm_ffi_config("--ldflags")), "-ltvm_ffi",
               "-Wl,-s", "-Wl,-z,lazy" if args.skip else "-Wl,--no-undefined"]  # fmt: skip
    subprocess.run(command, check=True)
    partial.replace(library)
    print(f"{library} {library.stat().st_size / 2**20:.1f} MiB")


def write_report(library: Path, archs: list[str], reports: dict[Unit, str]) -> None:
    kernels = [entry for unit, report in reports.items() for entry in kernel_reports(unit, report)]
    for entry, name in zip(kernels, demangle([str(k["kernel"]) for k in kernels]), strict=True):
        entry["kernel"] = name
    text = json.dumps({"archs": archs, "kernels": kernels}, indent=1)
    library.with_suffix(".json").write_text(text)


def write_sources(path: Path) -> None:
    """Everything that device code includes, in one file that travels in the wheel."""
    files = sorted([*CSRC.rglob("*.cuh"), *CSRC.rglob("*.h")])
    path.write_text(json.dumps({str(f.relative_to(CSRC)): f.read_text() for f in files}))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--arch", default=RELEASE_ARCHS, help=f"default {RELEASE_ARCHS}")
    parser.add_argument("--only", default="", help="regular expression on generated instances")
    parser.add_argument(
        "--skip", default="", help="regular expression on units left out; calling them then fails"
    )
    parser.add_argument(
        "--nvrtc-rest",
        action="store_true",
        help="link units that the archs leave without code; NVRTC makes it on the card",
    )
    parser.add_argument("-j", "--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--lineinfo", action="store_true", help="source lines for profilers")
    parser.add_argument("--build-dir", default=str(ROOT / "build" / "kernels"))
    parser.add_argument("--output", default=str(LIBRARY), help="the library to write")
    parser.add_argument("--cuda-home", default=os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    parser.add_argument("--nvcc", default="nvcc")
    parser.add_argument("--cxx", default=os.environ.get("CXX", "g++"))
    return parser.parse_args()


if __name__ == "__main__":
    build(parse_args())
