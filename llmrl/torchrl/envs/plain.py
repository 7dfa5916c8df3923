"""Environments of `torchrl.envs.llm` for plain text, tokens and hashes, without messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase, lazy_stack
from tensordict.utils import NestedKey
from torchrl.data import Categorical, Composite, NonTensor, SipHash, TensorSpec, Unbounded
from torchrl.envs import EnvBase, Transform, TransformedEnv

from llmrl._utils.arguments import KnownArguments
from llmrl._utils.types import Tokenizer
from llmrl.data.ragged import check_entry
from llmrl.data.tensordicts import batch_elements, non_tensor, plain, tensordict_of
from llmrl.envs.primer import DataLoadingPrimer
from llmrl.envs.sources import Source
from llmrl.envs.tasks.task import REASONING_PROMPT


class LLMEnv(KnownArguments, EnvBase):
    """An environment of any batch shape that appends the policy's output, text or token ids, to the prompt.

    For conversations use `ChatEnv`, which keeps the sampled tokens of earlier turns. Only
    `eos_token_id` ends an episode; append a transform for other conditions.

    Args:
        str_key, token_key: entry of the text, by default `text`, or of the tokens `[num_tokens]`, by default `tokens`.
        action_key: entry of the policy's output; by default `text_response` or `tokens_response`.
        from_text: whether the entries are text rather than tokens.
        eos_token_id: token that ends an episode of tokens.
        device: device of the entries.

    Raises:
        ValueError: if `eos_token_id` is given with text, or if reset gets no prompt.

    Example:
        >>> from tensordict import TensorDict
        >>> env = LLMEnv()
        >>> data = env.reset(TensorDict(text="7 + 8 ="))
        >>> data["text_response"] = " 15"
        >>> env.step(data)["next", "text"]
        '7 + 8 = 15'
    """

    reads_turns = True

    def __init__(
        self,
        *,
        str_key: NestedKey | None = None,
        token_key: NestedKey | None = None,
        action_key: NestedKey | None = None,
        from_text: bool = True,
        eos_token_id: int | None = None,
        device: torch.device | None = None,
    ) -> None:
        if from_text and eos_token_id is not None:
            raise ValueError(
                "eos_token_id ends an episode of tokens only; with from_text=True, append a transform that ends them."
            )
        super().__init__(batch_size=(), device=device, allow_done_after_reset=True)
        self._batch_locked = False
        self.from_text = from_text
        self.eos_token_id = eos_token_id
        self.prompt_key: NestedKey
        # Not `action_key`, a property of `EnvBase` that is derived from the specs below.
        self._response_key: NestedKey
        if from_text:
            self.prompt_key = str_key or "text"
            self._response_key = action_key or "text_response"
            spec: TensorSpec = NonTensor(shape=(), example_data="")
        else:
            self.prompt_key = token_key or "tokens"
            self._response_key = action_key or "tokens_response"
            spec = Unbounded((-1,), dtype=torch.int64)
        self.observation_spec = Composite({self.prompt_key: spec})
        self.state_spec = Composite({self.prompt_key: spec.clone()})
        self.action_spec = Composite({self._response_key: spec.clone()})
        self.reward_spec = Unbounded((1, 1), dtype=torch.float32)

    @classmethod
    def from_dataloader(cls, dataloader: Source, *, repeats: int = 1, **options: Any) -> TransformedEnv:
        """Return an environment that draws rows as a `DataLoadingPrimer` does; one column must be named `str_key`."""
        return TransformedEnv(cls(**options), DataLoadingPrimer(dataloader, repeats=repeats))

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: object) -> TensorDictBase:
        if tensordict is None or self.prompt_key not in tensordict:
            raise ValueError(
                f"reset needs a tensordict with {self.prompt_key!r}; pass one, or use LLMEnv.from_dataloader."
            )
        flags = {key: torch.zeros(*tensordict.shape, 1, dtype=torch.bool) for key in ("done", "terminated")}
        # `select` does not stack, which would fail for token rows of different lengths.
        prompts = tensordict.select(self.prompt_key).update(flags)
        return prompts if self.device is None else prompts.to(self.device)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        if tensordict.batch_size:
            return lazy_stack([self._step(element) for element in tensordict.unbind(0)], 0)
        prompt, response = (tensordict.get(key, None) for key in (self.prompt_key, self._response_key))
        if response is None:
            raise ValueError(f"step needs the entry {self._response_key!r}, which a policy writes.")
        is_done = self.eos_token_id is not None and bool((response == self.eos_token_id).any())
        grown = non_tensor(plain(prompt) + plain(response)) if self.from_text else torch.cat([prompt, response], -1)
        flags = {key: torch.full((1,), is_done, device=self.device) for key in ("done", "terminated")}
        return tensordict_of({"reward": torch.zeros(1, 1, device=self.device), **flags}).set(self.prompt_key, grown)

    def _set_seed(self, seed: int | None) -> None:
        # The environment draws no random numbers.
        return None


class LLMHashingEnv(KnownArguments, EnvBase):
    """An environment that appends one token per step and identifies each token sequence by a hash, for tree search.

    The hash of a sequence is computed from the hash of its prefix and the last token, in constant time per step.

    Args:
        vocab_size: number of token ids; by default the tokenizer's.
        hashing_module: hash function from int64 `[*batch, n]` to int64 `[*batch]`.
        observation_key, text_key: keys of the tokens and their text.
        text_output: whether to write the text, which needs a tokenizer.

    Raises:
        TypeError: if a tokenizer is needed and missing.
        ValueError: if reset gets no tokens.

    Example:
        >>> env = LLMHashingEnv(100, text_output=False)
        >>> data = env.reset(TensorDict(observation=torch.tensor([[1, 2]]), batch_size=[1]))
        >>> data["action"] = torch.tensor([[3]])
        >>> step = env.step(data)["next"]
        >>> step["observation"].tolist(), step["hashing"].shape
        ([[1, 2, 3]], torch.Size([1, 1]))
    """

    reads_turns = True

    def __init__(
        self,
        vocab_size: int | None = None,
        *,
        hashing_module: Callable[[torch.Tensor], torch.Tensor] | None = None,
        observation_key: str = "observation",
        text_output: bool = True,
        tokenizer: Tokenizer | None = None,
        text_key: str | None = "text",
    ) -> None:
        super().__init__(batch_size=())
        self._batch_locked = False
        if tokenizer is None and (vocab_size is None or text_output):
            raise TypeError("tokenizer is missing: pass it, or pass vocab_size and text_output=False.")
        self.vocab_size: int = len(tokenizer) if vocab_size is None else vocab_size  # type: ignore[arg-type]
        self.observation_key = observation_key
        self.text_key = text_key or "text"
        self.text_output = text_output
        self._hash = hashing_module or SipHash()
        self._tokenizer = tokenizer
        observations: dict[str, TensorSpec] = {
            observation_key: Categorical(self.vocab_size, shape=(-1,), dtype=torch.int64),
            "hashing": Unbounded((1,), dtype=torch.int64),
        }
        if text_output:
            observations[self.text_key] = NonTensor(shape=(), example_data="")
        self.observation_spec = Composite(observations)
        self.action_spec = Composite(action=Categorical(self.vocab_size, shape=(1,), dtype=torch.int64))
        self.reward_spec = Unbounded((1,))

    def make_tensordict(self, input: str | list[str]) -> TensorDictBase:
        """Reset with one text, or with several of equal numbers of tokens."""
        if self._tokenizer is None:
            raise TypeError("make_tensordict needs a tokenizer; pass tokenizer= to LLMHashingEnv.")
        encode = self._tokenizer.encode
        token_ids: Sequence[object] = encode(input) if isinstance(input, str) else [encode(one) for one in input]
        tokens = torch.tensor(token_ids, dtype=torch.int64)
        return self.reset(TensorDict({self.observation_key: tokens}, batch_size=tokens.shape[:-1]))

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: object) -> TensorDictBase:
        if tensordict is None or (tokens := tensordict.get(self.observation_key, None)) is None:
            raise ValueError(f"reset needs a tensordict with tokens in {self.observation_key!r}; see make_tensordict.")
        return self._observed(tokens, self._hashed(tokens))

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        action = tensordict.get("action")
        tokens = torch.cat([tensordict.get(self.observation_key), action], -1)
        step = self._observed(tokens, self._hashed(torch.cat([tensordict.get("hashing"), action], -1)))
        return step.set("reward", torch.zeros(*tokens.shape[:-1], 1))

    def _hashed(self, values: torch.Tensor) -> torch.Tensor:
        return self._hash(torch.atleast_2d(values)).reshape(*values.shape[:-1], 1)

    def _observed(self, tokens: torch.Tensor, hashed: torch.Tensor) -> TensorDict:
        shape = tokens.shape[:-1]
        observed = TensorDict({self.observation_key: tokens, "hashing": hashed}, batch_size=shape)
        for key in ("done", "terminated"):
            observed.set(key, torch.zeros(*shape, 1, dtype=torch.bool))
        if self.text_output:
            assert self._tokenizer is not None
            texts = [self._tokenizer.decode(row) for row in tokens.reshape(-1, tokens.shape[-1]).tolist()]
            stacked = NonTensorStack(*texts).reshape(shape) if shape else NonTensorData(texts[0])
            observed.set(self.text_key, stacked)
        return observed

    def _set_seed(self, seed: int | None) -> None:
        # The environment draws no random numbers.
        return None


class GSM8KPrepareQuestion(KnownArguments, Transform):
    """At reset, writes each question of `in_keys` as DeepSeek-R1's prompt to `out_keys`; both default to `["text"]`.

    Insert this transform before the one that draws the questions, `env.insert_transform(0, GSM8KPrepareQuestion())`.

    Raises ValueError if the keys are not equally many, or if a reset gets no questions, and KeyError if one is missing.

    Example:
        >>> from tensordict import TensorDict
        >>> GSM8KPrepareQuestion().prepare(TensorDict({"text": "1 + 1 ="}))["text"][-42:]
        'answer>. User: 1 + 1 =. Assistant: <think>'
    """

    def __init__(self, in_keys: Sequence[str] | None = None, out_keys: Sequence[str] | None = None) -> None:
        in_keys = ["text"] if in_keys is None else list(in_keys)
        out_keys = in_keys if out_keys is None else list(out_keys)
        if len(in_keys) != len(out_keys):
            raise ValueError(f"in_keys and out_keys must be equally many, got {in_keys} and {out_keys}.")
        super().__init__(in_keys, out_keys)

    def prepare(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the prompts for a tensordict of any batch shape."""
        for element in batch_elements(tensordict):
            for in_key, out_key in zip(self.in_keys, self.out_keys, strict=True):
                check_entry(element, in_key, owner="The tensordict of a reset")
                prompt = f"{REASONING_PROMPT} User: {plain(element.get(in_key))}. Assistant: <think>"
                element.set(out_key, non_tensor(prompt))
        return tensordict

    def _reset_env_preprocess(self, tensordict: TensorDictBase | None) -> TensorDictBase:
        if tensordict is None:
            raise ValueError(
                f"there are no questions to prepare: pass reset a tensordict with {self.in_keys}, or insert "
                "GSM8KPrepareQuestion before the transform that draws them, env.insert_transform(0, ...)."
            )
        return self.prepare(tensordict)

    def _apply_transform(self, value: object) -> object:
        return value
