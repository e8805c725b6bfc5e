"""Runs cases, each in a lab of its own."""

from __future__ import annotations

import tempfile
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from bicl.frontends.http.chaos.cases import CASES
from bicl.frontends.http.chaos.model import tiny_llama
from bicl.frontends.http.chaos.rig import ChaosError, Lab

__all__ = ["Result", "run_case"]


@dataclass(frozen=True)
class Result:
    """What became of a case.

    Attributes:
        case: its name.
        problem: why it failed; empty if it did not.
        seen: what the case counted.
    """

    case: str
    problem: str
    seen: Mapping[str, float]
    seconds: float


def run_case(name: str, *, device: str = "cpu", seed: int = 0) -> Result:
    """Run one case of :data:`CASES` in a temporary folder."""
    began = time.perf_counter()
    problem, seen = "", {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the model is tiny, and sums must come out the same everywhere
    try:
        with tempfile.TemporaryDirectory(prefix="bicl-chaos-") as folder:
            lab = Lab(tiny_llama(device), Path(folder), seed)
            try:
                seen = dict(CASES[name](lab))
            finally:
                lab.close()
    except ChaosError as error:
        problem = str(error)
    except Exception:
        problem = traceback.format_exc()
    finally:
        torch.set_num_threads(threads)
    return Result(name, problem, seen, time.perf_counter() - began)
