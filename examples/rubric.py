"""Several weighted rewards, one of them an asynchronous judge; each rollout keeps its single rewards."""

from __future__ import annotations

import asyncio

from llmrl import (
    AsyncVLLM,
    DatasetChatEnv,
    LLMCollector,
    RewardFn,
    Rubric,
    RubricReward,
    ensure_embedded_model,
    vLLMWrapper,
)


def names_word(completion: str, word: str) -> float:  # arguments are passed by name, including columns of the data
    return float(word in completion.lower())


async def judge(completion: str) -> float:
    await asyncio.sleep(0.01)  # for example a call of another model; the judges of all rollouts wait concurrently
    return min(1.0, len(set(completion.split())) / 10)


def main(engine: AsyncVLLM) -> None:
    tasks = [{"query": f"Write a sentence with the word {word}.", "word": word} for word in ("bread", "sea")]
    rubric = Rubric(RewardFn(names_word, weight=3), RewardFn(judge, weight=1), truncation_reward=0.0)
    env = DatasetChatEnv(tasks, repeats=2).append_transform(RubricReward(rubric))
    policy = vLLMWrapper(engine, generate_kwargs={"max_new_tokens": 32})
    with LLMCollector(env, policy=policy, groups_per_batch=2) as collector:
        next(iter(collector))
    for rollout in collector.rollouts:
        print(f"{rollout.reward:.2f}", rollout.breakdown, rollout.status.name, rollout.reason)


if __name__ == "__main__":
    engine = AsyncVLLM.from_pretrained(ensure_embedded_model(), max_model_len=512)
    main(engine)
    engine.shutdown()
