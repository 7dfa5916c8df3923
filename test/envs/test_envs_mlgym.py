"""MLGym's interface, spoken by a shell in a process of its own."""

from __future__ import annotations

import subprocess
import time
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from tensordict import TensorDict

from llmrl.data import ChatHistory
from llmrl.envs import MessageChatEnv
from llmrl.envs.hubs.mlgym import MLGymWrapper, find_command, make_mlgym

END = "<end of output>"


@dataclass
class TaskArguments:
    """What MLGym's tasks bring to its templates."""

    description: str = "Make the number large."


class StandIn:
    """A bash process that is addressed as MLGym addresses its container."""

    def __init__(self, folder, state='{"working_dir": "here"}'):
        self.folder, self.state = folder, state
        self.task_workspace, self.task = str(folder / "workspace"), SimpleNamespace(args=TaskArguments())
        self.current_step, self.max_steps, self.returncode = 0, 3, 0
        self.commands, self.process = [], None
        (folder / "tool.sh").write_text("tool() { echo tooled; }\n")
        self.config = SimpleNamespace(
            system_template="Commands: {command_docs}",
            task_template="{description} In {working_dir}, {remaining_steps} steps.",
            strategy_template=None,
            next_step_template="{observation}({remaining_steps} left)",
            next_step_no_output_template="No output.",
            state_command=SimpleNamespace(name="state", code=f"state() {{ echo '{state}'; }}"),
            env_variables={"COLOUR": "red"},
            tools_handler=SimpleNamespace(command_docs="ls, validate", env_variables={}),
            command_files=[str(folder / "tool.sh")],
        )

    def reset_container(self):
        self.process = subprocess.Popen(
            ["bash"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def communicate(self, command):
        self.process.stdin.write(f"{command}\necho $?'{END}'\n")
        self.process.stdin.flush()
        lines = []
        while END not in (line := self.process.stdout.readline()):
            lines.append(line)
        self.returncode = int(line.split(END)[0])
        return "".join(lines)

    def reset(self):
        return None

    def add_commands(self, files):
        for file in files:
            self.communicate(file["contents"])

    def step(self, action):
        self.current_step += 1
        self.commands.append(action)
        if action == "validate":
            return "Baseline Score: {'Score': 0.5}\nEvaluation Score: {'Score': 0.8}", 0, False, {}
        return self.communicate(action), 0, self.current_step == self.max_steps, {}

    def close(self):
        self.process.stdin.close()
        self.process.wait(240)
        self.process.stdout.close()


def say(env, data, text):
    prompt = data["history"].prompt
    data["history"] = ChatHistory(prompt=prompt, full=prompt.append({"role": "assistant", "content": text}))
    return env.step(data)["next"]


def command(text):
    return f"I try this.\n```\n{text}\n```"


@pytest.fixture
def stand_in(tmp_path):
    (tmp_path / "workspace").mkdir()
    return StandIn(tmp_path)


def test_a_task_is_played_by_commands_until_it_is_done(stand_in):
    env = MessageChatEnv(lambda item: MLGymWrapper(stand_in))
    first = env.reset()
    assert first["history"].prompt.content == [
        "Commands: ls, validate",
        "Make the number large. In here, 3 steps.",
    ]
    data = say(env, first, command("echo $COLOUR; tool"))
    assert data["history"].prompt.content[-1] == "red\ntooled\n(2 left)" and data["reward"].item() == 0.0
    data["message_env"] = first["message_env"]
    data = say(env, data, command("validate"))
    assert data["reward"].item() == pytest.approx(0.3) and not data["done"].item()
    data["message_env"] = first["message_env"]
    data = say(env, data, command("cd /"))
    assert data["terminated"].item() and stand_in.commands[-1] == "cd /"
    env.release(first)
    assert stand_in.process.returncode == 0


@pytest.mark.parametrize("reply", ["", "ls", "```", "``` ```", "x" * 200_000])
def test_a_reply_without_a_command_runs_nothing_and_costs_the_penalty(stand_in, reply):
    env = MessageChatEnv(lambda item: MLGymWrapper(stand_in, reward_wrong_format=-0.5))
    data = env.reset()
    step = say(env, data, reply)
    assert step["reward"].item() == -0.5 and not step["done"].item() and stand_in.commands == []
    assert "```" in step["history"].prompt.content[-1]
    env.release(data)


def test_the_model_plays_a_task(vllm_engine, tokenizer, stand_in):
    from llmrl.policies import vLLMWrapper

    policy = vLLMWrapper(vllm_engine, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 8})
    env = MessageChatEnv(lambda item: MLGymWrapper(stand_in, reward_wrong_format=-0.5))
    rollout = env.rollout(2, policy)
    assert rollout[-1]["history"].full.role[-3:] == ["assistant", "user", "assistant"]
    assert len(stand_in.commands) == (rollout["next", "reward"] > -0.5).sum()
    env.release(rollout[0])


def test_a_state_that_is_no_json_ends_with_a_clear_error(tmp_path):
    (tmp_path / "workspace").mkdir()
    stand_in = StandIn(tmp_path, state="oops")
    with pytest.raises(ValueError, match="must print JSON"):
        MessageChatEnv(lambda item: MLGymWrapper(stand_in)).reset(TensorDict())
    stand_in.close()


@pytest.mark.parametrize(
    ("reply", "found"),
    [
        ("```\nls\n```", "ls"),
        ("```bash\nls\n```", "ls"),
        ("```a\nold\n``` then ```python\nx = 1\ny = 2\n```", "x = 1\ny = 2"),
        ("```ls -l```", "ls -l"),
        ("```\nls\n``` and ``` open", "ls"),
    ],
)
def test_the_last_closed_block_is_the_command(reply, found):
    assert find_command(reply) == found


def test_finding_a_command_in_many_fences_is_quick():
    started = time.process_time()
    find_command("`" * 200_000)
    assert time.process_time() - started < 1


def test_without_mlgym_it_is_said_how_to_install_it():
    with pytest.raises(ImportError, match="facebookresearch/MLGym"):
        make_mlgym(task="prisonersDilemma")
