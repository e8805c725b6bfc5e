"""A Docker engine for the image tests: the one that runs, or one that we may start ourselves."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ["docker.io", "docker-compose", "debootstrap", "iptables"]
BASE = "bicl-test-base:python"
ENVIRONMENT = os.environ | {"DOCKER_BUILDKIT": "1", "COMPOSE_DOCKER_CLI_BUILD": "0"}


def run(*command: str, **options: object) -> str:
    """Run a command and return its output; a failure shows it."""
    done = subprocess.run(command, text=True, capture_output=True, env=ENVIRONMENT, **options)
    assert done.returncode == 0, (
        f"{' '.join(command)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    )
    return done.stdout


def succeeds(*command: str, **options: object) -> bool:
    done = subprocess.run(command, capture_output=True, env=ENVIRONMENT, **options)
    return done.returncode == 0


def docker() -> str:
    """A client that can build with BuildKit, and an engine behind it; else the test is skipped."""
    if not shutil.which("dockerd"):
        _install()
    if not succeeds("docker", "info"):
        _start_engine()
    for client in ("docker", "/usr/bin/docker"):
        if shutil.which(client) and succeeds(client, "build", "-", input=b"FROM scratch\n"):
            return client
    pytest.skip("no Docker client with BuildKit on this machine")


def _install() -> None:
    """Only in CI, as root on Debian: nobody's own machine gets packages from a test."""
    if not (os.environ.get("CI") and os.geteuid() == 0 and shutil.which("apt-get")):
        pytest.skip(f"no Docker engine; install {' '.join(PACKAGES)} to run the image's tests")
    quiet = {"env": ENVIRONMENT | {"DEBIAN_FRONTEND": "noninteractive"}, "capture_output": True}
    subprocess.run(["apt-get", "update", "-qq"], check=True, **quiet)
    subprocess.run(["apt-get", "install", "-y", "-qq", *PACKAGES], check=True, **quiet)


def _start_engine() -> None:
    if os.geteuid() != 0 or not shutil.which("dockerd"):
        pytest.skip("no Docker engine runs, and only root can start one")
    (ROOT / "build").mkdir(exist_ok=True)
    log = ROOT / "build" / "dockerd.log"
    with log.open("w") as output:  # it outlives the tests; nobody waits for it
        subprocess.run(["setsid", "--fork", "dockerd"], stdout=output, stderr=output, check=True)
    for _ in range(60):
        if succeeds("docker", "info"):
            return
        time.sleep(1)
    pytest.skip(f"dockerd did not start: {log.read_text()[-500:]}")


def build_embedded(client: str, context: Path) -> str:
    """Build the ``embedded`` target on a base made of Debian's packages; its tag."""
    fill_context(context)
    run("sh", str(ROOT / "tests" / "e2e" / "make_base_image.sh"), BASE)
    return build(client, context, "embedded")


def build(client: str, context: Path, target: str, *arguments: str) -> str:
    """Build a target of the Dockerfile; its tag."""
    tag = f"bicl-{target}"
    run(
        client, "build", "--network", "host", "--target", target,
        "--build-arg", f"EMBEDDED_BASE={BASE}", *arguments, "-t", tag, str(context),
    )  # fmt: skip
    return tag


def fill_context(context: Path) -> None:
    """What a checkout would send to the engine, and a torch for the machine's own Python."""
    for name in ("Dockerfile", ".dockerignore", "Makefile"):
        shutil.copy(ROOT / name, context)
    unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.so", "*.whl")
    for name in ("server", "csrc", "patches", "deploy/wheels"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, context / name, ignore=unwanted)
    _bring_torch(context / "deploy" / "wheels")


def _bring_torch(wheels: Path) -> None:
    """Take the CPU build from this machine's pip, if it knows one; else the build fetches it."""
    python = next(p for p in ("/usr/bin/python3", "python3") if shutil.which(p))
    version = run(python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])").strip()
    succeeds(
        str(ROOT / ".venv/bin/python"), "-m", "pip", "download", "-q", "--no-deps",
        "--only-binary=:all:", "--python-version", version, "-d", str(wheels), "torch==2.13.0+cpu",
    )  # fmt: skip
