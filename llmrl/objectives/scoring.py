"""Log-probabilities of a batch under any policy."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase

from llmrl.data.ragged import ATTENTION_MASK_KEY, flat_batch, ragged_column
from llmrl.data.routed_experts import ROUTED_EXPERTS_KEY
from llmrl.data.sampling_mask import SAMPLING_MASK_KEY


def log_probs_of(policy: TensorDictModuleBase, batch: TensorDictBase, **options: object) -> list[torch.Tensor]:
    """Return the log-probs of a batch, one `[num_tokens]` tensor per row or turn; `options` are passed to the policy.

    Example:
        >>> from tensordict import TensorDict, lazy_stack
        >>> from tensordict.nn import TensorDictModule
        >>> policy = TensorDictModule(lambda ids: ids.float() - 3, [("tokens", "full")], [("log_probs", "full")])
        >>> log_probs_of(policy, lazy_stack([TensorDict({"tokens": {"full": torch.arange(3)}})]))
        [tensor([-3., -2., -1.])]
    """
    # A policy writes into its input, so it gets copies.
    replayed = (SAMPLING_MASK_KEY, ROUTED_EXPERTS_KEY)
    rows = flat_batch(batch).select(*policy.in_keys, ATTENTION_MASK_KEY, *replayed, strict=False).copy()
    log_probs_key = getattr(policy, "log_probs_key", None)  # llmrl's policies write other entries, too
    key = policy.out_keys[0] if log_probs_key is None else (log_probs_key, "full")
    return ragged_column(policy(rows, **options), key)
