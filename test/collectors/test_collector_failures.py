"""Whatever escapes from code of users, wherever: it ends its own rollout, and collection goes on."""

from __future__ import annotations

import asyncio
import queue
import random
import threading
import time
from collections import Counter
from concurrent.futures import Future

import pytest
from torchrl.envs import Transform
from waiting import wait_until

from llmrl._utils.background_loop import BackgroundLoop
from llmrl._utils.failure import EscapedError, contained
from llmrl._utils.replaceable_loop import ReplaceableLoop
from llmrl.collectors import CollectionStalled, GroupRules, LLMCollector, RolloutLimits
from llmrl.collectors.gates import DemandGate, StalenessGate
from llmrl.collectors.scheduler import RolloutScheduler, RolloutTask
from llmrl.data import ChatHistory, Rollout, RolloutStatus, StopReason
from llmrl.envs import DatasetChatEnv, MessageChatEnv, MessageEnv, MessageStep
from llmrl.envs.stepper import EnvStepper
from llmrl.policies import LLMWrapperBase
from llmrl.rewards import RewardFn, Rubric
from llmrl.testing import ScriptedEngine, run_in_virtual_time
from llmrl.transforms import RubricReward, ToolTransform

ESCAPING = [RuntimeError, SystemExit, asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, StopIteration]
ELSEWHERE = [error for error in ESCAPING if error is not KeyboardInterrupt]
"""What may escape on the main thread, where `KeyboardInterrupt` is the process's own."""
PROMPTS = [{"query": f"prompt {index}", "number": index} for index in range(len(ESCAPING) + 1)]
CALL = '<tool_call>{"name": "work", "arguments": {}}</tool_call><|im_end|>'


def ends(function, seconds=120.0):
    """The result of a function that must end by itself."""
    outcome = []

    def work():
        try:
            outcome.append((function(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    assert outcome, f"it did not end in {seconds:g} s"
    result, error = outcome[0]
    if error is not None:
        raise error
    return result


def fail(number):
    if number < len(ESCAPING):
        raise ESCAPING[number]("on purpose")


@pytest.fixture
def make_policy(renderer):
    def make(script=("1<|im_end|>",), **engine_kwargs):
        engine = ScriptedEngine(script, encode=renderer.encode, decode=renderer.decode, **engine_kwargs)
        return LLMWrapperBase(engine, renderer=renderer)

    return make


class Talk(MessageEnv):
    """Asks, is answered, and says done."""

    def __init__(self, item):
        self.item = item

    async def init(self):
        return [{"role": "user", "content": f"number {self.item.get('number', 0)}"}]

    async def step(self, message):
        return MessageStep(reward=1.0, is_done=True)


def failing_env(place):
    """An environment in which conversation `number` fails at a place, as `fail` says."""
    if place in ("init", "step"):

        class Failing(Talk):
            async def init(self):
                if place == "init":
                    fail(self.item["number"])
                return await super().init()

            async def step(self, message):
                fail(self.item["number"])
                return await super().step(message)

        return MessageChatEnv(Failing, PROMPTS)

    def reward(number):
        fail(number)
        return 1.0

    async def judge(number):
        await asyncio.sleep(0)
        fail(number)
        return 1.0

    class WholeRubric(Rubric):
        async def score(self, rollout):
            fail(rollout.columns["number"])
            return await super().score(rollout)

    class Stepping(Transform):
        def _step(self, tensordict, next_tensordict):
            for element in tensordict.unbind(0) if tensordict.batch_size else [tensordict]:
                fail(element["number"])
            return next_tensordict

        def _reset(self, tensordict, tensordict_reset):
            return tensordict_reset

    class Resetting(Stepping):
        def _step(self, tensordict, next_tensordict):
            return next_tensordict

        def _reset(self, tensordict, tensordict_reset):
            for element in tensordict_reset.unbind(0) if tensordict_reset.batch_size else [tensordict_reset]:
                fail(element["number"])
            return tensordict_reset

    class Before(Resetting):
        def _reset(self, tensordict, tensordict_reset):
            return tensordict_reset

        async def before_step(self, element):
            await asyncio.sleep(0)
            fail(element["number"])

    env = DatasetChatEnv(PROMPTS, num_epochs=1)
    if place in ("transform", "reset", "before_step"):
        part = {"transform": Stepping, "reset": Resetting, "before_step": Before}[place]()
        env = env.append_transform(part)
    scoring = {"reward": reward, "judge": judge, "rubric": WholeRubric(RewardFn(lambda: 1.0, name="one"))}
    return env.append_transform(RubricReward(scoring.get(place, RewardFn(lambda: 1.0, name="one"))))


@pytest.mark.parametrize(
    "place", ["init", "step", "reward", "judge", "rubric", "transform", "reset", "before_step", "engine"]
)
def test_whatever_escapes_costs_its_rollout_alone(place, make_policy, renderer):
    def script(prompt_ids):
        text = renderer.decode(prompt_ids)
        fail(next(number for number in range(len(PROMPTS)) if f"prompt {number}" in text))
        return "1<|im_end|>"

    env = failing_env(place if place != "engine" else "nowhere")
    policy = make_policy(script if place == "engine" else ["1<|im_end|>"])
    with LLMCollector(env, policy=policy, groups_per_batch=1) as collector:
        rollouts = ends(lambda: collector.play(len(PROMPTS)))
    assert [rollout.is_scored for rollout in rollouts] == [False] * len(ESCAPING) + [True]
    for rollout, error in zip(rollouts, ESCAPING, strict=False):
        assert error.__name__ in rollout.error or error is StopIteration  # which a coroutine makes a RuntimeError
        if place not in ("reward", "judge"):  # there the rollout is well, and has no score
            assert rollout.status is RolloutStatus.ERROR
            assert "in fail" in rollout.traceback
        else:
            assert rollout.status is RolloutStatus.COMPLETED


@pytest.mark.parametrize("place", ["step", "reward", "judge", "reset", "engine"])
def test_a_collector_that_is_iterated_goes_on_past_whatever_escapes(place, make_policy, renderer):
    numbers = iter([0, 1, 2, 3, 4, 5, 6, *[6] * 50])
    policy = make_policy()
    if place == "engine":
        policy = make_policy(lambda prompt_ids: fail(next(numbers)) or "1<|im_end|>")
    env = failing_env(place)
    with LLMCollector(env, policy=policy, groups_per_batch=1, max_concurrent_rollouts=3) as collector:
        batch = ends(collector.next)
        seen = Counter(rollout.rollout_id for rollout in collector.rollouts)
    assert len(batch) == 1 and set(seen.values()) == {1} and len(seen) >= len(ESCAPING)


def test_the_first_error_of_a_function_that_prepares_queries_is_logged_with_its_place(make_policy, caplog):
    def prepare(row):
        if row["query"] in ("b", "c"):
            raise KeyError("question")
        return row["query"]

    env = DatasetChatEnv([{"query": query} for query in "abcd"], repeats=2, prepare=prepare, num_epochs=1)
    env = env.append_transform(RubricReward(RewardFn(lambda: 1.0, name="one")))
    with LLMCollector(env, policy=make_policy(), groups_per_batch=2) as collector:
        assert set(collector.next()["rollout", "group_id"]) == {"train/0/0", "train/0/3"}
    [record] = [record for record in caplog.records if "a prompt could not be opened" in record.message]
    assert repr(record.exc_info[1]) == "KeyError('question')" and "in prepare" in caplog.text


def test_a_rule_that_escapes_is_raised_and_the_next_batch_comes(make_policy):
    raised = iter(ESCAPING)

    def rule(rollout):
        error = next(raised, None)
        if error is not None:
            raise error("on purpose")
        return True

    env = DatasetChatEnv(PROMPTS).append_transform(RubricReward(RewardFn(lambda: 1.0, name="one")))
    rules = GroupRules(rollout_filter=rule)
    with LLMCollector(env, policy=make_policy(), groups_per_batch=1, group_rules=rules) as collector:
        for error in ESCAPING:
            expected = RuntimeError if issubclass(error, Exception) else EscapedError
            with pytest.raises(expected, match=f"on purpose|{error.__name__}"):
                ends(collector.next)
        assert len(ends(collector.next)) == 1


def test_the_model_gets_the_error_of_a_tool_that_escapes(make_policy):
    errors = iter(ESCAPING)

    async def work():
        """Work."""
        raise next(errors)("on purpose")

    script = [CALL] * len(ESCAPING) + ["done<|im_end|>"]
    env = DatasetChatEnv(PROMPTS).append_transform(ToolTransform([work]))
    env = env.append_transform(RubricReward(RewardFn(lambda: 1.0, name="one")))
    with LLMCollector(env, policy=make_policy(script), groups_per_batch=1) as collector:
        (rollout,) = ends(lambda: collector.play(1))
    assert rollout.status is RolloutStatus.COMPLETED
    told = [message["content"] for message in rollout.messages if message["role"] == "tool"]
    assert len(told) == len(ESCAPING) and all("failed with" in text for text in told)


@pytest.mark.slow
def test_a_tool_that_blocks_its_thread_stops_no_judge(make_policy, clock):
    judging, is_blocked, goes_on = [], threading.Event(), threading.Event()

    class Blocking(Transform):
        async def before_step(self, element):
            if element["number"] == 0:
                while len(judging) < 3:
                    await asyncio.sleep(0.01)
                clock.pass_limit(600)
                is_blocked.set()
                assert goes_on.wait(240)

        def _step(self, tensordict, next_tensordict):
            return next_tensordict

        def _reset(self, tensordict, tensordict_reset):
            return tensordict_reset

    async def judge(number):
        judging.append(number)
        while not is_blocked.is_set():
            await asyncio.sleep(0.01)
        return 1.0

    env = DatasetChatEnv(PROMPTS[:4]).append_transform(Blocking()).append_transform(RubricReward(judge))
    with LLMCollector(
        env, policy=make_policy(), groups_per_batch=1, limits=RolloutLimits(step_timeout_seconds=600)
    ) as collector:
        blocked, *others = ends(lambda: collector.play(4))
        goes_on.set()
    assert blocked.status is RolloutStatus.ERROR and "more than 600 s" in blocked.error
    assert all(rollout.is_scored for rollout in others)


class Waiting(Transform):
    """Each step waits until it may go on."""

    def __init__(self):
        super().__init__()
        self.begun, self.goes_on = threading.Event(), threading.Event()

    def _step(self, tensordict, next_tensordict):
        self.begun.set()
        self.goes_on.wait(60)
        return next_tensordict

    def _reset(self, tensordict, tensordict_reset):
        return tensordict_reset


async def answered_prompt(stepper):
    """A conversation of the stepper's environment that is ready for a step."""
    element = await stepper.call(stepper.env.reset)
    prompt = element["history"].prompt
    element["history"] = ChatHistory(full=prompt.append({"role": "assistant", "content": "1"}), batch_size=())
    return element


def test_a_step_that_blocks_for_ever_loses_nothing_that_waits_for_its_thread():
    waiting = Waiting()
    before = set(threading.enumerate())

    def own_threads():
        return [thread for thread in set(threading.enumerate()) - before if thread.name == "llmrl-env"]

    async def main():
        stepper = EnvStepper(DatasetChatEnv(PROMPTS).append_transform(waiting), timeout_seconds=0.2)
        stepping = asyncio.ensure_future(stepper.step(await answered_prompt(stepper)))
        await asyncio.sleep(0.05)
        assert await stepper.call(max, 1, 2) == 2
        with pytest.raises(TimeoutError, match=r"more than 0\.2 s"):
            await stepping
        assert all(thread.daemon for thread in own_threads())
        stepper.shutdown()

    ends(lambda: asyncio.run(main()))
    waiting.goes_on.set()
    wait_until(lambda: not own_threads())


def test_a_step_that_ended_in_time_is_not_late_if_the_loop_was_blocked():
    waiting, ended = Waiting(), threading.Event()

    async def main():
        stepper = EnvStepper(DatasetChatEnv(PROMPTS).append_transform(waiting), timeout_seconds=60.0)
        element = await answered_prompt(stepper)
        stepping = asyncio.ensure_future(stepper.step(element))
        await asyncio.to_thread(waiting.begun.wait, 60)
        calling = asyncio.ensure_future(stepper.call(ended.set))  # begins when the step has ended
        await asyncio.sleep(0)
        waiting.goes_on.set()
        assert ended.wait(60)
        asyncio.get_running_loop().time = lambda: time.monotonic() + 90  # as if it had been blocked for so long
        assert (await stepping)[0] is element
        await calling
        stepper.shutdown()

    ends(lambda: asyncio.run(main()))


def test_an_engine_s_own_time_out_is_no_rollout_s(make_policy):
    policy = make_policy()
    policy.engine.fail_next(1, TimeoutError("the engine's own"))
    env = MessageChatEnv(Talk)
    limits = RolloutLimits(rollout_timeout_seconds=60.0)
    with LLMCollector(env, policy=policy, groups_per_batch=1, limits=limits) as collector:
        (rollout,) = collector.play(1)
    assert (rollout.status, rollout.reason) == (RolloutStatus.ERROR, StopReason.ENGINE_ERROR)


# Environments of messages


class Speaking(Talk):
    """Holds a process that belongs to the event loop which started it."""

    closed: list = []  # noqa: RUF012

    async def init(self):
        self.loops = [asyncio.get_running_loop()]
        self.process = await asyncio.create_subprocess_exec(
            "cat", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        return [{"role": "user", "content": "go"}]

    async def step(self, message):
        self.loops.append(asyncio.get_running_loop())
        self.process.stdin.write(b"echoed\n")
        await self.process.stdin.drain()
        answer = (await self.process.stdout.readline()).decode().strip()
        return MessageStep([{"role": "user", "content": answer}], reward=1.0, is_done=len(self.loops) == 3)

    async def close(self):
        self.loops.append(asyncio.get_running_loop())
        self.process.stdin.close()
        assert await self.process.wait() == 0
        self.closed.append(self)


@pytest.mark.parametrize("is_collected", [True, False])
def test_init_step_and_close_run_in_one_loop(is_collected, make_policy):
    Speaking.closed = []
    env = MessageChatEnv(Speaking)
    policy = make_policy()
    if is_collected:
        with LLMCollector(env, policy=policy, groups_per_batch=1) as collector:
            for rollout in ends(lambda: collector.play(3)):
                assert rollout.status is RolloutStatus.COMPLETED
                assert [m["content"] for m in rollout.messages if m["role"] == "user"] == ["go", "echoed", "echoed"]
    else:
        data = env.rollout(5, policy)
        assert data["next", "reward"].sum() == 2.0
        env.release(data[0])
    assert len(Speaking.closed) == (3 if is_collected else 1)
    assert all(len(spoken.loops) == 4 and len(set(spoken.loops)) == 1 for spoken in Speaking.closed)
    env.close()


def test_an_init_that_is_slow_or_fails_is_its_own_conversation_s(make_policy):
    opened, closed, may_open = [], [], threading.Event()

    class Opening(Talk):
        async def init(self):
            if self.item["number"] == 0:
                while not may_open.is_set():
                    await asyncio.sleep(0.01)
            if self.item["number"] == 1:
                raise ValueError("no such place")
            opened.append(self.item["number"])
            return await super().init()

        async def close(self):
            closed.append(self.item["number"])

    env = MessageChatEnv(Opening, PROMPTS[:5], num_epochs=1)
    with LLMCollector(env, policy=make_policy(), groups_per_batch=1) as collector:
        played = threading.Thread(target=lambda: opened.append(collector.play(4)), daemon=True)
        played.start()
        wait_until(lambda: {2, 3} <= set(closed))  # all of it, while the first waits
        may_open.set()
        played.join(240)
        rollouts = opened[-1]
        assert [rollout.status.name for rollout in rollouts] == ["COMPLETED", "ERROR", "COMPLETED", "COMPLETED"]
        assert rollouts[1].error == "ValueError: no such place" and "in init" in rollouts[1].traceback
        assert sorted(closed) == [0, 1, 2, 3]
        state = collector.state_dict()
    assert state["env"]["prompts"]["position"] == 4


def test_prompts_whose_conversations_open_are_in_the_state(make_policy):
    is_opening, may_open = threading.Event(), threading.Event()

    class Opening(Talk):
        async def init(self):
            is_opening.set()
            while not may_open.is_set():
                await asyncio.sleep(0.01)
            return await super().init()

    env = MessageChatEnv(Opening, PROMPTS[:4], num_epochs=1)
    with LLMCollector(env, policy=make_policy(), groups_per_batch=4) as collector:
        waiting = threading.Thread(target=collector.next, daemon=True)
        waiting.start()
        assert is_opening.wait(240)
        state = ends(collector.state_dict)
        may_open.set()
        waiting.join(240)
    assert sorted(state["env"]["prompts"]["again"]) == [0, 1, 2, 3]


def test_an_environment_speaks_after_the_tools(make_policy):
    def work() -> str:
        """Work."""
        return "worked"

    class Beside(Talk):
        async def step(self, message):
            if message.get("tool_calls"):
                return MessageStep([{"role": "user", "content": "and now?"}])
            return MessageStep(is_done=True)

    env = MessageChatEnv(Beside).append_transform(ToolTransform([work]))
    with LLMCollector(env, policy=make_policy([CALL, "done<|im_end|>"]), groups_per_batch=1) as collector:
        (rollout,) = ends(lambda: collector.play(1))
    assert [message["role"] for message in rollout.messages] == ["user", "assistant", "tool", "user", "assistant"]
    assert rollout.status is RolloutStatus.COMPLETED


def test_a_close_that_hangs_or_raises_harms_no_other_conversation(make_policy, clock, caplog):
    class Closing(Talk):
        async def close(self):
            if self.item["number"] == 0:
                raise SystemExit(3)
            if self.item["number"] == 1:
                while collector.num_played < 3:  # the others
                    await asyncio.sleep(0.001)
                clock.pass_limit(600)
                await asyncio.Event().wait()

    env = MessageChatEnv(Closing, PROMPTS[:4])
    with LLMCollector(
        env, policy=make_policy(), groups_per_batch=1, limits=RolloutLimits(step_timeout_seconds=600)
    ) as collector:
        rollouts = ends(lambda: collector.play(4))
    assert [rollout.status for rollout in rollouts] == [RolloutStatus.COMPLETED] * 4
    assert all(rollout.is_scored for rollout in rollouts)
    assert sum("release failed" in record.message for record in caplog.records) == 2
    env.close()


# Engines


def test_updates_that_abort_end_no_request_that_only_waits(make_policy):
    policy = make_policy(["1 2 3<|im_end|>"], latency_s=1000.0, max_num_seqs=4)
    engine = policy.engine
    with LLMCollector(MessageChatEnv(Talk, PROMPTS), policy=policy, groups_per_batch=1) as collector:
        rollouts = []
        playing = threading.Thread(target=lambda: rollouts.extend(collector.play(20)), daemon=True)
        playing.start()
        for version in range(1, 6):
            wait_until(lambda: engine.num_in_flight == 20)
            num_requests = len(engine.requests)
            engine.pause("abort")
            wait_until(lambda count=num_requests + 20: len(engine.requests) == count)
            engine.policy_version = version
            if version == 5:
                engine._latency_s, engine._max_num_seqs = 0.0, 100
                engine.pause("abort")
                wait_until(lambda count=num_requests + 40: len(engine.requests) == count)
            engine.resume()
        playing.join(240)
    assert [rollout.status for rollout in rollouts] == [RolloutStatus.COMPLETED] * 20


def test_two_collectors_share_an_engine(make_policy):
    policy = make_policy(latency_s=0.02)

    def collect():
        with LLMCollector(MessageChatEnv(Talk, PROMPTS), policy=policy, groups_per_batch=7) as collector:
            collector.next()
            return collector.rollouts

    results = []
    threads = [threading.Thread(target=lambda: results.append(collect()), daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    assert [rollout.status for rollouts in results for rollout in rollouts] == [RolloutStatus.COMPLETED] * 14


# Who asks for batches


def test_two_threads_get_each_batch_once(make_policy):
    env = MessageChatEnv(Talk, PROMPTS * 4, num_epochs=1)
    seen = []
    with LLMCollector(env, policy=make_policy(latency_s=0.005), groups_per_batch=2) as collector:

        def draw():
            try:
                while True:
                    seen.extend(collector.next()["rollout", "rollout_id"])
            except StopIteration:
                return

        threads = [threading.Thread(target=draw, daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(240)
    assert Counter(seen) == Counter(f"train/0/{index}/0" for index in range(28))


def test_what_is_dropped_after_the_last_batch_is_reported(make_policy):
    class Failing(Talk):
        async def step(self, message):
            if self.item["number"] >= 2:
                raise ValueError("broken")
            return await super().step(message)

    env = MessageChatEnv(Failing, PROMPTS[:5], num_epochs=1)
    seen = Counter()
    with LLMCollector(env, policy=make_policy(), groups_per_batch=2, max_concurrent_rollouts=1) as collector:
        for _ in collector:
            seen.update(rollout.rollout_id for rollout in collector.rollouts)
        seen.update(rollout.rollout_id for rollout in collector.rollouts)
        assert collector.report.num_dropped_by_reason == {StopReason.ENVIRONMENT_ERROR: 3}
    assert seen == Counter(f"train/0/{index}/0" for index in range(5))


def test_after_shutdown_it_is_said(make_policy):
    collector = LLMCollector(MessageChatEnv(Talk), policy=make_policy(), groups_per_batch=1)
    collector.next()
    collector.shutdown()
    with pytest.raises(RuntimeError, match="was shut down"):
        collector.next()
    with pytest.raises(RuntimeError, match="was shut down"):
        next(iter(collector))


# Loops


def test_a_batch_that_is_waited_for_at_a_shutdown_is_a_runtime_error(make_policy):
    collector = LLMCollector(DatasetChatEnv(PROMPTS), policy=make_policy(latency_s=600.0), groups_per_batch=1)
    threading.Timer(0.2, collector.shutdown).start()
    with pytest.raises(RuntimeError, match="shut down"):
        ends(collector.next)


def test_a_shutdown_while_iteration_waits_for_a_full_queue_is_a_runtime_error(make_policy):
    class Full(queue.Queue):
        closing = None

        def put(self, item, *, timeout):
            if self.closing is None:
                self.closing = threading.Thread(target=collector.shutdown)
                self.closing.start()
            time.sleep(0.01)
            raise queue.Full

    env = DatasetChatEnv(PROMPTS).append_transform(RubricReward(RewardFn(lambda: 1.0, name="one")))
    collector = LLMCollector(env, policy=make_policy(), groups_per_batch=1, queue=Full())
    with pytest.raises(RuntimeError, match="shut down"):
        ends(lambda: next(iter(collector)))


def test_an_interrupt_that_comes_when_a_batch_is_ready_loses_nothing(make_policy, monkeypatch):
    result, own_thread = Future.result, threading.get_ident()

    def interrupted(future, timeout=None):
        if threading.get_ident() != own_thread:  # the collector's loop waits for other things
            return result(future, timeout)
        monkeypatch.undo()
        future.result(timeout)
        raise KeyboardInterrupt

    env = DatasetChatEnv([{"query": str(number), "number": number} for number in range(4)])
    with LLMCollector(env, policy=make_policy(), groups_per_batch=2) as collector:
        monkeypatch.setattr(Future, "result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            collector.next()
        played = [rollout.columns["number"] for _ in range(2) for rollout in (collector.next(), collector.rollouts)[1]]
    assert sorted(played) == [0, 1, 2, 3]


def test_a_background_loop_outlives_whatever_escapes():
    loop = BackgroundLoop("test")

    async def escape(error):
        if error is asyncio.CancelledError:
            asyncio.current_task().cancel()
            await asyncio.sleep(0)
        raise error("on purpose")

    async def leave_behind(error):
        asyncio.get_running_loop().create_task(escape(error))

    async def main():
        for error in ESCAPING[1:5]:
            with pytest.raises(EscapedError, match=error.__name__):
                await loop.wait(escape(error))
            await loop.wait(leave_behind(error))
            assert await loop.wait(asyncio.sleep(0, result=42)) == 42

    asyncio.run(main())
    loop.close()
    assert not loop.thread.is_alive()


def test_a_cancellation_is_the_caller_s_or_a_failure():
    async def main():
        with pytest.raises(EscapedError, match="CancelledError"):
            await contained(cancel_oneself())
        waiting = asyncio.ensure_future(contained(asyncio.sleep(1000)))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    async def cancel_oneself():
        asyncio.current_task().cancel()
        await asyncio.sleep(0)

    asyncio.run(main())


def test_what_begins_while_a_thread_is_blocked_has_another(monkeypatch, caplog):
    monkeypatch.setattr("llmrl._utils.replaceable_loop._LOOK_SECONDS", 0.05)
    monkeypatch.setattr("llmrl._utils.replaceable_loop._GRACE_SECONDS", 0.05)
    loops, is_blocked, goes_on = ReplaceableLoop("test"), threading.Event(), threading.Event()

    async def block():
        is_blocked.set() or goes_on.wait(60)  # one line, which is in the stack whenever it is blocked
        return threading.get_ident()

    async def here():
        return threading.get_ident()

    async def main():
        blocking = asyncio.ensure_future(loops.wait(block()))
        while not is_blocked.is_set():
            await asyncio.sleep(0.01)
        elsewhere = await asyncio.gather(loops.wait(here()), loops.wait(here()))
        goes_on.set()
        assert await blocking not in elsewhere
        wait_until(lambda: not loops._loops[0].overdue_seconds)
        assert await loops.wait(here()) == await blocking  # the first is used again

    ends(lambda: asyncio.run(main()))
    assert "goes_on.wait(60)" in caplog.text
    loops.close()


# Everything at once


class BrokenSource:
    """Plays rollouts that take their time and fail in every way, without threads: for a loop of virtual time."""

    def __init__(self, draw, num_groups, group_size):
        self.draw, self.num_left, self.group_size, self.num_opened = draw, num_groups, group_size, 0
        self.policy_version = 0

    def maybe_fail(self):
        if self.draw.random() < 0.1:
            raise self.draw.choice(ELSEWHERE)("on purpose")

    async def open(self, num_groups):
        await asyncio.sleep(self.draw.random())
        self.maybe_fail()
        num_groups = min(num_groups, self.num_left)
        self.num_left -= num_groups
        groups = []
        for _ in range(num_groups):
            group_id = f"g{self.num_opened}"
            self.num_opened += 1
            groups.append([
                RolloutTask(records=[Rollout(rollout_id=f"{group_id}/{index}", group_id=group_id, sample_index=index,
                                     group_size=self.group_size)])
                for index in range(self.group_size)
            ])  # fmt: skip
        return groups

    async def play(self, job):
        await asyncio.sleep(self.draw.random() * 3)
        if self.draw.random() < 0.05:
            asyncio.current_task().cancel()
            await asyncio.sleep(0)
        self.maybe_fail()
        (rollout,) = job.records
        rollout.status, rollout.is_scored, rollout.num_completion_tokens = RolloutStatus.COMPLETED, True, 1
        return [rollout]

    async def score_group(self, rollouts):
        await asyncio.sleep(self.draw.random())
        self.maybe_fail()


class SoundSource(BrokenSource):
    def maybe_fail(self):
        return None


def test_a_group_that_was_dropped_is_in_the_state_until_that_is_reported():
    class Source(SoundSource):
        async def open(self, num_groups):
            groups = await super().open(num_groups)
            for group in groups:
                group[0].positions = (int(group[0].records[0].group_id[1:]),)
            return groups

        async def play(self, job):
            (rollout,) = await super().play(job)
            rollout.is_scored = job.positions != (0,)
            return [rollout]

    async def collect():
        source = Source(random.Random(1), num_groups=9, group_size=1)
        scheduler = RolloutScheduler(source, DemandGate(2), rules=GroupRules(), max_concurrent_rollouts=1)
        asking = asyncio.ensure_future(scheduler.next_batch())
        states = []
        while not asking.done():
            await asyncio.sleep(0.1)
            async with scheduler.frozen() as unfinished:
                states.append(sorted(unfinished))
        scheduler.mark_delivered()
        async with scheduler.frozen() as unfinished:
            states.append(unfinished)
        await scheduler.stop()
        return states, [rollout.rollout_id for rollout, _ in (await asking).dropped]

    states, dropped = run_in_virtual_time(collect())
    assert dropped == ["g0/0"]
    assert [state for index, state in enumerate(states) if not index or state != states[index - 1]][-3:] == [
        [0, 1],
        [0, 1, 2],
        [],
    ]


def test_a_member_that_was_dropped_is_reported_with_its_group():
    class Source(SoundSource):
        async def play(self, job):
            (rollout,) = await super().play(job)
            rollout.is_scored = rollout.sample_index > 0
            return [rollout]

    async def collect():
        scheduler = RolloutScheduler(
            Source(random.Random(2), num_groups=6, group_size=2),
            StalenessGate(2, max_staleness=1),
            rules=GroupRules(),
            max_concurrent_rollouts=8,
        )
        deliveries = []
        while (delivery := await scheduler.next_batch()) is not None:
            await asyncio.sleep(20)  # others settle meanwhile
            deliveries.append(delivery)
        await scheduler.stop()
        return deliveries

    for delivery in run_in_virtual_time(collect()):
        delivered = {rollout.group_id for group in delivery.groups for rollout in group}
        assert {rollout.group_id for rollout, _ in delivery.dropped} == delivered


def test_rollouts_that_are_given_up_before_they_begin_take_no_room():
    class Source(SoundSource):
        async def open(self, num_groups):
            groups = await super().open(num_groups)
            if self.policy_version == 0:  # before the tasks of these groups begin, they are a version too old
                self.policy_version = 1
                self.asking.cancel()
                self.asking = asyncio.create_task(self.scheduler.next_batch())
            return groups

    async def collect():
        source = Source(random.Random(3), num_groups=8, group_size=2)
        source.scheduler = RolloutScheduler(
            source, StalenessGate(2, max_staleness=0), rules=GroupRules(), max_concurrent_rollouts=4
        )
        source.asking = asyncio.create_task(source.scheduler.next_batch())
        await asyncio.wait([source.asking])  # it was taken back
        delivery = await asyncio.wait_for(source.asking, 1000)
        await source.scheduler.stop()
        return delivery, source.scheduler.num_running

    delivery, num_running = run_in_virtual_time(collect())
    assert len(delivery.groups) == 2 and num_running == 0


@pytest.mark.parametrize("num_pauses", [1, 2])
def test_rollouts_that_wait_for_their_places_start_after_the_last_pause(num_pauses):
    """Two rollouts of a group of four may play at once; they end within the pause."""

    class Source(SoundSource):
        num_started = 0

        async def play(self, job):
            self.num_started += 1
            return await super().play(job)

    async def collect():
        source = Source(random.Random(4), num_groups=1, group_size=4)
        scheduler = RolloutScheduler(source, DemandGate(1), rules=GroupRules(), max_concurrent_rollouts=2)
        asking = asyncio.ensure_future(scheduler.next_batch())
        while not source.num_started:
            await asyncio.sleep(0.01)
        for _ in range(num_pauses):
            await scheduler.pause()
        for _ in range(num_pauses - 1):
            scheduler.resume()
        await asyncio.sleep(1000)
        num_started, num_running = source.num_started, scheduler.num_running
        scheduler.resume()
        delivery = await asyncio.wait_for(asking, 1000)
        await scheduler.stop()
        return num_started, num_running, source.num_started, len(delivery.rollouts)

    assert run_in_virtual_time(collect()) == (2, 0, 4, 4)


@pytest.mark.parametrize("seed", range(30))
def test_every_rollout_of_a_scheduler_is_accounted_for_once(seed):
    draw = random.Random(seed)
    source = BrokenSource(draw, num_groups=draw.randint(1, 25), group_size=draw.randint(1, 4))
    gate = DemandGate(draw.randint(1, 4))
    scheduler = RolloutScheduler(
        source, gate, rules=GroupRules(), max_concurrent_rollouts=draw.randint(1, 12), patience=1000
    )
    seen = Counter()

    async def collect():
        while True:
            try:
                delivery = await asyncio.wait_for(scheduler.next_batch(), 10_000)
            except (RuntimeError, CollectionStalled):  # raised in every caller, which may ask again
                continue
            if delivery is None:
                break
            seen.update(rollout.rollout_id for group in delivery.groups for rollout in group)
            seen.update(rollout.rollout_id for rollout, _ in delivery.dropped)
        await scheduler.stop()
        return [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    assert run_in_virtual_time(collect()) == []
    size = source.group_size
    assert seen == Counter(f"g{group}/{index}" for group in range(source.num_opened) for index in range(size))


def test_nothing_is_left_of_a_collector(make_policy):
    before = {thread.name for thread in threading.enumerate()}
    env = failing_env("step")
    for _ in range(2):
        with LLMCollector(env, policy=make_policy(), groups_per_batch=1) as collector:
            ends(lambda collector=collector: collector.play(7))
    env.close()
    deadline = time.monotonic() + 240
    while (left := {thread.name for thread in threading.enumerate()} - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left
