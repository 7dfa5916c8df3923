"""Keywords of TorchRL's losses that have no meaning here, and why."""

from __future__ import annotations

from collections.abc import Mapping

EXPLAINED: Mapping[str, str] = {
    "samples_mc_entropy": "the entropy is exact here, no samples are needed",
    "reduction": "use aggregation",
    "gamma": "there is no value function and nothing is discounted",
    "clip_value": "there is no value function",
    "ref_log_prob_padding_side": "rows are ragged, nothing is padded",
    "ref_log_prob_padding_value": "rows are ragged, nothing is padded",
    "tokenizer": "rows carry token ids and masks, nothing is tokenized",
    "tokenizer_kwargs": "rows carry token ids and masks, nothing is tokenized",
    "assistant_only": "use masking_strategy, 'rlhf' or 'generic'",
    "device": "the loss works on the policy's device",
}
