"""Installing the overlay into an environment and taking it out again."""

from __future__ import annotations

from pathlib import Path

import fake_tgi
import pytest
from fake_tgi import SHOW, run_python

from bicl.frontends.tgi.install import main


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Path]:
    site = tmp_path / "site-packages"
    site.mkdir()
    (site / "other.pth").write_text("# nothing\n")
    (site / "bicl-0.1.0.dist-info").mkdir()
    return {
        "site": site,
        "tree": fake_tgi.make_tree(tmp_path / "tgi"),
        "patches": fake_tgi.make_patches(tmp_path),
    }


def test_tgi_is_found_as_the_other_environment_finds_it(
    places: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--site-packages", str(places["site"]), "--patches", str(places["patches"])]
    assert main(command) == 1
    assert f"is installed neither in {places['site']} nor in" in capsys.readouterr().err
    (places["site"] / "__editable__.tgi.pth").write_text(f"{places['tree'].parent}\n")
    assert main(command) == 0
    assert "for TGI 9.9" in capsys.readouterr().out


def test_an_environment_without_our_package_is_not_touched(
    places: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    (places["site"] / "bicl-0.1.0.dist-info").rmdir()
    before = contents(places["site"])
    assert run(places) == 1
    assert f"bicl is not installed in {places['site']}" in capsys.readouterr().err
    assert contents(places["site"]) == before


def run(places: dict[str, Path], *flags: str) -> int:
    fixed = ["--site-packages", places["site"], "--patches", places["patches"]]
    return main([*map(str, fixed), "--package", str(places["tree"]), *flags])


def started(places: dict[str, Path], **environ: str) -> str:
    code = f"import site; site.addsitedir({str(places['site'])!r})\n{SHOW}"
    done = run_python(code, places["tree"].parent, **environ)
    assert done.returncode == 0, done.stderr
    return done.stdout


def contents(site: Path) -> dict[str, bytes]:
    files = (path for path in site.rglob("*") if path.is_file())
    return {str(p.relative_to(site)): p.read_bytes() for p in files if "__pycache__" not in p.parts}


def test_installed_overlay_starts_from_its_pth_file(places: dict[str, Path]) -> None:
    assert run(places) == 0
    assert "bicl.frontends.tgi.kv_cache.KVCache" in started(places)


def test_installing_twice_changes_nothing(places: dict[str, Path]) -> None:
    run(places)
    once = contents(places["site"])
    assert run(places) == 0
    assert contents(places["site"]) == once


def test_uninstalling_leaves_what_was_there_before(places: dict[str, Path]) -> None:
    before = contents(places["site"])
    run(places)
    assert run(places, "--uninstall") == 0
    assert run(places, "--uninstall") == 0
    assert contents(places["site"]) == before
    assert started(places).startswith("256 stock")


def test_verify_accepts_an_installation(
    places: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run(places)
    assert run(places, "--verify") == 0
    assert "for TGI 9.9" in capsys.readouterr().out


def test_verify_names_what_is_missing(
    places: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(places, "--verify") == 1
    assert "bicl_tgi_start.pth is missing or altered" in capsys.readouterr().err


def test_verify_names_an_altered_file(
    places: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run(places)
    (places["site"] / "bicl_tgi_patches" / "overlay" / "cuda.py").write_text("")
    assert run(places, "--verify") == 1
    assert "cuda.py is missing or differs" in capsys.readouterr().err


def test_unknown_tree_is_refused_before_anything_is_written(
    places: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    (places["tree"] / "server.py").write_text("edited")
    before = contents(places["site"])
    assert run(places) == 1
    assert contents(places["site"]) == before
    assert "server.py is of no release" in capsys.readouterr().err


def test_missing_site_packages_is_named(
    places: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    places["site"] = places["site"] / "nowhere"
    assert run(places) == 1
    assert "nowhere is no folder" in capsys.readouterr().err
