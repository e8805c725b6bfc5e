"""``python -m bicl.frontends.tgi.install``: put the overlay into an environment, or take it out."""

from __future__ import annotations

import argparse
import filecmp
import shutil
import sys
import sysconfig
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path

from bicl.errors import ConfigError
from bicl.frontends.tgi.upstream import Release, identify, read_upstream

__all__ = ["find_patches", "install", "main", "uninstall", "verify", "verify_files"]

PACKAGE = "text_generation_server"
START = "bicl_tgi_start"
FOLDER = "bicl_tgi_patches"
CONTENTS = ("UPSTREAM", "overlay/kv_cache.py", "overlay/cuda.py", "overlay/ipex.py")
PTH_LINE = f"import {START}\n"
AGAIN = "python -m bicl.frontends.tgi.install puts it in place"


def find_patches() -> Path:
    """``patches/`` of a source tree, of the image, or an installed copy.

    Raises:
        ConfigError: there is none.
    """
    places = [
        Path(__file__).resolve().parents[4] / "patches",
        Path("/opt/bicl/patches"),
        Path(sysconfig.get_path("purelib")) / FOLDER,
    ]
    for place in places:
        if (place / "UPSTREAM").is_file() and (place / "hook").is_dir():
            return place
    listed = ", ".join(map(str, places))
    raise ConfigError(f"no patches folder in {listed}; name it with --patches")


def install(site: Path, patches: Path) -> None:
    """Copy the overlay and its start-up hook into ``site``; again is harmless."""
    _check_site(site)
    target = site / FOLDER
    shutil.rmtree(target, ignore_errors=True)
    for name in (*CONTENTS, f"hook/{START}.py"):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(patches / name, target / name)
    shutil.copyfile(patches / "hook" / f"{START}.py", site / f"{START}.py")
    # Last: from here on every Python of this environment starts through the hook.
    (site / f"{START}.pth").write_text(PTH_LINE)


def uninstall(site: Path) -> None:
    """Remove what ``install`` wrote; harmless where nothing is."""
    _check_site(site)
    (site / f"{START}.pth").unlink(missing_ok=True)
    (site / f"{START}.py").unlink(missing_ok=True)
    shutil.rmtree(site / FOLDER, ignore_errors=True)


def verify(site: Path, patches: Path, package: Path) -> Release:
    """Check that the overlay in ``site`` is whole and fits TGI's tree.

    Raises:
        ConfigError: naming the file.
    """
    verify_files(site, patches)
    return identify(package, read_upstream(site / FOLDER / "UPSTREAM"))


def verify_files(site: Path, patches: Path) -> None:
    """Check that the overlay in ``site`` is whole; raises ConfigError naming the file."""
    pth = site / f"{START}.pth"
    if not pth.is_file() or pth.read_text() != PTH_LINE:
        raise ConfigError(f"{pth} is missing or altered; {AGAIN}")
    pairs = [(patches / name, site / FOLDER / name) for name in CONTENTS]
    pairs.append((patches / "hook" / f"{START}.py", site / f"{START}.py"))
    for source, copy in pairs:
        if not copy.is_file() or not filecmp.cmp(source, copy, shallow=False):
            raise ConfigError(f"{copy} is missing or differs from {source}; {AGAIN}")


def _find_package(given: Path | None, site: Path) -> Path:
    """TGI's package, as a Python with this ``site`` would find it, or as this one does."""
    found = given or _in_site(PACKAGE, site) or _folder(find_spec(PACKAGE))
    if found is None:
        raise ConfigError(
            f"{PACKAGE} is installed neither in {site} nor in {sys.prefix}; name it with --package"
        )
    return found


def _check_ours(site: Path) -> None:
    """The hook imports us when TGI starts."""
    if site != Path(sysconfig.get_path("purelib")) and not any(site.glob("bicl-*.dist-info")):
        raise ConfigError(
            f"bicl is not installed in {site}; first install it with that environment's Python "
            "(pip install ./server)"
        )


def _in_site(package: str, site: Path) -> Path | None:
    """Where a package lies that ``site`` holds, or names in a ``.pth`` file (editable installs)."""
    lines = (line for pth in sorted(site.glob("*.pth")) for line in pth.read_text().splitlines())
    named = [line for line in lines if line and not line.startswith(("#", "import "))]
    folders = [str(site), *(str(site / line) for line in named)]
    return _folder(PathFinder.find_spec(package, folders))


def _folder(spec: ModuleSpec | None) -> Path | None:
    places = spec.submodule_search_locations if spec is not None else None
    return Path(next(iter(places))) if places else None


def _check_site(site: Path) -> None:
    if not site.is_dir():
        raise ConfigError(f"{site} is no folder; name the environment's site-packages")


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code; errors are one line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m bicl.frontends.tgi.install")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--uninstall", action="store_true", help="back to stock TGI")
    action.add_argument("--verify", action="store_true", help="check what is installed")
    parser.add_argument(
        "--site-packages", type=Path, default=Path(sysconfig.get_path("purelib")), metavar="PATH"
    )
    parser.add_argument("--patches", type=Path, help="default: beside the package")
    parser.add_argument("--package", type=Path, help=f"where {PACKAGE} lies; default: as installed")
    options = parser.parse_args(arguments)
    try:
        if options.uninstall:
            uninstall(options.site_packages)
            print(f"bicl: removed from {options.site_packages}")
            return 0
        _check_site(options.site_packages)
        patches = options.patches or find_patches()
        package = _find_package(options.package, options.site_packages)
        if not options.verify:
            # Refuse before anything is written.
            _check_ours(options.site_packages)
            identify(package, read_upstream(patches / "UPSTREAM"))
            install(options.site_packages, patches)
        release = verify(options.site_packages, patches, package)
    except (ConfigError, OSError) as error:
        print(f"bicl: {error}", file=sys.stderr)
        return 1
    limits = f"; without {', '.join(release.limits)}" if release.limits else ""
    print(f"bicl: in place in {options.site_packages} for TGI {release.name}{limits}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
