"""How often Python looks for garbage while conversations are in flight."""

import gc
import weakref

import pytest
from torchrl.envs import Transform

from llmrl._utils import garbage
from llmrl.collectors import LLMCollector, RolloutLimits
from llmrl.data.tensordicts import batch_elements
from llmrl.envs import DatasetChatEnv
from llmrl.policies import LLMWrapperBase
from llmrl.testing import ScriptedEngine


class Owner:
    """Of a rarer search."""


@pytest.fixture(autouse=True)
def as_python_begins(monkeypatch):
    threshold = gc.get_threshold()
    monkeypatch.setattr(garbage, "_num_owners", 0)
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*threshold)


def test_python_searches_as_before_once_the_last_owner_is_done():
    first, second = Owner(), Owner()
    end_first, end_second = garbage.search_rarely(first), garbage.search_rarely(second)
    assert gc.get_threshold() == (garbage.NUM_OBJECTS, 10, 10)
    end_first(), end_first()
    assert gc.get_threshold() == (garbage.NUM_OBJECTS, 10, 10)
    del second  # forgotten, not ended
    assert gc.get_threshold() == (700, 10, 10)
    end_second()
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("own", [(0, 10, 10), (200_000, 5, 5)])
def test_a_threshold_that_was_set_elsewhere_stays(own):
    gc.set_threshold(*own)
    end = garbage.search_rarely(owner := Owner())
    assert gc.get_threshold() == own
    end()
    assert gc.get_threshold() == own
    gc.set_threshold(700, 10, 10)
    end = garbage.search_rarely(owner)
    gc.set_threshold(1_000, 10, 10)  # meanwhile
    end()
    assert gc.get_threshold() == (1_000, 10, 10)


@pytest.fixture
def policy(renderer):
    return LLMWrapperBase(ScriptedEngine(["1<|im_end|>"], encode=renderer.encode), renderer=renderer)


def test_a_collector_is_such_an_owner_until_it_is_shut_down(policy):
    collector = LLMCollector(DatasetChatEnv(["Hi."]), policy=policy, groups_per_batch=1)
    assert gc.get_threshold() == (garbage.NUM_OBJECTS, 10, 10)
    collector.shutdown(), collector.shutdown()
    assert gc.get_threshold() == (700, 10, 10)


def test_cycles_that_training_left_are_gone_with_the_next_batch(policy):
    one_turn = RolloutLimits(max_turns=1)
    with LLMCollector(DatasetChatEnv(["Hi."]), policy=policy, groups_per_batch=1, limits=one_turn) as collector:
        for _ in range(3):
            collector.next()
            left = Owner()
            left.itself = left
            flag = weakref.ref(left)
            del left
            assert flag() is not None
            collector.next()
            assert flag() is None


def test_what_a_turn_wrote_is_let_go_of_while_its_conversation_goes_on(policy):
    seen, num_alive = [], []

    class GoOn(Transform):
        def _step(self, tensordict, next_tensordict):
            num_alive.append(sum(flag() is not None for flag in seen))
            seen.extend(weakref.ref(element.get("done")) for element in batch_elements(tensordict))
            for element in batch_elements(next_tensordict):
                prompt = element.get(("history", "prompt")).append({"role": "user", "content": "And then?"})
                element.set(("history", "prompt"), prompt)
            return next_tensordict

    env = DatasetChatEnv(["Hi."]).append_transform(GoOn())
    with LLMCollector(env, policy=policy, groups_per_batch=1, limits=RolloutLimits(max_turns=4)) as collector:
        collector.next()
    assert num_alive == [0, 0, 0, 0]
