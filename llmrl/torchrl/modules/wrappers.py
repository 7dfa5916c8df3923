"""Policy wrappers for TorchRL's calls: with a `vllm.LLM`, scoring by vLLM, default templates and batching arguments."""

from __future__ import annotations

import asyncio
import os
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

from tensordict import TensorDictBase

from llmrl import policies, trainer
from llmrl._utils.arguments import keywords_of, refuse_unknown
from llmrl._utils.asynchronous import run_sync
from llmrl._utils.types import Tokenizer
from llmrl.data import LogProbs
from llmrl.data.templated_text import template_of_model
from llmrl.engines import Engine, SamplingConfig
from llmrl.engines.scores import ScoresTokens, TokenScores
from llmrl.policies import WrapperOptions
from llmrl.policies.sampling import sampling_from_kwargs
from llmrl.policies.scored_rows import ScoresRows
from llmrl.torchrl.modules.given_llm import GivenLLM

if TYPE_CHECKING:
    from vllm import LLM

_BATCHING = {"batching", "batching_timeout", "max_batch_size", "min_batch_size"}


class _LikeTorchRL:
    """Mixin that ignores TorchRL's batching arguments and, as TorchRL, chooses a chat template by the model's name.

    Batching arguments are not needed, because an engine batches the requests of all threads.
    """

    _takes: tuple[str, ...]

    def __new__(cls, *args: object, **options: object) -> Self:
        refuse_unknown(cls.__name__, options.keys() - _BATCHING, cls._takes)
        return super().__new__(cls, *args, **_others(options))

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **_others(options))

    def _template_of(self, tokenizer: Tokenizer) -> str | None:
        name = str(getattr(tokenizer, "name_or_path", ""))
        template = template_of_model(name, has_own=bool(getattr(tokenizer, "chat_template", None)))
        if template is not None:
            warnings.warn(
                f"The chat template of {name!r} is chosen by its name; pass chat_template= instead.", stacklevel=2
            )
        return template

    def cleanup_batching(self) -> None:
        """Do nothing, because no request waits for others."""


def _others(options: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in options.items() if name not in _BATCHING}


class TransformersWrapper(_LikeTorchRL, trainer.TransformersWrapper):
    """`llmrl.trainer.TransformersWrapper`, which also accepts TorchRL's batching arguments."""

    _takes = keywords_of(trainer.TransformersWrapper.__init__) or ()


class _ScoresByEngine(policies.vLLMWrapper, ScoresRows):
    def __init__(
        self, model: Engine | LLM | str | os.PathLike[str], *, generate: bool = True, **options: object
    ) -> None:
        if not isinstance(model, (Engine, str, os.PathLike)):
            if not hasattr(model, "model_config"):  # importing vLLM for its class takes seconds
                raise TypeError(
                    "model must be an engine, a vllm.LLM, or the name or folder of a model for one, "
                    f"got {type(model).__name__}; a transformers model is for a TransformersWrapper."
                )
            model = GivenLLM(model)
        super().__init__(model, generate=generate, **options)  # type: ignore[arg-type]

    def _check_arguments(
        self,
        *,
        generate: bool = True,
        generate_kwargs: Mapping[str, object] | SamplingConfig | None = None,
        **others: Any,
    ) -> None:
        super()._check_arguments(generate=generate, generate_kwargs=generate_kwargs, **others)
        temperature = sampling_from_kwargs(generate_kwargs).temperature
        if not generate and temperature != 1:
            raise ValueError(f"an engine scores at temperature 1, got {temperature:g}.")

    def _set_up(self, engine: Engine, *, generate: bool, options: WrapperOptions) -> None:
        super()._set_up(engine, generate=generate, options=options)
        if generate:
            return
        if not isinstance(engine, ScoresTokens):
            raise TypeError(f"generate=False needs an engine that scores tokens, got {type(engine).__name__}.")
        self.model = engine

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Generate, or write the log-probs of the masked tokens, without gradients."""
        if self.generate:
            return super().forward(tensordict)
        scored = tensordict if self.inplace else tensordict.copy()
        token_ids, masks, replay = self.scored_tokens(scored)
        if "sampling_mask" in replay:
            raise ValueError(
                "an engine scores whole distributions, but these rows were sampled from truncated ones: sample with "
                "top_p=1, top_k=0 and min_p=0, or score with TransformersWrapper(model, generate=False)."
            )

        async def score_all() -> list[TokenScores]:
            return await asyncio.gather(*(self.model.score(ids.tolist()) for ids in token_ids))

        scores = run_sync(score_all())
        columns = [row.log_probs.to(mask.device) * mask for row, mask in zip(scores, masks, strict=True)]
        self.write_scored(scored, self.log_probs_key, LogProbs, {"full": columns})
        return self._returned(tensordict, scored, ())


class vLLMWrapper(_LikeTorchRL, _ScoresByEngine):
    """`llmrl.policies.vLLMWrapper`, which also accepts a `vllm.LLM` and batching arguments, and can score tokens.

    A `vllm.LLM` serves all waiting requests in one call. An `AsyncVLLM` is faster, and accepts new weights.

    With `generate=False`, raises ValueError unless the temperature is 1, and for rows of truncated distributions.
    """

    _takes = keywords_of(policies.vLLMWrapper.__init__) or ()
