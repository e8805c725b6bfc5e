"""``bicl doctor`` beside text-generation-inference: the door of its image, not the embedded one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bicl import cli, hardware
from bicl.frontends.tgi.install import install
from bicl.hardware import Gpu
from bicl.launcher import doctor

sys.path.insert(0, str(Path(__file__).parents[2] / "frontends" / "tgi"))
import fake_tgi


class Image:
    """A tree with TGI's names, and the overlay installed beside it."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (root / "site").mkdir()
        self.site = root / "site"
        self.tree = fake_tgi.make_tree(root / "tgi")
        install(self.site, fake_tgi.make_patches(root))
        self.kernels = root / "libbicl_kernels.so"
        self.kernels.touch()
        monkeypatch.syspath_prepend(str(self.tree.parent))
        monkeypatch.setenv("BICL_SITE_PACKAGES", str(self.site))
        monkeypatch.setattr(doctor, "find_patches", lambda: root / "patches")
        monkeypatch.setattr("bicl.launcher.installed.KERNELS", self.kernels)
        monkeypatch.setattr(doctor, "find_gpus", lambda _: [Gpu("NVIDIA H200", (9, 0))])


@pytest.fixture
def image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Image:
    return Image(tmp_path, monkeypatch)


def report() -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, ["doctor"])
    return result.exit_code, result.output


def test_in_the_image_it_speaks_of_that_door(image: Image) -> None:
    code, text = report()
    assert code == 0, text
    assert "overlay       in place for TGI 9.9" in text
    assert "gpu           NVIDIA H200" in text
    assert text.splitlines()[-1] == "text-generation-inference on BICL pages can run here"
    for embedded in ("fastapi", "bundled", "bicl serve"):
        assert embedded not in text


def test_it_does_not_import_what_it_looks_for(image: Image) -> None:
    report()
    assert "text_generation_server" not in sys.modules


def test_without_a_gpu_it_says_what_the_launcher_says(
    image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "find_gpus", lambda _: [])
    code, text = report()
    assert code == 1
    assert "fail gpu" in text
    assert "no NVIDIA GPU is visible" in text
    assert "stock text-generation-inference runs instead" in text
    assert text.splitlines()[-1] == "text-generation-inference on BICL pages cannot run here"


def test_a_jetson_is_named(image: Image, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "is_jetson", lambda: True)
    assert "Jetson" in report()[1]


def test_an_overlay_that_is_gone_or_does_not_fit_is_named_with_the_command(image: Image) -> None:
    (image.tree / "server.py").write_text("edited\n")
    code, text = report()
    assert code == 1
    assert f"{image.tree / 'server.py'} is of no release" in text
    (image.site / "bicl_tgi_start.pth").unlink()
    assert "python -m bicl.frontends.tgi.install puts it in place" in report()[1]


def test_kernels_that_were_not_built_are_named(image: Image) -> None:
    image.kernels.unlink()
    code, text = report()
    assert code == 1
    assert "build the image with --build-arg KERNELS=cuda" in text


def test_a_missing_package_is_named(image: Image, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda name: None if name == "xxhash" else object())
    assert "missing: xxhash" in report()[1]


def test_switched_off_it_says_that_stock_runs(
    image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BICL_DISABLE", "yes")
    assert "BICL_DISABLE is 'yes'; use 1 or 0" in report()[1]
    monkeypatch.setenv("BICL_DISABLE", "1")
    code, text = report()
    assert code == 0
    assert "warn overlay" in text
    assert "BICL_DISABLE is set; stock text-generation-inference runs instead" in text
