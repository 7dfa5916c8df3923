"""Log-probs under another model and the KL from it, in environments and over batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, TypedDict, Unpack

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey, unravel_key
from torchrl.data import Composite, Unbounded
from torchrl.envs import Compose, Transform

from llmrl._utils.arguments import KnownArguments, check_choice
from llmrl._utils.types import Tokenizer
from llmrl.data.keys import LOSS_MASK_KEY, TOKENS_KEY
from llmrl.data.ragged import padded_like, write_column
from llmrl.data.tensordicts import batch_elements
from llmrl.objectives.kl import masked_kl
from llmrl.objectives.losses.inputs import with_tokens
from llmrl.objectives.penalties.kl_penalty import dense_reward
from llmrl.objectives.scoring import log_probs_of

_PROMPT: NestedKey = ("tokens", "prompt")


class ScoringOptions(TypedDict, total=False):
    """Options of `RetrieveLogProb`."""

    detach: bool
    assistant_only: bool
    tokenizer: Tokenizer | None
    tokenizer_kwargs: Mapping[str, object] | None


class RetrieveLogProb(KnownArguments, Transform):
    """Scores the sampled tokens of each turn with a model, and writes the log-probs under `next`.

    In an environment it scores the conversation after each step. `forward` scores the rows or turns of a batch (for a
    collector's `postproc` or a replay buffer); if the batch has no `next`, it writes at the root. Sampled tokens are
    never tokenized again: the model reads `("tokens", "full")` and the loss mask.

    Args:
        model: `TransformersWrapper`, or any TensorDict module that reads these entries and writes
            log-probs, `[num_tokens]` per row.
        model_factory: function that builds the model at first use; alternative to `model`.
        log_probs_full_key: entry under `next`; by default the model's own key, or else `("ref_log_probs", "full")`.
        detach: whether to score without gradients.
        assistant_only: whether to score only the loss mask's tokens; False needs a `TransformersWrapper`.
        tokenizer, tokenizer_kwargs: for conversations without tokens, the tokenizer and the options
            of `History.apply_chat_template`; by default the model's tokenizer and template.

    Raises:
        ValueError: unless exactly one of model and factory is given, or if `assistant_only` is true
            for a model of text.
        TypeError: if the model is not callable.

    Example:
        >>> from tensordict import TensorDict, lazy_stack
        >>> from tensordict.nn import TensorDictModule
        >>> model = TensorDictModule(lambda ids: ids.float() - 3, [("tokens", "full")], [("log_probs", "full")])
        >>> row = TensorDict({"tokens": {"full": torch.arange(3)}, "next": {}})
        >>> RetrieveLogProb(model)(lazy_stack([row]))["next", "ref_log_probs", "full"].tolist()
        [[-3.0, -2.0, -1.0]]
    """

    reads_turns = True

    def __init__(
        self,
        model: TensorDictModuleBase | None = None,
        *,
        model_factory: Callable[[], TensorDictModuleBase] | None = None,
        log_probs_full_key: NestedKey | None = None,
        detach: bool = True,
        assistant_only: bool = True,
        tokenizer: Tokenizer | None = None,
        tokenizer_kwargs: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__()
        if (model is None) == (model_factory is None):
            raise ValueError("exactly one of model and model_factory is needed, got both or neither.")
        if model is not None and not callable(model):
            raise TypeError(f"model must be a TensorDict module, such as a TransformersWrapper, got {model!r}.")
        if assistant_only and getattr(model, "input_mode", None) == "text":
            raise ValueError(
                "The model must have `input_mode='history'` when assistant_only=True: a text does not mark what the "
                "assistant wrote; pass assistant_only=False to score the whole text."
            )
        # In a list, so that the model is not registered as a submodule.
        self._models = [] if model is None else [model]
        self._model_factory = model_factory
        own_name = getattr(model, "log_probs_key", "ref_log_probs")
        self.log_probs_full_key: NestedKey = log_probs_full_key or (own_name, "full")
        self.detach = detach
        self._options = {} if assistant_only else {"assistant_only": False}
        self._tokenizer = tokenizer
        self._tokenizer_kwargs = tokenizer_kwargs

    @property
    def model(self) -> TensorDictModuleBase:
        """Model that scores, built at first use if a factory was given."""
        if not self._models:
            assert self._model_factory is not None
            self._models.append(self._model_factory())
        return self._models[0]

    def _log_probs(self, rows: TensorDictBase) -> list[torch.Tensor]:
        if self._tokenizer is not None or self._tokenizer_kwargs is not None:
            tokenizer = self._tokenizer or getattr(self.model, "tokenizer", None)
            template = {"chat_template": getattr(self.model, "chat_template", None)}
            if self._tokenizer_kwargs is not None:
                template = dict(self._tokenizer_kwargs)
            rows = with_tokens(rows, tokenizer, tokens_key=TOKENS_KEY, mask_key=LOSS_MASK_KEY, **template)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.detach):
            log_probs = log_probs_of(self.model, rows, **self._options)
        return padded_like(rows, log_probs, pad_left=getattr(self.model, "pad_output", False))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Score a batch of any shape in place."""
        key = self.log_probs_full_key
        if "next" in tensordict:
            key = unravel_key(("next", key))
        write_column(tensordict, key, self._log_probs(tensordict))
        return tensordict

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        write_column(next_tensordict, self.log_probs_full_key, self._log_probs(tensordict))
        return next_tensordict

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Add the log-probs."""
        observation_spec[self.log_probs_full_key] = Unbounded((*observation_spec.shape, -1))
        return observation_spec


class KLComputation(KnownArguments, Transform):
    """Writes the KL `log pi - log pi_ref` of each sampled token (k1, http://joschu.net/blog/kl-approx.html).

    The KL is written under `next` (at the root if there is no `next`) as `[num_tokens, 1]`, and is 0 outside the mask
    and within a turn's `("tokens", "prompt")`, so that each token of a conversation counts once.

    With `add_to_reward`, an existing reward becomes dense, `[num_tokens, 1]`: minus `coeff` times the KL at each
    sampled token, plus the turn's reward at the last one. Append this transform after the one that writes the reward.

    Args:
        gen_log_probs_full_key: entry of the policy's log-probs, under `next` or else at the root, where samplers write.
        ref_log_probs_full_key, kl_key: entries of the reference's log-probs and of the KL, under `next`.
        assistant_only: whether to count only the loss mask's tokens; False needs both models' log-probs for all tokens.

    Example:
        >>> from tensordict import TensorDict
        >>> turn = TensorDict({"log_probs": {"full": torch.tensor([0.0, -1.0])}, "masks": {"all_assistant_mask":
        ...     torch.tensor([False, True])}, "next": {"ref_log_probs": {"full": torch.tensor([0.0, -3.0])},
        ...     "reward": torch.ones(1, 1)}})
        >>> KLComputation(coeff=0.1)(turn)["next", "reward"].flatten()
        tensor([0.0000, 0.8000])
    """

    reads_turns = True
    writes_reward = True

    def __init__(
        self,
        gen_log_probs_full_key: NestedKey = ("log_probs", "full"),
        ref_log_probs_full_key: NestedKey = ("ref_log_probs", "full"),
        *,
        kl_key: NestedKey = "kl_penalty",
        add_to_reward: bool = True,
        coeff: float = 1.0,
        assistant_only: bool = True,
    ) -> None:
        super().__init__()
        self.gen_log_probs_full_key = gen_log_probs_full_key
        self.ref_log_probs_full_key = ref_log_probs_full_key
        self.kl_key = kl_key
        self.add_to_reward = add_to_reward
        self.coeff = coeff
        self.assistant_only = assistant_only

    def _computed(
        self, element: TensorDictBase, next_element: TensorDictBase
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the KL of one row or turn, `[num_tokens, 1]`, and its reward."""
        others = next_element.get(self.ref_log_probs_full_key)
        log_probs = None
        if self.gen_log_probs_full_key != self.ref_log_probs_full_key:
            log_probs = next_element.get(self.gen_log_probs_full_key, None)
        if log_probs is None:
            log_probs = element.get(self.gen_log_probs_full_key)
        # Rows of text or history alone have no mask, but at tokens not to be counted both models' log-probs are 0.
        mask = torch.ones_like(log_probs).bool()
        if self.assistant_only:
            mask = element.get(LOSS_MASK_KEY, mask).bool()
            if (prompt := element.get(_PROMPT, None)) is not None:
                mask = mask & (torch.arange(len(mask), device=mask.device) >= len(prompt))
        divergences = masked_kl(log_probs, others, mask)
        reward = None
        if self.add_to_reward and (reward := next_element.get("reward", None)) is not None:
            reward = dense_reward(reward, divergences, mask, self.coeff)
        return divergences.unsqueeze(-1), reward

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Process a batch of turns or rows, of any shape, in place."""
        self._step(tensordict, tensordict.get("next", tensordict))
        return tensordict

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        pairs = zip(batch_elements(tensordict), batch_elements(next_tensordict), strict=True)
        divergences, rewards = zip(*(self._computed(*pair) for pair in pairs), strict=True)
        write_column(next_tensordict, self.kl_key, divergences)
        if rewards[0] is not None:
            write_column(next_tensordict, "reward", rewards)
        return next_tensordict

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Add the KL of each token."""
        observation_spec[self.kl_key] = Unbounded((*observation_spec.shape, -1, 1))
        return observation_spec

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        """Make the reward dense if the KL is added to it."""
        if self.add_to_reward:
            reward_spec["reward"] = Unbounded((*reward_spec.shape, -1, 1))
        return reward_spec


class RetrieveKL(KnownArguments, Compose):
    """Composes `RetrieveLogProb` for the reference, optionally the policy, and `KLComputation`.

    Args:
        gen_model, gen_model_factory: model of the policy, or a function that builds it; with
            `"from_collector"`, the log-probs that the sampler reported are used.
        ref_model, ref_model_factory: reference model, or a function that builds it.
        gen_log_probs_full_key, ref_log_probs_full_key, kl_key, add_to_reward, coeff: see `KLComputation`.
        options: see `RetrieveLogProb`.

    Raises ValueError if only one of the models pads, or if `assistant_only` is False without a `gen_model`.

    Example:
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import TensorDictModule
        >>> model = TensorDictModule(lambda ids: ids.float() - 3, [("tokens", "full")], [("log_probs", "full")])
        >>> turn = TensorDict({"tokens": {"full": torch.tensor([0, 1])}, "log_probs": {"full": torch.tensor([0.0, -1])},
        ...     "masks": {"all_assistant_mask": torch.tensor([False, True])}, "next": {"reward": torch.ones(1, 1)}})
        >>> RetrieveKL(ref_model=model)(turn)["next", "kl_penalty"].flatten()
        tensor([0., 1.])
    """

    def __init__(
        self,
        gen_model: TensorDictModuleBase | Literal["from_collector"] | None = "from_collector",
        ref_model: TensorDictModuleBase | None = None,
        *,
        gen_model_factory: Callable[[], TensorDictModuleBase] | None = None,
        ref_model_factory: Callable[[], TensorDictModuleBase] | None = None,
        gen_log_probs_full_key: NestedKey = ("log_probs", "full"),
        ref_log_probs_full_key: NestedKey = ("ref_log_probs", "full"),
        kl_key: NestedKey = "kl_penalty",
        add_to_reward: bool = True,
        coeff: float = 1.0,
        **options: Unpack[ScoringOptions],
    ) -> None:
        if isinstance(gen_model, str):
            check_choice(("from_collector",), gen_model=gen_model)
            gen_model = None
        is_scored_anew = gen_model is not None or gen_model_factory is not None
        assistant_only = options.get("assistant_only", True)
        if not (assistant_only or is_scored_anew):
            raise ValueError("assistant_only=False needs gen_model: a sampler scores only the tokens that it sampled.")
        if {getattr(model, "pad_output", None) for model in (gen_model, ref_model)} >= {True, False}:
            raise ValueError("pad_output mismatch: gen_model and ref_model must have the same pad_output.")
        scored = [(ref_model, ref_model_factory, ref_log_probs_full_key)]
        if is_scored_anew:
            scored.insert(0, (gen_model, gen_model_factory, gen_log_probs_full_key))
        retrieve = [
            RetrieveLogProb(model, model_factory=factory, log_probs_full_key=key, **options)
            for model, factory, key in scored
        ]
        compute = KLComputation(
            gen_log_probs_full_key,
            ref_log_probs_full_key,
            kl_key=kl_key,
            add_to_reward=add_to_reward,
            coeff=coeff,
            assistant_only=assistant_only,
        )
        super().__init__(*retrieve, compute)


class KLRewardTransform(RetrieveKL):
    """`RetrieveKL` under TorchRL's earlier name; see `RetrieveKL` for the other arguments.

    Args:
        coef: weight of the KL in the reward.
        log_prob_key: entry of the policy's log-probs; by default those that the sampler reported.
    """

    def __init__(
        self,
        ref_model: TensorDictModuleBase | None = None,
        *,
        ref_model_factory: Callable[[], TensorDictModuleBase] | None = None,
        coef: float = 1.0,
        log_prob_key: NestedKey = ("log_probs", "full"),
        add_to_reward: bool = True,
        **options: Unpack[ScoringOptions],
    ) -> None:
        super().__init__(
            ref_model=ref_model,
            ref_model_factory=ref_model_factory,
            gen_log_probs_full_key=log_prob_key,
            add_to_reward=add_to_reward,
            coeff=coef,
            **options,
        )
