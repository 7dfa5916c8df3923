"""A tool: the model writes Python, a confined interpreter runs it, and the conversation continues with the output."""

from __future__ import annotations

from llmrl import AsyncVLLM, DatasetChatEnv, LLMCollector, RolloutLimits, ensure_embedded_model, vLLMWrapper
from llmrl.transforms import PythonInterpreter, RubricReward

# An example conversation for a small model: code in a fenced block, then the answer.
SHOWN = [
    {"role": "user", "content": "What is 12 * 34?"},
    {"role": "assistant", "content": "```python\nprint(12 * 34)\n```"},
    {"role": "tool", "content": "Code block 1 executed successfully:\n408\n"},
    {"role": "assistant", "content": "It is 408."},
]


def is_right(completion: str, answer: str) -> float:  # the completion is the last answer, after the tool's output
    return float(answer in completion)


def main(engine: AsyncVLLM) -> None:
    products = [{"query": f"What is {a} * {a + 7}?", "answer": str(a * (a + 7))} for a in (21, 48)]
    env = DatasetChatEnv(products, repeats=4, prepare=lambda row: [*SHOWN, {"role": "user", "content": row["query"]}])
    interpreter = PythonInterpreter(timeout=5.0)
    env = env.append_transform(interpreter).append_transform(RubricReward(is_right))

    policy = vLLMWrapper(engine, generate_kwargs={"max_new_tokens": 48, "temperature": 0.5})
    limits = RolloutLimits(max_turns=3)
    with LLMCollector(env, policy=policy, groups_per_batch=2, limits=limits) as collector:
        batch = next(iter(collector))
    for message in max(collector.rollouts, key=lambda rollout: rollout.num_turns).messages[len(SHOWN) :]:
        print(f"{message['role']}: {message['content']}")
    # The tool's output is context; only sampled tokens are trained.
    print("right:", batch["next", "reward"].mean().item(), "tool:", dict(interpreter.counts))
    interpreter.close()


if __name__ == "__main__":
    engine = AsyncVLLM.from_pretrained(ensure_embedded_model(), max_model_len=512)
    main(engine)
    engine.shutdown()
