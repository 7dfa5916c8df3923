"""`AddThinkingPrompt`: a second thought where the first answer was not good enough."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Literal

import torch
from tensordict import TensorDictBase
from torchrl.envs import Transform

from llmrl._utils.arguments import KnownArguments
from llmrl.data import Message
from llmrl.data.tensordicts import batch_elements, restacked

_AS_ASSISTANT = (
    "But wait, let me think about this more carefully...",
    "Let me check this once more, step by step.",
    "Something may be wrong here; let me go through it again.",
)
_AS_USER = (
    "Think about it more carefully, and answer again.",
    "Are you sure? Check it step by step.",
    "Go through your reasoning again, and correct what is wrong.",
)


class AddThinkingPrompt(KnownArguments, Transform):
    """Asks for another attempt after an answer that meets a condition, and lets the conversation go on.

    Append it after what gives the reward, since the condition usually reads it. What the assistant said is never
    edited, as tokens that were sampled stay as they were: the prompt comes as a message of its own. (TorchRL edits the
    last answer by default; there its log-probs no longer belong to it.)

    Args:
        cond: told the element of one conversation's `next`; true asks again.
        prompt: what is said; one of its own by default.
        random_prompt: choose among several of its own.
        role: `user`, or `assistant` for a message in the first person.
        edit_last_turn: TorchRL's, only false.
        zero_reward: take back the reward of the answer that is asked again.
        undo_done: let the conversation go on although it was over.
        seed: of the choice.

    Raises:
        ValueError: for an unknown role, or `prompt` together with `random_prompt`.

    Example:
        >>> from llmrl.data import ChatHistory
        >>> from llmrl.envs import ChatEnv
        >>> from tensordict import TensorDict
        >>> env = ChatEnv().append_transform(AddThinkingPrompt(lambda step: step["reward"].sum() < 1, "Again."))
        >>> data = env.reset(TensorDict({"query": "7 + 8 ="}))
        >>> full = data["history"].prompt.append({"role": "assistant", "content": "14"})
        >>> data["history"] = ChatHistory(full=full, batch_size=())
        >>> env.step(data)["next", "history"].prompt.content
        ['7 + 8 =', '14', 'Again.']
    """

    def __init__(
        self,
        cond: Callable[[TensorDictBase], bool | torch.Tensor],
        prompt: str | None = None,
        *,
        random_prompt: bool = False,
        role: Literal["user", "assistant"] = "user",
        edit_last_turn: bool = False,
        zero_reward: bool = True,
        undo_done: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if edit_last_turn:
            raise ValueError("edit_last_turn=True cannot be had: sampled tokens stay as they were; leave it out.")
        if role not in ("user", "assistant"):
            raise ValueError(f"role must be 'user' or 'assistant', got {role!r}.")
        if prompt is not None and random_prompt:
            raise ValueError("prompt and random_prompt exclude each other; give one of them.")
        own = _AS_USER if role == "user" else _AS_ASSISTANT
        self.cond, self.role = cond, role
        self.prompts = (prompt,) if prompt is not None else own if random_prompt else own[:1]
        self.zero_reward, self.undo_done = zero_reward, undo_done
        self._random = random.Random(seed)

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        elements = batch_elements(next_tensordict)
        for element in elements:
            if bool(self.cond(element)):
                self._ask_again(element)
        return restacked(elements, next_tensordict.batch_size)

    def _ask_again(self, element: TensorDictBase) -> None:
        message: Message = {"role": self.role, "content": self._random.choice(self.prompts)}
        element.set(("history", "prompt"), element.get(("history", "prompt")).append(message))
        if self.zero_reward:
            element.set("reward", torch.zeros_like(element.get("reward")))
        if self.undo_done:
            for key in ("done", "terminated"):
                element.set(key, torch.zeros_like(element.get(key)))

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        return tensordict_reset
