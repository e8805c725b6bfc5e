"""The steps of the ``tgi`` target, built by a real engine on an image with TGI's names."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from engine import (
    BASE,
    ENVIRONMENT,
    build,
    build_embedded,
    docker,
    fill_context,
    run,
    succeeds,
)
from stand_in_tgi import build_official, fake_tgi

import bicl

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

SMI = "#!/bin/sh\necho '0, GPU-1, 9.0, NVIDIA H200'\n"
PYTHON = "/usr/src/.venv/bin/python"


@pytest.fixture(scope="module")
def client() -> str:
    return docker()


@pytest.fixture(scope="module")
def image(client: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Our Dockerfile over the stand-in; ``UPSTREAM`` knows the stand-in's files."""
    context = tmp_path_factory.mktemp("context")
    build_embedded(client, context)
    official = build_official(client, tmp_path_factory.mktemp("official"))
    shutil.rmtree(context / "patches")
    fake_tgi.make_patches(context)
    return build(client, context, "tgi", "--build-arg", f"TGI_IMAGE={official}")


def in_image(client: str, image: str, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [client, "run", "--rm", "--entrypoint", command[0], image, *command[1:]],
        capture_output=True, text=True, env=ENVIRONMENT, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def kernels(client: str, image: str) -> str:
    """Where the image keeps the compiled kernels, if it was built with them."""
    show = "from bicl.launcher.installed import KERNELS; print(KERNELS)"
    return in_image(client, image, PYTHON, "-c", show).stdout.strip()


@pytest.fixture
def with_gpu(tmp_path: Path, kernels: str) -> list[str]:
    """Flags of ``docker run`` that put the driver's tool and a library there."""
    (tmp_path / "nvidia-smi").write_text(SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    (tmp_path / "kernels.so").touch()
    return [
        *("-v", f"{tmp_path}/nvidia-smi:/usr/local/bin/nvidia-smi:ro"),
        *("-v", f"{tmp_path}/kernels.so:{kernels}:ro"),
    ]


def launched(client: str, image: str, flags: list[str], *arguments: str) -> tuple[dict, str]:
    """What the real launcher was started with, and what was said."""
    done = subprocess.run(
        [client, "run", "--rm", *flags, image, *arguments],
        capture_output=True, text=True, env=ENVIRONMENT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_launcher_is_behind_the_shim_under_its_own_name(
    client: str, image: str, with_gpu: list[str]
) -> None:
    facts, said = launched(client, image, with_gpu, "--model-id", "m", "--block-size", "64")
    assert facts["argv"] == ["--model-id", "m"]
    assert facts["pid"] == 1
    assert facts["environ"]["ATTENTION"] == "flashdecoding"
    assert facts["environ"]["BICL_BLOCK_SIZE"] == "64"
    assert "bicl: pages of 64 tokens" in said


def test_without_a_gpu_stock_runs_and_it_is_said(client: str, image: str) -> None:
    facts, said = launched(client, image, [], "--model-id", "m")
    assert facts["environ"]["BICL_DISABLE"] == "1"
    assert "no NVIDIA GPU is visible" in said


def test_help_shows_both_sets(client: str, image: str) -> None:
    told = run(client, "run", "--rm", image, "--help")
    assert told.index("Usage: text-generation-launcher") < told.index("--block-size <32|64|auto>")


def test_unusable_flags_end_the_container_with_one_line(
    client: str, image: str, with_gpu: list[str]
) -> None:
    """(A47)"""
    done = subprocess.run(
        [client, "run", "--rm", *with_gpu, image, "--block-size", "48"],
        capture_output=True, text=True, env=ENVIRONMENT, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("bicl: --block-size '48' is not supported")


def test_image_built_without_kernels_says_so_at_once(
    client: str, image: str, with_gpu: list[str]
) -> None:
    done = subprocess.run(
        [client, "run", "--rm", *with_gpu[:2], image, "--model-id", "m"],
        capture_output=True, text=True, env=ENVIRONMENT, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert "there are no compiled kernels; build the image with" in done.stderr


def test_sigterm_reaches_the_launcher_as_process_1(
    client: str, image: str, with_gpu: list[str]
) -> None:
    """(A67)"""
    name = "bicl-test-tgi-stop"
    try:
        run(client, "run", "-d", "--name", name, *with_gpu, image, "--stay")
        while "argv" not in run(client, "logs", name):
            time.sleep(0.2)
        begin = time.monotonic()
        run(client, "stop", "-t", "30", name)
        assert time.monotonic() - begin < 20
        assert run(client, "inspect", "-f", "{{.State.ExitCode}}", name).strip() == "143"
    finally:
        succeeds(client, "rm", "-f", name)


def test_hook_is_in_place_and_verified(client: str, image: str) -> None:
    show = f"import os; os.environ['ATTENTION'] = 'flashdecoding'\n{fake_tgi.SHOW}"
    started = in_image(client, image, PYTHON, "-c", show)
    assert started.stdout == "64 <class 'bicl.frontends.tgi.kv_cache.KVCache'> True True\n"
    verified = in_image(client, image, PYTHON, "-m", "bicl.frontends.tgi.install", "--verify")
    assert verified.returncode == 0, verified.stderr
    assert "for TGI 9.9" in verified.stdout


def test_edited_file_of_tgi_ends_every_shard(client: str, image: str) -> None:
    script = (
        "echo '# edited' >> /usr/src/server/text_generation_server/server.py; "
        f"{PYTHON} -c 'import text_generation_server.cli'"
    )
    done = in_image(client, image, "sh", "-c", script)
    assert done.returncode == 78
    assert "server.py is of no release" in done.stderr


def test_one_variable_goes_back_to_stock(client: str, image: str) -> None:
    script = f"BICL_DISABLE=1 ATTENTION=flashinfer {PYTHON} -c '{fake_tgi.SHOW}'"
    assert in_image(client, image, "sh", "-c", script).stdout == "256 stock True stock\n"


def test_doctor_and_selftest_are_there(client: str, image: str) -> None:
    """Without a GPU the first says so; the second needs TGI's real server, and says so, too."""
    doctor = in_image(client, image, "bicl", "doctor")
    assert "no NVIDIA GPU is visible" in doctor.stdout
    assert "stock text-generation-inference runs instead" in doctor.stdout
    assert "overlay       in place for TGI 9.9" in doctor.stdout
    assert "Traceback" not in doctor.stderr
    selftest = in_image(client, image, "bicl", "selftest", "llama")
    assert selftest.returncode != 0
    assert "text_generation_server" in selftest.stdout + selftest.stderr


def test_labels_health_check_and_parts_list(client: str, image: str) -> None:
    config = json.loads(run(client, "inspect", "-f", "{{json .Config}}", image))
    assert config["Labels"]["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert config["Labels"]["org.opencontainers.image.version"] == bicl.__version__
    assert config["Labels"]["org.opencontainers.image.revision"] == ""
    assert config["Labels"]["org.opencontainers.image.base.name"] == "bicl-test-tgi:official"
    assert config["Healthcheck"]["Test"] == ["CMD", PYTHON, "-m", "bicl.healthcheck"]
    unwell = in_image(client, image, PYTHON, "-m", "bicl.healthcheck")
    assert (unwell.returncode, unwell.stderr[:27]) == (1, "http://127.0.0.1:80/health:")
    assert config["Entrypoint"] == ["/tgi-entrypoint.sh"], "TGI's own"
    bom = json.loads(in_image(client, image, "cat", "/opt/bicl/sbom.cdx.json").stdout)
    assert {"bicl", "apache-tvm-ffi", "xxhash"} <= {part["name"] for part in bom["components"]}
    for folder in ("/tmp/bicl", "/tmp/bom"):
        assert in_image(client, image, "ls", folder).returncode != 0
    layers = run(client, "history", "--no-trunc", "--format", "{{.CreatedBy}}", image)
    assert "COPY /out" not in layers, "a wheel in a layer of its own is there for good"


def test_official_image_can_be_pinned_by_digest(client: str, image: str, tmp_path: Path) -> None:
    """The engine is asked for exactly that one; here it does not exist."""
    fill_context(tmp_path)
    pinned = f"sha256:{'0' * 64}"
    done = subprocess.run(
        [client, "build", "--target", "tgi", "--build-arg", "TGI_IMAGE=localhost:1/tgi:3.3.7",
         "--build-arg", f"TGI_DIGEST={pinned}", "--build-arg", f"EMBEDDED_BASE={BASE}",
         str(tmp_path)],
        capture_output=True, text=True, env=ENVIRONMENT, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert f"localhost:1/tgi:3.3.7@{pinned}" in done.stderr
