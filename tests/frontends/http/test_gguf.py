"""Reading GGUF files once a load."""

import pytest

from bicl.frontends.http.gguf import read_once

gguf = pytest.importorskip("gguf", reason="gguf is not installed")


def test_a_file_is_parsed_once_a_load(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []

    def reader(path: str) -> list[str]:
        parsed.append(path)
        return parsed

    monkeypatch.setattr(gguf, "GGUFReader", reader)
    with read_once():
        assert gguf.GGUFReader("a.gguf") is gguf.GGUFReader("a.gguf")
        gguf.GGUFReader("b.gguf")
    with read_once():  # the file may have changed
        gguf.GGUFReader("a.gguf")
    assert parsed == ["a.gguf", "b.gguf", "a.gguf"]


def test_a_failed_load_leaves_the_library_as_it_was() -> None:
    before = gguf.GGUFReader, gguf.get_tensor_name_map
    with pytest.raises(OSError, match="cut off"), read_once():
        raise OSError("cut off")
    assert (gguf.GGUFReader, gguf.get_tensor_name_map) == before
