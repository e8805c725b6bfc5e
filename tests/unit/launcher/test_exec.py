"""The shim as a process, in front of a launcher that records what it gets. (A67)"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from bicl.frontends.tgi.install import find_patches, install
from bicl.launcher.flags import split
from bicl.launcher.installed import KERNELS, note_on_shared_memory
from bicl.ops.cuda.library import library_path

FAKE = """#!{python}
import json, os, signal, sys, time
if "--help" in sys.argv:
    print("Usage: text-generation-launcher [OPTIONS]")
    sys.exit(0)
def stop(number, frame):
    print("drained", flush=True)
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
facts = dict(argv=sys.argv, pid=os.getpid(), environ=dict(os.environ))
open(os.environ["RECORD"] + ".part", "w").write(json.dumps(facts))
os.rename(os.environ["RECORD"] + ".part", os.environ["RECORD"])
if "--stay" in sys.argv:
    time.sleep(60)
sys.exit(7)
"""
START = """
import pathlib, sys
from bicl.launcher import installed, main
installed.KERNELS = pathlib.Path(sys.argv.pop(1))
sys.argv[0] = "bicl-launcher"
main()
"""
SMI = "#!/bin/sh\necho '0, GPU-1, 9.0, NVIDIA H200'\n"


class Image:
    """A folder laid out like the image: launcher, driver's tool, model, installed overlay."""

    def __init__(self, root: Path) -> None:
        self.record, self.bin, self.site = root / "record", root / "bin", root / "site"
        self.bin.mkdir()
        self.site.mkdir()
        self.write("text-generation-launcher-upstream", FAKE.format(python=sys.executable))
        self.write("nvidia-smi", SMI)
        install(self.site, find_patches())
        self.kernels = root / "libbicl_kernels.so"
        self.kernels.touch()
        self.model = root / "model"
        self.model.mkdir()
        config = {"model_type": "llama", "hidden_size": 512, "num_attention_heads": 8}
        (self.model / "config.json").write_text(json.dumps(config))

    def write(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def start(self, *arguments: str, **environ: str) -> subprocess.Popen[str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("BICL_")}
        return subprocess.Popen(
            [sys.executable, "-c", START, str(self.kernels), *arguments],
            env=clean
            | {
                "PATH": f"{self.bin}:/usr/bin:/bin",
                "RECORD": str(self.record),
                "BICL_SITE_PACKAGES": str(self.site),
                **environ,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str, **environ: str) -> tuple[int, str, str]:
        process = self.start(*arguments, **environ)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err


@pytest.fixture
def image(tmp_path: Path) -> Image:
    return Image(tmp_path)


def test_the_real_launcher_takes_over_the_process(image: Image) -> None:
    process = image.start("--model-id", str(image.model), "--block-size", "64", "--port", "80")
    _, err = process.communicate(timeout=60)
    facts = json.loads(image.record.read_text())
    assert facts["pid"] == process.pid
    assert facts["argv"][1:] == ["--model-id", str(image.model), "--port", "80"]
    assert process.returncode == 7, "its exit code is ours"
    chosen = {k: facts["environ"].get(k) for k in ("ATTENTION", "BICL_BLOCK_SIZE", "RECORD")}
    assert chosen == {
        "ATTENTION": "flashdecoding",
        "BICL_BLOCK_SIZE": "64",
        "RECORD": str(image.record),
    }
    assert "PREFIX_CACHING" not in facts["environ"]
    assert "bicl: pages of 64 tokens" in err


def test_sigterm_reaches_the_real_launcher(image: Image) -> None:
    process = image.start("--stay")
    deadline = time.monotonic() + 30
    while not image.record.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=30)
    assert (process.returncode, out) == (143, "drained\n")


def test_help_shows_both_sets(image: Image) -> None:
    code, out, _ = image.run("--help")
    assert code == 0
    assert out.index("Usage: text-generation-launcher") < out.index("--block-size <32|64|auto>")


def test_refusal_is_one_line_and_nothing_starts(image: Image) -> None:
    code, out, err = image.run("--block-size", "100")
    assert (code, out) == (2, "")
    assert err == "bicl: --block-size '100' is not supported; use one of ['32', '64', 'auto']\n"
    assert not image.record.exists()


def test_overlay_that_is_not_installed_is_noticed(image: Image) -> None:
    (image.site / "bicl_tgi_start.pth").unlink()
    code, _, err = image.run("--model-id", str(image.model))
    assert code == 2
    assert "bicl_tgi_start.pth is missing" in err


def test_image_without_kernels_is_noticed_before_a_model_is_loaded(image: Image) -> None:
    image.kernels.unlink()
    code, _, err = image.run("--model-id", str(image.model))
    assert code == 2
    assert err.startswith(f"bicl: {image.kernels} is missing: there are no compiled kernels;")
    assert "--build-arg KERNELS=cuda" in err
    assert not image.record.exists()
    code, _, _ = image.run("--model-id", str(image.model), "--flash-attn-version", "2")
    assert code == 7, "stock needs none"


def test_kernels_are_looked_for_where_they_are_loaded_from() -> None:
    assert library_path() == KERNELS


@pytest.mark.parametrize(
    ("command", "gpus", "shards"),
    [("", 2, "2"), ("--num-shard 4", 8, "4"), ("--num-shard 1", 2, ""), ("", 1, "")],
)
def test_little_shared_memory_for_several_shards_is_said(
    monkeypatch: pytest.MonkeyPatch, command: str, gpus: int, shards: str
) -> None:
    """(A66)"""
    usage = SimpleNamespace(total=64 * 2**20)
    monkeypatch.setattr("bicl.doctor.shutil.disk_usage", lambda _: usage)
    note = note_on_shared_memory(split(command.split(), {}), gpus)
    assert note.startswith(f"{shards} shards, but /dev/shm has 64 MiB" if shards else "")
    assert bool(note) == bool(shards)
    assert "--shm-size 1g" in note or not shards
    usage.total = 2**30
    assert note_on_shared_memory(split(command.split(), {}), gpus) == ""


def test_without_gpu_stock_runs_and_it_is_said(image: Image) -> None:
    code, _, err = image.run("--model-id", str(image.model), CUDA_VISIBLE_DEVICES="")
    environ = json.loads(image.record.read_text())["environ"]
    assert code == 7
    assert environ["BICL_DISABLE"] == "1"
    assert "ATTENTION" not in environ
    assert "no NVIDIA GPU is visible" in err
    assert "stock text-generation-inference runs instead" in err


def test_unreadable_config_is_left_to_the_shard(image: Image) -> None:
    code, _, err = image.run("--model-id", "nobody/nothing", HF_HUB_OFFLINE="1")
    assert code == 7
    assert "config.json of nobody/nothing could not be read" in err


def test_a_folder_that_is_not_there_is_not_taken_for_a_hub_model(image: Image) -> None:
    _, _, err = image.run("--model-id", "/data/typo", HF_HUB_OFFLINE="1")
    assert "could not be read (there is no folder /data/typo)" in err


def test_launcher_under_its_old_name_is_found(image: Image) -> None:
    old = image.bin / "text-generation-launcher"
    (image.bin / "text-generation-launcher-upstream").rename(old)
    assert image.run("--model-id", str(image.model))[0] == 7


def test_missing_launcher_is_said(image: Image) -> None:
    (image.bin / "text-generation-launcher-upstream").unlink()
    code, _, err = image.run("--model-id", str(image.model))
    assert code == 2
    assert "is on PATH" in err
    assert "bicl serve" in err
