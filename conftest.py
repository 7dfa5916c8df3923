"""Doctests of what is not installed are not collected."""

from __future__ import annotations

import importlib.util

# The set-up leaves reasoning-gym out where nothing can compile what it requires.
NEEDS = {
    "reasoning_gym": ["llmrl/envs/reasoning_gym.py", "llmrl/rewards/adapters.py"],
    "vllm": ["llmrl/weight_sync/load_plan.py", "llmrl/weight_sync/worker.py"],
}
collect_ignore = [path for package, paths in NEEDS.items() if not importlib.util.find_spec(package) for path in paths]
