"""`MixedEnv`: several environments in one training run."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torchrl.envs import EnvBase

from llmrl._utils.numbers import finite_number
from llmrl._utils.types import StateDict
from llmrl.envs.dataset import DatasetChatEnv
from llmrl.envs.primer import DataLoadingPrimer, dataset_env_of
from llmrl.envs.sampler import PromptSampler

_RECENT = 64
"""Approximate number of rollouts in a running mean reward."""


@dataclass(slots=True)
class EnvProgress:
    """Statistics of an environment, passed to a user's function of weights."""

    num_groups: int = 0
    """Number of groups drawn."""
    num_scored: int = 0
    """Number of scored rollouts."""
    reward: float = 0.0
    """Mean reward of approximately the last 64 scored rollouts."""

    def add(self, reward: float) -> None:
        """Count a scored rollout."""
        self.num_scored += 1
        self.reward += (reward - self.reward) / min(self.num_scored, _RECENT)


Weights = Mapping[str, float] | Callable[[Mapping[str, EnvProgress]], Mapping[str, float]]
"""Weights of the environments by name, or a function that returns them before each draw."""


class MixedPrompts:
    """Chooses the environment of each group by smooth weighted round-robin, and stores the position in each dataset.

    The choice is deterministic, so a restored state continues the same sequence. `weights=None` means equal weights.

    Example:
        >>> samplers = {name: PromptSampler([{"query": name}]) for name in ("a", "b")}
        >>> prompts = MixedPrompts(samplers, {"a": 2, "b": 1})
        >>> "".join(prompts.choose(1)[0] for _ in range(6))
        'abaaba'
    """

    def __init__(self, samplers: Mapping[str, PromptSampler], weights: Weights | None = None) -> None:
        self._samplers = dict(samplers)
        self._names = list(samplers)
        self._weights = dict.fromkeys(self._names, 1.0) if weights is None else weights
        if not callable(self._weights):
            self._shares(self._weights, self._names)
        self.num_samples = next(iter(self._samplers.values())).num_samples
        """Number of rollouts in a group."""
        self.name = "+".join(self._names)
        self.progress = {name: EnvProgress() for name in self._names}
        self._credits = dict.fromkeys(self._names, 0.0)
        self._ended: set[str] = set()
        self._again: deque[int] = deque()

    def choose(self, group_size: int) -> tuple[str, list[int]] | None:
        """Return the environment of the next group, and the positions in its dataset if the group is drawn again.

        Returns None when the data of every environment has ended.
        """
        if self._again:
            name, _ = self.place(self._again[0])
            return name, [self.place(self._again.popleft())[1] for _ in range(min(group_size, len(self._again)))]
        names = [name for name in self._names if name not in self._ended]
        if not names:
            return None
        weights = self._weights
        if callable(weights):
            weights = weights(self.progress)
        shares = self._shares(weights, names)
        for name in names:
            self._credits[name] += shares[name]
        chosen = max(names, key=lambda name: self._credits[name])
        self._credits[chosen] -= 1.0
        self.progress[chosen].num_groups += 1
        return chosen, []

    def choose_many(self, count: int, group_size: int) -> list[tuple[str, list[int]]]:
        """Return up to `count` results of `choose`; only the last environment may have reached the end of its data.

        Example:
            >>> samplers = {name: PromptSampler([{}], num_epochs=1) for name in ("a", "b")}
            >>> [name for name, _ in MixedPrompts(samplers).choose_many(9, 1)]
            ['a', 'b', 'a']
        """
        chosen: list[tuple[str, list[int]]] = []
        num_new = Counter[str]()
        while len(chosen) < count and (choice := self.choose(group_size)) is not None:
            chosen.append(choice)
            name, again = choice
            if not again:
                num_new[name] += group_size
            if num_new[name] > self._samplers[name].num_surely_left:
                break
        return chosen

    def end(self, name: str) -> None:
        """Exclude an environment after its data ended during a draw."""
        self._ended.add(name)
        self.progress[name].num_groups -= 1

    def position(self, name: str, position: int) -> int:
        """Encode an environment and a position in its dataset as one number."""
        return position * len(self._names) + self._names.index(name)

    def place(self, position: int) -> tuple[str, int]:
        """Return the environment, and the position in its dataset, that `position` encodes."""
        place, index = divmod(position, len(self._names))
        return self._names[index], place

    def _shares(self, weights: Mapping[str, float], names: Sequence[str]) -> dict[str, float]:
        if set(weights) != set(self._names):
            raise ValueError(f"weights must name the environments {self._names}; got {sorted(weights)}.")
        shares = {name: finite_number(weights[name], f"the weight of {name!r}") for name in names}
        if min(shares.values()) < 0:
            raise ValueError(f"weights must not be negative, got {shares}.")
        if not (total := sum(shares.values())):
            raise ValueError(f"weights must not all be 0, but they are for the environments with data left: {shares}.")
        return {name: share / total for name, share in shares.items()}

    def state_dict(self, *, unfinished: Sequence[int] = ()) -> StateDict:
        """Return the state of all samplers and of the choice between them.

        `unfinished` lists drawn positions that must be drawn again after a restart.
        """
        progress = {name: [one.num_groups, one.num_scored, one.reward] for name, one in self.progress.items()}
        return {
            "samplers": {name: sampler.state_dict() for name, sampler in self._samplers.items()},
            "credits": dict(self._credits),
            "ended": sorted(self._ended),
            "progress": progress,
            "again": [*unfinished, *self._again],
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Restore a saved state; raise ValueError if it was saved with other environments."""
        if list(state["samplers"]) != self._names:
            raise ValueError(f"the saved state is for the environments {list(state['samplers'])}, not {self._names}.")
        for name, sampler in self._samplers.items():
            sampler.load_state_dict(state["samplers"][name])
        self._credits = dict(state["credits"])
        self._ended = set(state["ended"])
        self.progress = {name: EnvProgress(*saved) for name, saved in state["progress"].items()}
        self._again = deque(state["again"])


class MixedEnv:
    """Several environments for one collector; each group comes from one of them, with its own rubric, tools and prompt.

    It has no `reset` or `step`: to step one of the environments yourself, get it by name, as in `mixed["gsm8k"]`. The
    environment's name is the prefix of its group ids and is in each record (`Rollout.env`) and in
    the metrics. An environment is excluded when its data ends; collection ends with the last one.

    Args:
        envs: environments by name, each over a dataset (`DatasetChatEnv`, transformed or not), with equal `repeats`.
        weights: relative frequencies by name, or a function that is called with the `EnvProgress`
            of each environment before a group is drawn. By default all are equal.

    Raises ValueError if an environment has no dataset of its own, or if names, `repeats` or weights are invalid.

    Example:
        >>> from llmrl.envs import DatasetChatEnv
        >>> envs = {name: DatasetChatEnv([{"query": name}], repeats=2) for name in ("easy", "hard")}
        >>> mixed = MixedEnv(envs, weights={"easy": 1, "hard": 3})
        >>> mixed["hard"].reset()["query"], mixed.prompts.num_samples
        ('hard', 2)
    """

    def __init__(self, envs: Mapping[str, EnvBase], *, weights: Weights | None = None) -> None:
        if not envs:
            raise ValueError("envs is empty; at least one environment is needed.")
        self._envs = dict(envs)
        self._dataset_envs: dict[str, DatasetChatEnv | DataLoadingPrimer] = {}
        samplers: dict[str, PromptSampler] = {}
        for name, env in self._envs.items():
            dataset_env = dataset_env_of(env)
            if not name or "/" in name:
                raise ValueError(
                    f"an environment's name is the prefix of its group ids, so it must not be empty or contain '/', "
                    f"got {name!r}."
                )
            if dataset_env is None:
                raise ValueError(f"the environment {name!r} has no dataset to draw prompts from: use a DatasetChatEnv.")
            if any(dataset_env.prompts is other for other in samplers.values()):
                raise ValueError(f"the environment {name!r} shares its prompts with another one: give it its own.")
            samplers[name] = dataset_env.prompts
            samplers[name].name = name
            self._dataset_envs[name] = dataset_env
        repeats = {name: sampler.num_samples for name, sampler in samplers.items()}
        if len(set(repeats.values())) > 1:
            raise ValueError(
                f"all groups of a batch have the same size: give all environments the same repeats, not {repeats}."
            )
        self.prompts = MixedPrompts(samplers, weights)

    def __getitem__(self, name: str) -> EnvBase:
        return self._envs[name]

    def items(self) -> list[tuple[str, EnvBase]]:
        """Return names and environments."""
        return list(self._envs.items())

    def state_dict(self) -> StateDict:
        """Return the position in every dataset, and the states of the environments, such as a curriculum."""
        envs = {name: env.state_dict() for name, env in self._dataset_envs.items()}
        return {"prompts": self.prompts.state_dict(), "envs": envs}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restore a saved position and the states of the environments."""
        self.prompts.load_state_dict(state_dict["prompts"])
        for name, state in state_dict.get("envs", {}).items():  # absent from states of older versions
            self._dataset_envs[name].load_state_dict(state)
