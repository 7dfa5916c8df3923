"""Groups of answers to the same prompt, as training rows: the input of GRPO."""

from __future__ import annotations

from llmrl import AsyncVLLM, DatasetChatEnv, LLMCollector, MCAdvantage, RubricReward, ensure_embedded_model, vLLMWrapper


def is_short(completion: str) -> float:
    return 1.0 / (1 + len(completion.split()))


def main(engine: AsyncVLLM) -> None:
    prompts = [{"query": f"What is {a} times {a}?"} for a in range(2, 10)]
    env = DatasetChatEnv(prompts, repeats=4, shuffle=True).append_transform(RubricReward(is_short))
    policy = vLLMWrapper(engine, generate_kwargs={"max_new_tokens": 24})
    with LLMCollector(env, policy=policy, groups_per_batch=2, postproc=MCAdvantage(grpo_size=4)) as collector:
        batch = next(iter(collector))
    for row in batch.unbind(0):  # the batch is ragged: each row has its own number of tokens
        num_trained = int(row["masks", "all_assistant_mask"].sum())
        print(row["rollout", "rollout_id"], num_trained, "tokens", row["advantage"].item())
    print(collector.report)


if __name__ == "__main__":
    engine = AsyncVLLM.from_pretrained(ensure_embedded_model(), max_model_len=512)
    main(engine)
    engine.shutdown()
