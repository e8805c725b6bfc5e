"""Start-up of a shard on the CPU whose GPU is pretended: logits are there at once, and what waits
for the graph waits until it would have ended."""

import importlib.util
import os
import time
from pathlib import Path

import bicl

FLASH = "text_generation_server.models.flash_causal_lm"


def _stubs():
    """The self-test's start-up, which knows how TGI runs on a CPU."""
    folder = Path(bicl.__file__).parent / "frontends" / "tgi" / "selftest" / "stubs"
    spec = importlib.util.spec_from_file_location("bicl_stubs", folder / "sitecustomize.py")
    stubs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stubs)
    return stubs


def _pretend_a_gpu(module):
    import torch

    busy = float(os.environ["BENCH_GRAPH_US"]) / 1e6
    logits, ends = {}, [0.0]
    tolist = torch.Tensor.tolist

    def forward(self, batch, adapter_data):
        rows = len(batch)
        if rows not in logits:
            generator = torch.Generator().manual_seed(rows)
            logits[rows] = torch.randn(rows, len(self.tokenizer), generator=generator)
        ends[0] = time.perf_counter() + busy
        return logits[rows].clone(), None

    def waiting_tolist(tensor):
        while time.perf_counter() < ends[0]:
            pass
        return tolist(tensor)

    module.FlashCausalLM.forward = forward
    torch.Tensor.tolist = waiting_tolist


stubs = _stubs()
stubs.STEPS[FLASH] = (None, _pretend_a_gpu)
