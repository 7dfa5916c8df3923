"""`AddThinkingPrompt`: a second thought where the first answer was not good enough."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Literal

import torch
from tensordict import TensorDictBase
from torchrl.envs import Transform

from llmrl._utils.arguments import KnownArguments
from llmrl.data import History, Message, text_of
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

    Append it after what gives the reward, since the condition usually reads it. The prompt comes within the answer, in
    place of its last `<answer>`, or at its end; without `edit_last_turn` it is a message of its own. What is left of
    the answer stays as it was sampled, and what follows is context; where more than half of it goes, the answer stays
    whole in a row of its own (see `Conversation`).

    Args:
        cond: told the element of one conversation's `next`; true asks again.
        prompt: what is said; one of its own by default.
        random_prompt: choose among several of its own.
        role: `assistant` for a prompt in the first person, or `user`.
        edit_last_turn: whether the prompt is written into the last answer, in place of a new message.
        zero_reward: take back the reward of the answer that is asked again; by default that of one that is edited.
        undo_done: let the conversation go on although it was over.
        seed: seed of the random choice.

    Raises:
        ValueError: if the role is unknown, if a user's prompt is to stand in the assistant's answer, or if both
            `prompt` and `random_prompt` are given.

    Example:
        >>> from llmrl.data import ChatHistory
        >>> from llmrl.envs import ChatEnv
        >>> from tensordict import TensorDict
        >>> env = ChatEnv().append_transform(AddThinkingPrompt(lambda step: step["reward"].sum() < 1, "Wait."))
        >>> data = env.reset(TensorDict({"query": "7 + 8 ="}))
        >>> full = data["history"].prompt.append({"role": "assistant", "content": "14"})
        >>> data["history"] = ChatHistory(full=full, batch_size=())
        >>> env.step(data)["next", "history"].prompt.content
        ['7 + 8 =', '14 Wait.']
    """

    def __init__(
        self,
        cond: Callable[[TensorDictBase], bool | torch.Tensor],
        prompt: str | None = None,
        *,
        random_prompt: bool = False,
        role: Literal["user", "assistant"] = "assistant",
        edit_last_turn: bool = True,
        zero_reward: bool | None = None,
        undo_done: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if role not in ("user", "assistant"):
            raise ValueError(f"role must be 'user' or 'assistant', got {role!r}.")
        if edit_last_turn and role != "assistant":
            raise ValueError(
                "edit_last_turn=True, the default, needs role='assistant': the prompt becomes a part of its answer."
            )
        if prompt is not None and random_prompt:
            raise ValueError("prompt and random_prompt exclude each other; give one of them.")
        own = _AS_USER if role == "user" else _AS_ASSISTANT
        self.cond = cond
        self.role = role
        self.edit_last_turn = edit_last_turn
        self.prompts = (prompt,) if prompt is not None else own if random_prompt else own[:1]
        self.zero_reward = edit_last_turn if zero_reward is None else zero_reward
        self.undo_done = undo_done
        self._random = random.Random(seed)

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        elements = batch_elements(next_tensordict)
        for element in elements:
            if bool(self.cond(element)):
                self._ask_again(element)
        return restacked(elements, next_tensordict.batch_size)

    def _ask_again(self, element: TensorDictBase) -> None:
        history = element.get(("history", "prompt"))
        prompt = self._random.choice(self.prompts)
        if self.edit_last_turn and history.chats:  # of random actions, as of a check of specs, there may be none
            *earlier, last = history.chats
            before, tag, after = text_of(last.get("content")).rpartition("<answer>")
            edited: Message = {**last, "content": f"{before if tag else after} {prompt}".lstrip()}
            history = History.from_chats((*earlier, edited))
        else:
            history = history.append({"role": self.role, "content": prompt})
        element.set(("history", "prompt"), history)
        if self.zero_reward:
            element.set("reward", torch.zeros_like(element.get("reward")))
        if self.undo_done:
            for key in ("done", "terminated"):
                element.set(key, torch.zeros_like(element.get(key)))

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        return tensordict_reset
