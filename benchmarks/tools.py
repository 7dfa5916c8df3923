"""Wall time of many conversations that run Python concurrently, compared with the ideal and TorchRL's interpreter."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from typing import Any

from rich.console import Console
from rich.table import Table

NUM_CONVERSATIONS = 256
NUM_CALLS = 4
WORK_SECONDS = 0.02
NUM_REPEATS = 3
# TorchRL's interpreter runs calls sequentially, so the time of all conversations is extrapolated from a part.
NUM_PEER_CONVERSATIONS = 32
NUM_EMPTY_CALLS = 200
GOAL = 1.35
# The work is measured in CPU time, so that it stays constant when interpreters share a core.
WORK = f"""```python
import time
end = time.process_time() + {WORK_SECONDS}
while time.process_time() < end: pass
print('done')
```"""
EMPTY = "```python\npass\n```"


async def converse(interpreter: Any, num_conversations: int, text: str) -> list[float]:
    """Play conversations concurrently, each with sequential calls; return the seconds of each call."""
    from llmrl.tools import ToolSession

    seconds: list[float] = []

    async def play() -> None:
        session = ToolSession()
        interpreter._join(session)
        for turn in range(NUM_CALLS):
            started = time.perf_counter()
            (message,) = await interpreter.answer({"role": "assistant", "content": text}, (), session, turn=turn)
            seconds.append(time.perf_counter() - started)
            assert "executed successfully" in message["content"], message
        session.release()

    await asyncio.gather(*(play() for _ in range(num_conversations)))
    return seconds


def ours(*, persistent: bool) -> tuple[float, float]:
    """Return the wall seconds of all conversations, and the median milliseconds of an empty call."""
    from llmrl.transforms import PythonExecutorService, PythonInterpreter

    executor = PythonExecutorService(pool_size=2 * num_cores())
    interpreter = PythonInterpreter(persistent=persistent, executor=executor)
    try:
        interpreter.loop.run(converse(interpreter, 4, EMPTY))  # starts the first interpreters
        started = time.perf_counter()
        interpreter.loop.run(converse(interpreter, NUM_CONVERSATIONS, WORK))
        wall = time.perf_counter() - started
        empty: list[float] = []
        for _ in range(NUM_EMPTY_CALLS // NUM_CALLS):
            empty += interpreter.loop.run(converse(interpreter, 1, EMPTY))
        return wall, 1000 * statistics.median(empty)
    finally:
        interpreter.close()
        executor.close()


def torchrl() -> tuple[float, float]:
    """Return the same for TorchRL's interpreter with its defaults, scaled to all conversations."""
    from torchrl.envs.llm.transforms import PythonInterpreter

    interpreter = PythonInterpreter()
    started = time.perf_counter()
    for index in range(NUM_PEER_CONVERSATIONS):
        for _ in range(NUM_CALLS):
            (answer,) = interpreter._process_batch_item(WORK, index) or [""]
            assert "executed successfully" in answer, answer
    wall = (time.perf_counter() - started) * NUM_CONVERSATIONS / NUM_PEER_CONVERSATIONS
    empty = []
    for _ in range(20):
        started = time.perf_counter()
        interpreter._process_batch_item(EMPTY, 0)
        empty.append(time.perf_counter() - started)
    return wall, 1000 * statistics.median(empty)


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def run() -> dict[str, Any]:
    """Measure alternately, so that a disturbance of the machine affects all cases alike."""
    ideal = NUM_CONVERSATIONS * NUM_CALLS * WORK_SECONDS / num_cores()
    measured: dict[str, list[tuple[float, float]]] = {"variables kept": [], "afresh each call": [], "TorchRL": []}
    for _ in range(NUM_REPEATS):
        measured["variables kept"].append(ours(persistent=True))
        measured["afresh each call"].append(ours(persistent=False))
        measured["TorchRL"].append(torchrl())
    walls = {name: statistics.median(wall for wall, _ in runs) for name, runs in measured.items()}
    calls = {name: statistics.median(call for _, call in runs) for name, runs in measured.items()}

    table = Table(title=f"{NUM_CONVERSATIONS} conversations, {NUM_CALLS} calls of {1000 * WORK_SECONDS:.0f} ms each")
    for column in ("interpreter", "wall s", "relative to ideal", "empty call ms"):
        table.add_column(column, justify="left" if column == "interpreter" else "right")
    table.add_row(f"ideal on {num_cores()} cores", f"{ideal:.2f}", "1.00", "")
    for name, wall in walls.items():
        table.add_row(name, f"{wall:.2f}", f"{wall / ideal:.2f}", f"{calls[name]:.2f}")
    Console().print(table)
    ratio = walls["variables kept"] / ideal
    return {
        "name": "tools",
        "ratio": round(ratio, 3),
        "ratio_of": "wall time of conversations that keep their variables to the time of their work on all cores",
        "goal": GOAL,
        "met": ratio <= GOAL,
        "medians": {
            "ideal, s": round(ideal, 2),
            **{f"{name}, s": round(wall, 2) for name, wall in walls.items()},
            **{f"{name}, empty call, ms": round(value, 3) for name, value in calls.items()},
            "TorchRL to ours": round(walls["TorchRL"] / walls["variables kept"], 2),
        },
    }
