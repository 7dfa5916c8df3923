"""`LLMHashingEnv`: token chains known by their hash."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from torchrl.data import Categorical, Composite, NonTensor, SipHash, TensorSpec, Unbounded
from torchrl.envs import EnvBase

from llmrl._utils.arguments import KnownArguments
from llmrl._utils.types import Tokenizer


class LLMHashingEnv(KnownArguments, EnvBase):
    """Appends one token per step, and names each chain of tokens by a hash: nodes of a search tree, say.

    The hash of a chain is that of its beginning's hash and its last token, so that a step costs the same however long
    the chain is.

    Args:
        vocab_size: number of token ids; by default the tokenizer's.
        hashing_module: hash function from int64 `[*batch, n]` to int64 `[*batch]`.
        observation_key, text_key: keys of the tokens and their text.
        text_output: whether the text is written, which needs a tokenizer.
        tokenizer: tokenizer of the tokens.

    Raises:
        TypeError: if both `vocab_size` and tokenizer are missing, or if there is text and no tokenizer.
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
        text_key: str = "text",
    ) -> None:
        super().__init__(batch_size=())
        self._batch_locked = False
        if tokenizer is None and (vocab_size is None or text_output):
            raise TypeError(
                "tokenizer is needed for vocab_size and for text; or give vocab_size and text_output=False."
            )
        self.vocab_size: int = len(tokenizer) if tokenizer is not None and vocab_size is None else vocab_size  # type: ignore[assignment]
        self.observation_key = observation_key
        self.text_key = text_key
        self.text_output = text_output
        self._hash = hashing_module or SipHash()
        self._tokenizer = tokenizer
        observations: dict[str, TensorSpec] = {
            observation_key: Categorical(self.vocab_size, shape=(-1,), dtype=torch.int64),
            "hashing": Unbounded((1,), dtype=torch.int64),
        }
        if text_output:
            observations[text_key] = NonTensor(shape=(), example_data="")
        self.observation_spec = Composite(observations)
        self.action_spec = Composite(action=Categorical(self.vocab_size, shape=(1,), dtype=torch.int64))
        self.reward_spec = Unbounded((1,))

    def make_tensordict(self, input: str | list[str]) -> TensorDictBase:
        """Reset on texts, which must have the same number of tokens."""
        if self._tokenizer is None:
            raise TypeError("make_tensordict needs a tokenizer; give LLMHashingEnv one.")
        texts = [input] if isinstance(input, str) else input
        rows = torch.tensor([self._tokenizer.encode(one) for one in texts], dtype=torch.int64)
        tokens = rows[0] if isinstance(input, str) else rows
        return self.reset(TensorDict({self.observation_key: tokens}, batch_size=tokens.shape[:-1]))

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: object) -> TensorDictBase:
        tokens = None if tensordict is None else tensordict.get(self.observation_key, None)
        if tokens is None:
            raise ValueError(f"reset needs a tensordict with tokens in {self.observation_key!r}; see make_tensordict.")
        return self._observed(tokens, self._hashed(tokens))

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        action = tensordict.get("action")
        tokens = torch.cat([tensordict.get(self.observation_key), action], -1)
        step = self._observed(tokens, self._hashed(torch.cat([tensordict.get("hashing"), action], -1)))
        return step.set("reward", torch.zeros(*tokens.shape[:-1], 1))

    def _hashed(self, values: torch.Tensor) -> torch.Tensor:
        hashed = self._hash(values if values.ndim > 1 else values.unsqueeze(0)).reshape(values.shape[:-1])
        return hashed.unsqueeze(-1)

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
        # Nothing is drawn here.
        return None
