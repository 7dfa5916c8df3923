"""`PythonInterpreter`: TorchRL's documented example, fenced blocks and calls, sessions that end with rollouts."""

from __future__ import annotations

import gc

import pytest
from tensordict import TensorDict
from tool_conversations import Chat
from waiting import wait_until

from llmrl.data import ChatHistory
from llmrl.envs import ChatEnv
from llmrl.transforms import PythonExecutorService, PythonInterpreter

ANSWER = "Here is a python code to execute:\n```python\na=7**2\nprint(f'{a=}')\n```"


@pytest.fixture(scope="module")
def executor():
    executor = PythonExecutorService(num_ready=2, timeout=60.0)
    yield executor
    executor.close()


def test_the_documented_example_gives_the_conversation_that_torchrl_gives(executor, takes_long):
    env = ChatEnv(batch_size=(1,), system_prompt="I'm the system, do as I say")
    env = env.append_transform(PythonInterpreter(executor=executor))
    data = env.reset(TensorDict({"query": ["This is the user prompt"]}, batch_size=(1,)))
    full = data["history"].prompt.append({"role": "assistant", "content": ANSWER})
    data["history"] = ChatHistory(full=full, batch_size=(1,))
    (ours,) = env.step(data)["next", "history"].prompt.to_chats()
    assert ours == _torchrl_conversation()
    assert ours[-1] == {"role": "tool", "content": "Code block 1 executed successfully:\na=49\n"}


def _torchrl_conversation():
    from tensordict import lazy_stack, set_list_to_stack
    from torchrl.data.llm import History
    from torchrl.envs.llm import ChatEnv as TorchRLChatEnv
    from torchrl.envs.llm.transforms import PythonInterpreter as TorchRLPythonInterpreter
    from torchrl.modules.llm.policies.common import ChatHistory as TorchRLChatHistory

    with set_list_to_stack(True):
        env = TorchRLChatEnv(batch_size=(1,), input_mode="history", system_prompt="I'm the system, do as I say")
        env = env.append_transform(TorchRLPythonInterpreter())
        data = env.reset(TensorDict({"query": ["This is the user prompt"]}, batch_size=(1,)))
        prompt = data["history"].prompt
        response = lazy_stack([lazy_stack([History(role="assistant", content=ANSWER)])])
        data["history"] = TorchRLChatHistory(full=prompt.extend(response, inplace=False, dim=-1), batch_size=(1,))
        following = env.step(data)["next", "history"].prompt[0]
        return [{"role": message.role, "content": message.content} for message in following.unbind(0)]


def test_each_block_is_answered_and_failures_say_why(executor):
    transform = PythonInterpreter(executor=executor)
    chat = Chat(transform)
    messages = chat.say("One:\n```python\nprint(1)\n```\nTwo:\n```py\nprint(2)\n1/0\n```\n```bash\nls\n```")
    assert [message["content"].splitlines()[0] for message in messages] == [
        "Code block 1 executed successfully:",
        "Code block 2 failed:",
    ]
    assert "ZeroDivisionError" in messages[1]["content"] and "\n2\n" in messages[1]["content"]
    assert transform.counts == {"calls": 2, "failures": 1}
    assert chat.say("No code here, and ```python inline``` is none.") == ()
    (empty,) = chat.say("```python\n```")
    assert empty["content"] == "Code block 1 executed successfully:\n"


def test_a_persistent_conversation_keeps_its_variables_and_shares_them_with_no_other(executor):
    transform = PythonInterpreter(executor=executor, persistent=True)
    first, second = Chat(transform), Chat(transform)
    first.say("```python\ndef f(n): return 1 if n < 2 else n * f(n - 1)\n```")
    assert "120" in first.say("```python\nprint(f(5))\n```")[0]["content"]
    assert "NameError" in second.say("```python\nprint(f(5))\n```")[0]["content"]
    fresh = Chat(PythonInterpreter(executor=executor))
    fresh.say("```python\nx = 1\n```")
    assert "NameError" in fresh.say("```python\nprint(x)\n```")[0]["content"]


def test_interpreters_end_with_their_conversations(executor):
    transform = PythonInterpreter(executor=executor, persistent=True)
    gc.collect()
    executor.execute("1")  # those of earlier tests are gone
    before = executor.num_sessions
    released, dropped = Chat(transform), Chat(transform)
    for chat in (released, dropped):
        chat.say("```python\nx = 1\n```")
    assert executor.num_sessions == before + 2
    transform.release(released.data)
    transform.reset_parent()
    del dropped, chat
    gc.collect()
    executor.execute("1")
    assert executor.num_sessions == before


@pytest.mark.slow
def test_code_comes_in_calls_of_a_tool_too(executor):
    transform = PythonInterpreter(executor=executor, calls="tool_call", persistent=True, timeout=60.0)
    chat = Chat(transform)
    assert chat.tool_names == ["python"]
    assert chat.call("python", code="x = 6; print(x * 7)") == "42\n"
    assert "ZeroDivisionError" in chat.call("python", code="x / 0")
    assert chat.call("python", code="print(x)") == "6\n"
    assert "the only argument is 'code' (a string)" in chat.call("python", source="1")
    transform.timeout = 0.5
    assert "ran longer than 0.5 s" in chat.call("python", code="while True: pass")
    assert transform.counts == {"calls": 5, "failures": 3, "invalid": 1, "timeouts": 1}


def test_a_service_of_its_own_is_started_late_and_closed():
    transform = PythonInterpreter(timeout=60.0)
    assert transform._executor is None
    assert "executed successfully" in Chat(transform).say(ANSWER)[0]["content"]
    transform.close()
    transform.close()
    assert transform._executor is None


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"calls": "json"}, "calls must be 'fenced' or 'tool_call'"),
        ({"services": "dask"}, "services must be 'ray' or None"),
    ],
)
def test_unknown_choices_are_refused(arguments, reason):
    with pytest.raises(ValueError, match=reason):
        PythonInterpreter(**arguments)


def test_a_ray_actor_serves_the_interpreters_of_many_environments(ray_cluster):
    from torchrl.services import get_services

    services = get_services(backend="ray", namespace="llmrl-tests")
    services.register("python_executor", PythonExecutorService, pool_size=4, timeout=60.0, num_ready=1)
    transform = PythonInterpreter(services="ray", namespace="llmrl-tests", persistent=True)
    first, second = Chat(transform), Chat(transform)
    first.say("```python\nx = 5\n```")
    assert "5" in first.say("```python\nprint(x)\n```")[0]["content"]
    assert "NameError" in second.say("```python\nprint(x)\n```")[0]["content"]
    ray_cluster.kill(services["python_executor"])
    wait_until(lambda: "out of order" in first.say("```python\nprint(x)\n```")[0]["content"])  # it ends soon
