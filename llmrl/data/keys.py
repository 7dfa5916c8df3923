"""Keys of entries that several packages read."""

from __future__ import annotations

from tensordict.utils import NestedKey

TOKENS_KEY: NestedKey = ("tokens", "full")
"""Token ids of a row or a turn with its prompt, `[num_tokens]`."""
LOSS_MASK_KEY: NestedKey = ("masks", "all_assistant_mask")
"""Tokens that the policy sampled, `[num_tokens]`."""
GROUP_ID_KEY: NestedKey = ("rollout", "group_id")
"""Id of a rollout's group."""
