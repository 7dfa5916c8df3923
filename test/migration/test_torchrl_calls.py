"""Calls of TorchRL's own files that llmrl takes, and orders of transforms that it refuses."""

from __future__ import annotations

import copy
from array import array

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torchrl.envs import (
    AsyncEnvPool,
    Compose,
    RewardClipping,
    RewardScaling,
    RewardSum,
    StepCounter,
    TransformedEnv,
    transforms,
)

from llmrl.data import ChatHistory, History
from llmrl.data.sampling_mask import SamplingMask
from llmrl.engines.scores import TokenScores
from llmrl.envs import ChatEnv, DatasetChatEnv
from llmrl.objectives import SFTLoss
from llmrl.policies import LLMWrapperBase, vLLMWrapper
from llmrl.testing import ScriptedEngine
from llmrl.torchrl.collectors import llm as torchrl_collectors
from llmrl.torchrl.envs import VecNormV2
from llmrl.torchrl.envs import llm as torchrl_envs
from llmrl.torchrl.envs.llm.transforms import AddThinkingPrompt, SimpleToolTransform
from llmrl.torchrl.modules import llm as torchrl_modules
from llmrl.transforms import IncrementalTokenizer, PolicyVersion, RubricReward


def answered(env, *texts):
    """A step in which the policy answers with these texts."""
    data = env.reset(TensorDict(query=["7 + 8 ="] * len(texts), batch_size=len(texts)))
    answers = lazy_stack([History(role="assistant", content=text) for text in texts])
    data["history"].full = data["history"].prompt.append(answers, inplace=False)
    return env.step(data)["next"]


def ten(completion):
    return 10.0


def is_fifteen(completion):
    return float(completion == "15")


@pytest.mark.parametrize(
    "make_reader",
    [
        lambda: RewardScaling(0, 0.1),
        lambda: RewardClipping(-1, 1),
        RewardSum,
        lambda: Compose(StepCounter(), RewardScaling(0, 0.1)),
    ],
)
def test_a_reader_of_the_reward_before_its_writer_is_refused(make_reader):
    early = TransformedEnv(ChatEnv(), make_reader())
    with pytest.raises(ValueError, match=r"reads the reward before RubricReward writes it.*append RubricReward first"):
        early.append_transform(RubricReward(ten))


def test_a_reader_after_a_writer_works_and_a_second_writer_may_follow():
    env = ChatEnv().append_transform(RubricReward(ten)).append_transform(RewardScaling(0, 0.1))
    assert answered(env, "15")["reward"].flatten().tolist() == pytest.approx([1.0])
    other = RubricReward(is_fifteen, terminate_when_answered=False)
    assert isinstance(TransformedEnv(env, other), TransformedEnv)


def test_a_condition_sees_the_reward_only_once_it_is_written():
    def is_wrong(step):
        return step["reward"].sum() < 1

    env = ChatEnv().append_transform(AddThinkingPrompt(is_wrong, "Wait.")).append_transform(RubricReward(ten))
    with pytest.raises(KeyError, match="append AddThinkingPrompt after the transform that writes the reward"):
        answered(env, "15")
    env = ChatEnv().append_transform(RubricReward(is_fifteen))
    following = answered(env.append_transform(AddThinkingPrompt(is_wrong, "Wait.")), "15", "14")
    assert [chat[-1]["content"] for chat in following["history"].prompt.chats] == ["15", "14 Wait."]


def test_another_attempt_is_asked_for_where_a_limit_had_truncated_the_conversation():
    env = ChatEnv().append_transform(StepCounter(1)).append_transform(AddThinkingPrompt(lambda step: True, "Wait."))
    following = answered(env, "14")
    assert not any(following[flag].any() for flag in ("done", "terminated", "truncated"))
    kept = ChatEnv().append_transform(StepCounter(1))
    following = answered(kept.append_transform(AddThinkingPrompt(lambda step: True, undo_done=False)), "14")
    assert following["done"].all() and following["truncated"].all()


def test_a_prompt_to_think_again_is_not_written_into_the_reply_of_a_tool():
    tools = SimpleToolTransform({"seven": lambda: 7})
    env = ChatEnv().append_transform(tools).append_transform(AddThinkingPrompt(lambda step: True, "Wait."))
    [chat] = answered(env, "<tool>seven\n</tool>")["history"].prompt.chats
    assert [(message["role"], message["content"]) for message in chat[-2:]] == [
        ("tool", "seven succeeded: 7"),
        ("assistant", "Wait."),
    ]


def test_a_chat_environment_is_made_with_its_tokenizer(tokenizer):
    env = ChatEnv(tokenizer=tokenizer, system_prompt="Be brief.", with_tokenizer=True)
    assert isinstance(env, TransformedEnv) and isinstance(env.base_env, ChatEnv)
    data = env.reset(TensorDict(query="Hi"))
    expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(data["tokens", "prompt"]) == expected
    rows = DatasetChatEnv(["Hi"], tokenizer=tokenizer, with_tokenizer=True)
    assert tokenizer.decode(rows.reset()["tokens", "prompt"]).endswith("user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert type(ChatEnv(with_tokenizer=False)) is ChatEnv
    with pytest.raises(ValueError, match="needs tokenizer="):
        ChatEnv(with_tokenizer=True)


def test_incremental_tokens_go_where_they_are_asked_and_a_missing_template_is_warned_of(tokenizer, monkeypatch):
    env = ChatEnv().append_transform(IncrementalTokenizer(tokenizer, tokens_key=("seen", "all")))
    data = env.reset(TensorDict(query="Hi"))
    assert tokenizer.decode(data["seen", "all"]).endswith("user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert data.get("tokens", None) is None
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.warns(UserWarning, match="has no chat template"):
        transform = IncrementalTokenizer(tokenizer)
    data = ChatEnv().append_transform(transform).reset(TensorDict(query="Hi"))
    assert tokenizer.decode(data["tokens", "prompt"]) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_a_version_that_is_counted_may_be_set():
    transform = PolicyVersion("int")
    transform.version = 7
    assert ChatEnv().append_transform(transform).reset(TensorDict(query="a"))["policy_version"].item() == 7
    transform.increment_version()
    assert transform.version == 8
    with pytest.raises(RuntimeError, match="follows its source"):
        PolicyVersion(source=lambda: 1).version = 2
    with pytest.raises(ValueError, match="uuids"):
        PolicyVersion("uuid").version = 2


def test_a_history_that_is_cut_trains_nothing_that_was_not_written(tiny_model_path, tokenizer):
    from llmrl.trainer import TransformersWrapper

    text = "<|im_start|>user\n7 + 8 =<|im_end|>\n<|im_start|>assistant\nIt is 1"
    batch = TensorDict(history=ChatHistory(full=History.from_text([text]), batch_size=(1,)), batch_size=(1,))
    policy = TransformersWrapper(tiny_model_path, tokenizer=tokenizer, input_mode="history", generate=False)
    scored = policy(batch)[0]
    trained = scored["tokens", "full"][scored["masks", "all_assistant_mask"]]
    assert tokenizer.decode(trained) == "It is 1"
    log_probs = scored["log_probs", "full"]
    assert torch.equal(log_probs != 0, scored["masks", "all_assistant_mask"])
    loss = SFTLoss(policy, reduction="sum", normalize_by_seq_length=False)(policy(batch)).loss_sft
    assert loss.item() == pytest.approx(-log_probs.sum().item(), rel=1e-5)


def test_the_parsers_have_torchrls_functions_for_one_answer():
    assert torchrl_envs.GSM8KRewardParser.extract_tags("<think>so</think> <answer>42</answer>") == ("so", "42")
    assert torchrl_envs.GSM8KRewardParser.extract_tags("42") == ("", "")
    assert torchrl_envs.GSM8KRewardParser.normalize_answer("$1,200.00") == "1200"
    assert torchrl_envs.MATHRewardParser.extract_boxed(r"\boxed{\frac{1}{2}}") == r"\frac{1}{2}"
    assert torchrl_envs.MATHRewardParser.extract_boxed(" none ") == "none"
    assert torchrl_envs.CountdownRewardParser.validate_expression("(25 + 3) * 4", 112, [25, 3, 4])
    assert not torchrl_envs.CountdownRewardParser.validate_expression("25 + 25", 50, [25, 3])
    assert torchrl_envs.CountdownRewardParser.validate_expression("25 + 3", torch.tensor(28), torch.tensor([25, 3]))


def test_the_scorers_bonus_is_torchrls():
    rows = [[1.0], [0.0]]
    accuracies = {name: torch.tensor(rows) for name in ("prompt_level_strict_acc", "inst_level_strict_acc")}
    score = torchrl_envs.IFEvalScoreData(**accuracies, batch_size=(2,))
    reward = torchrl_envs.IfEvalScorer().default_reward_aggregator(score, think_blocks=["a"], answer_blocks=["b"])
    assert reward.shape == (2, 1, 1) and reward.flatten().tolist() == pytest.approx([0.85, 0.15])
    assert torchrl_envs.IfEvalScorer().default_reward_aggregator(score.to("meta")).is_meta
    scorer = torchrl_envs.IfEvalScorer(format_weights=iter([0.0, 0.0, 0.0, 1.0]))
    assert scorer.default_reward_aggregator(score).flatten().tolist() == [0.0, 0.0]


@pytest.mark.parametrize("argument", ["batch_size_dl", "collate_fn", "primers", "dataloader_actor_name"])
def test_an_argument_of_torchrls_data_sets_that_is_not_there_is_refused_with_advice(argument):
    with pytest.raises(TypeError, match=f"DatasetChatEnv has no argument '{argument}': "):
        torchrl_envs.DatasetChatEnv(["7 + 8 ="], **{argument: None})


@pytest.mark.parametrize("argument", ["score_key", "prompt_key", "verbose", "response_column"])
def test_an_argument_of_torchrls_scorer_that_is_not_there_is_refused_with_advice(argument):
    assert torchrl_envs.IfEvalScorer(format_weights=None).format_weights == (0.4, 0.3, 0.2, 0.1)
    with pytest.raises(TypeError, match=f"IfEvalScorer has no argument '{argument}': "):
        torchrl_envs.IfEvalScorer(**{argument: None})


def test_a_task_of_torchrls_takes_apply_template_and_scores_an_answer(tokenizer):
    row = {"question": "7 + 8 =", "answer": "7 + 8 = 15 #### 15"}
    env = torchrl_envs.GSM8KEnv([row], tokenizer=tokenizer, apply_template=True, ray_backend=False)
    data = env.reset()
    answer = History(role="assistant", content="<think>15</think> <answer>15</answer>")
    data["history"].full = data["history"].prompt.append(lazy_stack([answer]), inplace=False)
    assert env.step(data)["next", "reward"].item() == 1
    assert isinstance(env.transform, torchrl_envs.GSM8KRewardParser)
    with pytest.raises(TypeError, match="apply_templates"):
        torchrl_envs.DatasetChatEnv([row], apply_templates=True)
    with pytest.raises(TypeError, match="'ray_backend': use a ChatEnv with a RayDataLoadingPrimer"):
        torchrl_envs.DatasetChatEnv([row], ray_backend=True)


def test_a_loader_of_torchrls_takes_the_one_order_of_repeats():
    rows = [{"query": "7 + 8 ="}, {"query": "1 + 1 ="}]
    env = torchrl_envs.ChatEnv.from_dataloader(rows, repeats=2, group_repeats=True, batch_size=(4,))
    assert list(env.reset()["query"]) == ["7 + 8 ="] * 2 + ["1 + 1 ="] * 2
    with pytest.raises(TypeError, match="'group_repeats': draws of a prompt always follow each other"):
        torchrl_envs.ChatEnv.from_dataloader(rows, repeats=2, group_repeats=False)


def test_a_collector_of_torchrls_takes_a_pool_of_environments(renderer):
    def make_env():
        env = torchrl_envs.ChatEnv.from_dataloader([{"query": "7 + 8 ="}, {"query": "1 + 1 ="}], batch_size=(1,))
        return env.append_transform(StepCounter(2))

    pool = AsyncEnvPool([make_env] * 3, backend="threading", stack="lazy")
    policy = LLMWrapperBase(ScriptedEngine(["1<|im_end|>"], encode=renderer.encode), renderer=renderer)
    arguments = {"dialog_turns_per_batch": 3, "yield_only_last_steps": True, "total_dialog_turns": 4}
    with torchrl_collectors.LLMCollector(pool, policy=policy, **arguments) as collector:
        assert collector.max_concurrent_rollouts == 3
        batches = list(collector)
    pool.close()
    assert [batch["query"] for batch in batches] == [["7 + 8 ="], ["1 + 1 ="]]


@pytest.mark.filterwarnings("ignore:The chat template of")
def test_a_wrapper_of_torchrls_has_its_template_for_a_tokenizer_without_one(tokenizer):
    from torchrl.data.llm import History as TheirHistory

    base = copy.deepcopy(tokenizer)
    base.chat_template, base.name_or_path = None, "gpt2"
    chat = [{"role": "user", "content": "7 + 8 ="}]
    policy = torchrl_modules.vLLMWrapper(ScriptedEngine([[1]]), tokenizer=base)
    rendered = base.decode(policy.renderer.render(chat, add_generation_prompt=True))
    theirs = TheirHistory.from_chats([chat]).apply_chat_template(tokenizer=base, add_generation_prompt=True)
    assert rendered == theirs[0]
    with pytest.raises(ValueError, match="no chat template and none is guessed"):
        vLLMWrapper(ScriptedEngine([[1]]), tokenizer=base)


@pytest.mark.parametrize("model", [torch.nn.Linear(1, 1), None])
def test_a_model_that_is_neither_an_engine_nor_one_of_vllm_is_refused_by_its_type(model):
    with pytest.raises(TypeError, match=rf"model must be an engine, a vllm.LLM.*got {type(model).__name__}"):
        torchrl_modules.vLLMWrapper(model)


class ScoringEngine(ScriptedEngine):
    async def score(self, token_ids, *, top_k=0):
        log_probs = torch.tensor([0.0, *(-float(number) for number in range(1, len(token_ids)))])
        return TokenScores(log_probs, torch.full((len(token_ids), 0), -1), torch.zeros(len(token_ids), 0))


def test_rows_of_truncated_distributions_are_not_scored_as_if_they_were_whole():
    judge = torchrl_modules.vLLMWrapper(ScoringEngine([[1]]), input_mode="tokens", generate=False)
    mask = {"all_assistant_mask": torch.tensor([False, True, True])}
    row = TensorDict(tokens=TensorDict(full=torch.tensor([5, 6, 7])), masks=TensorDict(mask))
    assert judge(lazy_stack([row.clone()]))[0]["log_probs", "full"].tolist() == [0.0, -1.0, -2.0]
    kept = SamplingMask.of([None, None, array("i", [7, 9])])
    row["sampling_mask"] = TensorDict(token_ids=kept.token_ids, counts=kept.counts)
    with pytest.raises(ValueError, match="sampled from truncated"):
        judge(lazy_stack([row]))


def test_a_temperature_at_which_no_engine_scores_is_refused_before_an_engine_starts(tmp_path):
    with pytest.raises(ValueError, match=r"scores at temperature 1, got 0\.7"):
        torchrl_modules.vLLMWrapper(tmp_path, generate=False, generate_kwargs={"temperature": 0.7})


@pytest.mark.filterwarnings("ignore:Support of VecNormV2")
@pytest.mark.parametrize("batch_size", [None, (2,)])
def test_rewards_of_a_batch_are_normalized_as_one_after_another(batch_size):
    def length(completion):
        return float(len(completion))

    def alone(text):
        data = one.reset(TensorDict(query="7 + 8 ="))
        answer = {"role": "assistant", "content": text}
        data["history"].full = data["history"].prompt.append(answer, inplace=False)
        return one.step(data)["next", "reward"].item()

    env = ChatEnv(batch_size=batch_size).append_transform(RubricReward(length)).append_transform(VecNormV2(["reward"]))
    one = ChatEnv().append_transform(RubricReward(length)).append_transform(transforms.VecNormV2(["reward"]))
    rewards, expected = [], []
    for texts in (["15", "It is fifteen."], ["No.", "fifteen"]):
        rewards += answered(env, *texts)["reward"].flatten().tolist()
        expected += [alone(text) for text in texts]
    assert rewards == pytest.approx(expected, abs=1e-5) and len(set(rewards)) == 4


def test_following_answers_are_scored_with_torchrls_entry_of_ifeval(tokenizer):
    row = {"prompt": "Name colours.", "kwargs": [{}, {"relation": "less than", "num_words": 10}]}
    row["instruction_id_list"] = ["punctuation:no_comma", "length_constraints:number_words"]
    env = torchrl_envs.IFEvalEnv([row] * 2, tokenizer=tokenizer, num_envs=2)
    data = env.reset()
    texts = ["<think>a</think> <answer>red and blue</answer>", "<think>a</think> <answer>red, blue</answer>"]
    answers = lazy_stack([History(role="assistant", content=text) for text in texts])
    data["history"].full = data["history"].prompt.append(answers, inplace=False)
    first, second = env.step(data)["next", "ifeval_score"].unbind(0)
    assert first.all() and first.inst_level_strict_acc.tolist() == [True, True]
    assert second.inst_level_strict_acc.tolist() == [False, True] and not second.prompt_level_strict_acc.any()


def test_an_aggregate_of_torchrls_gets_the_accuracies_of_ifeval_as_tensors():
    def strict(score, think_blocks=None, answer_blocks=None, complete=None):
        assert score.prompt_level_strict_acc.dtype == torch.bool and answer_blocks == ["red, blue"]
        return score.inst_level_strict_acc.float().mean(-1, keepdim=True)

    row = {"query": "Name colours.", "kwargs": [{}, {"relation": "less than", "num_words": 10}]}
    row["instruction_id_list"] = ["punctuation:no_comma", "length_constraints:number_words"]
    env = DatasetChatEnv([row]).append_transform(torchrl_envs.IfEvalScorer(aggregate_reward=strict))
    data = env.reset()
    answer = {"role": "assistant", "content": "<think>a</think> <answer>red, blue</answer>"}
    data["history"].full = data["history"].prompt.append(answer, inplace=False)
    assert env.step(data)["next", "reward"].item() == 0.5
