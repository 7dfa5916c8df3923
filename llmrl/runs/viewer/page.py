"""`write_page`: a run as one HTML file that needs no network."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import math
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from llmrl.data import Message, text_of
from llmrl.runs.token_log import TokenRow
from llmrl.runs.viewer.run_data import Record, RunData, facts_of

# Of rollouts; opening one decompresses its block alone, so that a page of thousands opens at once.
_BLOCK_SIZE = 64
_LISTED = (
    "step",
    "split",
    "group_id",
    "rollout_id",
    "reward",
    "status",
    "reason",
    "num_turns",
    "num_completion_tokens",
)


def write_page(run: RunData, path: str | Path) -> Path:
    """Write the page: curves, rollouts by step, group and reward, conversations as chat, and tokens.

    Args:
        run: what `read_run` gave.
        path: of the HTML file.

    Returns:
        The path.
    """
    blocks = [
        [_details(run, record) for record in run.rollouts[start : start + _BLOCK_SIZE]]
        for start in range(0, len(run.rollouts), _BLOCK_SIZE)
    ]
    head = {
        "name": run.name,
        "metrics": run.metrics,
        "facts": facts_of(run.summary),
        "config": run.config,
        "tokenTexts": run.token_texts,
        "blockSize": _BLOCK_SIZE,
        "hasRows": bool(run.rows),
        "index": {name: [record.get(name) for record in run.rollouts] for name in _LISTED},
        "previews": [_preview(record) for record in run.rollouts],
    }
    assets = files("llmrl.runs.viewer")
    page = (assets / "page.html").read_text()
    scripts = [f'<script type="text/plain" id="head">{_packed(head)}</script>']
    scripts += [
        f'<script type="text/plain" id="block-{number}">{_packed(block)}</script>'
        for number, block in enumerate(blocks)
    ]
    script = (assets / "page.js").read_text()
    page = page.replace("/* STYLE */", (assets / "page.css").read_text())
    page = page.replace("/* SCRIPT */", script).replace("/* POLICY */", _policy(f"\n{script}\n"))
    page = page.replace("<!-- TITLE -->", html.escape(run.name)).replace("<!-- DATA -->", "\n".join(scripts))
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8", errors="backslashreplace")
    return path


def _policy(script: str) -> str:
    """Content-security policy: this script and no other, nothing from elsewhere.

    A run is data of models and of whoever sent it. That it is shown as text is the page's doing; this is for the day
    on which it is not.
    """
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _packed(value: object) -> str:
    text = json.dumps(_finite(value), ensure_ascii=False, separators=(",", ":"))
    # Lone surrogates are escaped as JSON does.
    return base64.b64encode(gzip.compress(text.encode(errors="backslashreplace"), mtime=0)).decode()


def _finite(value: object) -> object:
    """Return the value as browsers read JSON: they know neither NaN nor infinity."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def _preview(record: Record) -> str:
    """Return the last answer's beginning, to know a rollout by in a list."""
    answers: list[Message] = [message for message in record["messages"] if message["role"] == "assistant"]
    answer = answers[-1] if answers else {}
    calls = " ".join(f"calls {call['function']['name']}" for call in answer.get("tool_calls") or [])
    return " ".join(f"{text_of(answer.get('content'))} {calls}".split())[:120]


def _details(run: RunData, record: Record) -> dict[str, object]:
    rows = run.rows.get((record["step"], record["rollout_id"]), [])
    return {**record, "rows": [_row(row) for row in sorted(rows, key=lambda row: row.row_index)]}


def _row(row: TokenRow) -> dict[str, object]:
    return {
        "advantage": row.advantage,
        "ids": row.token_ids,
        "trained": [int(value) for value in row.loss_mask],
        "logProbs": _rounded(row.log_probs),
        "trainerLogProbs": _rounded(row.trainer_log_probs),
        "versions": row.versions,
    }


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(value, 4) for value in values]
