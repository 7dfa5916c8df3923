"""`write_page`: writes runs into one HTML file that needs no network."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import math
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.resources import files
from pathlib import Path

from llmrl._utils.files import write_atomically
from llmrl.data import Message, text_of
from llmrl.data.message import prompt_of
from llmrl.viewer.run_data import Record, RunData, facts_of, key_of, read_run
from llmrl.watch.token_log import TokenRow

# Rollouts per compressed block. A page with thousands of rollouts opens quickly, because a block is
# decompressed only when it is needed.
_BLOCK_SIZE = 32
_LISTED = (
    "step",
    "split",
    "group_id",
    "role",
    "rollout_id",
    "reward",
    "is_scored",
    "status",
    "reason",
    "num_completion_tokens",
)
# Scripts in the order of their dependencies.
_SCRIPTS = (
    "base",
    "state",
    "scales",
    "charts",
    "curves",
    "groups",
    "list",
    "health",
    "messages",
    "turns",
    "tokens",
    "rollout",
    "main",
)


def write_page(runs: Sequence[RunData], path: str | Path) -> Path:
    """Write a page with health, overlaid curves, rewards, groups, conversations and tokens of runs; return its path.

    The page of an unfinished run reloads periodically to show a rewritten file. Raises ValueError if there are no runs.
    """
    page = _page(runs)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda at: at.write_text(page, encoding="utf-8", errors="backslashreplace"))
    return path


class RunPage:
    """The page of runs in a notebook: a cell with this object as its last value shows the page.

    Args:
        runs: folders of runs.

    Raises:
        FileNotFoundError: if a folder holds no run.
    """

    def __init__(self, *runs: str | Path) -> None:
        self._runs = [read_run(run) for run in runs]

    def _repr_html_(self) -> str:
        style = "width: 100%; height: 800px; border: 0"
        return f'<iframe style="{style}" srcdoc="{html.escape(_page(self._runs))}"></iframe>'


def _page(runs: Sequence[RunData]) -> str:
    if not runs:
        raise ValueError("runs is empty; give at least one run from read_run.")
    rollouts = [(number, record) for number, run in enumerate(runs) for record in run.rollouts]
    blocks = [
        [_details(runs[number], record) for number, record in rollouts[start : start + _BLOCK_SIZE]]
        for start in range(0, len(rollouts), _BLOCK_SIZE)
    ]
    records = [record for _, record in rollouts]
    problems: dict[str, int] = {}
    names = Counter(run.name for run in runs)
    head = {
        "runs": [
            {
                "name": run.name if names[run.name] == 1 else f"{run.name} ({number + 1})",
                "metrics": run.metrics,
                "facts": facts_of(run.summary),
                "config": run.config,
                "tokenTexts": run.token_texts,
                "hasRows": bool(run.rows),
                "health": run.health,
                "replay": f"llmrl replay {shlex.quote(run.path)}" if run.path else "",
                "isRunning": run.is_running,
            }
            for number, run in enumerate(runs)
        ],
        "blockSize": _BLOCK_SIZE,
        "index": {
            **{name: [record.get(name) for record in records] for name in _LISTED},
            "run": [number for number, _ in rollouts],
            "problem": [problems.setdefault(_key_of_problem(record), len(problems)) for record in records],
            "question": list(map(_question, records)),
            "answer": list(map(_answer, records)),
        },
    }
    assets = files("llmrl.viewer") / "page"
    script = "\n".join((assets / f"{name}.js").read_text(encoding="utf-8") for name in _SCRIPTS)
    data = [f'<script type="text/plain" id="head">{_packed(head)}</script>']
    data += [
        f'<script type="text/plain" id="block-{number}">{_packed(block)}</script>'
        for number, block in enumerate(blocks)
    ]
    parts = {
        "/* STYLE */": (assets / "page.css").read_text(encoding="utf-8"),
        "/* SCRIPT */": script,
        "/* POLICY */": _policy(f"\n{script}\n"),
        "<!-- TITLE -->": html.escape(", ".join(run.name for run in runs)),
        "<!-- DATA -->": "\n".join(data),
    }
    page = (assets / "page.html").read_text(encoding="utf-8")
    for mark, part in parts.items():
        page = page.replace(mark, part)
    return page


def _policy(script: str) -> str:
    """Return a content-security policy that allows only this script, as a second defence after escaping."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _packed(value: object) -> str:
    write = partial(json.dumps, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    try:
        text = write(value)
    except ValueError:  # contains NaN or an infinity
        text = write(_readable(value))
    # `backslashreplace` writes a lone surrogate as a JSON escape.
    return base64.b64encode(gzip.compress(text.encode(errors="backslashreplace"), 6, mtime=0)).decode()


def _readable(value: object) -> object:
    """Return the value with NaN and infinities as strings, because JSON in browsers lacks them."""
    if isinstance(value, float) and not math.isfinite(value):
        return {math.inf: "Infinity", -math.inf: "-Infinity"}.get(value, "NaN")
    if isinstance(value, dict):
        return {key: _readable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_readable(item) for item in value]
    return value


def _opening(record: Record) -> list[Message]:
    """Return the messages before the first answer."""
    turns = record.get("turns")
    return prompt_of(turns[0]["messages"] if turns else record["messages"])


def _key_of_problem(record: Record) -> str:
    """Return a key that identifies a problem across steps and runs."""
    return json.dumps(_opening(record) or record.get("columns"), default=str)


def _question(record: Record) -> str:
    asked = [text_of(message.get("content")) for message in _opening(record) if message["role"] != "system"]
    return _shortened("".join(asked[-1:]), 160)


def _answer(record: Record) -> str:
    """Return the end of the last answer, which identifies a rollout in a list."""
    answer: Message = next((one for one in reversed(record["messages"]) if one["role"] == "assistant"), {})
    calls = " ".join(f"calls {call['function']['name']}" for call in answer.get("tool_calls") or [])
    return _shortened(f"{text_of(answer.get('content'))} {calls}", 100, is_end=True)


def _shortened(text: str, length: int, *, is_end: bool = False) -> str:
    part = " ".join((text[-4 * length :] if is_end else text[: 4 * length]).split())
    if len(part) <= length:
        return part
    if is_end:
        return f"…{part[-length:]}"
    return f"{part[:length]}…"


def _details(run: RunData, record: Record) -> Mapping[str, object]:
    rows = run.rows.get(key_of(record), [])
    return {**record, "rows": [_row(row) for row in sorted(rows, key=lambda row: row.row_index)]}


def _row(row: TokenRow) -> dict[str, object]:
    return {
        "advantage": None if math.isnan(row.advantage) else row.advantage,
        "ids": row.token_ids,
        "trained": [int(value) for value in row.loss_mask],
        "logProbs": _rounded(row.log_probs),
        "trainerLogProbs": _rounded(row.trainer_log_probs),
        "versions": row.versions,
    }


def _rounded(values: Sequence[float]) -> list[float | None]:
    return [None if math.isnan(value) else round(value, 4) for value in values]
