"""Names in TorchRL, TRL, verl and prime-rl that are missing here, with alternatives.

Errors and `docs/migrating-from-torchrl.md` quote the alternatives. A test compares `TABLE` with TorchRL's signatures.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

_TASKS = "GSM8KEnv IFEvalEnv MATHEnv CountdownEnv"
_DATASETS = f"DatasetChatEnv {_TASKS}"
_ON_RAY = "DatasetChatEnv GSM8KEnv IFEvalEnv MATHEnv"
_PARSERS = "GSM8KRewardParser MATHRewardParser CountdownRewardParser"
_POLICY_LOSSES = "GRPOLoss DAPO CISPOLoss"
_LOSSES = f"{_POLICY_LOSSES} SFTLoss DistillationLoss"
_KL = "RetrieveLogProb RetrieveKL KLRewardTransform"
_WRAPPERS = "TransformersWrapper vLLMWrapper"
_COLLECTORS = "LLMCollector RayLLMCollector"
_SCHEMES = "VLLMWeightSyncScheme VLLMDoubleBufferSyncScheme"

TABLE: tuple[tuple[str, str, str], ...] = (
    (
        f"{_DATASETS} make_gsm8k_env",
        "batch_size_dl",
        "the dataset is read once, row by row, without batches of a data loader",
    ),
    (_DATASETS, "collate_fn", "the dataset is read once, row by row, without batches of a data loader"),
    (f"{_DATASETS} DataLoadingPrimer make_gsm8k_env", "group_repeats", "draws of a prompt always follow each other"),
    (
        "DatasetChatEnv DataLoadingPrimer",
        "primers",
        "the environment carries the dataset's columns with each conversation",
    ),
    (_ON_RAY, "ray_backend dataloader_actor_name", "use a ChatEnv with a RayDataLoadingPrimer, or RayLLMCollector"),
    (_DATASETS, "apply_template", "the policy renders conversations: give it the tokenizer and its template"),
    (_TASKS, ".from_dataloader", "pass the loader as dataset="),
    ("make_gsm8k_env", "dataset", "pass it as data="),
    ("DataLoadingPrimer", "batch_size", "reset takes a tensordict of any batch shape"),
    ("DataLoadingPrimer", "stack_method", "batches are lazily stacked"),
    ("DataLoadingPrimer", "use_ray_service", "use RayDataLoadingPrimer"),
    ("RayDataLoadingPrimer", "num_gpus", "rows need no GPU"),
    (
        "RayDataLoadingPrimer",
        ".dataloader .endless_dataloader .data_keys .repeats",
        "use prompts (the sampler of rows), columns (the names of a row's entries) and group_size (the repeats)",
    ),
    ("RayDataLoadingPrimer", ".primers .stack_method", "the corresponding arguments do not exist either"),
    ("DataLoadingPrimer RayDataLoadingPrimer", "device", "rows are not tensors, so they have no device"),
    ("DataLoadingPrimer", ".device", "rows are not tensors, so they have no device"),
    ("LLMEnv", "attention_key has_attention", "token entries are ragged, so they need no attention mask"),
    ("LLMEnv", "reward_key", "the reward is in ('next', 'reward')"),
    (
        "LLMEnv",
        "assign_reward assign_done",
        "the reward (0 unless a transform writes one) and the done flags always exist",
    ),
    ("LLMEnv", "batch_size", "reset takes a tensordict of any batch shape"),
    ("LLMEnv", "vocab_size", "the specs do not bound token ids"),
    ("LLMEnv", "as_llm_data", "entries always have the names of the data contract"),
    (
        "LLMEnv.from_dataloader",
        "assign_done assign_reward attention_key batch_size example_data group_repeats has_attention primers "
        "reward_key stack_method tokenizer vocab_size",
        "as for LLMEnv and DataLoadingPrimer",
    ),
    ("ChatEnv", "policy_role", "the role is always 'assistant', which rewards and tools read"),
    ("ChatEnv.from_dataloader DatasetChatEnv.from_dataloader", "group_repeats primers", "as for DatasetChatEnv"),
    ("MLGymWrapper", ".set_env", "pass the environment to the constructor"),
    ("make_mlgym", "tokenizer device", "the policy renders conversations, and messages are not tensors"),
    (
        _PARSERS,
        "tokenizer eos_token",
        "the text of the last message is judged, which contains no end-of-turn token",
    ),
    (_PARSERS, "in_keys", "the last message is judged; columns are read by the names that the hub's dataset has"),
    (_PARSERS, "out_keys", "scores are in ('next', 'reward') and ('next', 'reward_breakdown', NAME)"),
    (_PARSERS, "input_mode .input_mode", "the answer is judged, independent of the environment's input_mode="),
    (_PARSERS, ".extract_tags", "use llmrl.rewards.extract_tags"),
    ("GSM8KRewardParser", ".normalize_answer", "use the functions of llmrl.rewards that judge answers"),
    ("CountdownRewardParser", ".validate_expression", "use the functions of llmrl.rewards that judge answers"),
    ("MATHRewardParser", ".answers_match .extract_boxed", "use the functions of llmrl.rewards that judge answers"),
    ("IfEvalScorer", "id_key prompt_key", "the score does not depend on this column"),
    (
        "IfEvalScorer",
        "instruction_ids_key keyword_args_key",
        "the columns are always 'instruction_id_list' and 'kwargs'",
    ),
    ("IfEvalScorer", "response_column", "the last message is judged"),
    ("IfEvalScorer", "score_key verbose", "scores are in ('next', 'reward_breakdown', NAME)"),
    (
        "IfEvalScorer",
        ".default_reward_aggregator",
        "without aggregate_reward, the reward is the weighted mean of the accuracies",
    ),
    ("IfEvalScorer", ".expected_keys", "the columns are always 'instruction_id_list' and 'kwargs'"),
    (
        "IFEvalScoreData",
        "prompt_level_strict_acc prompt_level_loose_acc batch_size device names",
        "give inst_level_strict_acc and inst_level_loose_acc, from which the prompt's accuracies are computed",
    ),
    ("IFEvalScoreData", ".default_spec .fields .from_tensordict", "it is a plain record, not a tensorclass"),
    ("AddThinkingPrompt", "egocentric", "use role='assistant'"),
    ("AddThinkingPrompt", ".prompt", "prompts has the texts to choose from"),
    ("BrowserTransform", "headless", "the browser never opens a window; set screenshot_folder= to get screenshots"),
    ("BrowserTransform", "tokenizer", "the policy renders conversations"),
    ("MCPToolTransform", "tool_call_pattern", "calls are read in the chat template's format, or by tool_parser="),
    ("IncrementalTokenizer", "add_generation_prompt", "a prompt always ends with the assistant's generation prompt"),
    (
        "IncrementalTokenizer",
        "chat_template chat_template_name",
        "pass renderer=TemplateRenderer(tokenizer, chat_template=...)",
    ),
    ("Tokenizer", "padding max_length", "tokens are ragged; pad a batch with get(key, as_padded_tensor=True)"),
    ("Tokenizer", "use_raw_nontensor", "the text is always unwrapped"),
    ("Tokenizer", "additional_tokens", "call tokenizer.add_tokens, and resize the model's embedding"),
    (
        "Tokenizer",
        "missing_tolerance",
        "a missing entry is an error; for entries that only a reset has, set call_before_reset",
    ),
    ("Tokenizer", ".call_tokenizer_fn .call_tokenizer_inv_fn", "call the attribute tokenizer"),
    ("Tokenizer", ".device .out_device", "tokens are on the device of the tensordict"),
    (_KL, "device", "call model.to(device); the results are moved back to the rows' device"),
    (f"{_KL} KLComputation", "padding_side", "rows are ragged, so nothing is padded"),
    ("RetrieveKL", "history_key", "the sampled tokens are scored, not the rendered history"),
    (
        "RetrieveKL KLRewardTransform",
        "use_ray_service",
        "use ref_model_factory, which builds the model in the process that uses it",
    ),
    ("KLRewardTransform", "in_keys", "the reward is always read at 'reward'"),
    ("KLRewardTransform", "out_keys", "use kl_key and ref_log_probs_full_key of RetrieveKL"),
    ("KLRewardTransform", ".action_key .tokenizer .pad_output", "the sampled tokens are read, without padding"),
    ("as_padded_tensor", "dim stack_dim", "rows are padded along dimension 0 and stacked along a new dimension 0"),
    ("Text.to_tokens", "padding truncation return_tensors", "token ids are always ragged tensors"),
    (
        "Tokens.to_history",
        "skip_special_tokens",
        "messages are recognised by their special tokens, which are therefore kept",
    ),
    ("TopKRewardSelector", "verbose", "the number of rows kept is the length of the returned batch"),
    ("AsyncVLLM", "engine_args num_replicas actor_class enable_prefix_caching", "call AsyncVLLM.from_pretrained"),
    ("AsyncVLLM", ".launch", "call AsyncVLLM.from_pretrained"),
    (
        "AsyncVLLM.from_pretrained",
        "use_ray ray_options ray_init_config",
        "call EngineReplicas.from_pretrained(model, num_replicas=...), which starts them in Ray actors",
    ),
    (
        "AsyncVLLM.generate",
        "prompts sampling_params prompt_token_ids use_tqdm lora_request prompt_adapter_request guided_options_request "
        "timeout_seconds actor_index",
        "use a policy, or await generate(prompt_ids, SamplingConfig(...)) for a single request",
    ),
    (
        "AsyncVLLM",
        ".create_load_balancer .get_random_actor_index .get_num_unfinished_requests .get_cache_usage",
        "use EngineReplicas; its Router chooses a replica for each request",
    ),
    (
        "AsyncVLLM",
        ".collective_rpc .get_master_address .get_master_port .get_model_metadata .get_tp_size "
        ".init_weight_update_group",
        "use VLLMWeightSyncScheme().create_sender(), which connects to the engine",
    ),
    ("AsyncVLLM.update_weights", "weights", "use update_policy_weights_ of a collector, or a scheme's sender"),
    (_POLICY_LOSSES, "samples_mc_entropy", "the entropy is computed exactly, without samples"),
    (_POLICY_LOSSES, "reduction", "use aggregation"),
    (_POLICY_LOSSES, "gamma clip_value", "there is no value function, and nothing is discounted"),
    (
        _POLICY_LOSSES,
        "ref_log_prob_padding_side ref_log_prob_padding_value",
        "rows are ragged, so nothing is padded",
    ),
    (_LOSSES, "device", "the loss works on the policy's device"),
    ("DistillationLoss", "assistant_only", "use masking_strategy, 'rlhf' or 'generic'"),
    ("SFTLoss DistillationLoss", ".default_keys", "use tensor_keys, which has the entries that are read"),
    (_COLLECTORS, "weight_updater", "pass weight_sync_schemes={'policy': VLLMWeightSyncScheme()}"),
    (_COLLECTORS, ".init_updater .set_weight_updater .weight_updater", "pass weight_sync_schemes="),
    (_COLLECTORS, ".receive_weights .register_scheme_receiver", "engines receive weights, not collectors"),
    ("RayLLMCollector", "policy", "each actor builds its own policy: pass policy_factory="),
    (_COLLECTORS, ".as_remote", "use RayLLMCollector"),
    (_COLLECTORS, ".get_model .get_policy_model", "use policy.engine"),
    (_COLLECTORS, ".iterator", "iterate the collector itself"),
    (_COLLECTORS, ".rollout", "call next() for a batch, or play() for whole rollouts"),
    (_COLLECTORS, ".reset", "pass reset_at_each_iter=True, or create a new collector"),
    (_WRAPPERS, "batching batching_timeout min_batch_size", "the engine batches the requests of all threads"),
    (_WRAPPERS, "max_batch_size", "pass max_num_seqs= to the engine"),
    (_WRAPPERS, "device", "a policy computes on its model's device: call model.to(device)"),
    (_WRAPPERS, "layout", "entries are ragged; call .as_nested_tensor(key) of a container for a nested tensor"),
    (
        _WRAPPERS,
        "history_key masks_key text_key tokens_key",
        "entries always have the names that losses and environments read",
    ),
    (_WRAPPERS, "tokenizer_kwargs", "pass renderer=make_renderer(tokenizer, template_kwargs=...), or pad_output="),
    (
        f"{_WRAPPERS} LLMWrapperBase",
        ".batching .cleanup_batching .get_batching_state",
        "the engine batches the requests of all threads",
    ),
    (f"{_WRAPPERS} LLMWrapperBase", ".collector .register_collector", "a policy does not depend on its collector"),
    (
        f"{_WRAPPERS} LLMWrapperBase",
        ".dist_params_keys .dist_sample_keys .log_prob_keys",
        "use log_probs_key, the container of the entries that are written",
    ),
    (
        "vLLMWrapper LLMWrapperBase",
        ".get_dist .log_prob",
        "use TransformersWrapper(model, generate=False), which has both",
    ),
    ("vLLMWrapper", ".get_dist_with_prompt_mask", "use get_dist of TransformersWrapper(model, generate=False)"),
    ("vLLMWrapper", ".CompletionOutput_tc", "engines return a Completion"),
    ("vLLMWrapper", ".set_tokenizer", "pass tokenizer= to the constructor"),
    ("TransformersWrapper", ".repeat_interleave_causal", "a prompt that rows share is always computed once"),
    (
        "TransformersWrapper.get_dist",
        "as_nested_tensor as_padded_tensor layout padding_side padding_value tensordict_out",
        "rows are always padded on the left, as in the losses",
    ),
    (
        _COLLECTORS,
        ".set_seed",
        "set the environment's seed for the order of prompts, and the engine's or a request's seed for the tokens",
    ),
    (
        _COLLECTORS,
        ".cascade_execute .get_distant_attr .getattr_env .getattr_policy .map_fn",
        "use the attributes env, policy and replay_buffer; those of an actor come from your factory functions",
    ),
    (
        _COLLECTORS,
        ".enable_profile .disable_profile .profile_config",
        "use report, which shows where a batch's time went",
    ),
    (_COLLECTORS, ".stats", "use report, which has the statistics of a collection"),
    (_COLLECTORS, ".fake_tensordict", "call next() once, because rows are ragged and have no spec"),
    (_COLLECTORS, ".pre_collect_hook", "use set_post_collect_hook; the hook is called with each batch"),
    (_COLLECTORS, ".worker_idx", "rows name their rollout, not their actor"),
    (
        "LLMCollector.shutdown LLMCollector.async_shutdown",
        "close_env",
        "close the environment and the engine yourself after the shutdown",
    ),
    ("LLMCollector.shutdown", "raise_on_error", "errors are always raised"),
    (
        "LLMCollector.update_policy_weights_ RayLLMCollector.update_policy_weights_",
        "worker_ids",
        "all workers use the same weights",
    ),
    ("VLLMDoubleBufferSyncScheme", "num_threads", "a single file is written, at the speed of the disk"),
    (
        _SCHEMES,
        ".apply_weights .prepare_weights .send .receive .weights .model .model_id",
        "call create_sender() for the trainer's end, then its register_model and update_weights",
    ),
    (
        _SCHEMES,
        ".connect .context .create_transport .from_backend .init_on_receiver .init_on_sender .initialized_on_receiver "
        ".initialized_on_sender .receiver_transport .sender_transports .shared_transport .shutdown "
        ".synchronized_on_receiver .synchronized_on_sender .worker_idx",
        "call create_sender() for the trainer's end, then its init_all_workers_group, and finally shutdown",
    ),
    (
        "VLLMWeightSyncScheme",
        ".create_receiver",
        "engines receive weights without a receiver after init_all_workers_group of the sender",
    ),
)
"""Classes or functions, their arguments and (with a dot) attributes, and the alternative."""

# Arguments of TRL's reward functions.
_REWARDS: tuple[tuple[str, str, str], ...] = (
    ("RubricReward", "reward_weights", "set the weight of each function, RewardFn(f, weight=2)"),
    ("RubricReward", "reward_funcs", "combine several functions in a rubric, RubricReward(Rubric(f, g))"),
)
# Arguments that llmrl had until 0.1.0, with their replacements. Remove them in 0.2.0.
RENAMED: tuple[tuple[str, str, str], ...] = (
    (
        "GRPOLoss",
        "importance_floor importance_mode importance_level",
        "use importance_cap=llmrl.objectives.ImportanceBound(cap, floor=..., mode=..., level=...)",
    ),
    ("MCAdvantage", "is_constant_group_dropped", "use drop_constant_groups"),
    ("MCAdvantage", "is_batch_normalized", "use normalize_batch"),
    (_COLLECTORS, "step_timeout_seconds", "use limits=RolloutLimits(step_timeout_seconds=...)"),
    ("AsyncVLLM.from_pretrained", "max_num_batched_tokens", "use engine_args={'max_num_batched_tokens': ...}"),
)


@functools.cache
def instead_of(*owners: str) -> Mapping[str, str]:
    """Return the arguments and attributes that these classes or functions lack here, with the alternatives."""
    found = {}
    for names, entries, advice in (*TABLE, *_REWARDS, *RENAMED):
        if not set(owners).isdisjoint(names.split()):
            found.update(dict.fromkeys(entries.split(), advice))
    return found


def missing_attribute(owner: object, name: str) -> AttributeError:
    """Return the error for a missing attribute, with the alternative if TorchRL's class has the attribute."""
    known = instead_of(*(base.__name__ for base in type(owner).__mro__))
    advice = f": {known['.' + name]}." if "." + name in known else ""  # Python may add a sentence of its own
    return AttributeError(f"{type(owner).__name__} has no {name!r}{advice}", name=name, obj=owner)


_SAME: tuple[tuple[str, str], ...] = (
    ("num_generations rollout_n n group_size grpo_size rollouts_per_example", "group_size repeats grpo_size"),
    ("beta kl_coef kl_loss_coef kl_tau", "kl_to_ref_coeff"),
    ("epsilon clip_ratio clip_ratio_low cliprange", "clip_epsilon"),
    ("epsilon_high clip_ratio_high", "clip_epsilon_high"),
    ("delta clip_ratio_c", "dual_clip"),
    ("max_completion_length max_response_length response_length max_tokens", "max_new_tokens"),
    ("per_device_train_batch_size train_batch_size", "groups_per_batch"),
    ("num_iterations ppo_epochs num_train_epochs total_epochs", "num_epochs"),
    ("steps_per_generation", "num_minibatches"),
    ("max_steps total_steps total_training_steps", "num_steps"),
    ("save_steps save_freq", "checkpoint_every export_every"),
    ("eval_steps test_freq val_freq", "eval_every every"),
    ("num_generations_eval", "num_samples"),
    ("report_to logger", "trackers"),
    ("output_dir default_local_dir", "path"),
    ("hub_model_id push_to_hub_model_id", "push_to_hub"),
    ("reward_funcs", "reward_fns"),
    ("lr", "learning_rate"),
    ("loss_type loss_mode adv_estimator", "loss"),
    ("loss_agg_mode", "aggregation"),
    ("lr_scheduler_type warmup_style", "schedule"),
    ("num_warmup_steps lr_warmup_steps", "warmup_steps"),
    ("max_prompt_length prompt_length", "max_prompt_tokens max_model_len"),
    ("vllm_max_model_length seq_len max_seq_length", "max_model_len"),
    ("vllm_gpu_memory_utilization", "gpu_memory_utilization"),
    ("vllm_tensor_parallel_size tensor_model_parallel_size", "tensor_parallel_size"),
    ("vllm_enable_sleep_mode free_cache_engine", "sleep_while_training"),
    ("vllm_importance_sampling_cap vllm_importance_sampling_clip_max", "importance_cap"),
    ("clip_grad grad_clip max_norm", "max_grad_norm"),
    ("enable_gradient_checkpointing", "gradient_checkpointing"),
    ("ppo_max_token_len_per_gpu ppo_micro_batch_size ppo_micro_batch_size_per_gpu micro_batch_size", "token_budget"),
    ("max_tool_calling_iterations max_assistant_turns max_user_turns", "max_turns"),
    ("max_async_level async_level strict_async_level max_off_policy_steps", "max_staleness"),
    ("max_concurrent", "max_concurrent_rollouts"),
    ("filter_groups dynamic_sampling use_dynamic_sampling", "replace_constant_groups"),
    ("resume_from_checkpoint resume_mode", "resume"),
    ("keep_last save_total", "save_total_limit"),
    ("metric_for_best_model", "best_by"),
    ("early_stopping_patience", "patience"),
    ("torch_compile use_torch_compile", "compile_layers"),
    ("use_liger_kernel use_liger_loss", "head_kernel"),
    ("n_gpus_per_node nproc_per_node", "num_ranks"),
    ("ulysses_sequence_parallel_size context_parallel_size sp_size cp_size", "context_ranks"),
)
SYNONYMS: Mapping[str, tuple[str, ...]] = {
    name: tuple(ours.split()) for theirs, ours in _SAME for name in theirs.split()
}
"""Names of options in TRL, verl and prime-rl, and the names here with the same meaning."""

_SERVER = "engine=ServerEngine(url, weight_sync=True) generates with a `vllm serve` and updates its weights"
_SPLIT = "a batch is split by its tokens, train.token_budget, and the gradient does not depend on the split"
_DTYPE = "set dtype= (in scripts model.dtype) for engine and trainer; it is float32 on a CPU and bfloat16 on a GPU"
_RATIO = (
    "the ratio uses the trainer's own log-probs, with the correction of importance_cap; write a loss to change that"
)
_OTHER: tuple[tuple[str, str], ...] = (
    (
        "use_vllm vllm_mode vllm_model_impl cache_implementation",
        "vLLM always generates, unless engine= is another engine",
    ),
    ("vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port", _SERVER),
    (
        "use_transformers_paged use_transformers_continuous_batching",
        "use engine=TransformersEngine(model) to generate with transformers",
    ),
    ("gradient_accumulation_steps per_device_eval_batch_size auto_find_batch_size", _SPLIT),
    ("log_prob_micro_batch_size_per_gpu use_dynamic_bsz remove_unused_columns pad_to_multiple_of", _SPLIT),
    ("bf16 fp16 tf32 torch_dtype", _DTYPE),
    ("generation_batch_size batch_size", "use groups_per_batch, the number of prompts; each has `repeats` answers"),
    ("ppo_mini_batch_size", "use num_minibatches, the number of updates per batch"),
    (
        "scale_rewards norm_adv_by_std_in_grpo",
        "the loss determines the advantage: loss='dr_grpo' does not divide by the standard deviation",
    ),
    (
        "sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_k_neg vespo_lambda_pos vespo_lambda_neg",
        "SAPO and VESPO are not implemented; `loss` accepts the names of the losses that are",
    ),
    ("importance_sampling_level ratio_type", "loss='gspo' uses the ratio of a whole answer"),
    ("vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_importance_sampling_clip_min", _RATIO),
    ("off_policy_mask_threshold use_bias_correction_kl top_entropy_quantile", _RATIO),
    ("token_mask_low token_mask_high", _RATIO),
    (
        "reward_weights reward_model custom_reward_function",
        "set the weights of rewards in the environment, Rubric(RewardFn(f, weight=2))",
    ),
    ("multi_objective_aggregation", "a Rubric adds weighted rewards"),
    (
        "mask_truncated_completions zero_truncated_completions overlong_filter",
        "Rubric(f, truncation_reward=0.0) sets the reward of truncated answers, and GroupRules(drop_truncated=True) of "
        "a collector drops them",
    ),
    (
        "entropy_coef entropy_coeff use_adaptive_entropy entropy_target",
        "use GRPOLoss(entropy_coeff=...) in a loop of your own",
    ),
    (
        "use_kl_loss use_kl_in_reward",
        "set kl_to_ref_coeff to a number to add the KL to the loss, or to None to omit it",
    ),
    (
        "sync_ref_model ref_model_mixup_alpha ref_model_sync_steps",
        "the reference is always the model at the start of training",
    ),
    ("model_init_kwargs trust_remote_code", "load a model of your own in a loop of your own: llmrl new loop NAME"),
    ("chat_template_kwargs", "pass a template to the tokenizer, chat_template=FILE"),
    (
        "repetition_penalty generation_kwargs",
        "with a repetition penalty, the trainer could not compute the log-probs of the sampling distribution",
    ),
    ("shuffle_dataset", "use DatasetChatEnv(rows, shuffle=True)"),
    ("eval_dataset val_files test_data", "pass environments with held-out problems, eval_envs={'sums': env}"),
    (
        "log_completions num_completions_to_print log_unique_prompts",
        "use llmrl view RUN, which shows every conversation",
    ),
    ("logging_steps logging_dir", "every step is logged to metrics.csv in the run's folder and to trackers=[...]"),
    (
        "eval_strategy evaluation_strategy save_strategy",
        "set the number of steps between two evaluations or exports, eval_every and export_every",
    ),
    ("load_best_model_at_end", "use best_by='eval/NAME/pass@1', which saves the best model in model-best/"),
    (
        "project_name experiment_name run_name wandb_project wandb",
        "use trackers=['wandb'], which names the run after its folder",
    ),
    (
        "optim optimizer adam_beta1 adam_beta2 adam_epsilon",
        "the optimizer is AdamW; use another one in a loop of your own",
    ),
    ("warmup_ratio lr_warmup_steps_ratio", "use warmup_steps, a number of steps"),
    (
        "deepspeed fsdp ddp strategy param_offload optimizer_offload",
        "use train.num_ranks, which shards the trainer over GPUs",
    ),
    ("nnodes", "use hardware=ray-cluster, which distributes a run over machines"),
    ("val_before_train eval_on_start", "eval_envs are also evaluated before and after training"),
    ("critic_warmup critic", "there is no critic: advantages are relative to a group"),
    (
        "tools environment_factory rollout_func multi_turn",
        "the environment defines tools and turns: see ToolTransform and MessageEnv",
    ),
    ("peft_config lora_alpha", "lora_rank=16 trains an adapter; in scripts, model.lora has the other options"),
    ("processing_class tokenizer", "the model's tokenizer is used; chat_template=FILE replaces its template"),
    ("callbacks", "write a loop of your own: llmrl new loop NAME"),
    ("args", "pass options as keywords of train itself: train(model, env, num_steps=100)"),
    (
        "oversampling_factor online_difficulty_filtering easy_fraction hard_fraction",
        "replace_constant_groups=True replaces groups without signal, and max_staleness collects ahead",
    ),
    (
        "train_files prompt_key reward_fn_key",
        "the environment contains the rows, DatasetChatEnv(rows), and rewards read their columns by name",
    ),
    ("val_batch_size", "conversations of eval_envs run concurrently, as many as the engine accepts"),
    (
        "truncation filter_overlong_prompts",
        "max_model_len bounds prompt and answer; remove longer rows from the dataset",
    ),
    ("do_sample ignore_eos min_tokens", "answers are always sampled, and end at the model's end-of-turn token"),
    ("max_num_batched_tokens", "use the script, which passes engine.engine_args to vLLM"),
    (
        "kl_loss_type kl_penalty kl_ctrl",
        "kl_to_ref_coeff adds the KL to the loss; use another form in a loop of your own",
    ),
    ("gamma lam", "there is no critic; to discount over turns, use MCAdvantage(gamma=...) in a loop of your own"),
    (
        "balance_batch use_remove_padding calculate_log_probs",
        "rows are always packed without padding, and have the sampler's log-probs",
    ),
    ("mask_env_responses trajectory_strategy", "exactly the tokens that the policy sampled are trained, each once"),
    ("min_lr_ratio", "schedule names the course of the learning rate; use another one in a loop of your own"),
    ("adv_tau length_bonus", "set the weights of rewards in the environment, Rubric(RewardFn(f, weight=2))"),
)
EXPLAINED: Mapping[str, str] = {name: text for names, text in _OTHER for name in names.split()}
"""Names of options in TRL, verl and prime-rl without a counterpart here, and what to do instead."""

SAMPLING = frozenset(
    ("temperature", "top_p", "top_k", "min_p", "max_new_tokens", "max_tokens", "stop", "repetition_penalty")
)
"""Names of sampling parameters in any of the libraries, which policies take as `generate_kwargs`."""
