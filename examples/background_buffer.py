"""Collection in the background: a replay buffer fills while something else happens, and waits on demand."""

from __future__ import annotations

import time

from torchrl.data import LazyStackStorage, ReplayBuffer

from llmrl import AsyncVLLM, LLMCollector, ensure_embedded_model, vLLMWrapper
from llmrl.envs import make_addition_env


def main(engine: AsyncVLLM) -> None:
    buffer = ReplayBuffer(storage=LazyStackStorage(256), batch_size=4)
    policy = vLLMWrapper(engine, generate_kwargs={"max_new_tokens": 12})
    env = make_addition_env("train", repeats=4)
    # At most one batch ahead of the weights: without an update the collector stops after two, and waits.
    collector = LLMCollector(env, policy=policy, groups_per_batch=2, replay_buffer=buffer, max_staleness=1)
    with collector:  # leaving it shuts the collector down, whatever is in flight
        collector.start()
        while len(buffer) < 8:
            collector.is_running()  # raises what ended the background, if anything did
            time.sleep(0.01)
        rows = buffer.sample()  # a trainer would take a step here, and then update_policy_weights_()
        print(rows.shape[0], "rows of version", rows[0]["policy_versions", "full"].max().item())
        with collector.pause():  # nothing is started or written within: evaluate, save, sync
            print("paused with", len(buffer), "rows")
    print("shut down; running:", collector.is_running())


if __name__ == "__main__":
    engine = AsyncVLLM.from_pretrained(ensure_embedded_model(), max_model_len=512)
    main(engine)
    engine.shutdown()
