"""Doctests of what is not installed are not collected."""

from __future__ import annotations

import importlib.util

# The set-up leaves reasoning-gym out where nothing can compile what it requires.
collect_ignore = (
    [] if importlib.util.find_spec("reasoning_gym") else ["llmrl/envs/reasoning_gym.py", "llmrl/rewards/adapters.py"]
)
