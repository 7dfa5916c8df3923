"""Train the embedded model on one-digit sums with TorchRL's `GRPOTrainer` and `Trainer`, and print mean rewards.

python -m benchmarks.torchrl_trainers [--num-steps 15] [--only GRPOTrainer]
"""

from __future__ import annotations

import argparse
import random
import re
import tempfile
import time
from pathlib import Path

import torch
from torchrl.record.loggers import CSVLogger
from torchrl.trainers import LogScalar, MixedPrecisionOptimizationStepper, Trainer, UpdateWeights
from torchrl.trainers.algorithms.grpo import GRPOTrainer
from transformers import AutoModelForCausalLM

from llmrl import AsyncVLLM, DatasetChatEnv, RubricReward
from llmrl.collectors import LLMCollector
from llmrl.objectives import GRPOLoss, MCAdvantage
from llmrl.policies import vLLMWrapper
from llmrl.testing.embedded_model import ensure_embedded_model
from llmrl.trainer import TransformersWrapper
from llmrl.weight_sync import VLLMWeightSyncScheme, get_model_metadata

NUM_GROUPS, GROUP_SIZE = 16, 8


def is_right(completion: str, answer: str) -> float:
    return float(re.findall(r"\d+", completion)[-1:] == [answer])


def make_env() -> DatasetChatEnv:
    problems = random.Random(0).sample([(a, b) for a in range(10) for b in range(10)], 75)
    rows = [{"query": f"{a} + {b} =", "answer": str(a + b)} for a, b in problems]
    prompt = "You are a calculator. Reply with the number only."
    env = DatasetChatEnv(rows, repeats=GROUP_SIZE, shuffle=True, system_prompt=prompt)
    return env.append_transform(RubricReward(is_right))


def curve(name: str, engine: AsyncVLLM, folder: str, num_steps: int) -> list[float]:
    """Train with a trainer of TorchRL, and return the mean reward of each batch."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    scorer = TransformersWrapper(model, generate=False, autocast_dtype=torch.bfloat16)
    policy = vLLMWrapper(engine, generate_kwargs={"max_new_tokens": 12})
    advantage = MCAdvantage(grpo_size=GROUP_SIZE, drop_constant_groups=False)
    collector = LLMCollector(make_env(), policy=policy, groups_per_batch=NUM_GROUPS, postproc=advantage)
    sender = VLLMWeightSyncScheme().create_sender()
    sender.register_model(model)
    sender.init_all_workers_group(get_model_metadata(model), vllm_engine=engine)
    sender.update_weights()
    loss = GRPOLoss(scorer)
    optimizer = torch.optim.AdamW(loss.parameters(), lr=2e-5)
    logs = tempfile.mkdtemp()
    arguments = {
        "collector": collector,
        "total_frames": num_steps * NUM_GROUPS * GROUP_SIZE,
        "frame_skip": 1,
        "optim_steps_per_batch": 1,
        "loss_module": loss,
        "logger": CSVLogger("run", log_dir=logs),
        "log_interval": 1,
        "progress_bar": False,
    }
    if name == "GRPOTrainer":
        trainer = GRPOTrainer(optimizer=optimizer, weight_sync_sender=sender, **arguments)
    else:
        trainer = Trainer(optimization_stepper=MixedPrecisionOptimizationStepper(optimizer), **arguments)
        trainer.register_op("pre_steps_log", LogScalar(key=("next", "reward"), logname="reward_mean"))
        UpdateWeights(trainer=trainer, sender=sender).register(trainer)
    trainer.train()
    collector.shutdown()
    sender.shutdown()
    [path] = Path(logs).rglob("reward_mean.csv")
    return [float(line.split(",")[1]) for line in path.read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--num-steps", type=int, default=15)
    parser.add_argument("--only", choices=("GRPOTrainer", "Trainer"))
    options = parser.parse_args()
    folder = str(ensure_embedded_model())
    with AsyncVLLM.from_pretrained(folder, max_model_len=256, kv_cache_memory=1 << 30) as engine:
        for name in ("GRPOTrainer", "Trainer"):
            if options.only in (None, name):
                start = time.perf_counter()
                rewards = curve(name, engine, folder, options.num_steps)
                cells = [f"`{name}`", *(f"{reward:.2f}" for reward in rewards)]
                print(f"| {' | '.join(cells)} | ({time.perf_counter() - start:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
