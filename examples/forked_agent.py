"""An agent that branches and rewrites its history: each sampled token is trained once, with a ratio of 1."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from openai import AsyncOpenAI

from llmrl import AgentEnv, AsyncVLLM, train
from llmrl.endpoint.agent import AgentModel
from llmrl.viewer import read_run
from llmrl.watch.token_log import TokenRow


async def play(row: Mapping[str, str], model: AgentModel) -> float:
    async with AsyncOpenAI(base_url=model.base_url, api_key=model.api_key) as client:

        async def ask(*messages: dict[str, str]) -> list[dict[str, str]]:
            answer = await client.chat.completions.create(model=model.name, messages=messages)
            return [*messages, {"role": "assistant", "content": answer.choices[0].message.content or ""}]

        draft = await ask({"role": "user", "content": row["query"]})
        why, other = await asyncio.gather(  # two branches of one history
            ask(*draft, {"role": "user", "content": "Why?"}),
            ask(*draft, {"role": "user", "content": "Name another one."}),
        )
        summary = f"{row['query']} Hints: {why[-1]['content']} {other[-1]['content']} Answer in one word."
        last = await ask({"role": "user", "content": summary})  # a rewritten history
    return 1 / (1 + len(last[-1]["content"].split()))


def draw(rows: list[TokenRow], path: Path) -> float:
    """Draw the rows of one rollout, and return the largest deviation of an importance ratio from 1."""
    figure = Figure(figsize=(9, 0.62 * len(rows) + 0.9), layout="constrained")
    axes = figure.add_subplot()
    sampled, farthest, places = 0, 0.0, []
    for place, row in enumerate(rows):
        trained = np.array(row.loss_mask)
        shared = max((_num_shared(row, before) for before in rows[:place]), default=0)
        ratios = np.exp(np.array(row.trainer_log_probs)[trained] - np.array(row.log_probs)[trained])
        sampled += len(ratios)
        axes.barh(place, shared, 0.5, color="#e4e4e4")
        axes.barh(place, len(trained) - shared, 0.5, left=shared, color="#b9c3d0")
        axes.broken_barh([(int(at), 1) for at in np.flatnonzero(trained)], (place - 0.25, 0.5), color="#2b7a4b")
        error = float(np.abs(ratios - 1).max())
        axes.text(len(trained) + 2, place, f"{len(ratios)} trained, ratio 1 ± {error:.0e}", va="center")
        farthest = max(farthest, error)
        places.append("first" if place == 0 else f"forks at token {shared}")
    axes.set_yticks(range(len(rows)), places)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.5 * max(len(row.token_ids) for row in rows))
    axes.set_xlabel("token of the row: shared with a row above (light), context (grey), sampled and trained (green)")
    axes.set_title(
        f"One rollout of an agent: {len(rows)} rows, {sampled} sampled tokens, each trained once", loc="left"
    )
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    return farthest


def _num_shared(row: TokenRow, before: TokenRow) -> int:
    """Return the number of tokens of the common prefix of two rows."""
    pairs = zip(row.token_ids, before.token_ids, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def main(engine: AsyncVLLM | None = None, picture: Path | None = None) -> None:
    rows = [{"query": f"Name one {kind}."} for kind in ("animal", "fruit", "river", "tool")]
    path = train(
        "embedded",
        AgentEnv(play, rows, repeats=4),
        path=tempfile.mkdtemp(prefix="llmrl-forked-"),
        num_steps=1,
        groups_per_batch=1,
        max_new_tokens=16,
        max_model_len=512,
        engine=engine,
    )
    run = read_run(path)
    places = [(one, (one["step"], one["split"], one["rollout_id"])) for one in run.rollouts]
    record, forked = next((one, run.rows[place]) for one, place in places if len(run.rows.get(place, ())) > 2)
    assert (
        sum(map(sum, (row.loss_mask for row in forked))) == record["num_completion_tokens"]
    )  # each sampled token once
    picture = Path(path) / "forked.png" if picture is None else picture
    farthest = draw(forked, picture)
    print(f"{picture}: ratios deviate from 1 by at most {farthest:.1e}. Look at the run: llmrl view {path}")


if __name__ == "__main__":
    main(picture=Path("docs/forked-agent.png"))
