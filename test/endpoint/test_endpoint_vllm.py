"""Agents on real vLLM: what they are trained on is what was sampled, with its log-probs."""

from __future__ import annotations

import asyncio

import openai
import torch

from llmrl.collectors import LLMCollector
from llmrl.engines import SamplingConfig
from llmrl.engines.token_stream import TokenStream
from llmrl.envs import AgentEnv
from llmrl.policies import vLLMWrapper


async def play(row, model):
    create = openai.AsyncOpenAI(base_url=model.base_url, api_key=model.api_key).chat.completions.create
    messages = [{"role": "user", "content": row["query"]}]
    answer = await create(model=model.name, messages=messages, n=2, max_tokens=12)
    said = {"role": "assistant", "content": answer.choices[1].message.content}
    others = ({"role": "user", "content": text} for text in ("Go on.", "Why?"))
    await asyncio.gather(*(create(model=model.name, messages=[*messages, said, other]) for other in others))
    asked = {"model": model.name, "messages": [{"role": "user", "content": "Count."}]}
    await create(**asked, stop=["3"], max_tokens=30)
    async with await create(**asked, stream=True) as stream:
        chunks = [chunk.choices[0].delta.content async for chunk in stream]
    async with await create(**asked, stream=True) as stream:
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break  # the rest is neither sampled nor trained
    return float(sum(map(bool, chunks)))


def test_an_agents_rows_have_the_log_probs_of_the_model(shallow_engine, shallow_model, tokenizer):
    policy = vLLMWrapper(
        shallow_engine, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 16, "temperature": 0.8}
    )
    env = AgentEnv(play, [{"query": "Tell me a story."}], repeats=2)
    with LLMCollector(env, policy=policy, groups_per_batch=1) as collector:
        rows = next(iter(collector)).unbind(0)
        rollouts = collector.rollouts
    assert [one.num_turns for one in rollouts] == [7, 7]
    assert all(one.reward >= 1 for one in rollouts)  # a streamed answer has text
    num_trained = sum(int(row["masks", "all_assistant_mask"].sum()) for row in rows)
    assert num_trained == sum(one.num_completion_tokens for one in rollouts)
    for row in rows:
        ids, mask = row["tokens", "full"], row["masks", "all_assistant_mask"][1:]
        with torch.no_grad():
            logits = shallow_model(input_ids=ids[None]).logits[0, :-1].float() / 0.8
        expected = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        torch.testing.assert_close(row["log_probs", "full"][1:][mask], expected[mask], atol=0.02, rtol=0)


def test_tokens_are_reported_while_they_are_sampled_and_a_stop_ends_the_request(vllm_engine, tokenizer):
    prompt_ids = tokenizer.encode("Once upon a time")
    sampling = SamplingConfig(max_new_tokens=400, temperature=0.0, ignore_eos=True)

    class Stopping(TokenStream):
        def report(self, token_ids):
            reported.append(list(token_ids))
            self.is_stopped = len(token_ids) >= 3

    async def main():
        stream = Stopping(lambda: None)
        return await vllm_engine.generate(prompt_ids, sampling, stream=stream)

    reported = []
    completion = asyncio.run(main())
    assert completion.finish_reason == "abort" and 3 <= len(completion.token_ids) < 400
    assert all(completion.token_ids[: len(ids)] == ids for ids in reported)
    assert len(completion.log_probs) == len(completion.versions) == len(completion.token_ids)
