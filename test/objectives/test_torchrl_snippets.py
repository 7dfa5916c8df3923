"""What TorchRL's pages print about its LLM layer, with the imports changed."""

from __future__ import annotations

import asyncio
import copy

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torchrl.data import Composite, Unbounded
from torchrl.envs import StepCounter, Transform

from llmrl import engines
from llmrl.collectors import LLMCollector
from llmrl.data import ChatHistory, History, Tokens, add_chat_template, templated_text
from llmrl.envs import ChatEnv, DatasetChatEnv, GSM8KEnv, make_gsm8k_env
from llmrl.objectives import k3_kl_token_estimate
from llmrl.policies import LLMWrapperBase, vLLMWrapper
from llmrl.testing import ScriptedEngine
from llmrl.tools import ToolSession
from llmrl.trainer import TransformersWrapper
from llmrl.transforms import AddThinkingPrompt, PythonInterpreter, SimpleToolTransform, XMLBlockParser
from llmrl.weight_sync import VLLMWeightSyncScheme, get_model_metadata


def make_policy(renderer, *answers):
    # A conversation without an end goes on until its context is full.
    engine = ScriptedEngine(list(answers), encode=renderer.encode, max_model_len=128)
    return LLMWrapperBase(engine, renderer=renderer)


def test_a_policy_by_position_and_an_environment_with_a_tokenizer(tokenizer, renderer):
    env = ChatEnv(tokenizer=tokenizer)
    assert env.reset(TensorDict(query="Hi"))["history"].prompt.content == ["Hi"]
    policy = make_policy(renderer, "Hello<|im_end|>")
    with LLMCollector(DatasetChatEnv(["Hi"], tokenizer=tokenizer), policy, dialog_turns_per_batch=4) as collector:
        assert next(iter(collector)).batch_size == (4,)
    LLMCollector(env, policy, dialog_turns_per_batch=4).shutdown()  # its queries come from the code that resets it
    assert policy.model is policy.engine


def test_a_query_may_be_a_formatted_conversation():
    env = ChatEnv(system_prompt="You are a helpful assistant.", input_mode="history")
    chat = [{"role": "user", "content": "Hello, how are you?"}, {"role": "assistant", "content": "I'm well, thanks."}]
    observed = env.reset(TensorDict({"query": History.from_chats([chat])}, batch_size=(1,)))
    assert observed["history"].prompt.role == [["system", "user", "assistant"]]
    parts = torch.stack([History(role=message["role"], content=message["content"]) for message in chat])
    assert env.reset(TensorDict({"query": parts}))["history"].prompt.role == ["system", "user", "assistant"]


def test_a_version_is_tracked(renderer):
    env, policy = DatasetChatEnv(["Hi"]), make_policy(renderer, "Hello<|im_end|>")
    with LLMCollector(env, policy, dialog_turns_per_batch=2, track_policy_version=True) as collector:
        data = next(iter(collector))
        assert collector.policy_version_tracker.version == 0
        assert data["policy_version"].flatten().tolist() == [0, 0]


def test_engines_are_started_by_their_number(monkeypatch, renderer, tokenizer):
    given = []

    def start_engines(*arguments):
        given.append(arguments)
        return [ScriptedEngine(["15<|im_end|>"], encode=renderer.encode) for _ in range(arguments[1])], None

    monkeypatch.setattr("llmrl.engines.replicas.start_engines", start_engines)
    engine = engines.AsyncVLLM.from_pretrained("Qwen/Qwen2.5-3B", num_replicas=2)
    policy = vLLMWrapper(engine, input_mode="history", tokenizer=tokenizer)
    assert policy(ChatEnv().reset(TensorDict(query="7 + 8 =")))["history"].full.content[-1] == "15"
    engines.AsyncVLLM.from_pretrained(
        model_name="Qwen/Qwen2.5-3B",
        num_devices=1,
        num_replicas=3,
        verbose=True,
        compile=False,
        enable_fp32_output=False,
    )
    (name, num_replicas, *_, options), (_, *more, said) = given
    assert (name, num_replicas, more[0]) == ("Qwen/Qwen2.5-3B", 2, 3)
    assert options == {}
    assert said == {"enforce_eager": True, "log_level": "INFO", "engine_args": {"tensor_parallel_size": 1}}
    with pytest.raises(ValueError, match="dtype='float32'"):
        engines.AsyncVLLM.from_pretrained("Qwen/Qwen2.5-3B", enable_fp32_output=True)


def test_weights_are_sent_with_the_sender_of_a_collector(trainable_engine, reference_model, tokenizer):
    scheme = VLLMWeightSyncScheme(master_address="localhost", gpus_per_replica=1, num_replicas=1)
    policy = vLLMWrapper(trainable_engine, input_mode="history", generate_kwargs={"max_new_tokens": 2})
    with LLMCollector(
        DatasetChatEnv(["Hi"]), policy, dialog_turns_per_batch=1, weight_sync_schemes={"policy": scheme}
    ) as collector:
        sender = collector._weight_senders["policy"]
        sender.register_model(reference_model)
        sender.init_all_workers_group(get_model_metadata(reference_model), vllm_engine=policy.model)
        version = trainable_engine.policy_version
        sender.update_weights()
        assert trainable_engine.policy_version == version + 1
        assert collector.update_policy_weights_() == version + 2  # the sender is the collector's own


def test_the_interpreter_answers_a_block_of_python(tokenizer):
    interpreter = PythonInterpreter(tokenizer)
    env = ChatEnv(batch_size=(1,), system_prompt="I'm the system, do as I say", tokenizer=tokenizer)
    env = env.append_transform(interpreter)
    data = env.reset(TensorDict(query=["This is the user prompt"], batch_size=(1,)))
    answer = "Here is a python code to execute:\n```python\na=1\nprint(f'{a=}')\n```"
    prompt = data["history"].prompt
    data["history"].full = prompt.append(lazy_stack([History(role="assistant", content=answer)]), inplace=False)
    data, following = env.step_and_maybe_reset(data)
    [text] = following["history"].prompt.apply_chat_template(tokenizer=tokenizer)
    assert "Code block 1 executed successfully:\na=1\n" in text
    interpreter.close()


def test_a_reward_is_designed_as_a_transform(renderer):
    class RightAnswer(Transform):
        def _call(self, tensordict):
            return tensordict

        def _step(self, tensordict, next_tensordict):
            last = tensordict["history", "full"][..., -1]
            is_right = last.content == "15"
            next_tensordict.set("reward", torch.tensor([[float(is_right)]]))
            next_tensordict.set("done", torch.tensor([True]))
            return next_tensordict

        def transform_reward_spec(self, reward_spec):
            reward_spec["reward"] = Unbounded((*reward_spec.shape, 1, 1))
            return reward_spec

    env = DatasetChatEnv(["7 + 8 ="], repeats=2).append_transform(RightAnswer()).append_transform(StepCounter())
    with LLMCollector(env, make_policy(renderer, "15<|im_end|>", "16<|im_end|>"), groups_per_batch=1) as collector:
        collector.next()
        assert sorted(rollout.reward for rollout in collector.rollouts) == [0.0, 1.0]
        assert all(rollout.num_turns == 1 for rollout in collector.rollouts)


def test_a_reward_of_several_parts_reads_the_last_messages_of_a_batch():
    class Parser(Transform):
        def _step(self, tensordict, next_tensordict):
            responses = tensordict["history", "full"]
            responses = lazy_stack([r[..., -1] for r in responses.unbind(0)])
            assert hasattr(responses, "content") and responses.is_complete == [True, True]
            is_right = torch.tensor([text == "15" for text in responses.content]).reshape(2, 1, 1)
            next_tensordict.set("reward_right", is_right.float())
            next_tensordict.set("reward", is_right.float())
            for key in ("done", "terminated"):
                next_tensordict.set(key, torch.ones(2, 1, dtype=torch.bool))
            return next_tensordict

        def transform_reward_spec(self, reward_spec: Composite) -> Composite:
            shape = reward_spec.shape + (1, 1)
            reward_spec.update(Composite(reward_right=Unbounded(shape), reward=Unbounded(shape)))
            return reward_spec

    env = ChatEnv(batch_size=(2,)).append_transform(Parser()).append_transform(StepCounter(max_steps=4))
    data = env.reset(TensorDict(query=["7 + 8 =", "1 + 1 ="], batch_size=(2,)))
    answers = lazy_stack([History(role="assistant", content=text) for text in ("15", "3")])
    data["history"].full = data["history"].prompt.append(answers, inplace=False)
    following = env.step(data)["next"]
    assert following["reward"].flatten().tolist() == following["reward_right"].flatten().tolist() == [1.0, 0.0]
    assert following["step_count"].flatten().tolist() == [1, 1] and bool(following["done"].all())
    assert env.full_reward_spec["reward_right"].shape == (2, 1, 1)


def test_a_task_is_made_as_torchrls_training_script_makes_it(tokenizer):
    row = {"question": "Tom has 2 boxes of 6 eggs. How many eggs?", "answer": "2 * 6 = 12 #### 12"}
    env = GSM8KEnv(
        dataset=[row], repeats=2, tokenizer=tokenizer, num_envs=2, max_steps=1, device=torch.device("cpu")
    ).append_transform(
        AddThinkingPrompt(
            cond=lambda td: td["reward"] <= 0.1 and td["step_count"] < 2,
            role="user",
            edit_last_turn=False,
            zero_reward=False,
            undo_done=True,
            random_prompt=True,
        )
    )
    data = env.reset()
    assert data.batch_size == (2,)
    wrong = lazy_stack([History(role="assistant", content="<answer>11</answer>") for _ in range(2)])
    data["history"].full = data["history"].prompt.append(wrong, inplace=False)
    following = env.step(data)["next"]
    assert following["step_count"].flatten().tolist() == [1, 1] and not following["done"].any()
    assert following["history"].prompt[:, -1].role == ["user", "user"]


@pytest.mark.parametrize("input_mode", ["history", "text", "tokens"])
def test_a_task_without_its_reward_opens_in_any_mode_and_begins_anew(tokenizer, input_mode):
    rows = [{"question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in range(2)]
    env = GSM8KEnv(rows, input_mode=input_mode, tokenizer=tokenizer, compute_reward=False, max_steps=1)
    queries = [env.reset()["query"], env.reset()["query"], env.reset_dataloader().reset()["query"]]
    assert queries == [["0 + 1?"], ["1 + 1?"], ["0 + 1?"]] and env.input_mode == input_mode
    if input_mode != "history":
        with pytest.raises(ValueError, match="need tokenizer="):
            GSM8KEnv(rows, input_mode=input_mode)


@pytest.mark.parametrize(("pads", "end"), [(0, ""), (2, "<|im_end|>")])
@pytest.mark.parametrize("input_mode", ["text", "tokens"])
def test_answers_of_text_and_of_tokens_are_rewarded_as_those_of_messages(tokenizer, input_mode, pads, end):
    rows = [{"question": "1 + 1?", "answer": "#### 2"}]
    options = {"tokenizer": tokenizer, "repeats": 2}
    answers = ["<think>Two.</think><answer>2</answer>", "<think>.</think><answer>3</answer>"]

    def rewards(mode):
        env = GSM8KEnv(rows, input_mode=mode, **options)
        found = []
        for answer in answers:
            data = env.reset()[0]
            if mode == "history":
                data["history"].full = data["history"].prompt.append({"role": "assistant", "content": answer})
            elif mode == "text":  # prompt and response, which make the full
                data["text"].response = answer + end + "<|endoftext|>" * pads
            else:
                ids = tokenizer.encode(answer + end) + [tokenizer.convert_tokens_to_ids("<|endoftext|>")] * pads
                data["tokens"].response = torch.tensor(ids)
            following = env.step(lazy_stack([data]))["next"]
            assert following["terminated"].all()
            found.append(following["reward"].item())
        return found

    assert rewards(input_mode) == rewards("history") == [1.0, pytest.approx(0.1)]


def test_the_full_of_a_turn_is_its_prompt_and_its_response():
    env = ChatEnv(input_mode="text")
    data = env.reset(TensorDict(query="1 + 1 ="))
    data["text"].response = " 2"
    assert env.step(data)["next", "text"].prompt == "1 + 1 = 2"
    env = ChatEnv()
    data = env.reset(TensorDict(query="1 + 1 ="))
    with pytest.raises(ValueError, match="or prompt and response"):
        env.step(data.clone())
    data["history"].response = History.from_chats([{"role": "assistant", "content": "2"}])
    assert env.step(data)["next", "history"].prompt.content == ["1 + 1 =", "2"]


def test_the_environment_of_one_question_has_one_turn(tokenizer):
    rows = [{"question": "1 + 1?", "answer": "#### 2"}]
    assert make_gsm8k_env(data=rows, num_envs=2, num_epochs=None).rollout(3).shape == (2, 1)
    assert make_gsm8k_env(data=rows, max_steps=2, num_epochs=None).rollout(3).shape == (1, 2)


def test_functions_by_their_names_answer_one_message_a_call():
    def calculator(operation, a, b):
        if operation != "add":
            raise ValueError(f"Unknown operation: {operation}")
        return {"result": a + b}

    env = ChatEnv(batch_size=(1,)).append_transform(SimpleToolTransform({"calculator": calculator}, timeout=60.0))
    call = '<tool>calculator\n{"operation": "%s", "a": 2, "b": 3}</tool>'
    text = "I compute: " + call % "add" + call % "divide" + "<tool>calculator\nno json</tool><tool>other\n{}</tool>"
    data = env.reset(TensorDict(query=["2 + 3"], batch_size=(1,)))
    data["history"].full = data["history"].prompt.extend(History(role="assistant", content=text).view(1, 1), dim=-1)
    answers = env.step(data)["next", "history"].prompt[0, 2:]
    assert answers.role == ["tool"] * 4
    assert answers.content[0] == "calculator succeeded: {'result': 5}"
    expected = ["Unknown operation: divide", "Failed to parse tool arguments", "Unknown tool: other"]
    assert all("failed" in one and end in one for one, end in zip(answers.content[1:], expected, strict=True))
    parsed = SimpleToolTransform({"calculator": calculator}, parser=XMLBlockParser())
    message = {"role": "assistant", "content": '<tool name="calculator">{"operation": "add", "a": 1, "b": 1}</tool>'}
    [answer] = asyncio.run(parsed.answer(message, (), ToolSession(), turn=2))
    assert answer["content"] == "calculator succeeded: {'result': 2}"


def test_a_template_is_added_by_name_and_for_models_of_a_name(tokenizer, monkeypatch):
    for table in ("_TEMPLATES", "_MODEL_NAMES", "_READERS"):
        monkeypatch.setattr(templated_text, table, dict(getattr(templated_text, table)))
    template = "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}{% endfor %}"

    def read(text):
        pairs = [part.split("]") for part in text.split("[")[1:]]
        return lazy_stack([History(role=role, content=content) for role, content in pairs])

    history = History.from_chats([[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]])
    own = history.apply_chat_template(tokenizer, tokenize=False)
    add_chat_template("square", template, inverse_parser=read, model_family_keywords=["Square-"])
    assert history.apply_chat_template(tokenizer, tokenize=False) == own
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.name_or_path = "owner/square-1B"
    written = history.apply_chat_template(tokenizer, tokenize=False)
    assert written == history.apply_chat_template(tokenizer, chat_template_name="square", tokenize=False)
    assert written == ["[user]Hi[assistant]Ho"]
    assert History.from_text(written, chat_template_name="square").chats == history.chats


def test_a_model_without_a_template_has_that_of_its_name(tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template, tokenizer.bos_token = None, "<s>"
    chat = [{"role": role, "content": role[0]} for role in ("system", "user", "assistant")]
    end = tokenizer.eos_token
    expected = {
        "microsoft/DialoGPT-medium": f"u{end}a{end}",
        "tiiuae/falcon-7b-instruct": "s\n\nUser: u\n\nAssistant: a\n\n",
        "deepseek-ai/deepseek-coder-6.7b-base": f"<s>s\n\nUser: u\n\nAssistant: a{end}",
    }
    for tokenizer.name_or_path, text in expected.items():
        history = History.from_chats(chat)
        assert history.apply_chat_template(tokenizer, tokenize=False, add_generation_prompt=False) == text


def test_how_a_policy_samples_is_said_by_their_names(renderer):
    given = {"max_tokens": 10, "n": 1, "temperature": 0.7}
    policy = LLMWrapperBase(ScriptedEngine(["."]), renderer=renderer, generate_kwargs=given)
    expected = {"max_new_tokens": 10, "num_return_sequences": 1, "temperature": 0.7, "do_sample": True}
    assert expected.items() <= policy.generate_kwargs.items()
    assert policy.get_new_version(generate_kwargs=policy.generate_kwargs).sampling == policy.sampling


def test_tokens_beside_a_history_are_scored_or_written_anew(tokenizer, tiny_model_path):
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    history = History.from_chats(chat)
    for prefer_tokens, expected in ((True, [5, 6]), (False, tokenizer.apply_chat_template(chat)["input_ids"])):
        policy = TransformersWrapper(tiny_model_path, tokenizer=tokenizer, generate=False, prefer_tokens=prefer_tokens)
        assert policy.get_new_version().prefer_tokens is prefer_tokens
        data = TensorDict(history=ChatHistory(full=history, batch_size=()), tokens=Tokens(full=torch.tensor([5, 6])))
        assert policy(data)["tokens", "full"].tolist() == expected


@pytest.mark.parametrize("input_mode", ["text", "tokens"])
def test_text_and_tokens_are_written_with_the_tokenizers_template(tokenizer, input_mode):
    chat = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    with pytest.raises(ValueError, match="pass tokenizer="):
        ChatEnv(input_mode=input_mode, system_prompt="Be kind.")
    env = ChatEnv(input_mode=input_mode, system_prompt="Be kind.", tokenizer=tokenizer)
    prompt = env.reset(TensorDict(query="Hi"))[input_mode].prompt
    expected = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=input_mode == "tokens")
    assert (prompt if input_mode == "text" else prompt.tolist()) == (
        expected if input_mode == "text" else expected["input_ids"]
    )


def test_the_order_of_the_k3_estimate_is_theirs(takes_long):
    from torchrl.objectives.llm import k3_kl_token_estimate as theirs

    target, sampled = torch.randn(50), torch.randn(50)
    torch.testing.assert_close(k3_kl_token_estimate(target, sampled), theirs(target, sampled))
    assert not torch.allclose(k3_kl_token_estimate(target, sampled), k3_kl_token_estimate(sampled, target))
    with pytest.raises(ValueError, match="same shape"):
        k3_kl_token_estimate(target, sampled[:1])
