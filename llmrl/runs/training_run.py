"""`TrainingRun`: the loop of the training scripts, from the engine to what a run leaves and resumes from."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from rich.console import Console
from tensordict import TensorDict, TensorDictBase

from llmrl.collectors import LLMCollector, NoSignal, RolloutLimits
from llmrl.engines import EngineRegistry
from llmrl.objectives.base import LLMLoss
from llmrl.policies import vLLMWrapper
from llmrl.runs.dry_run import as_dry_run, with_differing_rewards
from llmrl.runs.live_view import LiveView
from llmrl.runs.read_ahead import ReadAhead
from llmrl.runs.report import before_after_table, plot_curve, print_how_to_go_on, resume_command
from llmrl.runs.run_config import resumed_config, save_config
from llmrl.runs.run_folder import BackgroundWrites, RunFolder, random_states, restore_random_states
from llmrl.runs.run_setup import MakeEnv, TrainerDevice, compute_dtype, make_collector, start_engine
from llmrl.testing.embedded_model import ensure_embedded_model
from llmrl.trainer import TransformersWrapper, train_step


class NothingLearned(RuntimeError):
    """A run came to its end and no step of it changed the weights."""


Collected = dict[str, Any]
"""What a step collected, with everything that it takes to train on it again after a kill: `batch`, `metrics`,
`rollouts` (records), and the state after it, `collector` and `random`."""


class Update(Protocol):
    """How a script learns from what a step collected."""

    log_probs: list[torch.Tensor] | None
    """The policy's before the update, `[num_tokens]` a row of the batch; None where they are not known."""

    @property
    def needs_rows(self) -> bool:
        """Whether there is nothing to learn from before new rows come."""
        ...

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

    needs_rows = True

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
    """Everything that one training run holds: engine, collectors, trainer, folder. A context manager.

    The configuration is nested attributes, as hydra gives them (`own_config` gives a resumed run's);
    `sota-implementations/config/` has every entry with its reason. With `collect.max_staleness` collection goes on
    while it trains. With `collect.in_background`, too, and training goes on where no batch is ready; the two exclude
    each other, since versions that no batch was trained on would make every group too old.

    Args:
        cfg: the configuration; with `dry_run` it is replaced by `as_dry_run`.
        make_env: builds what is trained on and what is held out, such as `task_env`.
        make_update: gives the update of an actor and its optimizer.
        postproc: of the collected batches.
        console: where it reports.
        engine: generates, in place of the one that the configuration describes; it is not shut down.

    Raises:
        NothingLearned: by `execute`, at the end, when no step changed the weights.
        FileExistsError, FileNotFoundError: when the folder holds a run, or none to resume.
        ValueError: for a configuration whose parts do not fit; see `llmrl.runs.run_setup`.
        RuntimeError: when `train.device` is a GPU and there is none.
    """

    def __init__(
        self,
        cfg: Any,
        *,
        make_env: MakeEnv,
        make_update: Callable[[TransformersWrapper, torch.optim.Optimizer], Update],
        postproc: Callable[[TensorDictBase], TensorDictBase],
        console: Console | None = None,
        engine: Any = None,
    ) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils.logging import disable_progress_bar

        self.console = console or Console()
        self.cfg = cfg = as_dry_run(cfg) if cfg.dry_run else cfg
        if cfg.resume:
            resumed_config(cfg)  # refuses another run's
        if cfg.collect.in_background and cfg.collect.max_staleness is not None:
            raise ValueError("collect.in_background has no bound of staleness: leave collect.max_staleness=null.")
        self._owns_engine, self.engine = engine is None, engine
        # Before anything is started: what is wrong here costs no minutes.
        env, eval_env = make_env(cfg, "train"), make_env(cfg, "eval")
        self.device, self.dtype = TrainerDevice(cfg), compute_dtype(cfg)
        self.folder = RunFolder(cfg.run.path, resume=cfg.resume, trackers=list(cfg.run.trackers))
        self.logged_steps = {row["step"] for row in self.folder.read_metrics()}
        torch.manual_seed(cfg.seed)
        if cfg.train.cpu_threads is not None:
            torch.set_num_threads(cfg.train.cpu_threads)
        disable_progress_bar()  # the live view owns the terminal
        model_path = str(ensure_embedded_model() if cfg.model.path == "embedded" else cfg.model.path)

        # The engine: vLLM in a process of its own, or several. It is given what the trainer's device has left.
        if self._owns_engine:
            started = time.perf_counter()
            self.engine = start_engine(cfg, model_path)
            self.console.print(f"engine ready after {time.perf_counter() - started:.0f} s")
        self.tokenizer = AutoTokenizer.from_pretrained(model_path)
        self.folder.save_tokenizer(self.tokenizer)
        sampling = {"max_new_tokens": cfg.collect.max_new_tokens, "temperature": cfg.collect.temperature}
        policy = vLLMWrapper(self.engine, tokenizer=self.tokenizer, generate_kwargs=sampling)

        # Collection: groups of answers to the same prompt, as training rows.
        registry = None
        if cfg.collect.num_collectors is not None:
            registry = EngineRegistry.start()
            registry.publish(self.engine)
        self.collector = make_collector(
            cfg,
            policy,
            env,
            make_env=make_env,
            registry=registry,
            postproc=_after(with_differing_rewards, postproc) if cfg.dry_run else postproc,
        )
        limits = RolloutLimits(max_turns=cfg.collect.max_turns)
        self.evaluator = LLMCollector(eval_env, policy=policy, yield_completed_trajectories=True, limits=limits)
        prompts = eval_env.base_env.prompts
        self.num_eval_rollouts = len(prompts.items) * prompts.num_samples
        self._ahead: ReadAhead[Collected] | None = None
        self._last: Collected = {}

        # The trainer: float32 weights, computing in the engine's dtype.
        self.model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).to(self.device.name)
        if cfg.train.gradient_checkpointing:
            self.model.gradient_checkpointing_enable()
        actor = TransformersWrapper(
            self.model,
            temperature=cfg.collect.temperature,
            token_budget=cfg.train.token_budget,
            autocast_dtype=None if self.dtype is torch.float32 else self.dtype,
        )
        self.rates = {"lr": cfg.train.learning_rate, "weight_decay": cfg.train.weight_decay}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **self.rates)
        self.update = make_update(actor, self.optimizer)

        self.writes = BackgroundWrites()
        self.summary: dict[str, Any] = {}

    # The loop

    def execute(self) -> None:
        """Evaluate, train, evaluate, save and report; an interrupted run reports too."""
        cfg, console = self.cfg, self.console
        first_step = self.resume() if cfg.resume else 0
        save_config(cfg, self.folder.path)  # not before: a run that cannot be resumed keeps its own
        if "before" not in self.summary:
            self.summary["before"] = self.evaluate(0)
            self.folder.write_summary(self.summary)
        started = time.perf_counter()
        with LiveView(cfg.train.num_steps, first_step=first_step, console=console) as view:
            try:
                why_stopped = self.train(first_step, view)
            except KeyboardInterrupt:
                why_stopped = "interrupted; what was learned so far is kept"
        console.print(f"trained for {time.perf_counter() - started:.0f} s; {why_stopped}", highlight=False)
        self.summary["after"] = self.evaluate(cfg.train.num_steps)
        self.writes.wait()
        self.folder.save_model(self.model, self.tokenizer, self.dtype)
        self.folder.write_summary(self.summary)
        plot_curve(self.folder.read_metrics(), self.folder.curve_path)
        console.print(before_after_table(self.summary["before"], self.summary["after"]))
        if cfg.train.num_steps and all(row.get("is_skipped") for row in self.folder.read_metrics()):
            console.print(f"[bold red]nothing was learned: no step changed the weights; {why_stopped}[/bold red]")
            raise NothingLearned(f"no step of {self.folder.path} changed the weights; {why_stopped}.")
        if cfg.dry_run:
            console.print("dry run: two steps done")
        else:
            print_how_to_go_on(console, self.folder, resume_command(cfg.run.path, cfg.train.num_steps + 20))

    def train(self, first_step: int, view: LiveView) -> str:
        """Collect, train, sync, until the last step, the target or the end of the data; gives what ended it."""
        is_ahead = self.cfg.collect.max_staleness is not None or self.cfg.collect.in_background
        collecting, training = ("wait for a batch", "train, and generate") if is_ahead else ("generate", "train")
        batches = self._batches()
        self._ahead = ReadAhead(batches) if self.cfg.collect.in_background else None
        for step in range(first_step + 1, self.cfg.train.num_steps + 1):
            view.doing(collecting)
            try:
                collected = self._take(batches)
            except NoSignal as error:
                self.console.print(f"[bold red]step {step} has nothing to learn from: {error}[/bold red]")
                return f"nothing was left to learn from at step {step}"
            if collected is None:
                return f"the data ended before step {step}"
            self.folder.save_batch(step, collected)
            view.doing(training)
            metrics = self.train_on(step, collected)
            self.show(view, step, collected, metrics)
            target = self.cfg.train.target_reward
            if target is not None and metrics.get("reward_mean", -math.inf) >= target:
                return f"the mean reward reached train.target_reward={target:g} at step {step}"
        return f"all {self.cfg.train.num_steps} steps are done"

    def _batches(self) -> Iterator[Collected]:
        for batch in self.collector:
            report = self.collector.report
            assert batch is not None and report is not None
            records = [rollout.to_record() for rollout in self.collector.rollouts]
            # Its state has the groups in flight: after a kill they are played again.
            yield {"batch": batch, "metrics": report.to_metrics(), "rollouts": records, **self.state()}

    def _take(self, batches: Iterator[Collected]) -> Collected | None:
        """What the next step trains on; in the background that may be an empty batch, and what was kept before."""
        started = time.perf_counter()
        if self._ahead is None:
            collected = next(batches, None)
        else:
            collected = self._ahead.take(is_waited_for=self.update.needs_rows or not self._last)
            if collected is None and not self._ahead.is_at_end:
                nothing = {"batch": TensorDict(batch_size=[0]), "metrics": {}, "rollouts": []}
                collected = {**self._last, **nothing, "random": random_states()}
        if collected is not None:
            collected["metrics"]["generate_seconds"] = time.perf_counter() - started
            self._last = collected
        return collected

    def train_on(self, step: int, collected: Collected) -> dict[str, float]:
        """One update and one sync on what a step collected, logged."""
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

    def show(self, view: LiveView, step: int, collected: Collected, metrics: dict[str, float]) -> None:
        """Report a step, and write a checkpoint when it is time."""
        view.show_step(step, metrics)
        if metrics.get("is_skipped"):
            self.console.print(
                f"[bold red]step {step} changed nothing: no row, or a loss that is not finite[/bold red]"
            )
        if step % self.cfg.run.sample_every == 0 and collected["rollouts"]:
            view.show_sample(max(collected["rollouts"], key=lambda record: record["reward"]))
        if step % self.cfg.run.checkpoint_every == 0:
            trained = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
            trained["update"] = self.update.state_dict()
            state = {"collector": collected["collector"], "random": random_states()}
            self.writes.start(self.folder.save_checkpoint, {"step": step, **state, **trained})

    def evaluate(self, step: int) -> dict[str, float]:
        """Results on the held-out problems: the share of right answers (a reward of 1, as `llmrl eval`), the reward."""
        with self.collector.pause():
            rollouts = self.evaluator.play(self.num_eval_rollouts)
        self.folder.log_rollouts(step, "test", [rollout.to_record() for rollout in rollouts])
        report = self.evaluator.report
        assert report is not None
        num_right = sum(rollout.is_scored and rollout.reward >= 1.0 for rollout in rollouts)
        results = {
            "pass@1": num_right / len(rollouts),
            "mean reward": report.mean_reward,
            "completion tokens": report.mean_completion_tokens,
        }
        return {name: value for name, value in results.items() if not math.isnan(value)}  # none was scored

    # Recovery

    def resume(self) -> int:
        """Restore the last checkpoint, then train again on what was collected since."""
        checkpoint = self.folder.load_checkpoint() or {"step": 0}
        self.summary = self.folder.read_summary()
        step = checkpoint["step"]
        if step:
            self.model.load_state_dict(checkpoint["model"])
            self.optimizer.load_state_dict(checkpoint["optimizer"])
            for group in self.optimizer.param_groups:  # those of now: the state brings those of then
                group.update(self.rates)
            self.update.load_state_dict(checkpoint["update"])
            self.restore(checkpoint)
            self.engine.policy_version = step - 1  # versions count on from where they were
            self.collector.update_policy_weights_(self.model)
        while (collected := self.folder.load_batch(step + 1)) is not None:
            step += 1
            self.restore(collected)
            self.train_on(step, collected)
            self._last = collected
        self.console.print(f"resumed after step {step}, {step - checkpoint['step']} of them replayed")
        return step

    def state(self) -> dict[str, Any]:
        """Sampler position and random states."""
        return {"collector": self.collector.state_dict(), "random": random_states()}

    def restore(self, state: dict[str, Any]) -> None:
        """The reverse of `state`."""
        self.collector.load_state_dict(state["collector"])
        restore_random_states(state["random"])

    # The end

    def close(self) -> None:
        """End threads, and the engine where it was started here; of a dry run nothing is left."""
        if self._ahead is not None:
            self._ahead.close()
        self.collector.shutdown()
        self.evaluator.shutdown()
        self.folder.close()
        if self._owns_engine:
            self.engine.shutdown()
        if self.cfg.dry_run:
            self.writes.wait()
            shutil.rmtree(self.folder.path)

    def __enter__(self) -> TrainingRun:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()


def _after(first: Callable[[Any], Any], then: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda batch: then(first(batch))
