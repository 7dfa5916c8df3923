"""Health checks of what a run plays in: environments, rewards, tools and agents."""

from __future__ import annotations

from collections.abc import Iterator

from llmrl.watch.findings import Finding, Selection, Verdict, graded, percent, severity
from llmrl.watch.metric_history import NUM_SMOOTHED, MetricHistory

_TOOL_CAUSES = {
    "failed": "the tool raises: read the answers that it returned",
    "timeouts": "the tool is too slow, or its timeout is too short",
    "invalid": "the model passes invalid arguments: describe the arguments in the tool's docstring",
    "unknown": "the model calls tools that do not exist",
    "malformed": "the model's calls cannot be read: the model was trained with another format than the template's",
}


def check_environment(history: MetricHistory) -> Iterator[Finding]:
    """Yield findings about rollouts that failed or have no score."""
    played = history.now("num_rollouts")
    if not played:
        return
    failed = history.now("num_error") or 0.0
    unscored = history.now("num_unscored") or 0.0
    steps = [
        {
            "num_rollouts": step["num_rollouts"],
            "failed": step.get("num_error", 0.0) / step["num_rollouts"],
            "unscored": max(0.0, step.get("num_unscored", 0.0) - step.get("num_error", 0.0)) / step["num_rollouts"],
        }
        for step in history.steps[-NUM_SMOOTHED:]
        if step.get("num_rollouts")
    ]
    history.note(*range(max(0, len(history.steps) - NUM_SMOOTHED), len(history.steps)))
    shares = MetricHistory(steps)
    if failed and (verdict := graded(shares.share("failed", "num_rollouts"), look=0.05, broken=0.5)) != Verdict.FINE:
        yield Finding(
            "errors",
            verdict,
            f"{failed:.0f} of {played:.0f} rollouts failed.",
            ("the environment raises: see the record's traceback", "the engine failed: see its log"),
            Selection.ERROR,
        )
    verdict = graded(shares.share("unscored", "num_rollouts"), look=0.05, broken=0.5)
    if unscored > failed and verdict != Verdict.FINE:
        yield Finding(
            "unscored",
            verdict,
            f"{unscored:.0f} of {played:.0f} rollouts have no score.",
            (
                "a reward function fails: the record's error names the file and line",
                "agents make more requests than max_turns allows: see the record's reason",
            ),
            Selection.UNSCORED,
        )


def check_tools(history: MetricHistory) -> Iterator[Finding]:
    """Yield a finding about calls that were not answered, with its causes by their number."""
    share = history.share("tool_failure_share", "num_tool_calls")
    verdict = graded(share, look=0.5, broken=0.9)
    if share is None or verdict == Verdict.FINE:
        return
    outcomes = {name: history.now(f"tool_calls/{name}") or 0.0 for name in _TOOL_CAUSES}
    causes = sorted(_TOOL_CAUSES, key=lambda name: -outcomes[name])
    yield Finding(
        "broken_tools",
        verdict,
        f"{percent(share[0])} of the tool calls were not answered.",
        tuple(_TOOL_CAUSES[name] for name in causes if outcomes[name]),
        Selection.TOOLS,
    )


def check_agents(history: MetricHistory) -> Iterator[Finding]:
    """Yield a finding about requests of agents that were refused."""
    refused = history.now("agent/refused")
    if refused is not None and refused > 0.5:
        yield Finding(
            "refused_agents",
            severity(refused > 0.9),
            f"{percent(refused)} of the agents' requests were refused.",
            (
                "the endpoint does not support the agent's requests: read last_message under requests in the record",
                "the agent continues after a limit of the run: raise max_turns or max_completion_tokens",
            ),
            Selection.WORST,
        )
