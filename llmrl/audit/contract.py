"""`check_env`: tests whether an environment keeps its contract, with prepared answers and without a model."""

from __future__ import annotations

import math
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from pathlib import Path

from torchrl.envs import EnvBase, check_env_specs

from llmrl._utils.failure import describe
from llmrl._utils.json_values import as_json
from llmrl._utils.threads import start_in_thread
from llmrl._utils.types import JSON
from llmrl.audit.answers import FORMS, MAX_COLUMN_CHARS, Answer, Kind, answers_for
from llmrl.audit.checks import SLOW_S
from llmrl.audit.play import MAX_TURNS, AnsweringEngine, drawing_of
from llmrl.collectors import LLMCollector, RolloutLimits
from llmrl.data import Rollout, RolloutStatus, StopReason
from llmrl.data.message import prompt_of
from llmrl.data.state_file import load_state, save_state
from llmrl.envs.agent import AgentEnv
from llmrl.envs.dataset import DatasetChatEnv
from llmrl.envs.game import GameEnv
from llmrl.envs.primer import DataLoadingPrimer
from llmrl.envs.sampler import EndOfData
from llmrl.rendering import Renderer
from llmrl.watch.findings import Finding, Verdict, verdict_of

_PLAIN = Answer("a plain answer", Kind.WORTHLESS, lambda index: f"The answer is {index}.")
_MAX_ANSWERS = 10
_MAX_NEW_TOKENS = 1 << 20
_MEGABYTE = "All work and no play makes Jack a dull boy. " * 24_000


@dataclass(frozen=True, slots=True)
class Contract:
    """Result of `check_env`."""

    checks: Sequence[Finding]
    """Findings `specs`, `seed`, `groups`, `resume`, `hostile`, `rewards` and `timing`; fewer after an error."""

    @property
    def verdict(self) -> Verdict:
        """The worst verdict."""
        return verdict_of(self.checks)

    def to_json(self) -> dict[str, JSON]:
        """Return the result as JSON."""
        checks: list[JSON] = [{"name": one.name, "verdict": one.verdict, "says": one.says} for one in self.checks]
        return {"verdict": self.verdict, "checks": checks}


def check_env(
    make_env: Callable[[], EnvBase],
    renderer: Renderer,
    *,
    num_groups: int = 4,
    timeout_s: float = 30.0,
    on_step: Callable[[str], None] = lambda step: None,
) -> Contract:
    """Check specs, determinism, groups, resume, hostile answers, rewards and time of an environment.

    Args:
        make_env: function that creates the environment with the same seed each time; groups need `repeats=2`.
        renderer: renderer of the model that is to be trained.
        num_groups: number of groups to play with each answer.
        timeout_s: maximum time of one environment step.
        on_step: function that is called with the name of each step before it.

    Raises:
        ValueError: if the environment has no dataset.

    Example:
        >>> contract = check_env(make_env, renderer)                                            # doctest: +SKIP
        >>> [check.says for check in contract.checks if check.verdict != "fine"]                # doctest: +SKIP
        []
    """
    trial = _Trial(make_env, renderer, num_groups, timeout_s, on_step)
    on_step("specs")
    checks = [trial.check_specs()]
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder) / "state.safetensors"
        try:
            first, later = trial.play_and_save(state)
            again = trial.play_sequence()
            checks.append(_compared("seed", "A second environment of the same seed", first, again))
            checks.append(_check_groups([*first, *later], trial.num_samples))
            checks.append(_compared("resume", "A resumed environment", later, trial.play_resumed(state)))
        except Exception as error:  # user code may raise anything
            checks.append(Finding("seed", Verdict.BROKEN, f"Playing ended with {describe(error)}", ()))
            return Contract(checks)
    hostile, answered = trial.check_hostile()
    checks += [hostile, _check_rewards([*first, *later, *again], answered), trial.check_time()]
    return Contract(checks)


@dataclass
class _Trial:
    make_env: Callable[[], EnvBase]
    renderer: Renderer
    num_groups: int
    timeout_s: float
    on_step: Callable[[str], None]
    cpu_s: dict[str, float] = field(default_factory=dict)
    """Seconds of processor time of a reset and of a turn."""

    def __post_init__(self) -> None:
        drawing = drawing_of(self.make_env())
        self.num_samples = drawing.prompts.num_samples
        self.is_plain = not isinstance(drawing, AgentEnv | GameEnv)

    def _opened(self, max_turns: int = MAX_TURNS) -> tuple[AnsweringEngine, LLMCollector, list[Answer]]:
        """Return an engine, a collector of a new environment that uses the engine, and the answers to play."""
        env = self.make_env()
        answers = [_PLAIN, *_answers_of(drawing_of(env))]
        engine = AnsweringEngine(_PLAIN, self.renderer)
        limits = RolloutLimits(max_turns=max_turns, step_timeout_seconds=self.timeout_s)
        return engine, engine.collector(env, limits, _MAX_NEW_TOKENS), answers

    def _play(
        self, engine: AnsweringEngine, collector: LLMCollector, answers: Sequence[Answer], num_groups: int | None = None
    ) -> list[Rollout]:
        played: list[Rollout] = []
        for answer in answers:
            self.on_step(answer.name)
            engine.given = answer
            try:
                played += collector.play((num_groups or self.num_groups) * self.num_samples)
            except EndOfData:
                break
        return played

    def play_and_save(self, path: Path) -> tuple[list[Rollout], list[Rollout]]:
        """Play all answers, save the state, and continue; return the rollouts before and after saving."""
        engine, collector, answers = self._opened()
        with collector:
            started = time.process_time()
            first = self._play(engine, collector, answers)
            turns = sum(rollout.num_turns for rollout in first)
            self.cpu_s["a turn"] = (time.process_time() - started) / max(1, turns)
            save_state(path, collector.state_dict())
            return first, self._play(engine, collector, [_PLAIN])

    def play_sequence(self) -> list[Rollout]:
        """Play all answers in a new environment."""
        engine, collector, answers = self._opened()
        with collector:
            return self._play(engine, collector, answers)

    def play_resumed(self, path: Path) -> list[Rollout]:
        """Continue in a new environment, from a saved state."""
        engine, collector, _ = self._opened()
        with collector:
            collector.load_state_dict(load_state(path, advice="play again"))
            return self._play(engine, collector, [_PLAIN])

    def check_specs(self) -> Finding:
        """Compare an environment's data with its specs, as TorchRL does."""
        if not self.is_plain:
            return Finding("specs", Verdict.FINE, "Not examined: other players or an agent take part in a step.", ())
        env = self.make_env()

        def check() -> None:
            started = time.process_time()
            env.reset()
            self.cpu_s["a reset"] = time.process_time() - started
            check_env_specs(env)

        checked = start_in_thread(check)  # the thread is abandoned if it hangs
        if not wait([checked], 2 * self.timeout_s).done:
            says = f"A reset and a few steps took more than {2 * self.timeout_s:g} s."
            return Finding("specs", Verdict.BROKEN, says, ())
        if (error := checked.exception()) is not None:
            return Finding("specs", Verdict.BROKEN, f"TorchRL's check_env_specs: {describe(error)}", ())
        return Finding("specs", Verdict.FINE, "A reset and steps return data that matches the specs.", ())

    def check_hostile(self) -> tuple[Finding, list[Rollout]]:
        """Play hostile answers, and a plain one after them."""
        engine, collector, _ = self._opened(max_turns=2)
        half = self.renderer.encode("🙂")[:1]
        answers = [
            *(one for one in answers_for([{"query": ""}], "query") if one.kind is Kind.HOSTILE),
            Answer("nothing", Kind.HOSTILE, lambda index: ""),
            Answer("half a character", Kind.HOSTILE, lambda index: half),
            Answer("a megabyte", Kind.HOSTILE, lambda index: _MEGABYTE),
        ]
        with collector:
            played = {one.name: self._play(engine, collector, [one], 1) for one in answers}
            after = self._play(engine, collector, [_PLAIN], 1)
        everything = [rollout for rollouts in played.values() for rollout in rollouts]
        late = [name for name, rollouts in played.items() if any(map(_is_late, rollouts))]
        if late:
            says = f"Answers took longer than {self.timeout_s:g} s: {', '.join(late)}."
            return Finding("hostile", Verdict.BROKEN, says, ()), everything
        if failed := [rollout for rollout in after if rollout.error]:
            says = f"After the hostile answers, plain ones fail: {failed[0].error}"
            return Finding("hostile", Verdict.BROKEN, says, ()), everything
        if raised := {name: one.error for name, rollouts in played.items() for one in rollouts if one.error}:
            name, error = next(iter(raised.items()))
            says = f"Rollouts ended as errors for these answers: {', '.join(raised)}. {name.capitalize()}: {error}"
            return Finding("hostile", Verdict.LOOK, says, ()), everything
        says = f"All {len(everything)} rollouts of {len(played)} hostile answers were completed or truncated."
        return Finding("hostile", Verdict.FINE, says, ()), everything

    def check_time(self) -> Finding:
        """Judge the processor time of a reset and of a turn."""
        shown = ", ".join(f"{1000 * seconds:.1f} ms for {what}" for what, seconds in self.cpu_s.items())
        verdict = Verdict.LOOK if max(self.cpu_s.values(), default=0) > SLOW_S else Verdict.FINE
        return Finding("timing", verdict, f"Processor time: {shown}.", ())


def _answers_of(drawing: DatasetChatEnv | DataLoadingPrimer) -> list[Answer]:
    """Return the columns of the dataset as answers, in the forms of `FORMS`."""
    items = drawing.prompts.items
    query = drawing.data_key if isinstance(drawing, DatasetChatEnv) else "query"

    def answer(column: str, form: str, write: Callable[[str], str]) -> Answer:
        return Answer(f"{column} {form}".strip(), Kind.REFERENCE, lambda index: write(_text(items[index].get(column))))

    columns = [column for column in items[0] if column != query and _text(items[0][column])]
    return [answer(column, form, write) for column in columns for form, write in FORMS.items()][:_MAX_ANSWERS]


def _text(value: object) -> str:
    if not isinstance(value, str | int | float):
        return ""
    return str(value)[:MAX_COLUMN_CHARS]


def _is_late(rollout: Rollout) -> bool:
    return rollout.reason == StopReason.TIMEOUT or rollout.error.startswith("TimeoutError")


def _prompt(rollout: Rollout) -> JSON:
    return as_json([dict(message) for message in prompt_of(rollout.messages)])


def _compared(name: str, who: str, expected: Sequence[Rollout], found: Sequence[Rollout]) -> Finding:
    """Compare rollouts that should be equal: their groups, columns, prompts and rewards."""
    facts: Mapping[str, Callable[[Rollout], object]] = {
        "rows": lambda one: (one.group_id, one.sample_index, one.role, as_json(one.columns)),
        "prompts": _prompt,
        "rewards": lambda one: (one.status, one.is_scored, str(one.reward), as_json(one.breakdown)),
    }
    for fact, of in facts.items():
        num_other = sum(of(one) != of(other) for one, other in zip(expected, found, strict=False))
        if num_other or len(expected) != len(found):
            says = f"{who} has different {fact} in {num_other} of {len(expected)} rollouts ({len(found)} were played)."
            return Finding(name, Verdict.BROKEN, says, ())
    return Finding(name, Verdict.FINE, f"{who} has the same rows, prompts and rewards in {len(found)} rollouts.", ())


def _check_groups(rollouts: Sequence[Rollout], num_samples: int) -> Finding:
    if num_samples == 1:
        says = "Not examined: the environment plays each problem once. Create it with repeats=2."
        return Finding("groups", Verdict.LOOK, says, ())
    groups: dict[tuple[str, str], list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        groups[rollout.group_id, rollout.role].append(rollout)
    unequal = [place for place, group in groups.items() if any(_prompt(one) != _prompt(group[0]) for one in group)]
    if unequal:
        says = f"{len(unequal)} of {len(groups)} groups have different prompts, for example {unequal[0][0]!r}."
        return Finding("groups", Verdict.BROKEN, says, ())
    sizes = {one.group_size for one in rollouts}
    by_group = {group_id: sum(one.group_id == group_id for one in rollouts) for group_id, _ in groups}
    if sizes != {num_samples} or set(by_group.values()) != {num_samples}:
        says = f"Groups have {sorted(set(by_group.values()))} rollouts instead of {num_samples}."
        return Finding("groups", Verdict.BROKEN, says, ())
    return Finding("groups", Verdict.FINE, f"In each of {len(groups)} groups, the rollouts have the same prompt.", ())


def _check_rewards(plain: Sequence[Rollout], hostile: Sequence[Rollout]) -> Finding:
    odd = [one for one in [*plain, *hostile] if not math.isfinite(one.reward) or "finite" in one.error]
    if odd:
        says = f"{len(odd)} rewards are not finite numbers: {odd[0].error or odd[0].reward}"
        return Finding("rewards", Verdict.BROKEN, says, ())
    failed = [one for one in plain if one.status is RolloutStatus.ERROR]
    if failed:
        says = f"{len(failed)} of {len(plain)} ordinary answers ended as errors: {failed[0].error}"
        return Finding("rewards", Verdict.BROKEN, says, ())
    unscored = sum(not one.is_scored for one in plain)
    if unscored:
        says = f"{unscored} of {len(plain)} ordinary answers have no reward."
        return Finding("rewards", Verdict.BROKEN if unscored == len(plain) else Verdict.LOOK, says, ())
    values = sorted({one.reward for one in plain})
    says = f"Rewards are finite, from {values[0]:g} to {values[-1]:g} in {len(plain)} rollouts."
    return Finding("rewards", Verdict.FINE, says, ())
