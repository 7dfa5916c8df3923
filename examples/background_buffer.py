"""Collection in the background: a replay buffer fills while the program does other work, and can be paused."""

from __future__ import annotations

import time

from torchrl.data import LazyStackStorage, ReplayBuffer

from llmrl import AsyncVLLM, LLMCollector, ensure_embedded_model, vLLMWrapper
from llmrl.envs import make_addition_env


def main(engine: AsyncVLLM) -> None:
    buffer = ReplayBuffer(storage=LazyStackStorage(256), batch_size=4)
    policy = vLLMWrapper(engine, generate_kwargs={"max_new_tokens": 12})
    env = make_addition_env("train", repeats=4)
    # Collection is at most one batch ahead of the weights: without an update it waits after two batches.
    collector = LLMCollector(env, policy=policy, groups_per_batch=2, replay_buffer=buffer, max_staleness=1)
    with collector:  # leaving the block shuts the collector down, even with rollouts in flight
        collector.start()
        while len(buffer) < 8:
            collector.is_running()  # raises an error of the background collection
            time.sleep(0.01)
        rows = buffer.sample()  # a trainer would make a step here, and call update_policy_weights_()
        print(rows.shape[0], "rows of version", rows[0]["policy_versions", "full"].max().item())
        with collector.pause():  # nothing is started or written in this block: evaluate, save or sync here
            print("paused with", len(buffer), "rows")
    print("shut down; running:", collector.is_running())


if __name__ == "__main__":
    engine = AsyncVLLM.from_pretrained(ensure_embedded_model(), max_model_len=512)
    main(engine)
    engine.shutdown()
