"""`llmrl chat`: a conversation with a model through an environment, with its tools and token probabilities."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from rich.columns import Columns
from rich.console import Console, Group
from rich.text import Text
from tensordict import TensorDict, TensorDictBase
from torchrl.envs import EnvBase

from llmrl._utils.terminal import printable
from llmrl.data import History, Message, text_of
from llmrl.data.tensordicts import plain
from llmrl.envs import ChatEnv, make_task_env
from llmrl.envs.chat import unlock_batch_size
from llmrl.envs.primer import dataset_env_of
from llmrl.policies import LLMWrapperBase
from llmrl.transforms import PythonInterpreter

HELP = "/tokens shows the last answer's tokens, /problem asks a problem, /reset starts over, /quit ends"
_MAX_TOOL_TURNS = 8
_STYLES = ((0.9, "green"), (0.5, "yellow"), (0.0, "red"))


class ChatSession:
    """A conversation with a policy (in history mode) in a `ChatEnv`, which may answer with tools."""

    def __init__(self, policy: LLMWrapperBase, env: EnvBase) -> None:
        unlock_batch_size(env)
        self.policy = policy
        self.env = env
        self._state: TensorDictBase | None = None
        self.reward = 0.0
        """Reward of the last step."""

    def problem(self) -> Iterator[Message]:
        """Start over with the next problem, and yield the messages as they arrive; raise ValueError if none exists."""
        if dataset_env_of(self.env) is None:
            raise ValueError("this environment has no problems; start with --env.")
        state = self.env.reset()
        yield from state.get(("history", "prompt")).chats
        yield from self._go_on(state)

    def ask(self, text: str) -> Iterator[Message]:
        """Send a user message; yield the messages of the assistant and the tools as they arrive."""
        if self._state is None:
            state = self.env.reset(TensorDict({"query": text}))
            chat = state.get(("history", "prompt")).chats
            if text_of(chat[-1]["content"]) != text:  # a dataset environment drew its own problem: replace it
                state.set(("history", "prompt"), History.from_chats((*chat[:-1], {"role": "user", "content": text})))
        else:
            state = self._state
            prompt = state.get(("history", "prompt"))
            state.set(("history", "prompt"), prompt.append({"role": "user", "content": text}))
        yield from self._go_on(state)

    def _go_on(self, state: TensorDictBase) -> Iterator[Message]:
        for _ in range(_MAX_TOOL_TURNS):
            state = self.policy(state)
            answered = len(state.get(("history", "prompt")).chats) + 1
            yield state.get(("history", "full")).chats[-1]
            stepped = self.env.step(state)
            self.reward = float(stepped["next", "reward"].sum())
            state = self._state = self.env.step_mdp(stepped)
            replies = state.get(("history", "prompt")).chats[answered:]
            yield from replies
            if not replies:
                return

    def tokens(self) -> list[tuple[int, float]]:
        """Return the token ids of the last answer and their log-probs."""
        conversation = None if self._state is None else plain(self._state.get("conversation", None))
        if conversation is None or conversation.node is None:
            return []
        node = conversation.node
        return list(zip(node.completion_ids, node.log_probs, strict=True))

    def reset(self) -> None:
        """Forget the conversation."""
        self._state = None


def make_env(name: str | None = None, *, system_prompt: str | None, tools: list[str]) -> EnvBase:
    """Build a task environment by its name, or a `ChatEnv`, with the named tools.

    Raises:
        ValueError: if a tool is unknown, if the environment has its own system prompt, or as in `make_task_env`.
    """
    if name is not None and system_prompt is not None:
        raise ValueError(f"--system cannot be given, because the environment {name!r} has its own system prompt.")
    env = ChatEnv(system_prompt=system_prompt) if name is None else make_task_env(name, "test")
    for tool in tools:
        if tool != "python":
            raise ValueError(f"--tool must be 'python', got {tool!r}.")
        env = env.append_transform(PythonInterpreter(persistent=True))
    return env


def talk(session: ChatSession, console: Console, read: Callable[[], str], decode: Callable[[list[int]], str]) -> None:
    """Run the conversation until `/quit`, or until `read` raises `EOFError`."""
    console.print(f"[dim]{HELP}[/dim]", highlight=True)
    while True:
        try:
            text = read().strip()
        except (EOFError, KeyboardInterrupt):
            return
        if text == "/quit":
            return
        if text == "/reset":
            session.reset()
            console.print("[dim]forgotten[/dim]")
        elif text == "/problem":
            try:
                for message in session.problem():
                    console.print(_line(message))
                console.print(f"[dim]reward {session.reward:g}[/dim]")
            except ValueError as error:
                console.print(f"[dim]{error}[/dim]", highlight=True)
        elif text == "/tokens":
            console.print(coloured(session.tokens(), decode))
        elif text.startswith("/"):
            console.print(f"[dim]{HELP}[/dim]", highlight=True)
        elif text:
            for message in session.ask(text):
                console.print(_line(message))


def _line(message: Message) -> Text:
    return Text(f"{message['role']}: ", style="bold").append(said(message), style="not bold")


def said(message: Message) -> str:
    """Return the text of a message with its tool calls."""
    calls = [f"{call['function']['name']}({call['function']['arguments']})" for call in message.get("tool_calls") or []]
    return printable("\n".join(part for part in (text_of(message.get("content")).strip(), *calls) if part))


def coloured(tokens: list[tuple[int, float]], decode: Callable[[list[int]], str]) -> Group:
    """Return each token with its probability, coloured by it, and the answer's log-prob."""
    cells = []
    for token_id, log_prob in tokens:
        probability = math.exp(log_prob)
        style = next(style for bound, style in _STYLES if probability >= bound)
        cells.append(Text(repr(decode([token_id])), style=style).append(f" {probability:.2f}", style="dim"))
    total = sum(log_prob for _, log_prob in tokens)
    return Group(Columns(cells, padding=(0, 2)), Text(f"{len(tokens)} tokens, log-prob {total:.2f}", style="dim"))
