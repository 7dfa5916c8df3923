"""Log-probs of a reference and the KL to it; second thoughts."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from tensordict.nn import TensorDictModule
from torchrl.envs import check_env_specs
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from llmrl.collectors import LLMCollector, RolloutLimits
from llmrl.data import ChatHistory, History, Text
from llmrl.envs import DatasetChatEnv
from llmrl.objectives import KLPenalty
from llmrl.policies import LLMWrapperBase
from llmrl.testing import ScriptedEngine
from llmrl.trainer import TransformersWrapper
from llmrl.transforms import (
    AddThinkingPrompt,
    KLComputation,
    KLRewardTransform,
    PolicyVersion,
    RetrieveKL,
    RetrieveLogProb,
    RubricReward,
)

DATASET = [{"query": [1, 2, 3]}, {"query": [4, 5, 6, 7]}]


def constant(messages):
    return 1.0


@pytest.fixture(scope="module")
def reference():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return TransformersWrapper(
        LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes)), generate=False, log_probs_key="ref_log_probs"
    )


def expected_log_probs(reference, token_ids):
    with torch.no_grad():
        logits = reference.model(token_ids[None]).logits[0]
    scored = logits.log_softmax(-1)[:-1].gather(-1, token_ids[1:, None])[:, 0]
    return torch.cat([torch.zeros(1), scored])


def turn(prompt, sampled, log_probs, **more):
    token_ids = torch.tensor([*prompt, *sampled])
    mask = torch.tensor([False] * len(prompt) + [True] * len(sampled))
    full = torch.cat([torch.zeros(len(prompt)), torch.tensor(log_probs)])
    entries = {"tokens": {"full": token_ids}, "masks": {"all_assistant_mask": mask}, "log_probs": {"full": full}}
    return TensorDict({**entries, "next": {"reward": torch.ones(1, 1)}, **more})


def test_the_reference_scores_the_sampled_tokens_of_a_ragged_batch(reference):
    rows = [turn([1, 2], [3, 4, 5], [-1.0, -1.0, -1.0]), turn([6], [7], [-2.0])]
    batch = RetrieveLogProb(reference)(lazy_stack(rows, 0))
    for row in batch.unbind(0):
        written, mask = row["next", "ref_log_probs", "full"], row["masks", "all_assistant_mask"]
        torch.testing.assert_close(written[mask], expected_log_probs(reference, row["tokens", "full"])[mask])
        assert not written[~mask].any() and not written.requires_grad


def test_gradients_flow_when_asked(reference):
    batch = RetrieveLogProb(reference, detach=False)(lazy_stack([turn([1], [2], [-1.0])], 0))
    assert batch[0]["next", "ref_log_probs", "full"].requires_grad


def test_an_environment_writes_the_kl_and_a_dense_reward(reference):
    env = DatasetChatEnv(DATASET, input_mode="tokens").append_transform(RetrieveKL(ref_model=reference, coeff=0.5))
    policy = LLMWrapperBase(ScriptedEngine([[8, 9]]), input_mode="tokens")
    step = env.step(policy(env.reset()))
    mask = step["masks", "all_assistant_mask"]
    divergence = step["log_probs", "full"] - expected_log_probs(reference, step["tokens", "full"])
    torch.testing.assert_close(step["next", "kl_penalty"][mask, 0], divergence[mask])
    torch.testing.assert_close(step["next", "reward"][mask, 0], -0.5 * divergence[mask])
    assert step["next", "reward"].shape == (len(mask), 1) and not step["next", "reward"][~mask].any()


def test_the_turns_reward_stands_at_the_last_sampled_token():
    step = turn([1, 2], [3, 4], [-1.0, -2.0])
    step["next", "ref_log_probs"] = TensorDict({"full": torch.tensor([9.0, 9.0, -1.5, -2.5])})
    dense = KLComputation(coeff=2.0)(step)["next", "reward"][:, 0]
    torch.testing.assert_close(dense, torch.tensor([0.0, 0.0, -1.0, -1.0 + 1.0]))


def test_a_turn_pays_in_sum_what_its_rollout_pays_as_a_row():
    step = turn([1, 2], [3, 4], [-1.0, -2.0])
    step["next", "ref_log_probs"] = TensorDict({"full": torch.tensor([9.0, 9.0, -1.5, -2.25])})
    row = step.clone()
    row["rollout"] = TensorDict(rollout_id="a")
    dense = KLComputation(coeff=2.0)(step)["next", "reward"]
    assert float(dense.sum()) == float(KLPenalty(2.0)(lazy_stack([row]))["next", "reward"]) == 1 - 2 * (0.5 + 0.25)


def test_a_kl_that_is_not_added_leaves_the_reward():
    step = turn([1], [2], [-1.0])
    step["next", "ref_log_probs"] = TensorDict({"full": torch.tensor([0.0, -1.5])})
    step = KLComputation(add_to_reward=False, kl_key="kl")(step)
    assert step["next", "reward"].shape == (1, 1) and step["next", "kl"][1, 0] == 0.5


def test_the_kl_in_the_reward_is_torchrls(takes_long):
    from torchrl.envs.llm.transforms import KLRewardTransform as TorchRLKLRewardTransform

    class TorchRLKL(TorchRLKLRewardTransform):
        """Theirs, without an environment around it."""

        action_key = ("tokens", "full")

    model = TensorDictModule(lambda ids: -0.1 * ids.float(), [("tokens", "full")], [("log_probs", "full")])
    turns = [turn([1, 2], [3, 4], [-1.0, -2.0]), turn([5], [6, 7, 8], [-0.5, -1.5, -2.5])]
    batch = torch.stack(turns, 0)
    ours = KLRewardTransform(model, coef=0.3)(batch.clone())["next"]
    model.pad_output = True
    theirs = TorchRLKL(model, coef=0.3)(batch.clone())["next"]
    torch.testing.assert_close(ours["kl_penalty"], theirs["kl_penalty"])
    # The turn's own reward, 1, is at each token there, and at the last one here.
    last = torch.zeros(4, 1).index_fill(0, torch.tensor([3]), 1.0)
    torch.testing.assert_close(ours["reward"] - last, theirs["reward"] - 1.0)
    torch.testing.assert_close(
        KLRewardTransform(model, add_to_reward=False)(batch)["next", "reward"], torch.ones(2, 1, 1)
    )


def test_a_batch_of_any_shape_is_scored(reference):
    turns = [turn([1, 2], [3, 4], [-1.0, -2.0]), turn([1, 2], [3, 5], [-1.0, -1.0])]
    dense = RetrieveKL(ref_model=reference)(torch.stack(turns, 0))["next", "kl_penalty"]
    torch.testing.assert_close(RetrieveKL(ref_model=reference)(turns[1].clone())["next", "kl_penalty"], dense[1])
    nested = RetrieveKL(ref_model=reference)(torch.stack(turns, 0).reshape(2, 1))
    torch.testing.assert_close(nested["next", "kl_penalty"][:, 0], dense)


def test_arguments_of_torchrl_that_mean_nothing_here_are_answered(reference):
    with pytest.raises(ValueError, match="exactly one of model"):
        RetrieveKL("from_collector")
    with pytest.raises(ValueError, match="needs gen_model"):
        RetrieveKL("from_collector", reference, assistant_only=False)
    with pytest.raises(TypeError, match="nothing is padded"):
        KLComputation(padding_side="left")
    with pytest.raises(TypeError, match="did you mean 'coef'"):
        KLRewardTransform(reference, coeff=1.0)


def test_the_kl_between_two_models_of_a_batch_without_next(reference):
    """Of all tokens, then of those of the mask; the reward, if there is one, stands at the root, too."""
    torch.manual_seed(1)
    model = LlamaForCausalLM(reference.model.config)
    sampler = TransformersWrapper(model, generate=False, log_probs_key="gen_log_probs")
    rows = [turn([1, 2], [3, 4, 5], [-1.0, -1.0, -1.0]), turn([6], [7], [-2.0])]
    keys = {"gen_log_probs_full_key": ("gen_log_probs", "full"), "tokenizer": None, "coeff": 2.0}
    for assistant_only in (False, True):
        batch = lazy_stack([row.exclude("next", "log_probs") for row in rows], 0)
        batch.set("reward", torch.ones(2, 1, 1))
        scored = RetrieveKL(sampler, reference, assistant_only=assistant_only, **keys)(batch)
        for row in scored.unbind(0):
            ids, mask = row["tokens", "full"], row["masks", "all_assistant_mask"]
            expected = expected_log_probs(sampler, ids) - expected_log_probs(reference, ids)
            expected = expected * mask if assistant_only else expected
            torch.testing.assert_close(row["kl_penalty"][:, 0], expected)
            paid = torch.zeros(len(ids)).index_fill(0, torch.tensor([len(ids) - 1]), 1.0) - 2.0 * expected
            torch.testing.assert_close(row["reward"][:, 0], paid)


@pytest.mark.parametrize("sampled", [([6, 7, 8, 9], [13, 14]), ([6, 7], [13, 14, 15, 16])])
@pytest.mark.parametrize("pad_output", [False, True])
def test_the_kl_of_padded_answers_of_different_lengths_stands_at_their_tokens(reference, pad_output, sampled):
    """Prompts are padded on the left and answers on the right, so that a row's padding may be at both ends."""
    answers = dict(zip([(1, 2, 3, 4, 5), (10, 11, 12)], sampled, strict=True))
    policy = LLMWrapperBase(ScriptedEngine(lambda ids: answers[tuple(ids)]), input_mode="tokens", pad_output=pad_output)
    model = TransformersWrapper(reference.model, generate=False, pad_output=pad_output)
    env = DatasetChatEnv([{"query": list(ids)} for ids in answers], input_mode="tokens", num_envs=2)
    env = env.append_transform(KLRewardTransform(model))
    for row, (prompt, answer) in zip(env.rollout(1, policy).unbind(0), answers.items(), strict=True):
        log_probs = expected_log_probs(reference, torch.tensor([*prompt, *answer]))
        expected = torch.cat([torch.zeros(len(prompt)), -1.0 - log_probs[len(prompt) :]])
        num_left, num_right = (5 - len(prompt), 4 - len(answer)) if pad_output else (0, 0)
        expected = torch.nn.functional.pad(expected, (num_left, num_right))
        torch.testing.assert_close(row["next", "kl_penalty"].flatten(), expected)


@pytest.mark.parametrize("pad_output", [False, True])
def test_a_dense_batch_of_texts_is_scored_under_the_models_own_name(tokenizer, tiny_model_path, pad_output):
    options = {"tokenizer": tokenizer, "input_mode": "text", "generate": False}
    model = TransformersWrapper(tiny_model_path, pad_output=pad_output, log_probs_key="mine", **options)
    texts = ["7 + 8 = 15", "1 + 1 ="]
    with pytest.raises(ValueError, match="input_mode='history'"):
        RetrieveLogProb(model)
    scored = RetrieveLogProb(model, assistant_only=False)(TensorDict(text=Text(full=texts), batch_size=(2,)))
    written = scored.get(("mine", "full"), as_list=True)
    for text, row in zip(texts, written, strict=True):
        ids = torch.tensor(tokenizer.encode(text))
        torch.testing.assert_close(row[-len(ids) + 1 :], expected_log_probs(model, ids)[1:], atol=1e-4, rtol=1e-4)
        assert len(row) == max(map(len, map(tokenizer.encode, texts))) or not pad_output


def test_a_misspelt_source_of_the_policy_s_log_probs_is_refused(reference):
    with pytest.raises(ValueError, match=r"gen_model must be one of \['from_collector'\], got 'misspelt'"):
        RetrieveKL("misspelt", reference)


def test_models_of_which_one_pads_are_refused(reference):
    other = reference.get_new_version(log_probs_key="gen_log_probs", pad_output=True)
    with pytest.raises(ValueError, match="pad_output mismatch"):
        RetrieveKL(other, reference)


@pytest.mark.parametrize("make", [KLRewardTransform, RetrieveKL])
def test_specs_with_a_kl_in_the_reward(reference, make):
    env = DatasetChatEnv([{"query": [1, 2]}, {"query": [3, 4]}], input_mode="tokens", batch_size=(2,))
    policy = LLMWrapperBase(ScriptedEngine([[8, 9]]), input_mode="tokens")
    env = env.append_transform(make(ref_model=reference))
    step = env.step(policy(env.reset()))
    assert env.output_spec["full_reward_spec"]["reward"].shape == (2, -1, 1)
    assert env.output_spec["full_observation_spec"]["kl_penalty"].shape == (2, -1, 1)
    assert step["next", "reward"].shape == step["next", "kl_penalty"].shape == (2, 4, 1)


def test_a_collector_takes_them_as_they_are(reference):
    env = DatasetChatEnv(DATASET, input_mode="tokens", repeats=2)
    policy = LLMWrapperBase(ScriptedEngine([[8, 9]]), input_mode="tokens")
    limits = RolloutLimits(max_turns=1)
    with LLMCollector(
        env, policy=policy, groups_per_batch=2, limits=limits, postproc=RetrieveLogProb(reference)
    ) as collector:
        batch = next(iter(collector))
    assert all(row["next", "ref_log_probs", "full"].shape == row["tokens", "full"].shape for row in batch.unbind(0))


def half_a_nat_less():
    """A reference that gives each token half a nat less than the scripted sampler, so that its KL is 0.5."""
    return TensorDictModule(lambda ids: ids.float() * 0 - 1.5, [("tokens", "full")], [("log_probs", "full")])


def play_turns(transforms, num_turns, renderer):
    env = DatasetChatEnv([{"query": "Count."}])
    for transform in transforms:
        env = env.append_transform(transform)
    policy = LLMWrapperBase(ScriptedEngine([[8, 9, 10]], log_prob=-1.0), renderer=renderer)
    limits = RolloutLimits(max_turns=num_turns)
    with LLMCollector(env, policy=policy, dialog_turns_per_batch=num_turns, limits=limits) as collector:
        return collector.next(), collector.rollouts


@pytest.mark.parametrize("is_rubric_last", [False, True])
def test_each_token_of_a_conversation_pays_its_kl_once(renderer, is_rubric_last):
    # Three turns of three tokens: a KL of 4.5.
    transforms = [RubricReward(constant, terminate_when_answered=False), RetrieveKL(ref_model=half_a_nat_less())]
    turns, [rollout] = play_turns(reversed(transforms) if is_rubric_last else transforms, 3, renderer)
    assert rollout.num_completion_tokens == 9 and rollout.reward == pytest.approx(1.0 - 4.5)
    assert [float(turn["next", "reward"].sum()) for turn in turns.unbind(0)] == [-1.5, -1.5, -0.5]
    assert [int(turn["next", "kl_penalty"].count_nonzero()) for turn in turns.unbind(0)] == [3, 3, 3]


def test_turns_of_a_batch_pay_for_their_own_tokens_and_a_row_for_all(renderer):
    turns, _ = play_turns([RetrieveLogProb(half_a_nat_less())], 3, renderer)
    paid = KLComputation()(turns)
    assert [float(turn["next", "reward"].sum()) for turn in paid.unbind(0)] == [-1.5] * 3
    row = turns[-1].exclude(("tokens", "prompt"))
    assert float(KLComputation(add_to_reward=False)(row)["next", "kl_penalty"].sum()) == 4.5


def test_a_judges_score_is_added_once_to_a_reward_with_a_kl(renderer):
    async def judge(completion):
        return 1.0

    turns, [rollout] = play_turns([RubricReward(judge), RetrieveKL(ref_model=half_a_nat_less())], 1, renderer)
    assert rollout.reward == pytest.approx(1.0 - 1.5)
    assert turns[0]["next", "reward"][-4:, 0].tolist() == [0.0, -0.5, -0.5, 0.5]


def test_exactly_one_of_model_and_factory(reference):
    with pytest.raises(ValueError, match="exactly one"):
        RetrieveLogProb()
    built = []
    transform = RetrieveLogProb(model_factory=lambda: built.append(1) or reference)
    assert not built and transform.model is reference and transform.model is reference and built == [1]


def test_specs_of_an_environment_with_thinking_and_rewards():
    env = DatasetChatEnv([{"query": "a"}, {"query": "b"}]).append_transform(RubricReward(constant))
    env = env.append_transform(AddThinkingPrompt(lambda step: False)).append_transform(PolicyVersion())
    check_env_specs(env)


def test_another_attempt_is_asked_for_until_the_condition_is_met(renderer):
    script = ["no<|im_end|>", "yes<|im_end|>"]

    def is_yes(completion):
        return float(completion == "yes")

    def is_no(step):
        return step["reward"].sum() < 1

    env = DatasetChatEnv([{"query": "say yes"}]).append_transform(RubricReward(is_yes))
    env = env.append_transform(AddThinkingPrompt(is_no, "Again.", role="user", edit_last_turn=False))
    policy = LLMWrapperBase(ScriptedEngine(script, encode=renderer.encode), renderer=renderer)
    with LLMCollector(env, policy=policy, groups_per_batch=1, limits=RolloutLimits(max_turns=5)) as collector:
        collector.next()
    [rollout] = collector.rollouts
    assert [m["content"] for m in rollout.messages] == ["say yes", "no", "Again.", "yes"]
    assert rollout.reward == 1.0 and rollout.num_turns == 2


@pytest.mark.parametrize("thoughts", ["a b c d e f g h i j ", ""])
def test_a_prompt_within_the_answer_leaves_its_thoughts_as_they_were_sampled(renderer, thoughts):
    """What stood before the answer is trained in the same row; an answer without thoughts is a row of its own."""
    script = [f"{thoughts}<answer>1</answer><|im_end|>", "<answer>2</answer><|im_end|>"]

    def is_two(completion):
        return float("2" in completion)

    env = DatasetChatEnv([{"query": "say two"}]).append_transform(RubricReward(is_two))
    retry = AddThinkingPrompt(lambda step: step["reward"].sum() < 1, "Wait.")
    policy = LLMWrapperBase(ScriptedEngine(script, encode=renderer.encode), renderer=renderer)
    env, limits = env.append_transform(retry), RolloutLimits(max_turns=5)
    with LLMCollector(env, policy=policy, groups_per_batch=1, limits=limits) as collector:
        batch = collector.next()
    [rollout] = collector.rollouts
    assert [m["content"] for m in rollout.messages] == ["say two", f"{thoughts} Wait.".lstrip(), "<answer>2</answer>"]
    trained = [renderer.decode(row["tokens", "full"][row["masks", "all_assistant_mask"]]) for row in batch.unbind(0)]
    assert rollout.reward == 1.0 and "".join(trained).endswith(script[1])
    assert trained[0].startswith(thoughts.rstrip()) if thoughts else trained[0] == script[0]
    assert len(trained) == (1 if thoughts else 2)


def test_thinking_prompts_are_chosen_by_seed_and_bad_ones_refused():
    first, second = (AddThinkingPrompt(bool, random_prompt=True, seed=3) for _ in range(2))
    assert [first._random.choice(first.prompts) for _ in range(9)] == [
        second._random.choice(second.prompts) for _ in range(9)
    ]
    by_user = AddThinkingPrompt(bool, role="user", edit_last_turn=False)
    assert AddThinkingPrompt(bool).prompts != by_user.prompts
    assert AddThinkingPrompt(bool).zero_reward and not by_user.zero_reward  # as TorchRL's
    with pytest.raises(ValueError, match="needs role='assistant'"):
        AddThinkingPrompt(bool, role="user")
    with pytest.raises(ValueError, match="role must be"):
        AddThinkingPrompt(bool, role="system")
    with pytest.raises(ValueError, match="exclude each other"):
        AddThinkingPrompt(bool, "a", random_prompt=True)


def test_a_reference_scores_conversations_without_tokens_by_a_template_of_its_own(tiny_model_path, tokenizer):
    model = TransformersWrapper(tiny_model_path, tokenizer=tokenizer, generate=False)
    chat = [{"role": "user", "content": "2 + 2 ="}, {"role": "assistant", "content": "4"}]
    options = {"chat_template_name": "llama4", "padding": False, "return_assistant_tokens_mask": True}
    retrieve = RetrieveLogProb(model, tokenizer=tokenizer, tokenizer_kwargs=options, log_probs_full_key=("ref", "full"))
    batch = TensorDict(history=ChatHistory(full=History.from_chats([chat]), batch_size=(1,)), batch_size=(1,))
    scores = retrieve(batch)["ref", "full"][0]
    text = History.from_chats(chat).apply_chat_template(tokenizer, chat_template_name="llama4", tokenize=False)
    text = text.removesuffix("<|header_start|>assistant<|header_end|>\n\n")
    token_ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
    with torch.no_grad():
        log_probs = AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float32)(token_ids).logits
    expected = log_probs.log_softmax(-1)[0, :-1].gather(1, token_ids[0, 1:, None])[:, 0]
    is_scored = scores[1:] != 0
    assert len(scores) == token_ids.shape[1] and 0 < int(is_scored.sum()) < len(expected)
    torch.testing.assert_close(scores[1:][is_scored], expected[is_scored], atol=1e-4, rtol=0)
