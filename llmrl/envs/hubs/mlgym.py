"""MLGym: research tasks in a container, solved with shell commands (Nathani et al. 2025, arXiv 2502.14499)."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.util
import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Never

from llmrl._utils.arguments import keywords_of, refuse_unknown
from llmrl._utils.types import Row
from llmrl.data import Message, text_of
from llmrl.envs.message_env import MessageChatEnv, MessageEnv, MessageStep

if TYPE_CHECKING:
    from mlgym.environment.env import MLGymEnv

_SCORES = {name: re.compile(name + r" Score: \{'Score': ([-+.0-9eE]{1,40})\}") for name in ("Baseline", "Evaluation")}
_WRONG_FORMAT = "Your reply must end with one command inside a block that is fenced by ```. Nothing was run."
_folder_lock = threading.Lock()


def find_command(reply: str) -> str | None:
    r"""Return the last fenced block of a reply, without its language name; None if there is no block.

    Example:
        >>> find_command("I look around.\n```bash\nls -l\n```"), find_command("I look around.")
        ('ls -l', None)
    """
    parts = reply.split("```")
    if len(parts) < 3:
        return None
    block = parts[-2 if len(parts) % 2 else -3]
    first, newline, rest = block.partition("\n")
    if newline and " " not in first.strip():
        block = rest
    return block.strip() or None


def score_gain(observation: str) -> float:
    """Return the difference between the evaluation score in an observation and the baseline; 0 without an evaluation.

    Example:
        >>> score_gain("Baseline Score: {'Score': 0.5} Evaluation Score: {'Score': 0.75}"), score_gain("ls")
        (0.25, 0.0)
    """
    found = {name: pattern.search(observation) for name, pattern in _SCORES.items()}
    try:
        values = {name: float(match[1]) for name, match in found.items() if match}
        return values["Evaluation"] - values.get("Baseline", 0.0)
    except (ValueError, KeyError):
        return 0.0


class MLGymWrapper(MessageEnv):
    """One `MLGymEnv` as a conversation: its templates are user messages, and fenced blocks are commands.

    The reward is the environment's reward plus the gain of an evaluation over the baseline.

    Args:
        env: an `MLGymEnv` with the `config` of an MLGym agent.
        reward_wrong_format: reward added for a reply without a command.

    Example:
        >>> from types import SimpleNamespace
        >>> from llmrl._utils.asynchronous import run_sync
        >>> wrapper = MLGymWrapper(SimpleNamespace(config=None), reward_wrong_format=-0.5)
        >>> run_sync(wrapper.step({"role": "assistant", "content": "I look around."})).reward
        -0.5
    """

    def __init__(self, env: MLGymEnv, *, reward_wrong_format: float | None = None) -> None:
        self.env = env
        self.config = env.config
        self.reward_wrong_format = reward_wrong_format

    async def init(self) -> list[Message]:
        """Start the container, and return the system and task messages."""
        return await asyncio.to_thread(self._open)

    def _open(self) -> list[Message]:
        with _in_mlgym_folder():
            self.env.reset_container()
            self.env.communicate(f"cd {Path(self.env.task_workspace).parent}")
            self.env.reset()
            variables = [f"{name}={value}" for name, value in self.config.env_variables.items()]
            output = self.env.communicate("\n".join([self.config.state_command.code, *variables]))
            if self.env.returncode:
                raise RuntimeError(f"MLGym's set-up ended with exit code {self.env.returncode}: {output}")
            self.env.add_commands([_command_file(Path(path)) for path in self.config.command_files])
        system = self.config.system_template.format(**self._fields())
        templates = [self.config.task_template, self.config.strategy_template]
        task = self._say([template for template in templates if template is not None], "")
        return [{"role": "system", "content": system}, {"role": "user", "content": task}]

    async def step(self, message: Message) -> MessageStep:
        """Run the command of a reply."""
        command = find_command(text_of(message.get("content")))
        if command is None:
            return MessageStep([{"role": "user", "content": _WRONG_FORMAT}], self.reward_wrong_format or 0.0)
        return await asyncio.to_thread(self._run, command)

    def _run(self, command: str) -> MessageStep:
        observation, reward, is_done, info = self.env.step(command)
        observation = observation or ""
        reward = float(reward or 0.0) + score_gain(observation)
        if is_done:
            return MessageStep(reward=reward, is_done=True, info=info)
        template = self.config.next_step_template
        if not observation.strip():
            template = self.config.next_step_no_output_template
        return MessageStep([{"role": "user", "content": self._say([template], observation)}], reward, info=info)

    async def close(self) -> None:
        """Stop the container."""
        await asyncio.to_thread(self.env.close)

    def _fields(self) -> dict[str, object]:
        tools = self.config.tools_handler
        return {"command_docs": tools.command_docs, **tools.env_variables, **dataclasses.asdict(self.env.task.args)}

    def _say(self, templates: Sequence[str], observation: str) -> str:
        state = self.env.communicate(self.config.state_command.name)
        try:
            fields = {**self._fields(), **json.loads(state)}
        except json.JSONDecodeError as error:
            raise ValueError(f"MLGym's state command must print JSON, but printed {state!r:.200}.") from error
        fields["current_step"] = self.env.current_step
        fields["remaining_steps"] = self.env.max_steps - self.env.current_step
        return "\n".join(template.format(**fields, observation=observation) for template in templates)


def make_mlgym(
    *,
    task: str | None = None,
    tasks: Sequence[str] | None = None,
    max_steps: int = 10,
    reward_wrong_format: float | None = None,
    repeats: int = 1,
    seed: int = 42,
    container_type: str = "podman",
    **unknown: Never,
) -> MessageChatEnv:
    """Make a `ChatEnv` of MLGym tasks; each conversation has its own container.

    Args:
        task, tasks: name of one task, such as `prisonersDilemma`, or of several.
        max_steps: maximum number of commands per conversation.
        reward_wrong_format: see `MLGymWrapper`.
        repeats: group size, the number of conversations per task.

    Raises ImportError if MLGym is not installed (it is in no package index).

    Example:
        >>> make_mlgym()
        Traceback (most recent call last):
        ValueError: give either task or tasks, got None and None.
    """
    refuse_unknown("make_mlgym", unknown, keywords_of(make_mlgym) or ())
    if (task is None) == (tasks is None):
        raise ValueError(f"give either task or tasks, got {task!r} and {tasks!r}.")
    if importlib.util.find_spec("mlgym") is None:
        raise ImportError(
            "make_mlgym needs MLGym, which is on no package index: pip install "
            "git+https://github.com/facebookresearch/MLGym"
        )
    names = [task] if tasks is None else list(tasks)
    builders = {name: _builder(str(name), max_steps, seed, container_type) for name in names}

    def play(item: Row) -> MLGymWrapper:
        return MLGymWrapper(builders[item["task"]](), reward_wrong_format=reward_wrong_format)

    return MessageChatEnv(play, [{"task": name} for name in names], repeats=repeats, seed=seed)


def _builder(task: str, max_steps: int, seed: int, container_type: str) -> Callable[[], MLGymEnv]:
    import gymnasium
    from mlgym import CONFIG_DIR
    from mlgym.agent.base import AgentArguments
    from mlgym.backend.base import ModelArguments
    from mlgym.environment.env import EnvironmentArguments
    from mlgym.environment.registration import register_task

    with _in_mlgym_folder():
        arguments = EnvironmentArguments(
            task_config_path=f"tasks/{task}.yaml",
            max_steps=max_steps,
            seed=seed,
            container_type=container_type,
            verbose=False,
            aliases_file="docker/aliases.sh",
        )
        # Only the templates of MLGym's agent configuration are used, not its model.
        agent = AgentArguments(model=ModelArguments(""), agent_config_path=CONFIG_DIR / "agents" / "default.yaml")
        register_task(arguments)

    def build() -> MLGymEnv:
        with _in_mlgym_folder():
            env = gymnasium.make(f"mlgym/{arguments.task.id}", devices=["cpu_0"]).unwrapped
        env.config = agent.config  # type: ignore[attr-defined]
        return env

    return build


@contextlib.contextmanager
def _in_mlgym_folder() -> Iterator[None]:
    """Change to MLGym's folder, because it opens files by relative paths; one thread at a time."""
    spec = importlib.util.find_spec("mlgym")
    if spec is None or not spec.submodule_search_locations:
        yield
        return
    with _folder_lock, contextlib.chdir(Path(spec.submodule_search_locations[0]).parent):
        yield


def _command_file(path: Path) -> dict[str, str]:
    contents = path.read_text()
    if contents.strip().startswith("#!"):
        return {"contents": contents, "name": path.stem, "type": "script"}
    if path.suffix != ".sh" and not path.name.startswith("_"):
        raise ValueError(f"command file {path} must start with #!, end in .sh, or begin with _ to be sourced.")
    return {"contents": contents, "name": path.name, "type": "source_file" if path.suffix == ".sh" else "utility"}
