"""The library of the token-major rows belongs to the sources as they are."""

from pathlib import Path

import pytest

from bench.kernels.impls import Registry, bicl_token_major


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(bicl_token_major, "_FOLDER", tmp_path)
    bicl_token_major.library.cache_clear()
    yield tmp_path
    bicl_token_major.library.cache_clear()


def test_no_library_is_told_with_the_command_that_builds_it(folder: Path) -> None:
    with pytest.raises(ImportError, match=r"not built; run `python -m bench.kernels.impls"):
        bicl_token_major.register(Registry())


def test_a_library_of_other_sources_is_not_measured(folder: Path) -> None:
    (folder / "libbicl_token_major-0123456789ab.so").touch()
    with pytest.raises(ImportError, match="built from other sources"):
        bicl_token_major.register(Registry())


def test_the_library_of_these_sources_is_taken(folder: Path) -> None:
    registry = Registry()
    bicl_token_major.library().touch()
    bicl_token_major.register(registry)
    assert [contestant.name for contestant in registry.decode] == ["token-major"]


def test_its_name_changes_with_a_kernel(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = bicl_token_major.library()
    root = tmp_path_factory.mktemp("tree")
    (root / "csrc").mkdir()
    source = root / "token_major.cu"
    source.write_text("// other")
    for name, path in (("_ROOT", root), ("_CSRC", root / "csrc"), ("_SOURCE", source)):
        monkeypatch.setattr(bicl_token_major, name, path)
    bicl_token_major.library.cache_clear()
    assert bicl_token_major.library().name != before.name
