"""`TrainingRun`: what training scripts share, from the engine to what a run leaves and resumes from."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console
from tensordict import TensorDictBase
from torchrl.envs import EnvBase

from llmrl.collectors import LLMCollector, RolloutLimits
from llmrl.embedded_model import ensure_embedded_model
from llmrl.engines import AsyncVLLM
from llmrl.live_view import LiveView
from llmrl.objectives import train_step
from llmrl.objectives.base import LLMLoss
from llmrl.policies import TransformersWrapper, vLLMWrapper
from llmrl.report import before_after_table, plot_curve, print_how_to_go_on
from llmrl.run_folder import BackgroundWrites, RunFolder, random_states, restore_random_states
from llmrl.weight_sync import VLLMWeightSyncScheme


class Update(Protocol):
    """How a script learns from what a step collected."""

    log_probs: list[torch.Tensor] | None
    """The policy's before the update, `[num_tokens]` a row of the batch; None where they are not known."""

    def __call__(self, batch: TensorDictBase) -> dict[str, float]:
        """Train on a batch of rows; gives metrics."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs beyond model and optimizer."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The reverse of `state_dict`."""
        ...


class LossUpdate:
    """One step of an optimizer on one loss of the batch."""

    def __init__(self, loss: LLMLoss, optimizer: torch.optim.Optimizer, *, max_grad_norm: float | None) -> None:
        self.loss, self.optimizer, self.max_grad_norm = loss, optimizer, max_grad_norm
        self.log_probs: list[torch.Tensor] | None = None

    def __call__(self, batch: TensorDictBase) -> dict[str, float]:
        """Train on a batch of rows; gives metrics."""
        report = train_step(self.loss, batch, self.optimizer, max_grad_norm=self.max_grad_norm)
        self.log_probs = report.log_probs or None
        return report.to_metrics()

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the optimizer's state is the run's."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing."""


class TrainingRun:
    """Everything that one training run holds: engine, collectors, trainer, folder.

    The configuration is nested attributes, as hydra gives them: `seed`, `resume`, and the groups `run`, `model`,
    `collect` and `train` as the scripts' configs have them.

    Args:
        cfg: the configuration.
        console: where it reports.
        env: what is trained on.
        eval_env: what is held out; an environment of all its problems, several answers each.
        make_update: gives the update of an actor and its optimizer.
        postproc: of the collected batches.
        max_staleness: versions that collection may be ahead of training; None collects on demand.

    Raises:
        FileExistsError, FileNotFoundError: when the folder holds a run, or none to resume.
    """

    def __init__(
        self,
        cfg: Any,
        console: Console,
        *,
        env: EnvBase,
        eval_env: Any,
        make_update: Callable[[TransformersWrapper, torch.optim.Optimizer], Update],
        postproc: Callable[[TensorDictBase], TensorDictBase] | None = None,
        max_staleness: int | None = None,
    ) -> None:
        from omegaconf import OmegaConf
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils.logging import disable_progress_bar

        self.cfg, self.console = cfg, console
        self.folder = RunFolder(cfg.run.path, resume=cfg.resume)
        self.logged_steps = {row["step"] for row in self.folder.read_metrics()}
        OmegaConf.save(cfg, self.folder.path / "config.yaml", resolve=True)
        torch.manual_seed(cfg.seed)
        disable_progress_bar()  # the live view owns the terminal
        model_path = str(ensure_embedded_model() if cfg.model.path == "embedded" else cfg.model.path)

        # The engine: vLLM in a process of its own.
        self.engine = AsyncVLLM.from_pretrained(
            model_path,
            max_model_len=cfg.model.max_model_len,
            seed=cfg.seed,
            cpu_threads=cfg.model.engine_cpu_threads,
        )
        console.print(f"engine ready after {self.engine.start_s:.0f} s")
        self.tokenizer = AutoTokenizer.from_pretrained(model_path)
        self.folder.save_tokenizer(self.tokenizer)
        sampling = {"max_new_tokens": cfg.collect.max_new_tokens, "temperature": cfg.collect.temperature}
        policy = vLLMWrapper(self.engine, tokenizer=self.tokenizer, generate_kwargs=sampling)

        # Collection: groups of answers to the same prompt, as training rows.
        self.collector = LLMCollector(
            env,
            policy=policy,
            groups_per_batch=cfg.collect.groups_per_batch,
            max_staleness=max_staleness,
            limits=RolloutLimits(max_turns=cfg.collect.max_turns),
            weight_sync_schemes={"policy": VLLMWeightSyncScheme()},
            postproc=postproc,
        )
        self.evaluator = LLMCollector(eval_env, policy=policy, yield_completed_trajectories=True)
        prompts = eval_env.base_env.prompts
        self.num_eval_rollouts = len(prompts.items) * prompts.num_samples

        # The trainer: float32 master weights, bfloat16 arithmetic.
        self.model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        actor = TransformersWrapper(
            self.model,
            temperature=cfg.collect.temperature,
            token_budget=cfg.train.token_budget,
            autocast_dtype=torch.bfloat16 if cfg.train.bfloat16 else None,
        )
        rates = {"lr": cfg.train.learning_rate, "weight_decay": cfg.train.weight_decay}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **rates)
        self.update = make_update(actor, self.optimizer)

        self.writes = BackgroundWrites()
        self.summary: dict[str, Any] = {}

    def train_on(self, step: int, collected: dict[str, Any]) -> dict[str, float]:
        """One optimizer update and one sync on what a step collected, logged."""
        self.writes.wait()  # the checkpoint being written must not see half an update
        started = time.perf_counter()
        batch = collected["batch"]
        learned = self.update(batch)
        updated = time.perf_counter()
        version = self.collector.update_policy_weights_(self.model)
        synced = time.perf_counter()
        metrics = {**collected["metrics"], **learned, "policy_version": version}
        metrics |= {"train_seconds": updated - started, "sync_seconds": synced - updated}
        metrics["seconds"] = metrics["generate_seconds"] + synced - started
        if step not in self.logged_steps:  # a replayed step was logged before the kill, unless that came between
            self.folder.log_rollouts(step, "train", collected["rollouts"])
            if batch.shape[0]:
                self.folder.tokens.write(step, batch, self.update.log_probs)
            self.folder.log_metrics(step, metrics)
        return metrics

    def resume(self) -> int:
        """Restore the last checkpoint, then train again on what was collected since."""
        checkpoint = self.folder.load_checkpoint() or {"step": 0}
        self.summary = self.folder.read_summary()
        step = checkpoint["step"]
        if step:
            self.model.load_state_dict(checkpoint["model"])
            self.optimizer.load_state_dict(checkpoint["optimizer"])
            self.update.load_state_dict(checkpoint["update"])
            self.restore(checkpoint)
            self.engine.policy_version = step - 1  # versions count on from where they were
            self.collector.update_policy_weights_(self.model)
        while (collected := self.folder.load_batch(step + 1)) is not None:
            step += 1
            self.restore(collected)
            self.train_on(step, collected)
        self.console.print(f"resumed after step {step}, {step - checkpoint['step']} of them replayed")
        return step

    def state(self) -> dict[str, Any]:
        """Sampler position and random states."""
        return {"collector": self.collector.state_dict(), "random": random_states()}

    def restore(self, state: dict[str, Any]) -> None:
        """The reverse of `state`."""
        self.collector.load_state_dict(state["collector"])
        restore_random_states(state["random"])

    def evaluate(self, step: int) -> dict[str, float]:
        """Accuracy on the held-out problems."""
        with self.collector.pause():
            rollouts = self.evaluator.play(self.num_eval_rollouts)
        self.folder.log_rollouts(step, "test", [rollout.to_record() for rollout in rollouts])
        report = self.evaluator.report
        assert report is not None
        return {"accuracy": report.mean_reward, "completion tokens": report.mean_completion_tokens}

    def close(self) -> None:
        """End threads and the engine."""
        self.collector.shutdown()
        self.evaluator.shutdown()
        self.folder.close()
        self.engine.shutdown()

    def collected(self, batch: TensorDictBase) -> dict[str, Any]:
        """A batch with everything that it takes to train on it again after a kill."""
        report = self.collector.report
        assert report is not None
        records = [rollout.to_record() for rollout in self.collector.rollouts]
        return {"batch": batch, "metrics": report.to_metrics(), "rollouts": records, **self.state()}

    def show(self, view: LiveView, step: int, metrics: dict[str, float]) -> None:
        """Report a step, and write a checkpoint when it is time."""
        view.show_step(step, metrics)
        if step % self.cfg.run.sample_every == 0:
            view.show_sample(max(self.collector.rollouts, key=lambda rollout: rollout.reward))
        if step % self.cfg.run.checkpoint_every == 0:
            trained = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
            trained["update"] = self.update.state_dict()
            self.writes.start(self.folder.save_checkpoint, {"step": step, **self.state(), **trained})

    def execute(self, train: Callable[[TrainingRun, int, LiveView], None], script: str | Path) -> None:
        """Evaluate, `train(run, first_step, view)`, evaluate, save and report; an interrupted run reports too."""
        cfg, console = self.cfg, self.console
        first_step = self.resume() if cfg.resume else 0
        if "before" not in self.summary:
            self.summary["before"] = self.evaluate(0)
            self.folder.write_summary(self.summary)
        started = time.perf_counter()
        with LiveView(cfg.train.num_steps, first_step=first_step, console=console) as view:
            try:
                train(self, first_step, view)
            except KeyboardInterrupt:
                console.print("interrupted; what was learned so far is kept")
        console.print(f"trained for {time.perf_counter() - started:.0f} s")
        self.summary["after"] = self.evaluate(cfg.train.num_steps)
        self.writes.wait()
        self.folder.save_model(self.model, self.tokenizer)
        self.folder.write_summary(self.summary)
        plot_curve(self.folder.read_metrics(), self.folder.curve_path)
        console.print(before_after_table(self.summary["before"], self.summary["after"]))
        command = f"python {script} run.path={cfg.run.path} resume=true train.num_steps={cfg.train.num_steps + 20}"
        print_how_to_go_on(console, self.folder, command)
