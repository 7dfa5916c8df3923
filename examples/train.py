"""Training in one call: GRPO on one-digit sums, with a folder, a live view and an evaluation before and after."""

from __future__ import annotations

import random
import re
import tempfile

from llmrl import AsyncVLLM, DatasetChatEnv, RubricReward, train


def is_right(completion: str, answer: str) -> float:
    return float(re.findall(r"\d+", completion)[-1:] == [answer])  # the last number in the answer


def sums(name: str, problems: list[tuple[int, int]], repeats: int) -> DatasetChatEnv:
    data = [{"query": f"{a} + {b} =", "answer": str(a + b)} for a, b in problems]
    prompt = "You are a calculator. Reply with the number only."
    env = DatasetChatEnv(data, name=name, repeats=repeats, shuffle=True, system_prompt=prompt)
    return env.append_transform(RubricReward(is_right))


def main(engine: AsyncVLLM | None = None) -> None:
    problems = random.Random(0).sample([(a, b) for a in range(10) for b in range(10)], 100)
    path = train(
        "embedded",
        sums("train", problems[:75], repeats=8),
        eval_envs={"sums": sums("sums", problems[75:], repeats=1)},
        path=tempfile.mkdtemp(prefix="llmrl-sums-"),
        num_steps=1,  # 12 steps are enough to learn the task, in minutes
        groups_per_batch=2,
        max_new_tokens=12,
        max_model_len=256,
        learning_rate=2e-5,
        engine=engine,
    )
    print(f"Look at the run: llmrl view {path}")


if __name__ == "__main__":
    main()
