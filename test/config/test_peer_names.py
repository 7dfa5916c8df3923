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
from llmrl.runs.train import ENTRIES
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
        (lambda: ToolTransform(double), r"ToolTransform\(\[tool\]\)"),
        (lambda: LLMCollector(None, policy=None, num_generations=8), r"DatasetChatEnv\(rows, repeats=8\)"),
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
        (lambda: MCAdvantage(is_constant_group_dropped=True), "it is drop_constant_groups"),
        (lambda: MCAdvantage(is_batch_normalized=True), "it is normalize_batch"),
        (lambda: LLMCollector(None, step_timeout_seconds=1.0), r"it is limits=RolloutLimits\(step_timeout_seconds"),
        (lambda: RayLLMCollector(None, step_timeout_seconds=1.0), r"it is limits=RolloutLimits\(step_timeout_seconds"),
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
