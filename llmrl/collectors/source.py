"""Rollouts of an environment and a policy in this process."""

from __future__ import annotations

from tensordict import TensorDict, TensorDictBase

from llmrl.collectors.player import RolloutPlayer, as_scored
from llmrl.collectors.scheduler import Job
from llmrl.collectors.stepper import EnvStepper
from llmrl.data import Rollout
from llmrl.envs import PromptSampler


class EnvSource:
    """Opens rollouts by resetting an environment, plays them with a `RolloutPlayer`.

    Args:
        stepper: the environment.
        player: plays one rollout.
        prompts: the environment's dataset; None where it has none, and nothing is grouped.
        is_grouped: whether rollouts come in groups of one prompt each.
    """

    def __init__(
        self, stepper: EnvStepper, player: RolloutPlayer, prompts: PromptSampler | None, *, is_grouped: bool
    ) -> None:
        self.stepper, self.player, self.prompts = stepper, player, prompts
        self.group_size = prompts.num_samples if is_grouped and prompts is not None else 1

    @property
    def policy_version(self) -> int:
        """The engine's count of weight updates."""
        return self.player.policy.engine.policy_version

    async def open(self, num_groups: int) -> list[list[Job]]:
        """Reset the environment for each rollout of the next groups; fewer where the data ends."""
        jobs = await self.open_rollouts(num_groups * self.group_size)
        jobs = jobs[: len(jobs) - len(jobs) % self.group_size]
        return [jobs[start : start + self.group_size] for start in range(0, len(jobs), self.group_size)]

    async def open_rollouts(self, count: int) -> list[Job]:
        """Reset the environment for so many rollouts; fewer where the data ends."""
        return await self.stepper.call(self._draw, count)

    def _draw(self, count: int) -> list[Job]:
        positions = [] if self.prompts is None else self.prompts.upcoming(count)
        if self.prompts is not None:
            count = len(positions)
        if not count:
            return []
        elements: tuple[TensorDictBase, ...] = self.stepper.env.reset(TensorDict(batch_size=[count])).unbind(0)
        return [
            Job(
                records=[self.player.open(element)],
                payload=element,
                positions=(positions[index],) if positions else (),
            )
            for index, element in enumerate(elements)
        ]

    async def play(self, job: Job) -> list[Rollout]:
        """Play one rollout to its end."""
        element, job.payload = job.payload, None  # its tensors are not needed until the group has settled
        return [await self.player.play(element, job.records[0])]

    async def score_group(self, rollouts: list[Rollout]) -> None:
        """Score a group together where its rubric does; a failed member leaves all of them unscored."""
        rubric = self.player.rubric
        if rubric is None or not rubric.is_group_scored or not all(rollout.status.is_success for rollout in rollouts):
            return
        try:
            scoring = rubric.score_group([as_scored(rollout) for rollout in rollouts])
            scores = await self.stepper.slow_lane.run(scoring, rubric.timeout_seconds)
        except Exception as error:
            scores = [rubric.failed(f"{type(error).__name__}: {error}")] * len(rollouts)
        for rollout, score in zip(rollouts, scores, strict=True):
            self.player.take_score(rollout, score)
