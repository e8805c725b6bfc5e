"""Calibration: it learns what the attention looks at, and its file carries that over."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bicl.errors import ConfigError
from bicl.sparse.fit import Recording, fit
from bicl.sparse.gate_file import GATE_NAME, find_gate, load_gate, open_gate, save_gate
from bicl.sparse.selection import SelectionRule
from bicl.sparse.sgm import BoundGate, PageGate, SpatialGate, make_gate

RULE = SelectionRule(page_size=64, max_k=512, first=1, recent=2, floor=0)


def recording(seed: int, pages: int = 24) -> Recording:
    """Pages have a direction in the first eight dims. In the others their keys lie more or less
    far apart, which widens the boxes; but queries hardly look there."""
    generator = torch.Generator().manual_seed(seed)
    centre = torch.randn(pages, 1, 2, 16, generator=generator)
    spread = torch.rand(pages, 1, 2, 16, generator=generator) * 12
    noise = torch.randn(pages, 64, 2, 16, generator=generator)
    key = centre + 0.3 * noise
    key[..., 8:] = (spread * noise)[..., 8:]
    query = torch.randn(60, 4, 16, generator=generator) * 3
    query[:, :, 8:] *= 0.1
    position = torch.arange(60) * 5 + pages * 64 - 300
    value = torch.randn(pages * 64, 2, 16, generator=generator)
    return Recording(query, key.flatten(0, 1), value, position, 0.25)


@pytest.mark.parametrize("kind", ["centroids", "bounds", "gate"])
def test_a_fit_loses_less_attention_on_queries_that_it_has_not_seen(kind: str) -> None:
    recordings = {3: [recording(0), recording(1)], 5: [recording(2)]}
    told: list[tuple[int, int]] = []
    gate, report = fit(
        recordings, kind, RULE, 0.65, steps=40, progress=lambda *done: told.append(done)
    )
    assert [layer.layer for layer in report.layers] == [3, 5]
    assert report.mean("best") < report.mean("after") < report.mean("before")
    assert report.kind == gate.kind == kind
    assert report.parameters == sum(p.numel() for p in gate.parameters()) < 5000
    assert report.queries == (96, 24)
    assert told[-1] == (40, 40)


def test_a_layer_whose_attention_is_spread_leaves_out_less() -> None:
    """The mean stays what was asked for."""
    flat = recording(0)
    flat = replace(flat, query=flat.query * 0.1)
    gate, report = fit({3: [recording(1)], 5: [flat]}, "centroids", RULE, 0.65, steps=1)
    assert isinstance(gate, PageGate)
    sharp, spread = (layer.ratio for layer in report.layers)
    assert sharp > 0.65 > spread
    assert sharp + spread == pytest.approx(1.3)
    assert [gate.share_of(3), gate.share_of(5)] == pytest.approx([sharp / 0.65, spread / 0.65])


def test_a_layer_whose_values_are_all_alike_leaves_out_more() -> None:
    """Whatever draws its attention: what is left out would have added nothing else."""
    alike = recording(0)
    alike = replace(alike, value=torch.ones_like(alike.value))
    _, report = fit({3: [recording(0)], 5: [alike]}, "centroids", RULE, 0.65, steps=1)
    different, same = (layer.ratio for layer in report.layers)
    assert same > 0.65 > different


def test_texts_that_leave_nothing_out_are_refused() -> None:
    with pytest.raises(ConfigError, match="too short"):
        fit({3: [recording(0, pages=6)]}, "bounds", SelectionRule(64, 512, 1, 2, 32), 0.65, steps=1)


@pytest.mark.parametrize("kind", ["centroids", "bounds", "gate"])
def test_a_gate_comes_back_from_its_file(tmp_path: Path, kind: str) -> None:
    gate = make_gate(kind, (2, 4), 32)
    for parameter in gate.parameters():
        parameter.data.normal_()
    save_gate(tmp_path / GATE_NAME, gate, {"model": "a"})
    found = find_gate(tmp_path)
    assert found is not None
    back = open_gate(found)
    assert back is not None
    assert (back.kind, back.head_dim) == (kind, 32)
    for name, value in gate.state_dict().items():
        assert torch.equal(back.state_dict()[name], value)
    if isinstance(back, PageGate):
        assert back.layers == (2, 4)


def test_a_wide_gate_keeps_its_basis(tmp_path: Path) -> None:
    gate = SpatialGate(256, torch.linalg.qr(torch.randn(256, 256))[0][:128])
    save_gate(tmp_path / "g", gate)
    back = load_gate(tmp_path / "g")
    assert isinstance(back, SpatialGate)
    assert torch.equal(back.matrix("key"), gate.matrix("key"))


def test_files_that_are_no_gates_are_refused_by_name(tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    save_file({"a": torch.zeros(1)}, str(other))
    for path in (other, tmp_path / "absent", tmp_path):
        with pytest.raises(ConfigError, match=r"gate file .* cannot be used"):
            load_gate(path)


def test_the_gate_beside_a_model_is_found_and_its_absence_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    assert find_gate(file) is None
    assert find_gate("owner/name") is None
    assert open_gate(None) is None
    assert "analytic start" in caplog.text
    save_gate(tmp_path / GATE_NAME, BoundGate((1,), 16))
    assert find_gate(file) == str(tmp_path / GATE_NAME)
