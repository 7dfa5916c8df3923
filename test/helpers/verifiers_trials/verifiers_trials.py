"""An environment for verifiers in which each task goes wrong in its own way; tests install and play it."""

import os
import signal
import time

import verifiers.v1 as vf


class TrialData(vf.TaskData):
    answer: str


class TrialTask(vf.Task[TrialData]):
    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        trace.info["said"] = trace.last_reply
        kind = self.data.name
        if kind == "prints":
            for _ in range(1024):
                os.write(1, b"x" * (1 << 20))
        if kind == "dies":
            print("these were its last words", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "hangs":
            time.sleep(600)
        if kind == "raises":
            raise KeyError("no such answer")
        return float("nan") if kind == "nan" else float(self.data.answer in trace.last_reply)

    @vf.reward
    async def short(self, trace: vf.Trace) -> float:
        return 0.5

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float("inf") if self.data.name == "nan" else float(len(trace.last_reply))


class TrialConfig(vf.TasksetConfig):
    split: str = "train"
    key: str = ""


class TrialEnv(vf.SingleAgentEnv):
    """Asks twice in the task `twice`."""

    async def run(self, task, agents):
        async with agents.agent.interaction(task) as interaction:
            segment = await interaction.turn()
            if task.data.name == "twice" and not segment.terminated:
                await interaction.turn("Are you sure?")


class TrialTaskset(vf.Taskset[TrialTask, TrialConfig]):
    def load(self):
        if self.config.key:
            os.environ[self.config.key]
        names = ["fine", "twice", "raises", "nan", "prints", "dies", "after", "hangs"]
        return [
            TrialTask(
                TrialData(name=name, prompt=f"7 + 8 = ({self.config.split})", system_prompt="Add.", answer="15"),
                self.config.task,
            )
            for name in names
        ]


__all__ = ["TrialEnv", "TrialTaskset"]
