"""Plain text and tokens grow by what a policy wrote."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torch.utils.data import DataLoader
from torchrl.envs import check_env_specs

from llmrl.envs import GSM8KPrepareQuestion, LLMEnv, LLMHashingEnv


def test_text_grows_in_any_batch_shape():
    env = LLMEnv(str_key="line", action_key="more")
    data = env.reset(TensorDict(line=["a", "b"], batch_size=[2]))
    data["more"] = ["1", "2"]
    step = env.step(data)["next"]
    assert list(step["line"]) == ["a1", "b2"] and not step["done"].any()
    assert step["reward"].shape == (2, 1, 1)


def test_tokens_grow_and_an_end_token_ends_the_episode():
    env = LLMEnv(from_text=False, eos_token_id=0)
    starts = [TensorDict(tokens=torch.tensor(ids)) for ids in ([1, 2], [3])]
    data = env.reset(lazy_stack(starts, 0))
    for element, response in zip(data.unbind(0), ([5, 0], [6]), strict=True):
        element["tokens_response"] = torch.tensor(response)
    step = env.step(data)["next"]
    assert [element["tokens"].tolist() for element in step.unbind(0)] == [[1, 2, 5, 0], [3, 6]]
    assert step["terminated"].flatten().tolist() == [True, False]


def test_none_as_a_key_is_the_usual_entry(tokenizer):
    assert LLMEnv(str_key=None).reset(TensorDict(text="a"))["text"] == "a"
    assert LLMEnv(token_key=None, from_text=False).reset(TensorDict(tokens=torch.tensor([7])))["tokens"].item() == 7
    assert LLMHashingEnv(tokenizer=tokenizer, text_key=None).make_tensordict("a")["text"] == "a"


def test_nested_entries_of_text_grow():
    env = LLMEnv(str_key=("story", "text"), action_key=("story", "more"))
    data = env.reset(TensorDict(story=TensorDict(text="a")))
    data["story", "more"] = "1"
    assert env.step(data)["next", "story", "text"] == "a1"


def test_entries_are_on_the_environments_device():
    env = LLMEnv(from_text=False, device="meta")
    data = env.reset(TensorDict(tokens=torch.ones(2, 3, dtype=torch.int64), batch_size=2))
    data["tokens_response"] = torch.ones(2, 1, dtype=torch.int64, device="meta")
    step = env.step(data)["next"]
    assert step["tokens"].shape == (2, 4) and data["tokens"].is_meta
    assert all(part[key].is_meta for part in (data, step) for key in ("done", "terminated")) and step["reward"].is_meta


def test_rows_of_a_loader_are_prepared_and_open_the_episodes():
    loader = DataLoader([{"text": "1 + 1?", "answer": "2"}, {"text": "1 + 2?", "answer": "3"}], batch_size=2)
    env = LLMEnv.from_dataloader(loader, repeats=2)
    env.insert_transform(0, GSM8KPrepareQuestion())
    texts = [env.reset()["text"] for _ in range(3)]
    assert texts[0] == texts[1] != texts[2]
    assert texts[2].endswith("User: 1 + 2?. Assistant: <think>")


@pytest.mark.parametrize("from_text", [True, False])
def test_specs(from_text):
    env = LLMEnv(from_text=from_text)
    start = TensorDict(text="a") if from_text else TensorDict(tokens=torch.tensor([1]))
    check_env_specs(env, tensordict=env.reset(start))


def test_questions_that_are_missing_are_named():
    loader = [{"text": "1 + 1?"}]
    with pytest.raises(ValueError, match=r"no questions to prepare.*insert_transform\(0"):
        LLMEnv.from_dataloader(loader).append_transform(GSM8KPrepareQuestion()).reset()
    with pytest.raises(KeyError, match="has no 'question'"):
        GSM8KPrepareQuestion(["question"]).prepare(TensorDict(text="1 + 1?"))
    with pytest.raises(ValueError, match="equally many"):
        GSM8KPrepareQuestion(["text"], ["text", "prompt"])


def test_what_is_missing_is_named():
    with pytest.raises(ValueError, match="'text'"):
        LLMEnv().reset()
    with pytest.raises(ValueError, match="'text_response'"):
        LLMEnv().step(LLMEnv().reset(TensorDict(text="a")))
    with pytest.raises(ValueError, match="eos_token_id"):
        LLMEnv(eos_token_id=0)


def test_the_model_writes_on_in_plain_text_and_in_hashed_tokens(vllm_engine, tokenizer):
    from llmrl.data import Text, Tokens
    from llmrl.policies import vLLMWrapper

    def policy_of(input_mode, num_tokens):
        return vLLMWrapper(
            vllm_engine,
            tokenizer=tokenizer,
            input_mode=input_mode,
            generate_kwargs={"max_new_tokens": num_tokens, "temperature": 0.0},
        )

    def write_on(tensordict):
        answer = policy_of("text", 4)(TensorDict(text=Text(prompt=tensordict["text"])))
        tensordict["text_response"] = answer["text"].response
        return tensordict

    env = LLMEnv.from_dataloader([{"text": "The capital of France is"}])
    rollout = env.rollout(3, write_on)
    assert rollout["next", "reward"].shape == (3, 1, 1)
    assert rollout[-1]["next", "text"] == rollout[0]["text"] + "".join(rollout["text_response"])
    hashing = LLMHashingEnv(tokenizer=tokenizer)
    data = hashing.make_tensordict("The capital of France is")
    for _ in range(3):
        answer = policy_of("tokens", 1)(TensorDict(tokens=Tokens(prompt=data["observation"])))
        data = hashing.step_mdp(hashing.step(data.set("action", answer["tokens"].response)))
    assert rollout[0]["next", "text"].startswith(data["text"])


@pytest.mark.parametrize("make", [LLMEnv, lambda: LLMEnv(from_text=False)])
def test_200_kb_cost_little(make):
    env = make()
    is_text = env.from_text
    data = env.reset(TensorDict(text="a") if is_text else TensorDict(tokens=torch.tensor([1])))
    data["text_response" if is_text else "tokens_response"] = "no" * 100_000 if is_text else torch.ones(200_000).long()
    assert len(env.step(data)["next"]["text" if is_text else "tokens"]) == 200_001
