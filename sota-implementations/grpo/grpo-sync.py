"""GRPO, synchronous: generate a batch, train on it, hand the new weights to the engine, again.

python sota-implementations/grpo/grpo-sync.py                          # the demo
python sota-implementations/grpo/grpo-sync.py run.path=runs/mine seed=1
python sota-implementations/grpo/grpo-sync.py run.path=runs/mine resume=true
"""

from __future__ import annotations

import os
import time
from typing import Any

# Before torch: idle threads that spin would take the engine's cores.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

import hydra
import torch
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from llmrl.collectors import LLMCollector, RolloutLimits
from llmrl.embedded_model import ensure_embedded_model
from llmrl.engines import AsyncVLLM
from llmrl.envs import make_addition_env
from llmrl.live_view import LiveView
from llmrl.objectives import GRPOLoss, MCAdvantage, train_step
from llmrl.policies import TransformersWrapper, vLLMWrapper
from llmrl.report import before_after_table, plot_curve, print_how_to_go_on
from llmrl.run_folder import BackgroundWrites, RunFolder, random_states, restore_random_states
from llmrl.weight_sync import VLLMWeightSyncScheme, get_model_metadata


class Run:
    """Everything that one training run holds."""

    def __init__(self, cfg: DictConfig, console: Console) -> None:
        self.cfg, self.console = cfg, console
        self.folder = RunFolder(cfg.run.path, resume=cfg.resume)
        self.logged_steps = {row["step"] for row in self.folder.read_metrics()}
        OmegaConf.save(cfg, self.folder.path / "config.yaml", resolve=True)
        torch.manual_seed(cfg.seed)
        disable_progress_bar()  # the live view owns the terminal
        model_path = str(ensure_embedded_model() if cfg.model.path == "embedded" else cfg.model.path)

        # The engine: vLLM in a process of its own, on all cores, since nothing trains while it generates.
        self.engine = AsyncVLLM.from_pretrained(model_path, max_model_len=cfg.model.max_model_len, seed=cfg.seed)
        console.print(f"engine ready after {self.engine.start_s:.0f} s")
        self.tokenizer = AutoTokenizer.from_pretrained(model_path)
        sampling = {"max_new_tokens": cfg.collect.max_new_tokens, "temperature": cfg.collect.temperature}
        policy = vLLMWrapper(self.engine, tokenizer=self.tokenizer, generate_kwargs=sampling)

        # Collection: groups of answers to the same sum, as training rows with their advantages.
        env = make_addition_env("train", num_digits=cfg.env.num_digits, repeats=cfg.collect.group_size, seed=cfg.seed)
        self.collector = LLMCollector(
            env,
            policy=policy,
            groups_per_batch=cfg.collect.groups_per_batch,
            limits=RolloutLimits(max_turns=1),
            postproc=MCAdvantage(grpo_size=cfg.collect.group_size),
        )
        eval_env = make_addition_env("test", num_digits=cfg.env.num_digits, repeats=cfg.env.num_eval_samples)
        self.evaluator = LLMCollector(eval_env, policy=policy, yield_completed_trajectories=True)
        self.num_eval_rollouts = len(eval_env.base_env.prompts.items) * cfg.env.num_eval_samples

        # The trainer: float32 master weights, bfloat16 arithmetic.
        self.model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        actor = TransformersWrapper(
            self.model,
            temperature=cfg.collect.temperature,
            token_budget=cfg.train.token_budget,
            autocast_dtype=torch.bfloat16 if cfg.train.bfloat16 else None,
        )
        self.loss = GRPOLoss(actor, clip_epsilon=cfg.train.clip_epsilon)
        rates = {"lr": cfg.train.learning_rate, "weight_decay": cfg.train.weight_decay}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **rates)

        # New weights to the engine, in flight, counted by it.
        self.sender = VLLMWeightSyncScheme().create_sender()
        self.sender.register_model(self.model)
        self.sender.init_all_workers_group(get_model_metadata(self.model), self.engine)
        self.writes = BackgroundWrites()
        self.summary: dict[str, Any] = {}

    def train_on(self, step: int, collected: dict[str, Any]) -> dict[str, float]:
        """One optimizer update and one sync on what a step collected, logged."""
        self.writes.wait()  # the checkpoint being written must not see half an update
        started = time.perf_counter()
        report = train_step(self.loss, collected["batch"], self.optimizer, max_grad_norm=self.cfg.train.max_grad_norm)
        updated = time.perf_counter()
        self.engine.policy_version = step - 1
        version = self.sender.update_weights()
        synced = time.perf_counter()
        metrics = {**collected["metrics"], **report.to_metrics(), "policy_version": version}
        metrics |= {"train_seconds": updated - started, "sync_seconds": synced - updated}
        metrics["seconds"] = metrics["generate_seconds"] + synced - started
        if step not in self.logged_steps:  # a replayed step was logged before the kill, unless that came between
            self.folder.log_rollouts(step, "train", collected["rollouts"])
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
            self.restore(checkpoint)
        while (collected := self.folder.load_batch(step + 1)) is not None:
            step += 1
            self.restore(collected)
            self.train_on(step, collected)
        if step:
            self.engine.policy_version = step - 1
            self.sender.update_weights()
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
        """Accuracy on the held-out sums."""
        rollouts = self.evaluator.play(self.num_eval_rollouts)
        self.folder.log_rollouts(step, "test", [rollout.to_record() for rollout in rollouts])
        report = self.evaluator.report
        return {"accuracy": report.mean_reward, "completion tokens": report.mean_completion_tokens}

    def close(self) -> None:
        """End threads and the engine."""
        self.collector.shutdown()
        self.evaluator.shutdown()
        self.folder.close()
        self.engine.shutdown()

    def train(self, first_step: int, view: LiveView) -> None:
        """Generate, train, sync, until the last step."""
        step, batches = first_step, iter(self.collector)
        while step < self.cfg.train.num_steps:
            step += 1
            view.doing("generate")
            batch = next(batches)
            records = [rollout.to_record() for rollout in self.collector.rollouts]
            metrics = self.collector.report.to_metrics()
            collected = {"batch": batch, "metrics": metrics, "rollouts": records, **self.state()}
            self.folder.save_batch(step, collected)
            view.doing("train")
            metrics = self.train_on(step, collected)
            view.show_step(step, metrics)
            if step % self.cfg.run.sample_every == 0:
                view.show_sample(max(self.collector.rollouts, key=lambda rollout: rollout.reward))
            if step % self.cfg.run.checkpoint_every == 0:
                trained = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
                self.writes.start(self.folder.save_checkpoint, {"step": step, **self.state(), **trained})
            if metrics["reward_mean"] >= self.cfg.train.target_reward:
                break


@hydra.main(config_path="config", config_name="grpo-sync", version_base=None)
def main(cfg: DictConfig) -> None:
    """Set up, train, report; an interrupted run reports too."""
    console = Console()
    run = Run(cfg, console)
    try:
        first_step = run.resume() if cfg.resume else 0
        if "before" not in run.summary:
            run.summary["before"] = run.evaluate(0)
            run.folder.write_summary(run.summary)
        started = time.perf_counter()
        with LiveView(cfg.train.num_steps, first_step=first_step, console=console) as view:
            try:
                run.train(first_step, view)
            except KeyboardInterrupt:
                console.print("interrupted; what was learned so far is kept")
        console.print(f"trained for {time.perf_counter() - started:.0f} s")
        run.summary["after"] = run.evaluate(cfg.train.num_steps)
        run.writes.wait()
        run.folder.save_model(run.model, run.tokenizer)
        run.folder.write_summary(run.summary)
        plot_curve(run.folder.read_metrics(), run.folder.curve_path)
        console.print(before_after_table(run.summary["before"], run.summary["after"]))
        command = f"python {__file__} run.path={cfg.run.path} resume=true train.num_steps={cfg.train.num_steps + 20}"
        print_how_to_go_on(console, run.folder, command)
    finally:
        run.close()


if __name__ == "__main__":
    main()
