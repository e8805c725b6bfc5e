"""Start-up of a benchmarked shard: the overlay's hook, seeded weights, filled pages."""

import importlib.abc
import json
import os
import sys
import time
from pathlib import Path


class _Finder(importlib.abc.MetaPathFinder):
    """Calls a function on some modules right after they have run."""

    def find_spec(self, name, path, target=None):
        if name not in AFTER:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                spec.loader.exec_module = _then(spec.loader.exec_module, AFTER[name])
                return spec
        return None


def _then(run, after):
    def both(module):
        run(module)
        after(module)

    return both


def _seed_weights(module):
    if os.environ.get("BENCH_SEEDED_WEIGHTS") == "1":
        from seeded_weights import SeededWeights

        module.safe_open = SeededWeights


def _free_memory():
    """What the driver allows: a number, or a file that may change from warm-up to warm-up."""
    order = os.environ.get("BENCH_FREE_MEMORY")
    return int(Path(order).read_text() if order else os.environ["TEST_FREE_MEMORY"])


def _fixed_memory(module):
    module.get_free_memory = lambda device, fraction: _free_memory()


def _fill_pages(module):
    if os.environ.get("BENCH_FILL_PAGES") != "1":
        return
    init = module.KVCache.__init__

    def filled(self, **options):
        import torch

        init(self, **options)
        part = torch.randn(1 << 20, device="cuda").mul_(0.5)
        tensors = [self.layer.pages] if hasattr(self, "layer") else self.kv_cache
        for flat in (tensor.view(-1) for tensor in tensors):
            for start in range(0, flat.numel(), part.numel()):
                piece = flat[start : start + part.numel()]
                piece.copy_(part[: piece.numel()])

    module.KVCache.__init__ = filled


def _fit_flashinfer(module):
    """TGI calls an older FlashInfer: one argument has another name now, and the fa2 kernels that
    it had are asked for by name. ``BENCH_TENSOR_CORES=1``: what one flag would give."""
    paged = module.BatchPrefillWithPagedKVCacheWrapper
    decode = module.BatchDecodeWithPagedKVCacheWrapper

    class Prefill(paged):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, backend="fa2", **options)

        def plan(self, *, head_dim, **options):
            super().plan(head_dim_qk=head_dim, **options)

    class Decode(decode):
        def __init__(self, *arguments, **options):
            if os.environ.get("BENCH_TENSOR_CORES") == "1":
                options["use_tensor_cores"] = True
            super().__init__(*arguments, **options)

    module.BatchPrefillWithPagedKVCacheWrapper = Prefill
    module.BatchDecodeWithPagedKVCacheWrapper = Decode


def _watch(module):
    """The self-test's audit; where the time of some steps goes, and one profile, when asked for."""
    from bicl.frontends.tgi.selftest.audit import install

    if os.environ.get("TEST_AUDIT_EVERY"):
        install(module)
    order = Path(os.environ.get("BENCH_PROFILE", "/nowhere"))
    timeline = Path(os.environ.get("BENCH_TIMELINE", "/nowhere"))
    generate = module.FlashCausalLM.generate_token
    seen = [0]

    def watched(self, batch):
        if batch.prefilling:
            seen[0] = 0
            return generate(self, batch)
        seen[0] += 1
        if seen[0] == 8 and order.exists():
            out = Path(order.read_text())
            order.unlink()
            return _profile(lambda: generate(self, batch), out)
        if timeline.exists():
            return _timeline(lambda: generate(self, batch), timeline)
        return generate(self, batch)

    module.FlashCausalLM.generate_token = watched
    if os.environ.get("BENCH_FREE_MEMORY"):
        module.FlashCausalLM.warmup = _warm_up_again(module)


def _warm_up_again(module):
    """A shard may be warmed up anew, with other pages or, where there is no memory, with none."""
    warmup = module.FlashCausalLM.warmup

    def again(self, batch, max_input_tokens, max_total_tokens):
        import torch

        if self.cuda_graphs:  # they hold the pages before, and their pool goes with them
            self.cuda_graphs, module.MEM_POOL = {}, torch.cuda.graph_pool_handle()
        if _free_memory():
            return warmup(self, batch, max_input_tokens, max_total_tokens)
        self.kv_cache = []
        torch.cuda.empty_cache()
        return 0, max_input_tokens, max_total_tokens

    return again


def _timeline(step, out):
    """Append a line: microseconds on the host before the graph, on the GPU in it, and after it."""
    import torch

    replay = torch.cuda.CUDAGraph.replay
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    launched = []

    def timed_replay(graph):
        launched.append(time.perf_counter())
        begin.record()
        replay(graph)
        end.record()

    torch.cuda.CUDAGraph.replay = timed_replay
    began = time.perf_counter()
    try:
        result = step()
    finally:
        torch.cuda.CUDAGraph.replay = replay
    whole = time.perf_counter() - began
    if launched:
        before, graph = (launched[0] - began) * 1e6, begin.elapsed_time(end) * 1e3
        line = {"before": before, "graph": graph, "after": whole * 1e6 - before - graph}
        with out.open("a") as file:
            file.write(json.dumps(line) + "\n")
    return result


def _profile(step, out):
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        result = step()
    kernels = {}
    for event in found.events():
        if str(event.device_type).endswith("CUDA"):
            count, total = kernels.get(event.name, (0, 0.0))
            kernels[event.name] = count + 1, total + event.device_time_total
    lines = [f"{t:9.1f} us {n:5d} x {k[:160]}" for k, (n, t) in kernels.items()]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".txt").write_text("\n".join(sorted(lines, reverse=True)) + "\n")
    found.export_chrome_trace(str(out.with_suffix(".json.gz")))
    return result


AFTER = {
    "text_generation_server.models.flash_causal_lm": _watch,
    "flashinfer": _fit_flashinfer,
    "text_generation_server.layers.attention.kv_cache": _fill_pages,
    "text_generation_server.utils.weights": _seed_weights,
    "text_generation_server.utils.import_utils": _fixed_memory,
    "bicl.frontends.tgi.kv_cache": _fill_pages,
}

sys.meta_path.insert(0, _Finder())
import bicl_tgi_start  # noqa: E402, F401
