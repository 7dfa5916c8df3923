"""TorchRL's arguments and methods of collectors: each has its meaning here, or an error that says what to do."""

from __future__ import annotations

import pickle
import queue
import threading
import time

import pytest
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs import AsyncEnvPool, StepCounter

from llmrl._utils.arguments import keywords_of
from llmrl.collectors import DropReason, LLMCollector, RayLLMCollector, RolloutLimits
from llmrl.collectors.collector import CollectorOptions
from llmrl.collectors.ray_collector import _ahead
from llmrl.envs import DatasetChatEnv, MessageChatEnv, MessageEnv, MessageStep
from llmrl.policies import LLMWrapperBase
from llmrl.testing import ScriptedEngine
from llmrl.transforms import PolicyVersion


class Talk(MessageEnv):
    """Three turns."""

    def __init__(self, item):
        self.turn = 0

    async def init(self):
        return [{"role": "user", "content": "go"}]

    async def step(self, message):
        self.turn += 1
        return MessageStep([{"role": "user", "content": "again"}], reward=1.0, is_done=self.turn == 3)


@pytest.fixture
def make_collector(renderer):
    def make(latency_s=0.0, **arguments):
        engine = ScriptedEngine(["1<|im_end|>"], encode=renderer.encode, latency_s=latency_s)
        env = MessageChatEnv(Talk, [{}])
        return LLMCollector(env, policy=LLMWrapperBase(engine, renderer=renderer), **arguments)

    return make


def test_a_typo_is_answered_with_the_nearest_name(make_collector):
    with pytest.raises(TypeError, match="did you mean 'groups_per_batch'"):
        make_collector(group_per_batch=1)
    with pytest.raises(TypeError, match="RayLLMCollector has no argument 'remote_cfg'; did you mean 'remote_config'"):
        RayLLMCollector(lambda: None, policy_factory=lambda: None, groups_per_batch=1, remote_cfg={})
    with make_collector(groups_per_batch=1) as collector, pytest.raises(AttributeError, match="has no 'nxt'"):
        collector.nxt()


def test_a_collector_on_ray_takes_what_one_in_this_process_takes():
    own = {"env", "policy", "policy_factory"}
    assert set(CollectorOptions.__annotations__) == set(keywords_of(LLMCollector.__init__)) - own


def test_contradictions_are_refused(make_collector):
    for arguments, words in (
        ({"groups_per_batch": 1, "async_envs": False}, "max_concurrent_rollouts=1"),
        ({"groups_per_batch": 1, "flatten_data": False}, "yield_completed_trajectories=True"),
        ({"yield_only_last_steps": True, "yield_completed_trajectories": False}, "leave yield_completed"),
        ({"groups_per_batch": 1, "queue": queue.Queue(), "replay_buffer": object()}, "one of them"),
        ({"groups_per_batch": 1, "reset_at_each_iter": True, "max_staleness": 1}, "pass one of them"),
    ):
        with pytest.raises(ValueError, match=words):
            make_collector(**arguments)
    with pytest.raises(TypeError, match="put"):
        make_collector(groups_per_batch=1, queue=[])
    with pytest.raises(ValueError, match="function that builds"):
        RayLLMCollector(MessageChatEnv(Talk, [{}]), policy_factory=lambda: None, groups_per_batch=1)


def test_what_torchrl_asks_for_and_is_so_anyway_is_taken(make_collector, capsys):
    arguments = {"async_envs": True, "flatten_data": True, "yield_completed_trajectories": None, "verbose": True}
    with make_collector(dialog_turns_per_batch=3, **arguments) as collector:
        assert (collector.dialog_turns_per_batch, collector.is_initialized()) == (3, True)
        assert collector.next().shape == (3,)
        assert collector.policy_version == collector.get_policy_version() == 0
    assert "1 rollouts, 3 turns" in capsys.readouterr().err
    collector.async_shutdown(timeout=1.0)
    assert not collector.is_initialized()


def test_an_environment_of_any_batch_size_is_played(renderer):
    engine = ScriptedEngine(["1<|im_end|>"], encode=renderer.encode)
    env = DatasetChatEnv(["7 + 8 =", "1 + 1 ="], batch_size=2, repeats=3).append_transform(StepCounter(1))
    policy = LLMWrapperBase(engine, renderer=renderer)
    with LLMCollector(env, policy=policy, dialog_turns_per_batch=env.batch_size[0], total_dialog_turns=6) as collector:
        batches = list(collector)
    for turn in (turn for batch in batches for turn in batch.unbind(0)):
        prompt = "<|im_start|>user\n" + turn["query"] + "<|im_end|>\n<|im_start|>assistant\n"
        assert turn["text", "prompt"].endswith(prompt) and turn["text", "response"] == "1<|im_end|>"
        assert turn["text", "full"] == turn["text", "prompt"] + turn["text", "response"]
    assert [batch.batch_size for batch in batches] == [(2,)] * 3
    assert env.batch_size == () and not env.batch_locked and env.reset().batch_size == ()


def test_finished_conversations_come_as_many_as_the_environment_has(renderer):
    engine = ScriptedEngine(["1<|im_end|>"], encode=renderer.encode)
    env = DatasetChatEnv(["7 + 8 =", "1 + 1 ="], batch_size=2).append_transform(StepCounter(1))
    policy = LLMWrapperBase(engine, renderer=renderer)
    with LLMCollector(env, policy=policy, yield_only_last_steps=True) as collector:
        assert collector.dialog_turns_per_batch == 2 and collector.next().batch_size == (2,)


def test_reset_at_each_iter_begins_every_batch_with_new_conversations(make_collector):
    with make_collector(dialog_turns_per_batch=4, reset_at_each_iter=True) as collector:
        for version in range(3):
            batch = collector.next()
            dones = batch["next", "done"].flatten().tolist()
            assert dones == [False, False, True, False]  # never the rest of a conversation begun before
            assert {int(versions.max()) for versions in batch.get(("policy_versions", "full"), as_list=True)} == {
                version
            }
            assert set(collector.report.num_dropped_by_reason) == {DropReason.RESET}
            collector.policy.engine.policy_version = version + 1
        assert collector.state_dict()["left_over"] == []


def test_a_queue_takes_every_turn_once_and_is_waited_for(make_collector):
    turns: queue.Queue = queue.Queue(maxsize=2)
    with make_collector(dialog_turns_per_batch=3, queue=turns, total_dialog_turns=9) as collector:
        collector.start()
        taken = [turns.get(timeout=240) for _ in range(9)]
        assert [bool(turn["next", "done"]) for turn in taken] == [False, False, True] * 3
    with make_collector(dialog_turns_per_batch=3, queue=turns) as collector:
        collector.start()
        while not turns.full():
            time.sleep(0.01)  # a full queue does not keep it from ending
    assert not [thread for thread in threading.enumerate() if thread.name == "llmrl-buffer"]


def test_a_postproc_is_set_once(make_collector):
    with make_collector(dialog_turns_per_batch=3) as collector:
        collector.set_postproc(lambda batch: batch[:1])
        assert collector.next().shape == (1,)
        with pytest.raises(RuntimeError, match="one function"):
            collector.set_postproc(lambda batch: batch)


def test_versions_are_counted_by_the_engine_or_by_a_tracker_of_ones_own(make_collector):
    with make_collector(dialog_turns_per_batch=3) as collector, pytest.raises(RuntimeError, match="engine counts"):
        collector.increment_version()
    with make_collector(dialog_turns_per_batch=3, track_policy_version=True) as collector:
        assert collector.policy_version_tracker.version == 0
        with pytest.raises(RuntimeError, match="follows its source"):
            collector.increment_version()
    tracker = PolicyVersion()
    with make_collector(dialog_turns_per_batch=3, track_policy_version=tracker) as collector:
        collector.increment_version()
        assert collector.next()["policy_version"].tolist() == [1, 1, 1]


def test_sync_iter_false_collects_ahead():
    assert _ahead({"groups_per_batch": 2}) == {"groups_per_batch": 2, "max_staleness": 1}
    assert _ahead({"yield_only_last_steps": True})["max_staleness"] == 1
    assert _ahead({"dialog_turns_per_batch": 8})["max_concurrent_rollouts"] == 8
    assert _ahead({"groups_per_batch": 2, "max_staleness": 3})["max_staleness"] == 3
    with pytest.raises(ValueError, match="pass one of them"):
        _ahead({"groups_per_batch": 2, "max_staleness": 0})
    with pytest.raises(ValueError, match="groups_per_batch"):
        _ahead({"tokens_per_batch": 2})
    with pytest.raises(ValueError, match="pass dialog_turns_per_batch, or max_concurrent_rollouts"):
        _ahead({"yield_completed_trajectories": True})
    assert _ahead({"yield_completed_trajectories": True, "max_concurrent_rollouts": 4})["max_concurrent_rollouts"] == 4


def test_a_pool_of_environments_is_refused(renderer):
    pool = AsyncEnvPool([lambda: DatasetChatEnv([{"query": "a"}], batch_size=(1,))] * 2, backend="threading")
    try:
        engine = ScriptedEngine(["1"], encode=renderer.encode)
        with pytest.raises(ValueError, match="batch size"):
            LLMCollector(pool, policy=LLMWrapperBase(engine, renderer=renderer), dialog_turns_per_batch=1)
    finally:
        pool.close()


# State: no turn is lost, none comes twice


def test_turns_that_wait_for_the_next_batch_are_saved(renderer):
    def make():
        engine = ScriptedEngine(["1<|im_end|>"], encode=renderer.encode)
        env = MessageChatEnv(Talk, [{}] * 9, num_epochs=1)
        policy = LLMWrapperBase(engine, renderer=renderer)
        return LLMCollector(env, policy=policy, dialog_turns_per_batch=4, limits=RolloutLimits(max_turns=3))

    seen, collector = [], make()
    while True:  # saved and resumed after every batch
        with collector:
            try:
                batch = collector.next()
            except StopIteration:
                break
            seen += list(batch["rollout", "group_id"])
            state = collector.state_dict()
        collector = make()
        saved = pickle.dumps(state)
        assert len(saved) < 20_000  # no tokenizer, no environment came along
        collector.load_state_dict(pickle.loads(saved))
        assert len(state["left_over"]) == -len(seen) % 3 and state["num_turns"] == len(seen)
    assert seen == [f"train/0/{index}" for index in range(9) for _ in range(3)]


def test_a_batch_that_was_not_handed_on_is_still_in_the_state(renderer):
    def make(**arguments):
        engine = ScriptedEngine(["1<|im_end|>"], encode=renderer.encode)
        env = MessageChatEnv(Talk, [{}] * 50)
        policy = LLMWrapperBase(engine, renderer=renderer)
        return LLMCollector(env, policy=policy, dialog_turns_per_batch=3, **arguments)

    class Slow(ReplayBuffer):
        is_writing = threading.Event()
        may_write = threading.Event()

        def extend(self, data):
            if len(self):
                self.is_writing.set()
                assert self.may_write.wait(240)
            return super().extend(data)

    buffer = Slow(storage=LazyStackStorage(100))
    with make(replay_buffer=buffer, total_dialog_turns=6) as collector:
        collector.start()
        assert buffer.is_writing.wait(240)
        states = []
        saving = threading.Thread(target=lambda: states.append((len(buffer), collector.state_dict())))
        saving.start()  # waits for the batch that is being written
        buffer.may_write.set()
        saving.join(240)
        [(_, state)] = states
    assert (len(buffer), state["num_turns"]) == (6, 6)
    # A batch that was delivered and did not reach anybody is played again.
    with make(max_concurrent_rollouts=1) as collector:
        collector.next()
        assert collector._next() is not None  # as when an interrupt comes between
        state = collector.state_dict()
        assert state["num_turns"] == 3 and 1 in state["env"]["prompts"]["again"]
