"""Branches from the middle of a conversation: the prefix is stored once, and each token is trained once."""

from __future__ import annotations

from llmrl import AsyncVLLM, SamplingConfig, ensure_embedded_model
from llmrl._utils.asynchronous import run_sync
from llmrl.rendering import Conversation, TemplateRenderer, reconcile


def main(engine: AsyncVLLM) -> None:
    renderer = TemplateRenderer.from_pretrained(str(ensure_embedded_model()))
    sampling = SamplingConfig(max_new_tokens=12)

    def answer(conversation: Conversation) -> Conversation:
        completion = run_sync(engine.generate(conversation.prompt_ids, sampling))
        return conversation.with_completion(
            completion.token_ids, log_probs=completion.log_probs, versions=completion.versions
        )

    opening = [{"role": "user", "content": "Name an animal."}]
    root = answer(Conversation.start(renderer).with_prompt(opening))
    question = {"role": "user", "content": "Say one thing about it."}
    branches = [answer(root.with_prompt([*root.messages, question])) for _ in range(3)]

    result = reconcile([branch.node for branch in branches])
    num_trained = sum(sum(row.columns.loss_mask) for row in result.rows)
    num_sampled = sum(branch.node.num_completion_tokens for branch in branches) + root.node.num_completion_tokens
    print(len(result.rows), "rows;", num_trained, "tokens trained of", num_sampled, "sampled")
    assert num_trained == num_sampled


if __name__ == "__main__":
    engine = AsyncVLLM.from_pretrained(ensure_embedded_model(), max_model_len=512)
    main(engine)
    engine.shutdown()
