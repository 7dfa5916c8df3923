"""`LLMEnv`: text or tokens that grow, without messages."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase, lazy_stack
from torchrl.data import Composite, NonTensor, Unbounded
from torchrl.envs import EnvBase, TransformedEnv

from llmrl._utils.arguments import KnownArguments
from llmrl.data.tensordicts import non_tensor, plain, tensordict_of
from llmrl.envs.primer import DataLoadingPrimer
from llmrl.envs.sources import Source


class LLMEnv(KnownArguments, EnvBase):
    """Appends the policy's output to the prompt: plain text, or token ids.

    For conversations use `ChatEnv`, which keeps the exact tokens of several turns; this is for scripts and search that
    think in one string. It takes any batch shape. Nothing but `eos_token_id` ends it: append a transform that does.

    Args:
        str_key, token_key: where text, or tokens `[num_tokens]`, are.
        action_key: where the policy's part is; `text_response`, or `tokens_response`.
        from_text: whether it is text.
        eos_token_id: token of a response that ends the episode, where it is tokens.

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
        str_key: str = "text",
        token_key: str = "tokens",
        action_key: str | None = None,
        from_text: bool = True,
        eos_token_id: int | None = None,
        device: torch.device | None = None,
    ) -> None:
        if from_text and eos_token_id is not None:
            raise ValueError(
                "eos_token_id ends an episode of tokens; with from_text=True append a transform that does."
            )
        super().__init__(batch_size=(), device=device, allow_done_after_reset=True)
        self._batch_locked = False
        self.from_text = from_text
        self.eos_token_id = eos_token_id
        self.prompt_key = str_key if from_text else token_key
        # Not `action_key`: that is EnvBase's, read off the specs below.
        self._response_key = action_key or ("text_response" if from_text else "tokens_response")
        spec = NonTensor(shape=(), example_data="") if from_text else Unbounded((-1,), dtype=torch.int64)
        self.observation_spec = Composite({self.prompt_key: spec})
        self.state_spec = Composite({self.prompt_key: spec.clone()})
        self.action_spec = Composite({self._response_key: spec.clone()})
        self.reward_spec = Unbounded((1, 1), dtype=torch.float32)

    @classmethod
    def from_dataloader(cls, dataloader: Source, *, repeats: int = 1, **options: Any) -> TransformedEnv:
        """Return an environment that draws the next row of a `DataLoader` at reset; one column is named `str_key`.

        Args:
            dataloader: see `DataLoadingPrimer`.
            repeats: episodes a row.
            options: see the class.

        Example:
            >>> LLMEnv.from_dataloader([{"text": "7 + 8 =", "answer": "15"}]).reset()["text"]
            '7 + 8 ='
        """
        return TransformedEnv(cls(**options), DataLoadingPrimer(dataloader, repeats=repeats))

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: object) -> TensorDictBase:
        if tensordict is None or self.prompt_key not in tensordict:
            raise ValueError(
                f"reset needs a tensordict with {self.prompt_key!r}; pass one, or use LLMEnv.from_dataloader."
            )
        flags = {key: torch.zeros(*tensordict.shape, 1, dtype=torch.bool) for key in ("done", "terminated")}
        # Selected, not read: rows of tokens of several lengths cannot be stacked.
        return tensordict.select(self.prompt_key).update(flags)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        if tensordict.batch_size:
            return lazy_stack([self._step(element) for element in tensordict.unbind(0)], 0)
        prompt, response = (tensordict.get(key, None) for key in (self.prompt_key, self._response_key))
        if response is None:
            raise ValueError(f"step needs {self._response_key!r}, which a policy writes.")
        is_done = self.eos_token_id is not None and bool((response == self.eos_token_id).any())
        grown = non_tensor(plain(prompt) + plain(response)) if self.from_text else torch.cat([prompt, response], -1)
        flags = {key: torch.full((1,), is_done) for key in ("done", "terminated")}
        return tensordict_of({self.prompt_key: grown, "reward": torch.zeros(1, 1), **flags})

    def _set_seed(self, seed: int | None) -> None:
        # Nothing is drawn here.
        return None
