"""Which trees of TGI are known, and how the others are refused."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from bicl.errors import ConfigError
from bicl.frontends.tgi.upstream import Upstream, identify, read_upstream

FACTS = Path(__file__).parents[3] / "patches" / "UPSTREAM"


def write_facts(path: Path, lines: list[str]) -> Upstream:
    head = ["# a comment", "release 3.0 3.1 3.2 3.3", "limit 3.0-3.1 sliding windows"]
    path.write_text("\n".join(head + lines))
    return read_upstream(path)


def checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.fixture
def upstream(tmp_path: Path) -> Upstream:
    return write_facts(
        tmp_path / "UPSTREAM",
        [
            f"{checksum('one')} 3.0-3.1 cache.py",
            f"{checksum('two')} 3.2-3.3 cache.py",
            f"{checksum('a')} 3.0-3.2 model.py",
            f"{checksum('b')} 3.3 model.py",
        ],
    )


def tree(path: Path, **files: str) -> Path:
    for name, text in files.items():
        (path / f"{name}.py").write_text(text)
    return path


def test_every_file_is_known_for_every_release_once() -> None:
    upstream = read_upstream(FACTS)
    assert upstream.releases[0] == "3.0.0"
    assert upstream.releases[-1] == "3.3.7"
    for name, checksums in upstream.files.items():
        covered = [release for releases in checksums.values() for release in releases]
        assert sorted(covered) == sorted(upstream.releases), name
        assert all(len(each) == 64 for each in checksums)


def test_sliding_windows_need_3_2_1() -> None:
    upstream = read_upstream(FACTS)
    (limit,) = upstream.limits
    assert limit == ("sliding windows", upstream.span("3.0.0-3.2.0"))


def test_release_is_found_by_its_files(tmp_path: Path, upstream: Upstream) -> None:
    release = identify(tree(tmp_path, cache="two", model="a"), upstream)
    assert (release.name, release.windows) == ("3.2", True)


def test_equal_releases_are_named_together(tmp_path: Path, upstream: Upstream) -> None:
    release = identify(tree(tmp_path, cache="one", model="a"), upstream)
    assert (release.name, release.windows) == ("3.0-3.1", False)


def test_edited_file_is_refused_by_name(tmp_path: Path, upstream: Upstream) -> None:
    with pytest.raises(ConfigError, match=r"model\.py is of no release.*3\.0 to 3\.3.*DISABLE"):
        identify(tree(tmp_path, cache="two", model="edited"), upstream)


def test_missing_file_is_refused_by_name(tmp_path: Path, upstream: Upstream) -> None:
    with pytest.raises(ConfigError, match=r"model\.py is missing"):
        identify(tree(tmp_path, cache="two"), upstream)


def test_mixed_tree_is_refused(tmp_path: Path, upstream: Upstream) -> None:
    with pytest.raises(ConfigError, match=r"model\.py belongs to 3\.3, but .* 3\.0, 3\.1"):
        identify(tree(tmp_path, cache="one", model="b"), upstream)


def test_version_2_is_refused_by_name(tmp_path: Path, upstream: Upstream) -> None:
    (tmp_path / "utils").mkdir()
    (tmp_path / "utils" / "paged_attention.py").write_text("")
    with pytest.raises(ConfigError, match=r"2\.0\.2.*another shape.*3\.0 to 3\.3"):
        identify(tmp_path, upstream)
