"""`AgentEnv`: rollouts in which an agent calls the policy through an HTTP endpoint."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Unpack

import torch
from tensordict import TensorDictBase

from llmrl._utils.asynchronous import awaited, is_async
from llmrl._utils.failure import describe
from llmrl._utils.numbers import finite_number, location_of
from llmrl._utils.replaceable_loop import ReplaceableLoop
from llmrl._utils.threads import run_in_thread
from llmrl._utils.types import Row
from llmrl.data.tensordicts import batch_elements, non_tensor, plain, restacked, tensordict_of
from llmrl.endpoint.agent import AgentModel, Play
from llmrl.envs.agent_command import Command
from llmrl.envs.dataset import DatasetChatEnv
from llmrl.envs.sampler import DrawOptions
from llmrl.rewards import Score
from llmrl.transforms import write_score

logger = logging.getLogger(__name__)


class AgentEnv(DatasetChatEnv):
    """An environment that runs an agent on each row of a dataset; the policy answers the agent's model requests.

    A collector opens an endpoint with the OpenAI and Anthropic APIs, gives each rollout its own key, and calls `play`
    with the row and the address of the model. The result is the rollout's reward; the score of an
    appended `RubricReward` is added to it. The requests of a rollout form a tree (`TurnTree`).

    A `RolloutLimits` of the collector refuses further requests (`max_turns`, `max_completion_tokens`) or stops the
    agent (`rollout_timeout_seconds`); the rollout is then truncated and keeps its turns. A completion that is cut by
    its length does not end the rollout. Train on groups: other batches contain only each rollout's last answered turn.

    Args:
        play: a function of a row and an `AgentModel`, or a `command`. It returns a number, a
            mapping of named scores that are summed, or None to leave the rollout unscored unless
            answers are rewarded (`AgentModel.reward`). Async functions share one event loop; each
            plain function runs in its own thread, which is not stopped when the rollout ends.
        dataset, split, **draws: see `DatasetChatEnv`; the rows need no query.
        host: address at which the endpoint listens; by default only this machine can reach it.
        port: port of the endpoint; by default a free one.
        public_url: URL under which agents reach the endpoint, if not by `host` (from containers or
            other machines, or through a proxy with TLS); `{port}` stands for the port.
        roles: trained roles, if there are several: each is a separate rollout of the group with its own reward, as in a
            `GameEnv`. An agent sends a role's requests to `model.role(NAME)`, those of the first role also to `model`,
            and returns a score for each role by name; a single number is the score of every role.
        policies: policies by role; the collector's policy plays the other roles. A name that is not a role adds a
            model that is not trained, such as a frozen judge: `model.role(NAME)` reaches it, and nothing is recorded.

    Raises:
        TypeError: if `play` is not callable, or `roles` is a string.
        ValueError: if a command reads a missing column, `host` needs a `public_url`, names of roles are empty or equal,
            or `repeats` is not a multiple of the number of roles; see also `DatasetChatEnv`.

    Example:
        >>> async def play(row, model):
        ...     client = AsyncOpenAI(base_url=model.base_url, api_key=model.api_key)
        ...     messages = [{"role": "user", "content": row["query"]}]
        ...     answer = await client.chat.completions.create(model=model.name, messages=messages)
        ...     return float("15" in answer.choices[0].message.content)
        >>> env = AgentEnv(play, [{"query": "7 + 8 ="}], repeats=8)
        >>> env.reset()["query"]
        '7 + 8 ='
    """

    writes_reward = True

    def __init__(
        self,
        play: Play,
        dataset: str | Path | Iterable[Row | str],
        *,
        split: str | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        public_url: str | None = None,
        roles: Sequence[str] = ("",),
        policies: Mapping[str, object] | None = None,
        device: torch.device | None = None,
        **draws: Unpack[DrawOptions],
    ) -> None:
        if not callable(play):
            raise TypeError(f"play must be a function of a row and a model, or a command, got {play!r:.80}.")
        if public_url is None and host in _ALL_ADDRESSES:
            raise ValueError(
                f"host={host!r} is not an address that agents can connect to: pass public_url=, such as "
                "'http://10.0.0.5:{port}', or the address of one network as host."
            )
        if isinstance(roles, str):
            raise TypeError(f"roles must be a list of names, got {roles!r}; write roles=[{roles!r}] for one role.")
        self.roles = tuple(roles)
        self.policies = dict(policies or {})
        names = [*self.roles, *(set(self.policies) - set(self.roles))]
        if not self.roles or len(set(names)) < len(names) or "aside" in names or "" in names[1:]:
            raise ValueError(f"roles and policies must have distinct, non-empty names other than 'aside', got {names}.")
        draws.setdefault("repeats", len(self.roles))
        self.play = play
        self.host = host
        self.port = port
        self.public_url = public_url
        self._has_warned = False
        self._loops = ReplaceableLoop("llmrl-agents")
        super().__init__(dataset, split=split, prepare=_query_of, device=device, **draws)
        if isinstance(play, Command):
            play.check_columns(self.columns)

    async def run_agent(self, row: Row, model: AgentModel) -> dict[str, Score]:
        """Run the agent and return the score of each role; cancelling this coroutine cancels the agent."""
        returned: object
        if is_async(self.play):
            returned = await self._loops.wait(self._returned(row, model))
        else:
            returned = await run_in_thread(self.play, row, model)
        if len(self.roles) == 1 or not isinstance(returned, Mapping):
            return {role: _score_of(returned, self.play) for role in self.roles}
        if unknown := sorted(map(str, returned.keys() - set(self.roles))):
            raise ValueError(f"the agent returned scores of {unknown}, but the roles are {list(self.roles)}.")
        return {role: _score_of(returned.get(role), self.play) for role in self.roles}

    def ask_loops(self) -> None:
        """Ask the event loops of async agents whether they respond, for `warn_if_blocked`."""
        self._loops.ask()

    def warn_if_blocked(self) -> None:
        """Warn once if an async agent blocks its event loop in a synchronous call; the warning names the line."""
        if self._has_warned:
            return
        for frame in self._loops.blocked_frames():
            path = location_of(self.play).rpartition(":")[0]
            if (line := _line_of_blocking_read(frame, path)) is not None:
                self._has_warned = True
                logger.warning(
                    "an async agent waits for an answer in a synchronous call, at %s, which blocks all other async "
                    "agents: use the client's async class (AsyncOpenAI), or make the agent a plain function, which "
                    "runs in its own thread.",
                    line,
                )

    async def _returned(self, row: Row, model: AgentModel) -> object:
        return await awaited(self.play(row, model))

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        steps = []
        for element in batch_elements(tensordict):
            score = plain(element.get(("agent", "score"), None))
            if not isinstance(score, Score):
                raise RuntimeError(
                    "an AgentEnv must be played by a collector or an Evaluator, because its agent sends requests to "
                    "the policy."
                )
            end = "truncated" if plain(element.get(("rollout", "reason"), "")) else "terminated"
            flags = {key: torch.ones(1, dtype=torch.bool) for key in (end, "done")}
            step = tensordict_of({**dict(super()._step(element).items()), **flags})
            write_score(step, score, list(score.breakdown))
            steps.append(step)
        return restacked(steps, tensordict.batch_size)

    @staticmethod
    def end_with(element: TensorDictBase, score: Score) -> None:
        """Store the agent's score for the step that ends its conversation."""
        element.set("agent", tensordict_of({"score": non_tensor(score)}))

    def close(self, **kwargs: object) -> None:
        """Stop the event loop of async agents."""
        super().close(**kwargs)
        self._loops.close()


_ALL_ADDRESSES = ("0.0.0.0", "::")
# Files and functions in which a synchronous client waits; the last file belongs to httpx.
_BLOCKING_FILES = ("/socket.py", "/ssl.py", "/_backends/sync.py")
_BLOCKING_FUNCTIONS = ("read", "readinto", "recv", "recv_into")


def _line_of_blocking_read(frame: FrameType, path: str) -> str | None:
    """Return the line of the file `path` in which a thread waits for a connection, or None if it does not wait."""
    code = frame.f_code
    if not (code.co_filename.endswith(_BLOCKING_FILES) and code.co_name in _BLOCKING_FUNCTIONS):
        return None
    caller: FrameType | None = frame
    while caller is not None:
        if caller.f_code.co_filename == path:
            return f"{path}:{caller.f_lineno}"
        caller = caller.f_back
    return None


def _score_of(returned: object, play: Play) -> Score:
    """Convert the return value of `play` to a score."""
    if returned is None:
        return Score(0.0, is_scored=False)
    try:
        if isinstance(returned, Mapping):
            parts = {str(name): finite_number(part, f"the score {name!r}") for name, part in returned.items()}
            return Score(finite_number(sum(parts.values()), "the score"), parts)
        return Score(finite_number(returned, "the score"))
    except (TypeError, ValueError) as error:
        text = f"{describe(error)} Returned by {getattr(play, '__qualname__', play)} ({location_of(play)})."
        return Score(0.0, is_scored=False, error=text)


def with_answer_rewards(score: Score, rewards: float | None) -> Score:
    """Add the sum of the answers' rewards, which is None if no answer has one, to an agent's score.

    Example:
        >>> with_answer_rewards(Score(1.0, {"right": 1.0}), 0.5).breakdown
        {'right': 1.0, 'answers': 0.5}
    """
    if rewards is None or score.error:
        return score
    return Score(score.reward + rewards, {**score.breakdown, "answers": rewards})


def _query_of(row: Row) -> object:
    """Return the query of a row, or "" if it is not a text."""
    query = row.get("query")
    return query if isinstance(query, str) else ""
