"""Configuration of the trained model and its adapters."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import torch

from llmrl.config.entries import NAMED, EntryError, Section, at_least, one_of
from llmrl.engines import Engine
from llmrl.engines.base import HasTokenizer
from llmrl.testing import ensure_embedded_model
from llmrl.trainer import LoRAConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    ComputeDtype = Literal["float32", "bfloat16", "float16"]
else:  # OmegaConf does not support Literal: it checks for strings, and `one_of` checks their values
    ComputeDtype = str


@dataclass(slots=True, kw_only=True)
class LoRAEntries(Section):
    """Low-rank adapters, trained instead of the model's weights."""

    section: ClassVar[str] = "model.lora"
    rank: int | None = field(default=None, metadata=at_least(1))
    """Rank of the update of each weight; null trains all weights."""
    alpha: int = field(default=32, metadata=at_least(1))
    """Scale of the update, which is multiplied by `alpha / rank`."""
    target_modules: list[str] = field(default_factory=lambda: ["all-linear"], metadata=NAMED)
    """Names of the adapted layers; `all-linear` is all linear layers except the output head."""
    quantize_base: bool = False
    """Whether to hold the weights under the adapters in 4 bits; needs a single rank and the extra `optim`."""

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        if self.rank is not None:
            return
        for name, unused in (("alpha", 32), ("target_modules", ["all-linear"]), ("quantize_base", False)):
            if (value := getattr(self, name)) != unused:
                raise EntryError(
                    f"model.lora.{name}", f"is for adapters, got {value!r}: give them a rank, model.lora.rank=16."
                )

    def build(self) -> LoRAConfig | None:
        """Return the adapters; None if all weights are trained."""
        if self.rank is None:
            return None
        targets = "all-linear" if self.target_modules == ["all-linear"] else tuple(self.target_modules)
        return LoRAConfig(rank=self.rank, alpha=self.alpha, target_modules=targets, quantize_base=self.quantize_base)


@dataclass(slots=True, kw_only=True)
class ModelConfig(Section):
    """The model that is trained and generates."""

    section: ClassVar[str] = "model"
    path: str = field(metadata=NAMED)
    """A Hugging Face name or folder; `embedded` is SmolLM2-135M-Instruct from the package."""
    max_model_len: int | None = field(default=None, metadata=at_least(2))
    """Maximum number of tokens of a whole conversation; null is the model's limit."""
    chat_template: str | None = field(default=None, metadata=NAMED)
    """Chat template instead of the model's, for example for base models: a file, or Jinja text."""
    dtype: ComputeDtype = field(default="float32", metadata=one_of("float32", "bfloat16", "float16"))
    """Dtype of both engine and trainer, because updates below the engine's precision have no effect on the engine.
    `float16` is for GPUs without bfloat16 (T4, V100); the loss is scaled."""
    lora: LoRAEntries = field(default_factory=LoRAEntries)
    """LoRA adapters; `sync.lora` sets how the engine receives them."""

    @property
    def folder(self) -> str:
        """Name or folder that transformers and vLLM load: `path`, or the folder of the embedded model."""
        return str(ensure_embedded_model() if self.path == "embedded" else self.path)

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """Dtype of the trainer's computation over its float32 weights; None for float32."""
        return {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}[self.dtype]

    def template_text(self) -> str | None:
        """Return the text of `chat_template`; None for the model's own template.

        Raises ValueError if `chat_template` is neither an existing file nor Jinja text.
        """
        given = self.chat_template
        if given is None or "{" in given:
            return given
        if not Path(given).is_file():
            raise ValueError(f"model.chat_template={given!r} is neither an existing file nor Jinja text.")
        return Path(given).read_text(encoding="utf-8")

    def tokenizer_of(self, engine: Engine) -> PreTrainedTokenizerBase:
        """Return the engine's tokenizer, with `chat_template` if it is set."""
        assert isinstance(engine, HasTokenizer), "engines without a tokenizer are refused earlier"
        tokenizer = engine.get_tokenizer()
        template = self.template_text()
        if template is not None:
            tokenizer = copy.deepcopy(tokenizer)
            tokenizer.chat_template = template
        return tokenizer

    def check_template(self, engine: HasTokenizer | None = None) -> None:
        """Raise ValueError if the model has no chat template, before an engine is started.

        Without `engine`, a model that is not on this machine passes.
        """
        if self.template_text() is not None:
            return
        try:
            from transformers import AutoTokenizer

            if engine is not None:
                tokenizer = engine.get_tokenizer()
            else:
                tokenizer = AutoTokenizer.from_pretrained(self.folder, local_files_only=True)
        except (OSError, ValueError):
            return
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                f"the model {self.path} has no chat template, like most base models: set model.chat_template "
                "(chat_template of train) to a file or Jinja text, or use a model with a chat template."
            )
