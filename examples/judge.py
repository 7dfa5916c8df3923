"""A judge compares each pair of answers of a group, in both orders; the reward is the share of comparisons won."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
from collections.abc import Iterator, Sequence

from rich.console import Console

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
from llmrl._utils.background_loop import BackgroundLoop
from llmrl.cli.serve import ServeSettings, serve
from llmrl.policies import LLMWrapperBase
from llmrl.rewards import Judge, RewardInput, Score

PROMPT = "{query}\n\nAnswer A: {first}\n\nAnswer B: {second}\n\nWhich is better? Reply with one letter: A or B."


class Tournament(Rubric):
    """Scores each answer by the share of its comparisons that it wins."""

    def __init__(self, judge: Judge) -> None:
        super().__init__(RewardFn(lambda completion: 0.0, name="won"))
        self.judge = judge

    async def score_group(self, rollouts: Sequence[RewardInput]) -> list[Score]:
        async def is_first_better(first: int, second: int) -> float:
            query = rollouts[first].columns["query"]
            return await self.judge(query=query, first=rollouts[first].completion, second=rollouts[second].completion)

        pairs = list(itertools.permutations(range(len(rollouts)), 2))
        results = await asyncio.gather(*(is_first_better(*pair) for pair in pairs))
        num_won = [0.0] * len(rollouts)
        for (first, second), result in zip(pairs, results, strict=True):
            num_won[first] += result
            num_won[second] += 1 - result
        shares = [won / (2 * (len(rollouts) - 1)) for won in num_won]
        return [Score(share, {"won": share}) for share in shares]


@contextlib.contextmanager
def served(policy: LLMWrapperBase) -> Iterator[str]:
    """Serve a policy as `llmrl serve` does; a real judge is a larger model on another machine."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = ServeSettings(name="judge", host="127.0.0.1", port=port, api_key=None, out=None)
    background, until = BackgroundLoop("judge"), asyncio.Event()
    serving = background.submit(serve(settings, policy, Console(quiet=True), until=until))
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        background.post(until.set)
        serving.result(30)
        background.close()


def main(engine: AsyncVLLM) -> None:
    tasks = [{"query": f"Write a sentence with the word {word}."} for word in ("bread", "sea")]
    with served(vLLMWrapper(engine, generate_kwargs={"max_new_tokens": 2})) as url:
        judge = Judge("judge", PROMPT, base_url=url, api_key="-", read=lambda reply: float("A" in reply))
        env = DatasetChatEnv(tasks, repeats=3).append_transform(RubricReward(Tournament(judge)))
        policy = vLLMWrapper(engine, generate_kwargs={"max_new_tokens": 24})
        with LLMCollector(env, policy=policy, groups_per_batch=2) as collector:
            next(iter(collector))
    for rollout in collector.rollouts:
        print(f"{rollout.reward:.2f}", repr(rollout.messages[-1]["content"]))
    print(judge.usage)


if __name__ == "__main__":
    engine = AsyncVLLM.from_pretrained(ensure_embedded_model(), max_model_len=512)
    main(engine)
    engine.shutdown()
