"""`AgentEnv` in a collector: anybody's agent, pointed at a URL, is played as any environment is."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
import time
import urllib.request

import aiohttp
import openai
import pytest
import torch
from endpoint_agents import LoggingEngine

from llmrl.collectors import GroupRules, LLMCollector, RolloutLimits
from llmrl.data import RolloutStatus
from llmrl.engines import EngineError
from llmrl.envs import AgentEnv
from llmrl.objectives import MCAdvantage
from llmrl.policies import LLMWrapperBase
from llmrl.runs.evaluation import Evaluator
from llmrl.transforms import RubricReward
from llmrl.watch.rollout_metrics import rollout_metrics

ROWS = [{"query": "7 + 8 =", "answer": "15"}, {"query": "1 + 1 =", "answer": "2"}]


def client_of(model, **options):
    return openai.AsyncOpenAI(base_url=model.base_url, api_key=model.api_key, **options)


async def ask_once(row, model, **more):
    messages = [{"role": "user", "content": row["query"]}]
    answer = await client_of(model).chat.completions.create(model=model.name, messages=messages, **more)
    return answer.choices[0].message.content


def make_collector(
    play, renderer, answers=("15<|im_end|>", "2<|im_end|>"), *, rubric=None, repeats=2, latency_s=0.0, **options
):
    engine = LoggingEngine(answers, encode=renderer.encode, decode=renderer.decode, latency_s=latency_s)
    address = {name: options.pop(name) for name in ("host", "public_url") if name in options}
    env = AgentEnv(play, ROWS, repeats=repeats, **address)
    if rubric is not None:
        env = env.append_transform(RubricReward(rubric))
    options.setdefault("groups_per_batch", 1)
    return LLMCollector(env, policy=LLMWrapperBase(engine, renderer=renderer), **options)


def play_group(play, renderer, **options):
    """The rollouts of a group, and their batch, if there is one."""
    with make_collector(play, renderer, **options) as collector:
        rollouts = collector.play(2)
        return rollouts, collector.policy.engine


def test_an_agent_is_trained_on_what_it_asked(renderer):
    async def play(row, model):
        return {"right": float(await ask_once(row, model) == row["answer"]), "asked": 0.5}

    with make_collector(play, renderer) as collector:
        batches = [next(iter(collector)) for _ in range(2)]
        log = collector.policy.engine.log
    rows = [row for batch in batches for row in batch.unbind(0)]
    assert sorted(tuple(row["tokens", "full"].tolist()) for row in rows) == sorted(p + c for p, c in log)
    for row in rows:
        parts = {name: value.item() for name, value in row["reward_breakdown"].items()}
        assert row["next", "reward"].item() == parts["right"] + parts["asked"] and parts["asked"] == 0.5
        assert (row["rollout", "num_in_group"], row["rollout", "num_turns"]) == (2, 1)
        num_answer = int(row["masks", "all_assistant_mask"].sum())
        assert row["masks", "all_assistant_mask"][-num_answer:].all()
        trained = row["tokens", "full"][-num_answer:].tolist()
        expected = torch.tensor([-0.001 * (1 + token % 89) for token in trained])
        assert torch.equal(row["log_probs", "full"][-num_answer:], expected)
    assert len({row["rollout", "rollout_id"] for row in rows}) == 4


def test_a_plain_function_plays_in_a_thread_of_its_own(renderer):
    def play(row, model):
        client = openai.OpenAI(base_url=model.base_url, api_key=model.api_key)
        messages = [{"role": "user", "content": row["query"]}]
        for number in range(3):
            answer = client.chat.completions.create(model=model.name, messages=messages)
            said = {"role": "assistant", "content": answer.choices[0].message.content}
            messages += [said, {"role": "user", "content": str(number)}]
        return 1

    rollouts, _ = play_group(play, renderer)
    assert [(one.status, one.num_turns, one.reward) for one in rollouts] == [(RolloutStatus.COMPLETED, 3, 1.0)] * 2
    assert all(len(one.conversation.reconcile().rows) == 1 for one in rollouts)


@pytest.mark.slow
@pytest.mark.parametrize("client", ["openai", "urllib", None])
def test_an_async_agent_with_a_synchronous_client_is_noticed_with_its_line(renderer, caplog, client):
    async def play(row, model):
        def ask():
            body = {"model": model.name, "messages": [{"role": "user", "content": "Hi"}]}
            if client != "urllib":
                return openai.OpenAI(base_url=model.base_url, api_key=model.api_key).chat.completions.create(**body)
            url, headers = f"{model.base_url}/chat/completions", {"x-api-key": model.api_key}
            return urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers))

        if client is not None:
            ask()
        else:
            await asyncio.to_thread(ask)
            await ask_once(row, model)

    with make_collector(play, renderer, repeats=2, latency_s=0.3) as collector:
        collector.play(2)
    said = [record.getMessage() for record in caplog.records if "synchronous call" in record.getMessage()]
    line = play.__code__.co_firstlineno + {"openai": 4, "urllib": 6, None: 0}[client]
    assert [f"{__file__}:{line}" in one for one in said] == [True] * (client is not None)


def test_agents_elsewhere_ask_the_public_url(renderer):
    asked = []

    async def play(row, model):
        asked.append(model)
        return float(await ask_once(row, model) == "15")

    public_url = "http://127.0.0.2:{port}/v1"
    with make_collector(play, renderer, host="0.0.0.0", public_url=public_url) as collector:
        assert collector.play(1)[0].reward == 1.0
        collector.play(1)
        assert re.fullmatch(r"http://127\.0\.0\.2:\d+/v1", asked[0].base_url)
        assert "127.0.0.2" in asked[0].environment()["NO_PROXY"].split(",")
        with pytest.raises(openai.AuthenticationError):  # the key ended with its rollout
            asyncio.run(ask_once(ROWS[0], asked[0]))
    with pytest.raises(ValueError, match="pass public_url="):
        AgentEnv(play, ROWS, host="0.0.0.0")


def test_a_rubric_adds_to_what_an_agent_returns(renderer):
    def right(completion, answer, messages, status):
        assert status is RolloutStatus.COMPLETED and messages[-1]["role"] == "assistant"
        return float(completion == answer)

    async def play(row, model):
        await ask_once(row, model)
        return {"style": 0.25}

    rollouts, _ = play_group(play, renderer, rubric=right, answers=["15<|im_end|>"])
    assert [(one.reward, one.breakdown, one.is_scored) for one in rollouts] == [
        (1.25, {"style": 0.25, "right": 1.0}, True)
    ] * 2


def test_an_async_judge_scores_an_agents_rollout(renderer):
    async def judge(completion):
        await asyncio.sleep(0)
        return float(completion == "15")

    rollouts, _ = play_group(ask_and_return_nothing, renderer, rubric=judge, answers=["15<|im_end|>"])
    assert [(one.reward, one.is_scored) for one in rollouts] == [(1.0, True)] * 2


async def ask_and_return_nothing(row, model):
    await ask_once(row, model)


@pytest.mark.parametrize(
    ("returned", "error"),
    [(None, ""), ("good", "the score must be a number"), (float("nan"), "finite"), ({"a": "x"}, "the score 'a'")],
)
def test_what_is_no_score_leaves_a_rollout_unscored(renderer, returned, error):
    async def play(row, model):
        await ask_once(row, model)
        return returned

    rollouts, _ = play_group(play, renderer)
    for one in rollouts:
        assert one.status is RolloutStatus.COMPLETED and not one.is_scored and one.num_turns == 1
        assert error in one.error and (not error or "test_endpoint_agents.py" in one.error)


def test_an_agent_that_fails_ends_its_own_rollout(renderer):
    async def play(row, model):
        answer = await ask_once(row, model)
        if answer == "2":
            raise SystemExit("no more")
        return 1.0

    rollouts, _ = play_group(play, renderer)
    failed, good = sorted(rollouts, key=lambda one: one.reward)
    assert (good.status, good.is_scored) == (RolloutStatus.COMPLETED, True)
    assert (failed.status, failed.reason, failed.is_scored) == (RolloutStatus.ERROR, "environment_error", False)
    assert "no more" in failed.error and "test_endpoint_agents.py" in failed.traceback and failed.num_turns == 1


@pytest.mark.parametrize("catches", [True, False])
def test_a_budget_truncates_and_keeps_the_turns(renderer, catches):
    async def play(row, model):
        for _ in range(2):
            await ask_once(row, model)
        try:
            await ask_once(row, model)
        except openai.PermissionDeniedError:
            if not catches:
                raise
        return 0.5

    rollouts, engine = play_group(play, renderer, limits=RolloutLimits(max_turns=2))
    for one in rollouts:
        assert (one.status, one.reason, one.num_turns) == (RolloutStatus.TRUNCATED, "max_turns", 2)
        assert (one.is_scored, one.reward) == ((True, 0.5) if catches else (False, 0.0))
    assert len(engine.log) == 4  # the reply asks SDKs not to try again


def test_a_rollout_that_takes_too_long_is_truncated_and_its_agent_cancelled(renderer, clock):
    answered, cancelled = [], []

    async def play(row, model):
        answered.append(await ask_once(row, model))
        try:
            if len(answered) == 2:
                clock.pass_limit(600)
            await asyncio.Event().wait()
        finally:
            cancelled.append(row)

    rollouts, _ = play_group(play, renderer, rubric=lambda_reward, limits=RolloutLimits(rollout_timeout_seconds=600))
    for one in rollouts:
        assert (one.status, one.reason) == (RolloutStatus.TRUNCATED, "timeout")
        assert (one.num_turns, one.is_scored, one.reward) == (1, True, 1.0)
    assert len(cancelled) == 2


def lambda_reward(completion):
    return 1.0


def test_an_engine_that_fails_ends_the_rollout_as_the_engines_failure(renderer):
    asked = []

    async def play(row, model):
        asked.append(row)
        return len(await ask_once(row, model))

    engine = LoggingEngine(["15<|im_end|>"], encode=renderer.encode, decode=renderer.decode)
    engine.fail_next(4, EngineError("out of memory"))
    policy = LLMWrapperBase(engine, renderer=renderer)
    limits = RolloutLimits(num_engine_retries=1)
    env = AgentEnv(play, ROWS, repeats=1)
    with LLMCollector(env, policy=policy, groups_per_batch=1, limits=limits) as collector:
        failed = collector.play(2)
        (good,) = collector.play(1)
    assert [(one.status, one.reason) for one in failed] == [(RolloutStatus.ERROR, "engine_error")] * 2
    assert all("out of memory" in one.error for one in failed) and len(asked) == 3
    assert good.status is RolloutStatus.COMPLETED


def play_failing(renderer, play, *, latency_s=0.0, **options):
    """The rollout of an agent that makes the engine fail: it gets the engine, too."""
    engine = LoggingEngine(["15<|im_end|>"], encode=renderer.encode, decode=renderer.decode, latency_s=latency_s)

    async def of_engine(row, model):
        return await play(row, model, engine)

    policy = LLMWrapperBase(engine, renderer=renderer)
    options.setdefault("limits", RolloutLimits(num_engine_retries=0))
    with LLMCollector(AgentEnv(of_engine, ROWS), policy=policy, groups_per_batch=1, **options) as collector:
        return collector.play(1)[0]


def test_an_answer_that_the_engine_did_not_give_is_not_scored_as_the_agents(renderer):
    async def play(row, model, engine):
        await ask_once(row, model)
        engine.fail_next(1, EngineError("out of memory"))
        try:
            await ask_once(row, model)
        except openai.InternalServerError:
            return 0.0

    rollout = play_failing(renderer, play)
    assert (rollout.status, rollout.reason, rollout.is_scored) == (RolloutStatus.ERROR, "engine_error", False)
    assert "out of memory" in rollout.error and rollout.num_turns == 1


@pytest.mark.parametrize("fails", [False, True])
def test_a_later_answer_makes_up_for_an_engine_that_failed(renderer, fails):
    async def play(row, model, engine):
        engine.fail_next(1, EngineError("out of memory"))
        with contextlib.suppress(openai.InternalServerError):
            await ask_once(row, model)
        await ask_once(row, model)
        return 0.5 if not fails else {}["missing"]

    rollout = play_failing(renderer, play)
    if fails:
        assert (rollout.status, rollout.reason) == (RolloutStatus.ERROR, "environment_error")
        assert "KeyError" in rollout.error and "test_endpoint_agents.py" in rollout.traceback
    else:
        assert (rollout.status, rollout.is_scored, rollout.reward) == (RolloutStatus.COMPLETED, True, 0.5)


def test_an_answer_that_was_asked_for_before_a_failure_does_not_make_up_for_it(renderer):
    async def play(row, model, engine):
        slow = asyncio.ensure_future(ask_once(row, model))
        while not engine.requests:
            await asyncio.sleep(0.01)
        engine.fail_next(1, EngineError("out of memory"))
        with contextlib.suppress(openai.InternalServerError):
            await ask_once(row, model)
        await slow
        return 0.0

    assert play_failing(renderer, play, latency_s=0.2).reason == "engine_error"


def test_an_agent_that_compacted_and_then_failed_has_failed_by_itself(renderer):
    async def play(row, model, engine):
        with pytest.raises(openai.BadRequestError, match="prompt is too long"):
            await ask_once({"query": "word " * 4000}, model)
        await ask_once(row, model)
        return {}["missing"]

    rollout = play_failing(renderer, play, limits=RolloutLimits(max_prompt_tokens=250))
    assert (rollout.status, rollout.reason) == (RolloutStatus.ERROR, "environment_error")
    assert "KeyError" in rollout.error and "test_endpoint_agents.py" in rollout.traceback


def test_rollouts_do_not_read_each_other(renderer):
    keys = []

    async def play(row, model):
        keys.append(model)
        await ask_once(row, model)
        while len(keys) < 2:
            await asyncio.sleep(0.001)
        with pytest.raises(openai.AuthenticationError):
            await ask_once(row, type(model)(base_url=model.base_url, api_key="llmrl-guess", name=model.name))
        return 1.0

    rollouts, engine = play_group(play, renderer)
    assert [one.num_turns for one in rollouts] == [1, 1] and keys[0].api_key != keys[1].api_key
    assert len(engine.log) == 2


@pytest.mark.slow
def test_an_agent_that_goes_on_after_its_rollout_gets_an_error(renderer):
    errors = []

    def play(row, model):
        time.sleep(0.5)
        try:
            client = openai.OpenAI(base_url=model.base_url, api_key=model.api_key)
            client.chat.completions.create(model=model.name, messages=[{"role": "user", "content": "?"}])
        except openai.AuthenticationError as error:
            errors.append(error)

    with make_collector(play, renderer, limits=RolloutLimits(rollout_timeout_seconds=0.05)) as collector:
        rollouts = collector.play(2)
        while len(errors) < 2:
            time.sleep(0.01)
    assert all(one.reason == "timeout" and one.num_turns == 0 for one in rollouts)


def test_an_agent_that_never_asks_has_no_rows(renderer):
    rollouts, _ = play_group(lambda row, model: 1.0, renderer)
    assert [(one.status, one.reward, one.num_turns) for one in rollouts] == [(RolloutStatus.COMPLETED, 1.0, 0)] * 2
    assert all(one.conversation.reconcile().rows == [] for one in rollouts)


async def slow_one():
    return 1.0


def quick_one():
    return 1.0


@pytest.mark.parametrize("rubric", [slow_one, quick_one])
def test_the_parts_of_an_agents_result_stay_beside_a_rubric(renderer, rubric):
    rollouts, _ = play_group(lambda row, model: {"asked": 0.5, "right": 0.25}, renderer, rubric=rubric)
    expected = {"asked": 0.5, "right": 0.25, rubric.__name__: 1.0}
    assert [(one.reward, one.breakdown, one.is_scored) for one in rollouts] == [(1.75, expected, True)] * 2


@pytest.mark.parametrize("rubric", [None, slow_one, quick_one])
def test_an_agent_whose_result_is_no_score_is_not_scored(renderer, rubric):
    rollouts, _ = play_group(lambda row, model: "good", renderer, rubric=rubric)
    assert [(one.status, one.is_scored) for one in rollouts] == [(RolloutStatus.COMPLETED, False)] * 2
    assert all("Returned by" in one.error for one in rollouts)


@pytest.mark.parametrize("is_async", [False, True])
def test_an_agent_that_was_refused_answers_is_truncated_for_its_rubric_too(renderer, is_async):
    def right(status, reason):
        assert (status, reason) == (RolloutStatus.TRUNCATED, "max_turns")
        return 1.0

    async def judge(status, reason):
        return right(status, reason)

    async def play(row, model):
        await ask_once(row, model)
        with contextlib.suppress(openai.PermissionDeniedError):
            await ask_once(row, model)
        return 0.5

    limits = RolloutLimits(max_turns=1)
    rollouts, _ = play_group(play, renderer, rubric=judge if is_async else right, limits=limits)
    expected = (RolloutStatus.TRUNCATED, 1.5, True, "max_turns")
    assert [(one.status, one.reward, one.is_scored, one.reason) for one in rollouts] == [expected] * 2


def test_agents_with_different_parts_are_stepped_together(renderer):
    results = iter([{"a": 1.0}, {"b": 2.0}, None, 3.0])
    both = threading.Barrier(4)

    def play(row, model):
        both.wait(60)
        return next(results)

    with make_collector(play, renderer, repeats=4) as collector:
        rollouts = collector.play(4)
    assert sorted((one.reward, one.breakdown, one.is_scored) for one in rollouts if one.breakdown or one.reward) == [
        (1.0, {"a": 1.0}, True),
        (2.0, {"b": 2.0}, True),
        (3.0, {}, True),
    ]
    assert [one.is_scored for one in rollouts].count(False) == 1


def test_what_an_agent_notes_is_in_its_record(renderer):
    async def play(row, model):
        model.info["seen"] = row["answer"]
        await ask_once(row, model, temperature=0.2)

    rollouts, _ = play_group(play, renderer)
    assert rollouts[0].to_record()["info"] == {
        "seen": "15",
        "requests": {"num_answered": 1, "overridden": {"temperature": 1}},
    }


def test_a_record_has_what_became_of_an_agents_requests(renderer):
    async def play(row, model, engine):
        engine.fail_next(1, EngineError("out of memory"))
        with contextlib.suppress(openai.InternalServerError):
            await ask_once(row, model)
        for num_answers in (1000, 2000):  # refused before the session is looked for
            with pytest.raises(openai.BadRequestError):
                await ask_once(row, model, n=num_answers)
        with pytest.raises(openai.BadRequestError, match="prompt is too long"):
            await ask_once({"query": "word " * 400}, model)
        for _ in range(3):  # of one prompt: each is a row
            await ask_once(row, model, temperature=0.2)

    limits = RolloutLimits(num_engine_retries=0, max_prompt_tokens=250)
    rollout = play_failing(renderer, play, limits=limits)
    requests = rollout.to_record()["info"]["requests"]
    assert requests.pop("last_message").startswith("prompt is too long")
    assert requests == {
        "num_answered": 3,
        "num_failed": 1,
        "refused": {"invalid_request_error": 2, "context_length_exceeded": 1},
        "overridden": {"temperature": 3},
    }
    metrics = rollout_metrics([rollout])
    assert metrics["agent/refused"] == 3 / 7 and metrics["agent/lost"] == 0
    assert metrics["agent/rows_per_turn"] == len(rollout.conversation.reconcile().rows) / 3 == 1


async def reward_over_http(model, reply_id, value, answer=0):
    """As an agent in another language gives a reward."""
    body = {"id": reply_id, "reward": value, "answer": answer}
    headers = {"Authorization": f"Bearer {model.api_key}"}
    async with (
        aiohttp.ClientSession(headers=headers) as client,
        client.post(f"{model.base_url}/rewards", json=body) as r,
    ):
        return r.status


@pytest.mark.parametrize("way", ["python", "http"])
def test_an_answers_reward_is_credited_to_it(renderer, way):
    first = iter([1.0, 0.25])

    async def play(row, model):
        client, messages = client_of(model), [{"role": "user", "content": row["query"]}]
        for number in range(3):
            answer = await client.chat.completions.create(model=model.name, messages=messages)
            if number == 0 and way == "python":
                model.reward(answer.id, next(first))
            elif number == 0:
                assert await reward_over_http(model, answer.id, next(first)) == 200
            said = {"role": "assistant", "content": answer.choices[0].message.content}
            messages += [said, {"role": "user", "content": "And?"}]
        return {"right": 0.5}

    advantage = MCAdvantage(grpo_size=2, normalization="mean", gamma=0.0)
    with make_collector(play, renderer, postproc=advantage) as collector:
        batch = next(iter(collector))
    for row in batch.unbind(0):
        given = row["reward_breakdown", "answers"].item()
        assert given in (1.0, 0.25) and row["next", "reward"].item() == given + 0.5
        assert row["turns", "reward"].tolist() == [given, 0.0, 0.5]
        starts, trained = row["turns", "start"].tolist(), row["masks", "all_assistant_mask"]
        credited = row["advantage"].flatten()
        # The mean of the first answers' rewards is 0.625; the others have the same.
        assert credited[trained][0].item() == given - 0.625
        assert credited[starts[0] : starts[1]][trained[starts[0] : starts[1]]].unique().tolist() == [given - 0.625]
        assert not credited[starts[1] :].any() and not credited[~trained].any()


def test_the_reward_of_a_branch_is_credited_to_what_led_to_it_and_the_score_to_all(renderer):
    rewards = iter([(8.0, 4.0, 2.0, 1.0), (0.0, 0.0, 0.0, 0.0)])

    async def play(row, model):
        async def ask(*messages):
            asked = [{"role": role, "content": text} for role, text in messages]
            answer = await client_of(model).chat.completions.create(model=model.name, messages=asked)
            return answer.id, (*messages, ("assistant", answer.choices[0].message.content))

        left, right, sub_agent, score = next(rewards)
        _, stem = await ask(("user", "a"))
        left_id, _ = await ask(*stem, ("user", "left"))
        right_id, _ = await ask(*stem, ("user", "right"))
        own_id, _ = await ask(("user", "a sub-agent's"))
        model.reward(left_id, left)
        model.reward(right_id, right)
        model.reward(own_id, sub_agent)
        return score

    answers = iter([f"{number}<|im_end|>" for number in (1, 2, 3, 4)] * 2)
    advantage = MCAdvantage(grpo_size=2, normalization="none", gamma=1.0)
    with make_collector(
        play, renderer, lambda prompt: next(answers), postproc=advantage, max_concurrent_rollouts=1
    ) as collector:
        batch = next(iter(collector))
    credited = {}
    for row in batch.unbind(0):
        if row["rollout", "sample_index"] == 0:
            ids, trained = row["tokens", "full"], row["masks", "all_assistant_mask"]
            for token, value in zip(ids[trained].tolist(), row["advantage"].flatten()[trained].tolist(), strict=True):
                credited.setdefault(renderer.decode([token]), set()).add(value)
    # The score is 1, and that of the last answer in the order of rows goes to all, as the score does.
    assert {text: credited[text] for text in "1234"} == {"1": {15.0}, "2": {11.0}, "3": {7.0}, "4": {3.0}}


def test_rewards_reach_the_answers_of_branches_and_of_one_reply(renderer):
    async def play(row, model):
        create = client_of(model).chat.completions.create
        asked = {"model": model.name, "messages": [{"role": "user", "content": row["query"]}]}
        first = await create(**asked, n=2)
        other = await create(model=model.name, messages=[{"role": "user", "content": "Something else."}])
        said = {"role": "assistant", "content": first.choices[0].message.content}
        await create(model=model.name, messages=[*asked["messages"], said, {"role": "user", "content": "And?"}])
        model.reward(other.id, 4.0)
        model.reward(first.id, 1.0)
        model.reward(first.id, 2.0, answer=1)
        model.reward(first.id, 0.5)
        for wrong in (("chatcmpl-0", 1.0), (first.id, float("nan")), (first.id, "good")):
            with pytest.raises(ValueError, match=r"no recorded answer|the reward must be"):
                model.reward(*wrong)
        assert await reward_over_http(model, "chatcmpl-0", 1.0) == 404
        assert await reward_over_http(model, first.id, None) == await reward_over_http(model, first.id, "1") == 400

    answers = ["15<|im_end|>", "2<|im_end|>", "7<|im_end|>", "8<|im_end|>"]
    with make_collector(play, renderer, answers, repeats=1) as collector:
        [rollout] = collector.play(1)
    assert rollout.is_scored and rollout.reward == 7.5 and rollout.breakdown == {"answers": 7.5}
    rows = rollout.conversation.reconcile().rows
    credited = {}
    for row in rows:
        for place, start in row.turn_starts.items():
            text = renderer.decode(row.columns.token_ids[start : start + 8]).partition("<|im_end|>")[0]
            credited.setdefault(text, set()).add(rollout.turn_rewards[place])
    turns = [(turn.conversation.messages[-1]["content"], turn) for turn in rollout.conversation.turns]
    expected = dict(zip((text for text, _ in turns), ({1.5}, {2.0}, {4.0}, {0.0}), strict=True))
    assert credited == expected


def test_an_answer_that_is_not_to_be_trained_is_not_recorded(renderer):
    async def play(row, model):
        await ask_once(row, model)
        client = client_of(model)
        title = [{"role": "user", "content": "A title, please."}]
        answer = await client.chat.completions.create(model=model.name, messages=title, extra_body={"train": False})
        with pytest.raises(ValueError, match="no recorded answer"):
            model.reward(answer.id, 1.0)
        await client.responses.create(model=model.name, input="A title.", extra_body={"train": False})
        assert model.aside.aside.name == "policy:aside" and model.aside.api_key == model.api_key
        await client.responses.create(model=model.aside.name, input="A judge.")
        return 1.0

    rollouts, engine = play_group(play, renderer)
    assert [one.num_turns for one in rollouts] == [1, 1] and len(engine.log) == 8
    assert rollouts[0].info["requests"] == {"num_answered": 4, "num_aside": 3}


def test_groups_that_fail_are_replaced(renderer):
    async def play(row, model):
        await ask_once(row, model)
        if row["answer"] == "15":
            raise ValueError("it fails on these")
        return 1.0

    rules = GroupRules(drop_failed_groups=True)
    with make_collector(play, renderer, group_rules=rules, max_staleness=1) as collector:
        batches = [next(iter(collector)) for _ in range(2)]
        rollouts = list(collector.rollouts)
    assert [len(batch) for batch in batches] == [2, 2]
    assert {row["rollout", "group_id"].rsplit("/")[-1] for batch in batches for row in batch.unbind(0)} == {"1"}
    assert {one.status for one in rollouts} == {RolloutStatus.COMPLETED, RolloutStatus.ERROR}


def test_a_collector_that_is_shut_down_cancels_its_agents(renderer):
    begun, ended = threading.Event(), threading.Event()

    async def play(row, model):
        await ask_once(row, model)
        begun.set()
        try:
            await asyncio.sleep(600)
        finally:
            ended.set()

    collector = make_collector(play, renderer)

    def wait():
        with contextlib.suppress(RuntimeError):
            next(iter(collector))

    threading.Thread(target=wait, daemon=True).start()
    assert begun.wait(60)
    url = collector._source.runner._endpoint._server.url
    collector.shutdown()
    assert ended.wait(60)
    with pytest.raises(openai.APIConnectionError):
        openai.OpenAI(base_url=url, api_key="x", max_retries=0).models.list()


def test_agents_are_evaluated(renderer):
    async def play(row, model):
        return float(await ask_once(row, model) == row["answer"])

    engine = LoggingEngine(["15<|im_end|>"], encode=renderer.encode, decode=renderer.decode)
    policy = LLMWrapperBase(engine, renderer=renderer)
    with Evaluator({"sums": AgentEnv(play, ROWS, repeats=2)}, policy) as evaluator:
        report = evaluator.evaluate()["sums"]
    assert report.pass_at[1].mean == 0.5 and report.num_problems == 2


def test_what_agents_need_is_asked_for_at_once(renderer):
    with pytest.raises(TypeError, match="play must be a function"):
        AgentEnv("mini", ROWS)
    engine = LoggingEngine([[1]])
    tokens = LLMWrapperBase(engine, input_mode="tokens")
    with pytest.raises(ValueError, match="build the policy with input_mode='history'"):
        LLMCollector(AgentEnv(ask_once, ROWS), policy=tokens, groups_per_batch=1)
    messages = LLMWrapperBase(engine, renderer=renderer)
    with pytest.raises(ValueError, match="agents speak messages"):
        LLMCollector(AgentEnv(ask_once, ROWS, policies={"other": tokens}), policy=messages, groups_per_batch=1)
    env = AgentEnv(ask_once, ROWS)
    data = env.reset()
    data["history"].full = data["history"].prompt
    with pytest.raises(RuntimeError, match="played by a collector"):
        env.step(data)
