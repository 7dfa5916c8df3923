"""An environment that answers: a game of several turns, with one training row per game."""

from __future__ import annotations

from llmrl import (
    AsyncVLLM,
    LLMCollector,
    MessageChatEnv,
    MessageEnv,
    MessageStep,
    RolloutLimits,
    ensure_embedded_model,
    vLLMWrapper,
)


class Guess(MessageEnv):
    """The policy guesses a number; one instance plays one conversation."""

    def __init__(self, number: int) -> None:
        self.number = number

    async def init(self):
        return [{"role": "user", "content": "I think of a number from 1 to 9. Reply with your guess only."}]

    async def step(self, message):
        digits = [character for character in message["content"] if character.isdigit()]
        if not digits:
            return MessageStep([{"role": "user", "content": "A number, please."}])
        if int(digits[-1]) == self.number:
            return MessageStep(reward=1.0, is_done=True)
        return MessageStep([{"role": "user", "content": "higher" if int(digits[-1]) < self.number else "lower"}])


def main(engine: AsyncVLLM) -> None:
    env = MessageChatEnv(lambda item: Guess(item["number"]), [{"number": n} for n in range(1, 10)], repeats=2)
    policy = vLLMWrapper(engine, generate_kwargs={"max_new_tokens": 8})
    limits = RolloutLimits(max_turns=4)
    with LLMCollector(env, policy=policy, groups_per_batch=2, limits=limits) as collector:
        batch = next(iter(collector))
    for rollout in collector.rollouts:
        answers = [message["content"] for message in rollout.messages if message["role"] == "assistant"]
        print(rollout.status.name, rollout.reason, rollout.reward, answers)
    print(batch.shape[0], "rows for", len(collector.rollouts), "rollouts")


if __name__ == "__main__":
    engine = AsyncVLLM.from_pretrained(ensure_embedded_model(), max_model_len=512)
    main(engine)
    engine.shutdown()
