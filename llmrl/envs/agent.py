"""`AgentEnv`: conversations led by an agent, which calls the policy at a URL."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Unpack

import torch
from tensordict import TensorDictBase

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


class AgentEnv(DatasetChatEnv):
    """Plays an agent on each row of a dataset: the policy answers its requests to the model, and is trained on them.

    A collector opens an endpoint that speaks the dialects of OpenAI and Anthropic, gives each rollout its own key, and
    calls `play` with the row and the address of the model. Its result is the rollout's reward; a `RubricReward` may be
    appended, too, and adds to it. All requests of a rollout make a tree, which `TurnTree` explains: agents may compact
    their history, ask in parallel, and call sub-agents.

    An agent ends by itself. A `RolloutLimits` of the collector refuses its requests (`max_turns`,
    `max_completion_tokens`) or ends it (`rollout_timeout_seconds`): the rollout is truncated, and keeps its turns. An
    answer that was cut by its length ends nothing: the agent sees the reason. `env.step` alone plays nothing. Train on
    groups: a batch of turns or of trajectories has only the last answered turn of a rollout.

    Args:
        play: a function, plain or async, of a row and an `AgentModel`, or a `command`. It returns a number, named parts
            that add up, or None: not scored. Async ones share a loop; plain ones have a thread each, which is left
            behind when the rollout has ended.
        dataset: the rows, see `DatasetChatEnv`; they need no query.
        split, **draws: see `DatasetChatEnv`.

    Raises:
        TypeError: if `play` cannot be called.
        FileNotFoundError, ValueError: see `DatasetChatEnv`; also if a command reads a column that is missing.

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
        device: torch.device | None = None,
        **draws: Unpack[DrawOptions],
    ) -> None:
        if not callable(play):
            raise TypeError(f"play must be a function of a row and a model, or a command, got {play!r:.80}.")
        self.play = play
        self._loops = ReplaceableLoop("llmrl-agents")
        super().__init__(
            dataset,
            split=split,
            prepare=_query_of,
            device=device,
            **draws,
        )
        if isinstance(play, Command):
            play.check_columns(self.columns)

    async def run_agent(self, row: Row, model: AgentModel) -> Score:
        """Run the agent, and raise what it raised, as by `as_exception`; cancelling this cancels it."""
        is_async = any(map(inspect.iscoroutinefunction, (self.play, type(self.play).__call__)))
        if is_async:
            return _score_of(await self._loops.wait(self._returned(row, model)), self.play)
        return _score_of(await run_in_thread(self.play, row, model), self.play)

    async def _returned(self, row: Row, model: AgentModel) -> object:
        returned = self.play(row, model)
        return await returned if inspect.isawaitable(returned) else returned

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        steps = []
        for element in batch_elements(tensordict):
            score = plain(element.get(("agent", "score"), None))
            if not isinstance(score, Score):
                raise RuntimeError(
                    "an AgentEnv is played by a collector, or an Evaluator: its agent asks the policy itself."
                )
            end = "truncated" if plain(element.get(("rollout", "reason"), "")) else "terminated"
            flags = {key: torch.ones(1, dtype=torch.bool) for key in (end, "done")}
            step = tensordict_of({**dict(super()._step(element).items()), **flags})
            write_score(step, score, list(score.breakdown))
            steps.append(step)
        return restacked(steps, tensordict.batch_size)

    @staticmethod
    def end_with(element: TensorDictBase, score: Score) -> None:
        """Write the agent's result, for the step that ends its conversation."""
        element.set("agent", tensordict_of({"score": non_tensor(score)}))

    def close(self, **kwargs: object) -> None:
        """End the thread of async agents."""
        super().close(**kwargs)
        self._loops.close()


def _score_of(returned: object, play: Play) -> Score:
    """Read the returned value of a function: a number, named parts that add up, or None."""
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


def _query_of(row: Row) -> object:
    """Return the query of a row, for readers of the opening prompt; agents read the row."""
    query = row.get("query")
    return query if isinstance(query, str) else ""
