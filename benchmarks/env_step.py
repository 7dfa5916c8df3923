"""Cost of an environment step (answer, step, step_mdp), compared with TorchRL's ChatEnv with the same transforms.

The cost grows with batch and turn because of Python's garbage collection: TensorDict's copies of non-tensor leaves in
`step` and `step_mdp` create reference cycles. Without garbage collection, the sixteenth turn of 1,024 conversations
costs a fifth more than the first. Objects of other cases are frozen before each case; otherwise some turns would
traverse them, which doubled their cost. A collector computes the next root without `step_mdp`, and collects garbage
rarely.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

NUM_REPEATS = 5
BATCH_SIZES = (1, 16, 64, 1024)
TURNS = (1, 4, 16)
HEADLINE = (64, 16)
GOAL = 0.1
GOAL_LATE_TO_EARLY = 1.3
# A run of TorchRL's largest case takes minutes, so it is run once.
NUM_PEER_REPEATS = {1: 3, 16: 3, 64: 3, 1024: 1}
QUERY = "What is the capital of France?"
ANSWER = "It is Paris, a city of some two million people."
REPLY = "And of Italy?"


def ours(batch_size: int, num_turns: int) -> list[float]:
    """Return the seconds of each turn."""
    from tensordict import TensorDict, lazy_stack
    from torchrl.envs import StepCounter, Transform

    from llmrl.data import ChatHistory, History
    from llmrl.data.tensordicts import batch_elements
    from llmrl.envs import ChatEnv

    class Reply(Transform):
        """Appends a message of the user."""

        def _step(self, tensordict: Any, next_tensordict: Any) -> Any:
            for element in batch_elements(next_tensordict):
                prompt = element.get(("history", "prompt"))
                element.set(("history", "prompt"), prompt.append({"role": "user", "content": REPLY}))
            return next_tensordict

    def answer(tensordict: Any) -> Any:
        for element in batch_elements(tensordict):
            prompt = element.get(("history", "prompt"))
            message = {"role": "assistant", "content": ANSWER}
            response = History.from_chats([message], check=False)
            full = History.from_chats((*prompt.chats, message), check=False)
            element.set("history", ChatHistory(prompt=prompt, response=response, full=full))
        return tensordict

    env = ChatEnv().append_transform(StepCounter()).append_transform(Reply())
    queries = lazy_stack([TensorDict({"query": QUERY}) for _ in range(batch_size)], 0)
    return timed(env, env.reset(queries), answer, num_turns)


def torchrl(batch_size: int, num_turns: int) -> list[float]:
    """Return the seconds of each turn with TorchRL."""
    from tensordict import TensorDict, set_list_to_stack
    from torchrl.data.llm import History
    from torchrl.envs import StepCounter, Transform
    from torchrl.envs.llm import ChatEnv
    from torchrl.modules.llm.policies import ChatHistory

    def messages(role: str, content: str) -> Any:
        return History(role=[role] * batch_size, content=[content] * batch_size, batch_size=(batch_size,)).unsqueeze(-1)

    class Reply(Transform):
        """Appends a message of the user."""

        def _step(self, tensordict: Any, next_tensordict: Any) -> Any:
            history = next_tensordict["history"].prompt.extend(messages("user", REPLY), inplace=False, dim=-1)
            next_tensordict["history"] = ChatHistory(prompt=history, batch_size=(batch_size,))
            return next_tensordict

    def answer(tensordict: Any) -> Any:
        prompt = tensordict["history"].prompt
        response = messages("assistant", ANSWER)
        full = prompt.extend(response, inplace=False, dim=-1)
        tensordict["history"] = ChatHistory(prompt=prompt, response=response, full=full, batch_size=(batch_size,))
        return tensordict

    with set_list_to_stack(True):
        env = ChatEnv(batch_size=(batch_size,), input_mode="history")
        env = env.append_transform(StepCounter()).append_transform(Reply())
        reset = env.reset(TensorDict({"query": [QUERY] * batch_size}, batch_size=(batch_size,)))
        return timed(env, reset, answer, num_turns)


def timed(env: Any, tensordict: Any, answer: Callable[[Any], Any], num_turns: int) -> list[float]:
    """Return the seconds of each turn of a conversation."""
    seconds = []
    for _ in range(num_turns):
        started = time.perf_counter()
        tensordict = env.step_mdp(env.step(answer(tensordict)))
        seconds.append(time.perf_counter() - started)
    return seconds


def measure(batch_sizes: tuple[int, ...]) -> dict[str, dict[tuple[int, int], float]]:
    """Medians of seconds per conversation and turn, by batch size and turn."""
    cases: dict[str, Any] = {"llmrl": ours, "TorchRL": torchrl}
    runs: dict[tuple[str, int], list[list[float]]] = {}
    for batch_size in batch_sizes:
        for repeat in range(NUM_REPEATS):  # alternately, so that a disturbance of the machine affects both
            for name, case in cases.items():
                if name == "llmrl" or repeat < NUM_PEER_REPEATS[batch_size]:
                    gc.collect()
                    gc.freeze()  # collections then traverse only objects of this case, and none of the peer or of torch
                    runs.setdefault((name, batch_size), []).append(case(batch_size, max(TURNS)))
                    gc.unfreeze()
    return {
        name: {
            (batch_size, turn): statistics.median(run[turn - 1] for run in runs[name, batch_size]) / batch_size
            for batch_size in batch_sizes
            for turn in TURNS
        }
        for name in cases
    }


def run(batch_sizes: tuple[int, ...] = BATCH_SIZES) -> dict[str, Any]:
    """Measure all cases, print a table, and return the result."""
    ours(1, 2), torchrl(1, 2)  # imports and first uses
    medians = measure(batch_sizes)
    table = Table("batch", "turn", "llmrl", "TorchRL", "ratio", title="Microseconds per conversation and turn")
    for batch_size in batch_sizes:
        for turn in TURNS:
            mine, theirs = (1e6 * medians[name][batch_size, turn] for name in ("llmrl", "TorchRL"))
            table.add_row(str(batch_size), str(turn), f"{mine:.0f}", f"{theirs:.0f}", f"{mine / theirs:.3f}")
    Console(width=100).print(table)
    ratio = medians["llmrl"][HEADLINE] / medians["TorchRL"][HEADLINE]
    flatness = medians["llmrl"][HEADLINE[0], max(TURNS)] / medians["llmrl"][HEADLINE[0], min(TURNS)]
    return {
        "name": "env_step",
        "ratio": round(ratio, 4),
        "ratio_of": f"seconds per turn at batch {HEADLINE[0]} and turn {HEADLINE[1]} to those of TorchRL's ChatEnv",
        "goal": GOAL,
        "met": ratio <= GOAL and flatness <= GOAL_LATE_TO_EARLY,
        "medians": {
            f"{name}, batch {batch_size}, turn {turn}, us": round(1e6 * value, 1)
            for name, of_case in medians.items()
            for (batch_size, turn), value in of_case.items()
        }
        | {f"turn {max(TURNS)} to turn {min(TURNS)} at batch {HEADLINE[0]}": round(flatness, 3)},
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=list(BATCH_SIZES))
    print(run(tuple(parser.parse_args().batch_sizes)))
