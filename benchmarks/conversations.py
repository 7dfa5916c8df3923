"""Conversations with a fixed number of turns for the collector's benchmarks, in llmrl and in TorchRL."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

OPENING, FOLLOW_UP = "Go on, count.", "And then?"


def make_env(num_turns: int, *, repeats: int = 1, tool: Callable[[], Any] | None = None) -> Any:
    """Return llmrl's environment: the policy answers `num_turns` times, and `tool()` is awaited after each answer."""
    from llmrl.envs import MessageChatEnv, MessageEnv, MessageStep

    class Counting(MessageEnv):
        def __init__(self, item: Any) -> None:
            self.turn = 0

        async def init(self) -> Any:
            return [{"role": "user", "content": OPENING}]

        async def step(self, message: Any) -> MessageStep:
            self.turn += 1
            if tool is not None:
                await tool()
            return MessageStep([{"role": "user", "content": FOLLOW_UP}], reward=1.0, is_done=self.turn >= num_turns)

    return MessageChatEnv(Counting, repeats=repeats)


def make_torchrl_env(num_turns: int, num_conversations: int, tokenizer: Any) -> Any:
    """Return TorchRL's environment: the same conversations, `num_conversations` in lock-step."""
    import torch
    from tensordict import TensorDict, lazy_stack
    from torch.utils.data import DataLoader
    from torchrl.data import Unbounded
    from torchrl.data.llm import History
    from torchrl.envs import Transform, TransformedEnv
    from torchrl.envs.llm import ChatEnv
    from torchrl.envs.llm.transforms import DataLoadingPrimer

    class Counting(Transform):
        def _step(self, tensordict: Any, next_tensordict: Any) -> Any:
            chats = next_tensordict["history"].prompt.unbind(0)
            done = torch.tensor([[len(chat.content) >= 2 * num_turns] for chat in chats])
            question = History(role="user", content=FOLLOW_UP)
            next_tensordict["history"].prompt = lazy_stack(
                [chat.append(question, inplace=False, dim=-1) for chat in chats]
            )
            next_tensordict.update({"done": done, "terminated": done.clone(), "reward": torch.ones(len(done), 1)})
            return next_tensordict

        def _reset(self, tensordict: Any, tensordict_reset: Any) -> Any:
            return tensordict_reset

        def transform_reward_spec(self, reward_spec: Any) -> Any:
            reward_spec["reward"] = Unbounded(shape=(*reward_spec.shape, 1))
            return reward_spec

    loader = DataLoader(
        [{"query": OPENING}] * 4096,
        batch_size=1,
        collate_fn=lambda items: lazy_stack([TensorDict(item) for item in items]),
    )
    shape = (num_conversations,)
    env = TransformedEnv(ChatEnv(batch_size=shape, input_mode="history", tokenizer=tokenizer))
    env.append_transform(DataLoadingPrimer(dataloader=loader, batch_size=shape, repeats=1))
    return env.append_transform(Counting())


def make_torchrl_policy(
    generate: Callable[[list[list[int]]], list[Any]], tokenizer: Any, **generate_kwargs: Any
) -> Any:
    """Return TorchRL's `vLLMWrapper` over a function from prompts to `Completion`s, in place of a `vllm.LLM`."""
    from torchrl.modules.llm import vLLMWrapper
    from vllm.logprobs import Logprob
    from vllm.outputs import CompletionOutput, RequestOutput

    def to_vllm(index: int, prompt_ids: list[int], completion: Any) -> RequestOutput:
        log_probs = [
            {token: Logprob(log_prob)}
            for token, log_prob in zip(completion.token_ids, completion.log_probs, strict=True)
        ]
        output = CompletionOutput(
            index=0,
            text="",
            token_ids=list(completion.token_ids),
            cumulative_logprob=sum(completion.log_probs),
            logprobs=log_probs,
            finish_reason=completion.finish_reason,
        )
        return RequestOutput(
            request_id=str(index),
            prompt=None,
            prompt_token_ids=prompt_ids,
            prompt_logprobs=None,
            outputs=[output],
            finished=True,
        )

    class LLM:
        def get_tokenizer(self) -> Any:
            return tokenizer

        def generate(self, prompts: Any, sampling_params: Any = None, **_: Any) -> list[RequestOutput]:
            prompt_ids = [list(prompt["prompt_token_ids"]) for prompt in prompts]
            return [
                to_vllm(index, ids, completion)
                for index, (ids, completion) in enumerate(zip(prompt_ids, generate(prompt_ids), strict=True))
            ]

    LLM.__module__ = "vllm.benchmark"  # the wrapper recognises engines by the name of their module
    return vLLMWrapper(
        LLM(), tokenizer=tokenizer, input_mode="history", return_log_probs=True, generate_kwargs=generate_kwargs
    )


def torchrl_batches(env: Any, policy: Any, turns_per_batch: int) -> Iterator[Any]:
    """Return the batches of TorchRL's `LLMCollector`."""
    from torchrl.collectors.llm import LLMCollector

    return iter(LLMCollector(env, policy=policy, dialog_turns_per_batch=turns_per_batch, total_dialog_turns=10**9))
