"""Arguments of TorchRL's environments that have no meaning here, and what to do instead."""

from __future__ import annotations

from collections.abc import Mapping

_RENDERED = "the policy renders: give it the tokenizer and its template"
_BATCHES = "a loader is read once, for its rows; environments draw them one by one"

ENV_ARGUMENTS: Mapping[str, str] = {
    "apply_template": _RENDERED,
    "as_llm_data": "entries are those of the data contract",
    "assign_done": "done flags are always written",
    "assign_reward": "a reward, 0 unless a transform gives one, is always written",
    "attention_key": "padding is told by length, there are no masks of it",
    "batch_size": "any: reset takes a tensordict of any batch shape",
    "batch_size_dl": _BATCHES,
    "collate_fn": _BATCHES,
    "compute_reward": "take DatasetChatEnv for the prompts without the reward",
    "dataloader_actor_name": "use a ChatEnv with a RayDataLoadingPrimer, whose actor_name says what is shared",
    "device": "rows are no tensors",
    "group_repeats": "the draws of one prompt always follow each other",
    "has_attention": "padding is told by length, there are no masks of it",
    "input_mode": "tasks are conversations; the policy may read text or tokens all the same",
    "max_steps": "a question ends when it is answered; limit turns with RolloutLimits or StepCounter",
    "num_envs": "pass batch_size, or nothing: one environment serves any number of conversations",
    "num_gpus": "rows need none",
    "primers": "the columns of a dataset travel with the conversation by themselves",
    "ray_backend": "use a ChatEnv with a RayDataLoadingPrimer, or RayLLMCollector",
    "reward_key": "the reward is in ('next', 'reward')",
    "stack_method": "batches are lazily stacked",
    "template_kwargs": _RENDERED,
    "tokenizer": _RENDERED,
    "use_ray_service": "use RayDataLoadingPrimer",
    "vocab_size": "token ids are not bounded",
}
"""What to do instead of TorchRL's arguments of environments and primers."""

REWARD_ARGUMENTS: Mapping[str, str] = {
    "eos_token": "the end of a turn is no part of a message's text",
    "id_key": "nothing reads it",
    "in_keys": "the last message is judged; a dataset's columns are read by the names that the hub's have",
    "input_mode": "the last message is judged, whatever the policy reads",
    "instruction_ids_key": "the column must be named 'instruction_id_list'",
    "keyword_args_key": "the column must be named 'kwargs'",
    "out_keys": "the reward is in ('next', 'reward'), its parts are in ('next', 'reward_breakdown', NAME)",
    "prompt_key": "nothing reads it",
    "response_column": "the last message is judged",
    "score_key": "the scores are in ('next', 'reward_breakdown', NAME)",
    "tokenizer": "the text of the last message is judged",
    "verbose": "the scores are in ('next', 'reward_breakdown', NAME)",
}
"""What to do instead of TorchRL's arguments of the transforms that judge answers."""
