"""A conversation step by step: reset, policy and step, as a collector calls them."""

from __future__ import annotations

from tensordict import TensorDict

from llmrl import AsyncVLLM, ChatEnv, PolicyVersion, ensure_embedded_model, vLLMWrapper


def main(engine: AsyncVLLM) -> None:
    policy = vLLMWrapper(engine, generate_kwargs={"max_new_tokens": 16})
    env = ChatEnv(system_prompt="Be brief.").append_transform(PolicyVersion())

    step = env.reset(TensorDict({"query": "Name a colour."}))
    step = policy(step)  # adds the response and the full conversation, as messages and as tokens
    print(step["history"].response.content)
    print(step["tokens", "full"].tolist())
    print(step["log_probs", "response"].tolist())  # only the sampled tokens have log-probs

    step = env.step_mdp(env.step(step))  # the full conversation becomes the next prompt
    print(step["history"].prompt.role)


if __name__ == "__main__":
    engine = AsyncVLLM.from_pretrained(ensure_embedded_model(), max_model_len=512)
    main(engine)
    engine.shutdown()
