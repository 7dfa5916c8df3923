"""Spans of rollouts, read back by the SDK's in-memory exporter."""

from __future__ import annotations

import asyncio
import json

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from llmrl.collectors import LLMCollector, RolloutLimits, stop_spans, trace_spans
from llmrl.envs import AgentEnv, DatasetChatEnv
from llmrl.policies import LLMWrapperBase
from llmrl.rewards import RewardFn, Rubric
from llmrl.testing import ScriptedEngine
from llmrl.tools import ToolTransform
from llmrl.transforms import RubricReward


@pytest.fixture
def exporter():
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace_spans(provider)
    yield exporter
    stop_spans()


def tree_of(exporter):
    """Spans by their parent's id; the roots' is None."""
    children = {}
    for span in sorted(exporter.get_finished_spans(), key=lambda span: span.start_time):
        children.setdefault(span.parent and span.parent.span_id, []).append(span)
    return children


def names(children, parent):
    return [span.name for span in children.get(parent.context.span_id, ())]


def play(renderer, env, num_rollouts, answer):
    policy = LLMWrapperBase(ScriptedEngine(answer, encode=renderer.encode), renderer=renderer)
    with LLMCollector(env, policy=policy, groups_per_batch=1, limits=RolloutLimits(max_turns=4)) as collector:
        return collector.play(num_rollouts)


def looks_then_answers(renderer):
    def answer(prompt_ids):
        if "<|im_start|>tool" in renderer.decode(prompt_ids):
            return "15<|im_end|>"
        calls = [{"name": name, "arguments": {"place": "x"}} for name in ("look", "nowhere", "fall")]
        return "".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls) + "<|im_end|>"

    return answer


@pytest.mark.parametrize("is_judged", [False, True])
def test_a_rollout_is_turns_of_engine_tools_and_rewards(renderer, exporter, is_judged):
    seen = []

    async def look(place: str) -> str:
        """Look."""
        seen.append(trace.get_current_span(None).get_span_context().span_id)
        return place

    def fall(place: str) -> str:
        """Fall."""
        raise RuntimeError("fell")

    def is_right(completion):
        return float(completion == "15")

    async def judged(completion):
        await asyncio.sleep(0)
        return is_right(completion)

    rubric = Rubric(RewardFn(judged if is_judged else is_right, name="is_right"))
    env = DatasetChatEnv([{"query": "7 + 8 ="}, {"query": "8 + 7 ="}], repeats=2)
    env = env.append_transform(ToolTransform([look, fall])).append_transform(RubricReward(rubric))
    rollouts = play(renderer, env, 4, looks_then_answers(renderer))
    assert [rollout.reward for rollout in rollouts] == [1.0] * 4
    children = tree_of(exporter)
    roots = children[None]
    assert sorted(root.attributes["gen_ai.conversation.id"] for root in roots) == sorted(
        rollout.rollout_id for rollout in rollouts
    )
    told = dict(roots[0].attributes)
    assert told["gen_ai.operation.name"] == "invoke_agent" and told["llmrl.reward"] == 1.0
    assert told["llmrl.status"] == "completed" and told["llmrl.num_turns"] == 2
    looking = set()
    for root in roots:
        assert names(children, root) == (["turn", "turn", "reward"] if is_judged else ["turn", "turn"])
        first, last = children[root.context.span_id][:2]
        assert names(children, first) == ["chat", "execute_tool look", "execute_tool fall"]
        chat, tool, fallen = children[first.context.span_id]
        assert chat.attributes["gen_ai.usage.output_tokens"] > 50 and chat.attributes["gen_ai.usage.input_tokens"] > 20
        assert chat.attributes["gen_ai.response.finish_reasons"] == ("stop",)
        assert tool.attributes["gen_ai.tool.name"] == "look" and "error.type" not in tool.attributes
        assert fallen.attributes["error.type"] == "failed"
        looking.add(tool.context.span_id)
        assert names(children, last) == (["chat"] if is_judged else ["chat", "reward"])
        reward = children[(root if is_judged else last).context.span_id][-1]
        [event] = reward.events
        assert event.name == "gen_ai.evaluation.result"
        assert dict(event.attributes) == {"gen_ai.evaluation.name": "is_right", "gen_ai.evaluation.score.value": 1.0}
        assert root.start_time <= first.start_time <= chat.start_time <= chat.end_time <= tool.start_time
        assert tool.end_time <= last.start_time <= last.end_time <= root.end_time
    assert set(seen) == looking  # what a tool's own code does is in its span, on whatever thread it runs
    assert sum(map(len, children.values())) == 4 * 8  # and nothing of the tool that there is not


def test_errors_are_reported_and_agents_requests_are_in_their_rollout(renderer, exporter):
    import urllib.request

    def play_agent(row, model):
        body = json.dumps({"model": model.name, "messages": [{"role": "user", "content": "7 + 8 ="}]}).encode()
        headers = {"Authorization": f"Bearer {model.api_key}", "Content-Type": "application/json"}
        urllib.request.urlopen(urllib.request.Request(f"{model.base_url}/chat/completions", body, headers)).read()
        if row["query"] == "fail":
            raise RuntimeError("no more")
        return 1.0

    env = AgentEnv(play_agent, [{"query": "go"}, {"query": "fail"}])
    play(renderer, env, 2, lambda prompt_ids: "15<|im_end|>")
    children = tree_of(exporter)
    by_status = {root.attributes["llmrl.status"]: root for root in children[None]}
    assert by_status["error"].attributes["error.type"] == "RuntimeError"
    assert [names(children, root) for root in by_status.values()] == [["chat"], ["chat"]]


def test_nothing_is_made_while_they_are_off(renderer, exporter):
    stop_spans()
    [rollout] = play(renderer, DatasetChatEnv([{"query": "7 + 8 ="}]), 1, lambda prompt_ids: "15<|im_end|>")
    assert rollout.num_turns == 4 and exporter.get_finished_spans() == ()
