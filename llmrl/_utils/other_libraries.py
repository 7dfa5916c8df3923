"""Names in TorchRL, TRL, verl and prime-rl that are missing here, with alternatives.

Errors and `docs/migrating-from-torchrl.md` quote them; a test compares them with TorchRL's signatures.
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
    (f"{_DATASETS} make_gsm8k_env", "batch_size_dl", "a dataset is read once, for its rows"),
    (_DATASETS, "collate_fn", "a dataset is read once, for its rows"),
    (f"{_DATASETS} DataLoadingPrimer make_gsm8k_env", "group_repeats", "draws of a prompt always follow each other"),
    ("DatasetChatEnv DataLoadingPrimer", "primers", "the columns of a dataset travel with the conversation"),
    (_ON_RAY, "ray_backend dataloader_actor_name", "use a ChatEnv with a RayDataLoadingPrimer, or RayLLMCollector"),
    (_DATASETS, "apply_template", "the policy renders: give it the tokenizer and its template"),
    (_TASKS, ".from_dataloader", "pass the loader as dataset="),
    ("make_gsm8k_env", "dataset", "pass it as data="),
    ("DataLoadingPrimer", "batch_size", "reset takes a tensordict of any batch shape"),
    ("DataLoadingPrimer", "stack_method", "batches are lazily stacked"),
    ("DataLoadingPrimer", "use_ray_service", "use RayDataLoadingPrimer"),
    ("RayDataLoadingPrimer", "num_gpus", "rows need none"),
    (
        "RayDataLoadingPrimer",
        ".dataloader .endless_dataloader .data_keys .repeats",
        "prompts is the sampler of rows, columns names what a row has, group_size is repeats",
    ),
    ("RayDataLoadingPrimer", ".primers .stack_method", "these arguments do not exist, either"),
    ("DataLoadingPrimer RayDataLoadingPrimer", "device", "rows are no tensors"),
    ("DataLoadingPrimer", ".device", "rows are no tensors"),
    ("LLMEnv", "attention_key has_attention", "padding is known by its length; there are no masks for it"),
    ("LLMEnv", "reward_key", "the reward is in ('next', 'reward')"),
    (
        "LLMEnv",
        "assign_reward assign_done",
        "the reward (0 unless a transform writes one) and the done flags always exist",
    ),
    ("LLMEnv", "batch_size", "reset takes a tensordict of any batch shape"),
    ("LLMEnv", "vocab_size", "token ids are not bounded"),
    ("LLMEnv", "as_llm_data", "entries are those of the data contract"),
    (
        "LLMEnv.from_dataloader",
        "assign_done assign_reward attention_key batch_size example_data group_repeats has_attention primers "
        "reward_key stack_method tokenizer vocab_size",
        "as for LLMEnv and DataLoadingPrimer",
    ),
    ("ChatEnv", "policy_role", "it is 'assistant', which rewards and tools read"),
    ("ChatEnv.from_dataloader DatasetChatEnv.from_dataloader", "group_repeats primers", "as for DatasetChatEnv"),
    ("MLGymWrapper", ".set_env", "pass the environment to the constructor"),
    ("make_mlgym", "tokenizer device", "the policy renders, and messages are no tensors"),
    (f"{_PARSERS}", "tokenizer eos_token", "the text of the last message is judged, which has no end of turn"),
    (f"{_PARSERS}", "in_keys", "the last message is judged; columns of the dataset are read by the hub's names"),
    (f"{_PARSERS}", "out_keys", "scores are in ('next', 'reward') and ('next', 'reward_breakdown', NAME)"),
    (f"{_PARSERS}", "input_mode .input_mode", "the answer is judged, whatever the environment's input_mode="),
    (_PARSERS, ".extract_tags", "llmrl.rewards.extract_tags"),
    ("GSM8KRewardParser", ".normalize_answer", "functions of llmrl.rewards judge answers"),
    ("CountdownRewardParser", ".validate_expression", "functions of llmrl.rewards judge answers"),
    ("MATHRewardParser", ".answers_match .extract_boxed", "functions of llmrl.rewards judge answers"),
    ("IfEvalScorer", "id_key prompt_key", "nothing reads it"),
    ("IfEvalScorer", "instruction_ids_key keyword_args_key", "columns are named 'instruction_id_list' and 'kwargs'"),
    ("IfEvalScorer", "response_column", "the last message is judged"),
    ("IfEvalScorer", "score_key verbose", "scores are in ('next', 'reward_breakdown', NAME)"),
    ("IfEvalScorer", ".default_reward_aggregator", "without aggregate_reward, the weighed mean of the accuracies"),
    ("IfEvalScorer", ".expected_keys", "the columns are 'instruction_id_list' and 'kwargs'"),
    (
        "IFEvalScoreData",
        "prompt_level_strict_acc prompt_level_loose_acc batch_size device names",
        "inst_level_strict_acc and inst_level_loose_acc are booleans; the prompt's are made of them",
    ),
    ("IFEvalScoreData", ".default_spec .fields .from_tensordict", "it is a plain record, no tensorclass"),
    ("AddThinkingPrompt", "egocentric", "use role='assistant'"),
    ("AddThinkingPrompt", ".prompt", "prompts are those it chooses from"),
    ("BrowserTransform", "headless", "it never opens a window; screenshot_folder= shows what it sees"),
    ("BrowserTransform", "tokenizer", "the policy renders"),
    ("MCPToolTransform", "tool_call_pattern", "calls are read in the chat template's format, or by tool_parser="),
    ("IncrementalTokenizer", "add_generation_prompt", "a prompt always ends where the assistant is to speak"),
    (
        "IncrementalTokenizer",
        "chat_template chat_template_name",
        "pass renderer=TemplateRenderer(tokenizer, chat_template=...)",
    ),
    ("Tokenizer", "padding max_length", "tokens are ragged; pad a batch with get(key, as_padded_tensor=True)"),
    ("Tokenizer", "use_raw_nontensor", "the text is read from its wrapping"),
    ("Tokenizer", "additional_tokens", "call tokenizer.add_tokens, and let the model's embedding grow with it"),
    ("Tokenizer", "missing_tolerance", "what is missing is an error; what only a reset has needs call_before_reset"),
    ("Tokenizer", ".call_tokenizer_fn .call_tokenizer_inv_fn", "call the tokenizer"),
    ("Tokenizer", ".device .out_device", "tokens are made on the CPU"),
    (_KL, "device", "move the model, and its answer is moved back"),
    (
        f"{_KL} KLComputation",
        "padding_side",
        "rows are ragged, nothing is padded",
    ),
    ("RetrieveKL", "history_key", "what is scored are the tokens that were sampled"),
    ("RetrieveKL KLRewardTransform", "use_ray_service", "ref_model_factory builds the model where it is used"),
    ("KLRewardTransform", "in_keys", "the reward is read at 'reward'"),
    ("KLRewardTransform", "out_keys", "use kl_key and ref_log_probs_full_key of RetrieveKL"),
    ("KLRewardTransform", ".action_key .tokenizer .pad_output", "it reads the tokens that were sampled, unpadded"),
    ("as_padded_tensor", "dim stack_dim", "dimension 0 is padded, and dimension 0 is the new one"),
    ("Text.to_tokens", "padding truncation return_tensors", "ids are tensors, ragged"),
    ("Tokens.to_history", "skip_special_tokens", "messages are recognised by their special tokens"),
    ("TopKRewardSelector", "verbose", "len(batch) says how many rows it kept"),
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
        "a policy asks the engine; await generate(prompt_ids, SamplingConfig(...)) is one request",
    ),
    (
        "AsyncVLLM",
        ".create_load_balancer .get_random_actor_index .get_num_unfinished_requests .get_cache_usage",
        "EngineReplicas sends each request to a replica by its Router",
    ),
    (
        "AsyncVLLM",
        ".collective_rpc .get_master_address .get_master_port .get_model_metadata .get_tp_size "
        ".init_weight_update_group",
        "VLLMWeightSyncScheme().create_sender() arranges it with the engine",
    ),
    ("AsyncVLLM.update_weights", "weights", "update_policy_weights_ of a collector, or a scheme's sender"),
    (_POLICY_LOSSES, "samples_mc_entropy", "the entropy is exact here, no samples are needed"),
    (_POLICY_LOSSES, "reduction", "use aggregation"),
    (_POLICY_LOSSES, "gamma clip_value", "there is no value function, and nothing is discounted"),
    (
        _POLICY_LOSSES,
        "ref_log_prob_padding_side ref_log_prob_padding_value",
        "rows are ragged, nothing is padded",
    ),
    (_LOSSES, "device", "the loss works on the policy's device"),
    ("DistillationLoss", "assistant_only", "use masking_strategy, 'rlhf' or 'generic'"),
    ("SFTLoss DistillationLoss", ".default_keys", "tensor_keys has the entries that are read"),
    (_COLLECTORS, "weight_updater", "pass weight_sync_schemes={'policy': VLLMWeightSyncScheme()}"),
    (_COLLECTORS, ".init_updater .set_weight_updater .weight_updater", "pass weight_sync_schemes="),
    (_COLLECTORS, ".receive_weights .register_scheme_receiver", "engines receive weights, not collectors"),
    ("RayLLMCollector", "policy", "each actor builds its own: pass policy_factory="),
    (_COLLECTORS, ".as_remote", "use RayLLMCollector"),
    (_COLLECTORS, ".get_model .get_policy_model", "the engine is policy.engine"),
    (_COLLECTORS, ".iterator", "iterate the collector itself"),
    (_COLLECTORS, ".rollout", "call next() for a batch, or play() for whole rollouts"),
    (_COLLECTORS, ".reset", "pass reset_at_each_iter=True, or make a new collector"),
    (_WRAPPERS, "batching batching_timeout min_batch_size", "the engine batches the requests of all threads"),
    (_WRAPPERS, "max_batch_size", "pass max_num_seqs= to the engine"),
    (_WRAPPERS, "device", "a policy computes where its model is: model.to(device)"),
    (_WRAPPERS, "layout", "entries are ragged; .as_nested_tensor(key) of a container makes a nested tensor"),
    (
        _WRAPPERS,
        "history_key masks_key text_key tokens_key",
        "entries have the names that losses and environments read",
    ),
    (_WRAPPERS, "tokenizer_kwargs", "pass renderer=make_renderer(tokenizer, template_kwargs=...), or pad_output="),
    (
        f"{_WRAPPERS} LLMWrapperBase",
        ".batching .cleanup_batching .get_batching_state",
        "the engine batches the requests of all threads",
    ),
    (f"{_WRAPPERS} LLMWrapperBase", ".collector .register_collector", "a collector knows its policy"),
    (
        f"{_WRAPPERS} LLMWrapperBase",
        ".dist_params_keys .dist_sample_keys .log_prob_keys",
        "log_probs_key is the container of what is written",
    ),
    ("vLLMWrapper LLMWrapperBase", ".get_dist .log_prob", "TransformersWrapper(model, generate=False) has them"),
    ("vLLMWrapper", ".get_dist_with_prompt_mask", "TransformersWrapper(model, generate=False) has get_dist"),
    ("vLLMWrapper", ".CompletionOutput_tc", "engines return a Completion"),
    ("vLLMWrapper", ".set_tokenizer", "pass tokenizer= to the constructor"),
    ("TransformersWrapper", ".repeat_interleave_causal", "prompts that rows share are computed once by themselves"),
    (
        "TransformersWrapper.get_dist",
        "as_nested_tensor as_padded_tensor layout padding_side padding_value tensordict_out",
        "rows are padded on the left, as losses pad what they compare with",
    ),
    (
        _COLLECTORS,
        ".set_seed",
        "the environment's seed orders the prompts, the engine's and a request's draw the tokens",
    ),
    (
        _COLLECTORS,
        ".cascade_execute .get_distant_attr .getattr_env .getattr_policy .map_fn",
        "env, policy and replay_buffer are attributes; an actor's are made by your functions",
    ),
    (_COLLECTORS, ".enable_profile .disable_profile .profile_config", "report says where a batch's time went"),
    (_COLLECTORS, ".stats", "report says what a collection did"),
    (_COLLECTORS, ".fake_tensordict", "call next() once: rows are ragged, and have no spec"),
    (_COLLECTORS, ".pre_collect_hook", "set_post_collect_hook is called with each batch"),
    (_COLLECTORS, ".worker_idx", "rows say their rollout, not their actor"),
    ("LLMCollector.shutdown LLMCollector.async_shutdown", "close_env", "close env and engine yourself, after it"),
    ("LLMCollector.shutdown", "raise_on_error", "what fails is raised"),
    ("LLMCollector.update_policy_weights_ RayLLMCollector.update_policy_weights_", "worker_ids", "all have the same"),
    ("VLLMDoubleBufferSyncScheme", "num_threads", "one file is written, at the disk's speed"),
    (
        _SCHEMES,
        ".apply_weights .prepare_weights .send .receive .weights .model .model_id",
        "create_sender() gives the trainer's end: register_model, then update_weights",
    ),
    (
        _SCHEMES,
        ".connect .context .create_transport .from_backend .init_on_receiver .init_on_sender .initialized_on_receiver "
        ".initialized_on_sender .receiver_transport .sender_transports .shared_transport .shutdown "
        ".synchronized_on_receiver .synchronized_on_sender .worker_idx",
        "create_sender() gives the trainer's end: init_all_workers_group, and shutdown at the end",
    ),
    ("VLLMWeightSyncScheme", ".create_receiver", "engines receive by themselves once the sender has them"),
)
"""Classes or functions, their arguments and (with a dot) attributes, and the alternative."""

# Arguments of TRL's reward functions.
_REWARDS: tuple[tuple[str, str, str], ...] = (
    ("RubricReward", "reward_weights", "a function is weighed where it is named, RewardFn(f, weight=2)"),
    ("RubricReward", "reward_funcs", "several are Rubric(f, g): RubricReward(Rubric(f, g))"),
)
# Arguments of ours until 0.1.0, and what they are called now; goes with 0.2.0.
RENAMED: tuple[tuple[str, str, str], ...] = (
    (
        "GRPOLoss",
        "importance_floor importance_mode importance_level",
        "importance_cap=llmrl.objectives.ImportanceBound(cap, floor=..., mode=..., level=...) has it",
    ),
    ("MCAdvantage", "is_constant_group_dropped", "it is drop_constant_groups"),
    ("MCAdvantage", "is_batch_normalized", "it is normalize_batch"),
    (_COLLECTORS, "step_timeout_seconds", "it is limits=RolloutLimits(step_timeout_seconds=...)"),
    ("AsyncVLLM.from_pretrained", "max_num_batched_tokens", "it is engine_args={'max_num_batched_tokens': ...}"),
)


@functools.cache
def instead_of(*owners: str) -> Mapping[str, str]:
    """Return what classes or functions of these names offer in TorchRL, or offered here, with the alternatives.

    Example:
        >>> instead_of("DAPO")["reduction"]
        'use aggregation'
    """
    found = {}
    for names, entries, advice in (*TABLE, *_REWARDS, *RENAMED):
        if not set(owners).isdisjoint(names.split()):
            found.update(dict.fromkeys(entries.split(), advice))
    return found


def missing_attribute(owner: object, name: str) -> AttributeError:
    """Return the error for a missing attribute, with the alternative if TorchRL's class has the attribute."""
    known = instead_of(*(base.__name__ for base in type(owner).__mro__))
    advice = f": {known['.' + name]}." if "." + name in known else "."
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
"""Names of options there, and the names here with the same meaning."""

_SERVER = "engine=ServerEngine(url, weight_sync=True) asks a vllm serve, and trains its weights"
_SPLIT = "a batch is split by its tokens, train.token_budget, and the gradient is the same whatever the split"
_DTYPE = "dtype= (in scripts model.dtype) sets engine and trainer, by default float32 on a CPU and bfloat16 on a GPU"
_RATIO = "the ratio is to the trainer's own log-probs, corrected by importance_cap; a loss of your own changes that"
_OTHER: tuple[tuple[str, str], ...] = (
    ("use_vllm vllm_mode vllm_model_impl cache_implementation", "vLLM always generates, unless engine= is another"),
    ("vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port", _SERVER),
    ("use_transformers_paged use_transformers_continuous_batching", "engine=TransformersEngine(model) generates so"),
    ("gradient_accumulation_steps per_device_eval_batch_size auto_find_batch_size", _SPLIT),
    ("log_prob_micro_batch_size_per_gpu use_dynamic_bsz remove_unused_columns pad_to_multiple_of", _SPLIT),
    ("bf16 fp16 tf32 torch_dtype", _DTYPE),
    ("generation_batch_size batch_size", "groups_per_batch counts prompts, each of which has `repeats` answers"),
    ("ppo_mini_batch_size", "num_minibatches is the number of updates per batch"),
    (
        "scale_rewards norm_adv_by_std_in_grpo",
        "the loss has its advantage: loss='dr_grpo' does not divide by the spread",
    ),
    (
        "sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_k_neg vespo_lambda_pos vespo_lambda_neg",
        "neither SAPO nor VESPO is there; `loss` names those that are",
    ),
    ("importance_sampling_level ratio_type", "loss='gspo' takes the ratio of a whole answer"),
    ("vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_importance_sampling_clip_min", _RATIO),
    ("off_policy_mask_threshold use_bias_correction_kl top_entropy_quantile", _RATIO),
    ("token_mask_low token_mask_high", _RATIO),
    (
        "reward_weights reward_model custom_reward_function",
        "weigh rewards in the environment, Rubric(RewardFn(f, weight=2))",
    ),
    ("multi_objective_aggregation", "a Rubric adds weighted rewards"),
    (
        "mask_truncated_completions zero_truncated_completions overlong_filter",
        "Rubric(f, truncation_reward=0.0) scores answers that are cut",
    ),
    (
        "entropy_coef entropy_coeff use_adaptive_entropy entropy_target",
        "GRPOLoss(entropy_coeff=...) in a loop of your own",
    ),
    ("use_kl_loss use_kl_in_reward", "a number as kl_to_ref_coeff adds the KL to the loss, None leaves it out"),
    (
        "sync_ref_model ref_model_mixup_alpha ref_model_sync_steps",
        "the reference is the model that training began with",
    ),
    ("model_init_kwargs trust_remote_code", "load a model of your own in a loop of your own: llmrl new loop NAME"),
    ("chat_template_kwargs", "give the tokenizer's template, chat_template=FILE"),
    ("repetition_penalty generation_kwargs", "a repetition penalty samples from what the trainer cannot score again"),
    ("shuffle_dataset", "DatasetChatEnv(rows, shuffle=True)"),
    ("eval_dataset val_files test_data", "eval_envs={'sums': env} are environments of problems held out"),
    ("log_completions num_completions_to_print log_unique_prompts", "llmrl view RUN shows every conversation"),
    ("logging_steps logging_dir", "every step is logged, in metrics.csv of the run's folder and to trackers=[...]"),
    ("eval_strategy evaluation_strategy save_strategy", "the steps between say it: eval_every, export_every"),
    ("load_best_model_at_end", "best_by='eval/NAME/pass@1' saves the best model in model-best/"),
    ("project_name experiment_name run_name wandb_project wandb", "trackers=['wandb'] names the run as its folder"),
    ("optim optimizer adam_beta1 adam_beta2 adam_epsilon", "the optimizer is AdamW; another one in a loop of your own"),
    ("warmup_ratio lr_warmup_steps_ratio", "warmup_steps is a number of steps"),
    ("deepspeed fsdp ddp strategy param_offload optimizer_offload", "train.num_ranks shards the trainer over GPUs"),
    ("nnodes", "hardware=ray-cluster spreads a run over machines"),
    ("val_before_train eval_on_start", "eval_envs are evaluated before and after training, too"),
    ("critic_warmup critic", "there is no critic: advantages are those of a group"),
    (
        "tools environment_factory rollout_func multi_turn",
        "the environment has tools and turns: ToolTransform, MessageEnv",
    ),
    ("peft_config lora_alpha", "lora_rank=16 trains an adapter; model.lora has the rest"),
    ("processing_class tokenizer", "the tokenizer is the model's; chat_template=FILE replaces its template"),
    ("callbacks", "the loop is yours: llmrl new loop NAME"),
    ("args", "options are keywords of train itself: train(model, env, num_steps=100)"),
    (
        "oversampling_factor online_difficulty_filtering easy_fraction hard_fraction",
        "replace_constant_groups=True replaces groups without signal, and max_staleness collects ahead",
    ),
    (
        "train_files prompt_key reward_fn_key",
        "the environment has the rows: DatasetChatEnv(rows), whose columns rewards read by name",
    ),
    ("val_batch_size", "conversations of eval_envs run side by side, as many as the engine takes"),
    (
        "truncation filter_overlong_prompts",
        "max_model_len bounds prompt and answer; leave longer rows out",
    ),
    ("do_sample ignore_eos min_tokens", "answers are sampled, and end where the model ends them"),
    ("max_num_batched_tokens", "the script passes arguments to vLLM, as engine.engine_args"),
    ("kl_loss_type kl_penalty kl_ctrl", "kl_to_ref_coeff adds the KL to the loss; another form in a loop of your own"),
    ("gamma lam", "there is no critic; MCAdvantage(gamma=...) in a loop of your own credits turns"),
    (
        "balance_batch use_remove_padding calculate_log_probs",
        "rows are packed by their tokens, without padding, and have the sampler's log-probs",
    ),
    ("mask_env_responses trajectory_strategy", "what the policy sampled is trained, each token once, and nothing else"),
    ("min_lr_ratio", "schedule names the course of the learning rate; another one in a loop of your own"),
    ("adv_tau length_bonus", "weigh rewards in the environment, Rubric(RewardFn(f, weight=2))"),
)
EXPLAINED: Mapping[str, str] = {name: text for names, text in _OTHER for name in names.split()}
"""Names of options there without one of the same meaning here, and what to do instead."""

SAMPLING = frozenset(
    ("temperature", "top_p", "top_k", "min_p", "max_new_tokens", "max_tokens", "stop", "repetition_penalty")
)
"""Names of sampling parameters there and here, which policies take as `generate_kwargs`."""
