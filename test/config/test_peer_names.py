"""Names of options in TRL, verl and prime-rl are answered by what they are here, not by what is spelt alike."""

from __future__ import annotations

import importlib.util
import inspect
import re
from pathlib import Path

import pytest

from llmrl import (
    DatasetChatEnv,
    GRPOLoss,
    LLMCollector,
    MCAdvantage,
    RayLLMCollector,
    RolloutLimits,
    RubricReward,
    TransformersWrapper,
    train,
    vLLMWrapper,
)
from llmrl._utils.other_libraries import EXPLAINED, SYNONYMS
from llmrl.config.entries import entries_by_name
from llmrl.config.launch import hints
from llmrl.config.sections import GRPOConfig
from llmrl.objectives import ImportanceBound
from llmrl.scripts.train import ENTRIES
from llmrl.tools import ToolTransform


def answer(name):
    """What `train` says of an argument, "" where it knows it."""
    with pytest.raises((TypeError, ValueError)) as caught:
        train("embedded", None, **{name: 1})  # an environment that is none is refused after its arguments
    return str(caught.value) if f"no argument {name!r}" in str(caught.value) else ""


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("max_grad_norm", "the script has it, as train.max_grad_norm"),
        ("top_p", "the script has it, as collect.top_p"),
        ("gradient_accumulation_steps", "train.token_budget"),
        ("use_vllm", "vLLM always generates"),
        ("vllm_server_base_url", "ServerEngine(url, weight_sync=True)"),
        ("bf16", "model.dtype"),
        ("vllm_gpu_memory_utilization", "the script has it, as engine.gpu_memory_utilization"),
        ("num_generations", "repeats=8"),
        ("reward_weights", "Rubric(RewardFn(f, weight=2))"),
        ("delta", "did you mean 'dual_clip'"),
        ("max_response_length", "did you mean 'max_new_tokens'"),
        ("ppo_epochs", "did you mean 'num_epochs'"),
        ("clip_ratio_c", "did you mean 'dual_clip'"),
        ("tensor_model_parallel_size", "the script has it, as engine.tensor_parallel_size"),
        ("rollouts_per_example", "repeats=8"),
        ("max_async_level", "did you mean 'max_staleness'"),
        ("filter_groups", "did you mean 'replace_constant_groups'"),
        ("learning_rat", "did you mean 'learning_rate'"),
    ],
)
def test_a_name_of_another_library_gets_the_answer(name, expected):
    assert expected in answer(name)


def test_no_name_of_trls_configuration_is_answered_by_one_that_only_looks_alike():
    """Similar names mislead where the other library's means something else; a list of what there is does not."""
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("trl is not installed")
    path = Path(spec.origin).parent / "trainer/grpo_config.py"
    names = re.findall(r"^    ([a-z_0-9]+): ", path.read_text(), re.MULTILINE)
    assert len(names) > 50
    said = {name: answer(name) for name in names}
    alike = {name: text for name, text in said.items() if "did you mean" in text and name not in SYNONYMS}
    assert not alike
    assert sum("known are" in text for text in said.values()) < 0.2 * len(names), "most of them have an answer"


# Of verl's data, actor, rollout, algorithm and trainer sections, and of prime-rl's configurations.
OTHERS = """
train_files val_files prompt_key reward_fn_key max_prompt_length max_response_length train_batch_size val_batch_size
filter_overlong_prompts truncation ppo_mini_batch_size ppo_micro_batch_size_per_gpu use_dynamic_bsz
ppo_max_token_len_per_gpu grad_clip clip_ratio clip_ratio_low clip_ratio_high clip_ratio_c loss_agg_mode entropy_coeff
use_kl_loss kl_loss_coef kl_loss_type ppo_epochs lr lr_warmup_steps lr_warmup_steps_ratio min_lr_ratio warmup_style
weight_decay total_training_steps param_offload optimizer_offload ulysses_sequence_parallel_size
log_prob_micro_batch_size_per_gpu top_k prompt_length response_length gpu_memory_utilization ignore_eos enforce_eager
free_cache_engine tensor_model_parallel_size max_num_batched_tokens max_num_seqs n do_sample adv_estimator gamma lam
use_kl_in_reward kl_penalty kl_ctrl balance_batch total_epochs project_name experiment_name logger nnodes
n_gpus_per_node save_freq test_freq resume_mode val_before_train critic_warmup default_local_dir
enable_gradient_checkpointing use_remove_padding norm_adv_by_std_in_grpo calculate_log_probs multi_turn max_user_turns
max_assistant_turns custom_reward_function
batch_size micro_batch_size rollouts_per_example seq_len max_steps max_async_level async_level strict_async_level
oversampling_factor online_difficulty_filtering easy_fraction hard_fraction mask_env_responses
mask_truncated_completions zero_truncated_completions trajectory_strategy token_mask_low max_tokens min_tokens kl_tau
adv_tau ratio_type max_concurrent max_norm length_bonus output_dir
"""


def test_every_name_of_verl_and_prime_rl_has_an_answer_that_is_not_one_spelt_alike():
    said = {name: answer(name) for name in OTHERS.split()}
    alike = {name for name, text in said.items() if "did you mean" in text and name not in SYNONYMS}
    assert not alike and not {name for name, text in said.items() if "known are" in text}


def test_every_synonym_is_a_name_here_and_none_has_two_answers():
    ours = {*ENTRIES, *entries_by_name(GRPOConfig), "repeats", "grpo_size", "reward_fns", "max_prompt_tokens"}
    assert not {name: same for name, same in SYNONYMS.items() if not set(same) <= ours}
    assert not SYNONYMS.keys() & EXPLAINED.keys()


def test_the_script_gives_the_same_answers():
    (said,) = hints(["train.gradient_accumulation_steps=4"], GRPOConfig)
    assert "A batch is split by its tokens, train.token_budget" in said
    (said,) = hints(["actor.clip_ratio_high=0.3"], GRPOConfig)
    assert "'train.clip_epsilon_high'" in said


def test_parts_say_how_they_are_called():
    def double(number: int) -> int:
        """Double a number."""
        return 2 * number

    for call, words in (
        (lambda: RubricReward([double]), r"several are Rubric\(f, g\)"),
        (lambda: RubricReward(double, reward_weights=[2]), r"RewardFn\(f, weight=2\)"),
        (lambda: ToolTransform(double), r"ToolTransform\(\[tool\]\)"),
        (lambda: LLMCollector(None, policy=None, num_generations=8), r"DatasetChatEnv\(rows, repeats=8\)"),
        (lambda: LLMCollector(None, policy=None, grpo_size=8), r"DatasetChatEnv\(rows, repeats=8\)"),
        (lambda: DatasetChatEnv([], grpo_size=8), "did you mean 'repeats'"),
        (lambda: DatasetChatEnv([], num_generations=8), "did you mean 'repeats'"),
        (lambda: TransformersWrapper(None, temperature=1), r"generate_kwargs=\{'temperature': \.\.\.\}"),
        (lambda: vLLMWrapper(None, max_tokens=9), r"generate_kwargs=\{'max_new_tokens': \.\.\.\}"),
    ):
        with pytest.raises(TypeError, match=words):
            call()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: GRPOLoss(None, importance_floor=0.1), r"importance_cap=llmrl\.objectives\.ImportanceBound"),
        (lambda: MCAdvantage(is_constant_group_dropped=True), "use drop_constant_groups"),
        (lambda: MCAdvantage(is_batch_normalized=True), "use normalize_batch"),
        (lambda: LLMCollector(None, step_timeout_seconds=1.0), r"use limits=RolloutLimits\(step_timeout_seconds"),
        (lambda: RayLLMCollector(None, step_timeout_seconds=1.0), r"use limits=RolloutLimits\(step_timeout_seconds"),
    ],
)
def test_a_renamed_argument_is_answered_by_its_new_name(call, words):
    with pytest.raises(TypeError, match=words):
        call()


def test_new_names_exist():
    def names(called):
        return inspect.signature(called).parameters.keys()

    assert {"drop_constant_groups", "normalize_batch"} <= names(MCAdvantage)
    assert "step_timeout_seconds" in names(RolloutLimits) and "importance_cap" in names(GRPOLoss.__init__)
    assert {"cap", "floor", "mode", "level"} <= names(ImportanceBound)
