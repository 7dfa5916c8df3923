"""The search environment: question, search, answer, and rows as exact as any."""

from __future__ import annotations

import torch

from llmrl.collectors import LLMCollector, RolloutLimits, batch_rows, rollout_rows
from llmrl.envs import make_search_env, search_corpus
from llmrl.policies import LLMWrapperBase, vLLMWrapper
from llmrl.testing import ScriptedEngine
from llmrl.trainer import TransformersWrapper
from llmrl.transforms import SearchIndex


def test_the_best_document_comes_first_and_nothing_is_said_to_be_nothing():
    documents, questions = search_corpus(num_people=60)
    index = SearchIndex(documents, num_results=1)
    right = sum(question["answer"] in index.search(question["query"])[0][1] for question in questions)
    assert right > 0.8 * len(questions)
    assert index.search("zebra") == index.search("") == index.search("the") == []


def test_train_and_test_share_no_question():
    train, test = ({str(item) for item in make_search_env(split).base_env.prompts.items} for split in ("train", "test"))
    assert len(train) == 3 * len(test) and not train & test


def test_searching_and_answering_is_rewarded(renderer):
    def script(prompt_ids):
        text = renderer.decode(prompt_ids)
        question, _, following = text.split("<|im_start|>user\n")[-1].partition("<|im_end|>")
        if "[1]" not in following:
            return f'<tool_call>{{"name": "search", "arguments": {{"query": "{question}"}}}}</tool_call><|im_end|>'
        return following.split("[1] ")[1].split("\n")[0] + "<|im_end|>"

    policy = LLMWrapperBase(ScriptedEngine(script, encode=renderer.encode), renderer=renderer)
    with LLMCollector(make_search_env(), policy=policy, groups_per_batch=1) as collector:
        rollouts = collector.play(20)
    assert all(rollout.num_turns == 2 for rollout in rollouts)
    assert all(rollout.breakdown["searched"] == 1.0 for rollout in rollouts)
    assert sum(rollout.breakdown["answer"] for rollout in rollouts) > 15


def test_rows_of_tool_turns_are_as_exact_as_others_on_a_real_engine(vllm_engine, renderer, model_path):
    # So small a model seldom calls a tool that it was not taught: whatever it says is searched for.
    env = make_search_env(repeats=4, tool_parser="none")
    tools = env.transform[0]
    answer = tools.answer

    async def always_answer(message, malformed, session, *, turn):
        if turn > 10:
            return await answer(message, malformed, session, turn=turn)
        text = await tools.call("search", {"query": message["content"][:200]}, session)
        return [tools.tool_message(text, name="search")]

    tools.answer = always_answer
    policy = vLLMWrapper(vllm_engine, renderer=renderer, generate_kwargs={"max_new_tokens": 24, "stop": ["."]})
    with LLMCollector(env, policy=policy, groups_per_batch=1, limits=RolloutLimits(max_turns=3)) as collector:
        rollouts = [rollout for rollout in collector.play(16) if rollout.num_turns > 1]  # not cut in the first turn
    assert len(rollouts) >= 2
    for rollout in rollouts:
        (row,) = rollout_rows(rollout)
        trained = row["tokens", "full"][row["masks", "all_assistant_mask"]].tolist()
        assert trained == [token for turn in rollout.conversation.turns for token in turn.completion_ids]
    batch = batch_rows([rollouts])
    with torch.no_grad():
        recomputed = TransformersWrapper(model_path, generate=False)(batch.copy())
    for row, scored in zip(batch.unbind(0), recomputed.unbind(0), strict=True):
        difference = (row["log_probs", "full"] - scored["log_probs", "full"]).abs()
        mask = row["masks", "all_assistant_mask"]
        # Engine and trainer compute in float32.
        assert difference[mask].mean() < 0.001 and difference[mask].max() < 0.02
