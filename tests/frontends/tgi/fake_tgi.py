"""A package with the names and the import order of TGI's server, and facts that know it."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

PATCHES = Path(__file__).parents[3] / "patches"
SERVER = Path(__file__).parents[3] / "server"

FILES = {
    "__init__.py": "",
    "cli.py": "from text_generation_server import server\n",
    "server.py": "from text_generation_server.models import get_model\n",
    "models/__init__.py": """
FLASH_ATTENTION = True
SUPPORTS_WINDOWING = False
try:
    from text_generation_server.models.flash_causal_lm import FlashCausalLM
    from text_generation_server.layers.attention import SUPPORTS_WINDOWING
except ImportError as error:
    print("could not import flash models:", error)
    FLASH_ATTENTION = False
def get_model():
    return None
""",
    "models/globals.py": """
import os
ATTENTION = os.environ["ATTENTION"]
BLOCK_SIZE = 256
CUDA_GRAPHS = [2, 1]
""",
    "models/model.py": "from text_generation_server.models.globals import BLOCK_SIZE\n",
    "models/flash_causal_lm.py": """
from text_generation_server.models.globals import CUDA_GRAPHS
from text_generation_server.models.model import BLOCK_SIZE
from text_generation_server.layers.attention import KVCache
def get_free_memory(device, memory_fraction):
    return 1000
class FlashCausalLMBatch:
    @classmethod
    def from_tokenized(cls, pb, tokenizer, inputs, dtype, device):
        return pb
class HeterogeneousNextTokenChooser:
    def __call__(self, input_ids, scores, speculate): pass
class FlashCausalLM:
    def init_kv_cache(self): pass
    def forward(self, batch, adapter_data): pass
    def generate_token(self, batch): pass
    def warmup(self, batch): pass
""",
    "layers/__init__.py": "",
    "layers/attention/__init__.py": """
from .cuda import SUPPORTS_WINDOWING, attention, paged_attention
from .kv_cache import KVCache, get_kv_scales
""",
    "layers/attention/kv_cache.py": "KVCache = get_kv_scales = 'stock'\n",
    "layers/attention/cuda.py": "SUPPORTS_WINDOWING = attention = paged_attention = 'stock'\n",
}
SHOW = """
import text_generation_server.cli
from text_generation_server.models import FLASH_ATTENTION, SUPPORTS_WINDOWING, flash_causal_lm
print(flash_causal_lm.BLOCK_SIZE, flash_causal_lm.KVCache, FLASH_ATTENTION, SUPPORTS_WINDOWING)
"""


def make_tree(root: Path) -> Path:
    """The package in ``root``; returns its folder."""
    for name, text in FILES.items():
        path = root / "text_generation_server" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root / "text_generation_server"


def make_patches(root: Path, limit: str = "") -> Path:
    """Our real patches, but with facts about the fake tree."""
    shutil.copytree(PATCHES, root / "patches", ignore=shutil.ignore_patterns("__pycache__"))
    lines = ["release 9.9", *([f"limit 9.9 {limit}"] if limit else [])]
    for name, text in FILES.items():
        lines.append(f"{hashlib.sha256(text.encode()).hexdigest()} 9.9 {name}")
    (root / "patches" / "UPSTREAM").write_text("\n".join(lines))
    return root / "patches"


def run_python(code: str, *paths: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Python with these folders on its path."""
    base = {k: v for k, v in os.environ.items() if not k.startswith("BICL_")}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={
            **base,
            "PYTHONPATH": os.pathsep.join(map(str, (*paths, SERVER))),
            "ATTENTION": "flashdecoding",
            **environ,
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
