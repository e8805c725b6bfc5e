"""Start-up of a shard under test: the overlay's hook, then what a CPU run needs."""

import importlib.abc
import importlib.machinery
import os
import sys
import types

MODELS = "text_generation_server.models"


class _Triton(types.ModuleType):
    """Enough of Triton to define kernels; none can be run."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *arguments, **options: arguments[0] if arguments else self

    def jit(self, function):
        return function


class _CpuFinder(importlib.abc.MetaPathFinder):
    """Runs a few of TGI's modules with something done before or after."""

    def find_spec(self, name, path, target=None):
        if name not in STEPS:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                spec.loader = _Loader(spec.loader, *STEPS[name])
                return spec
        return None


class _Loader(importlib.abc.Loader):
    def __init__(self, inner, before, after):
        self.inner, self.before, self.after = inner, before, after

    def create_module(self, spec):
        return self.inner.create_module(spec)

    def exec_module(self, module):
        undo = self.before() if self.before else None
        try:
            self.inner.exec_module(module)
        finally:
            if undo:
                undo()
        if self.after:
            self.after(module)


def _with_triton_stub():
    """Only while the one module that needs it runs: torch looks for Triton, too."""
    triton = _Triton("triton")
    triton.language = _Triton("triton.language")
    stubs = {"triton": triton, "triton.language": triton.language}
    saved = {name: sys.modules.get(name) for name in stubs}
    sys.modules.update(stubs)

    def undo():
        for name, module in saved.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module

    return undo


def _watch_in_float32(module):
    from bicl.frontends.tgi.selftest.audit import install

    _float32("FlashCausalLM")(module)
    install(module)


def _float32(name):
    def change(module):
        import torch

        model = getattr(module, name)
        init = model.__init__

        def in_float32(self, *arguments, **options):
            options["dtype"] = torch.float32
            if options.get("kv_cache_dtype") not in (torch.float8_e4m3fn, torch.float8_e5m2):
                options["kv_cache_dtype"] = None
            init(self, *arguments, **options)

        model.__init__ = in_float32

    return change


def _fixed_memory(module):
    size = int(os.environ.get("TEST_FREE_MEMORY", str(64 << 20)))
    module.get_free_memory = lambda device, fraction: size


STEPS = {
    f"{MODELS}.metadata_kernels": (_with_triton_stub, None),
    f"{MODELS}.flash_causal_lm": (None, _watch_in_float32),
    f"{MODELS}.transformers_flash_causal_lm": (None, _float32("TransformersFlashCausalLM")),
    "text_generation_server.utils.import_utils": (None, _fixed_memory),
}

sys.meta_path.insert(0, _CpuFinder())
import bicl_tgi_start  # noqa: E402, F401
