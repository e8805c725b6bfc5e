"""Puts our modules in the place of TGI's while Python imports them.

Nothing is edited: a finder in front of Python's own answers for the modules we replace, and lets a
few others be changed right after they have run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from bicl.errors import ConfigError
from bicl.frontends.tgi.config import overlay_config
from bicl.frontends.tgi.upstream import DISABLE, identify, read_upstream

__all__ = ["PACKAGE", "OverlayFinder", "end_process", "install"]

PACKAGE = "text_generation_server"
REPLACED = ("kv_cache", "cuda", "ipex")
EXIT_CODE = 78  # EX_CONFIG

Patch = Callable[[ModuleType], None]


def install(patches: Path) -> None:
    """Verify TGI's tree and take our places in it; called before the first of its modules runs.

    Args:
        patches: folder with ``UPSTREAM`` and ``overlay/``.

    Raises:
        ConfigError: TGI is not there, unknown, or the settings are wrong.
    """
    from bicl.frontends.tgi import upstream_patches

    overlay_config()
    release = identify(find_package(), read_upstream(patches / "UPSTREAM"))
    attention = f"{PACKAGE}.layers.attention"
    replaced = {f"{attention}.{name}": patches / "overlay" / f"{name}.py" for name in REPLACED}
    missing = [str(path) for path in replaced.values() if not path.is_file()]
    if missing:
        raise ConfigError(f"{missing[0]} is missing; install the overlay again")
    sys.meta_path.insert(0, OverlayFinder(replaced, upstream_patches.patches(release)))


def find_package() -> Path:
    """Where TGI's Python package lies; it is not imported."""
    for finder in [f for f in sys.meta_path if hasattr(f, "find_spec")]:
        spec = finder.find_spec(PACKAGE, None)
        if spec is not None and spec.submodule_search_locations:
            return Path(next(iter(spec.submodule_search_locations)))
    raise ConfigError(f"{PACKAGE} is not installed in {sys.prefix}")


def end_process(error: BaseException | str) -> NoReturn:
    """Say why on stderr and stop at once: TGI would swallow an exception and serve without us."""
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    print(f"bicl: {text}", file=sys.stderr, flush=True)
    os._exit(EXIT_CODE)


class OverlayFinder(MetaPathFinder):
    """Answers for some modules of TGI and leaves every other import alone.

    Args:
        replaced: full module name to the file that takes its place.
        patched: full module name to what is done right after the module has run.
    """

    def __init__(self, replaced: Mapping[str, Path], patched: Mapping[str, Patch]) -> None:
        self._replaced = replaced
        self._patched = patched

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name in self._replaced:
            spec = spec_from_file_location(name, self._replaced[name])
            assert spec is not None
            assert spec.loader is not None
            spec.loader = _ReplacedLoader(spec.loader)
            return spec
        if name in self._patched:
            spec = self._ask_others(name, path)
            if spec is None or spec.loader is None:
                end_process(f"{name} was not found where text-generation-inference keeps it")
            spec.loader = _PatchedLoader(spec.loader, self._patched[name])
            return spec
        if name == f"{PACKAGE}.layers.attention.rocm":
            end_process(f"the BICL kernels are for NVIDIA GPUs, this is an AMD one; {DISABLE}")
        return None

    def _ask_others(self, name: str, path: Sequence[str] | None) -> ModuleSpec | None:
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = finder.find_spec(name, path) if hasattr(finder, "find_spec") else None
            if spec is not None:
                return spec
        return None


class _DelegatingLoader(Loader):
    def __init__(self, inner: Loader) -> None:
        self._inner = inner

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _ReplacedLoader(_DelegatingLoader):
    def exec_module(self, module: ModuleType) -> None:
        try:
            self._inner.exec_module(module)
        except BaseException as error:
            end_process(f"{module.__name__} could not be replaced: {_text(error)}; {DISABLE}")


class _PatchedLoader(_DelegatingLoader):
    def __init__(self, inner: Loader, patch: Patch) -> None:
        super().__init__(inner)
        self._patch = patch

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        try:
            self._patch(module)
        except ConfigError as error:
            end_process(str(error))
        except BaseException as error:
            end_process(f"{module.__name__} could not be changed: {_text(error)}; {DISABLE}")


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
