"""One interface of policies: what a `TransformersWrapper` generates and scores, beside TorchRL's and a plain model."""

from __future__ import annotations

import copy
from typing import ClassVar

import pytest
import torch
from loss_batches import tiny_model
from tensordict import TensorDict, lazy_stack

from llmrl.collectors import LLMCollector
from llmrl.data import ChatHistory, History, Masks, Text, Tokens
from llmrl.engines import EngineError
from llmrl.envs import DatasetChatEnv
from llmrl.objectives import DistillationLoss, GRPOLoss, KLPenalty, SFTLoss
from llmrl.policies import LLMWrapperBase, sampling_from_kwargs, vLLMWrapper
from llmrl.testing import ScriptedEngine
from llmrl.torchrl.modules import vLLMWrapper as ScoringVLLMWrapper
from llmrl.trainer import TransformersWrapper, write_log_probs
from llmrl.transforms import RetrieveLogProb

CHATS = [
    [{"role": "user", "content": "Are you happy?"}, {"role": "assistant", "content": "Yes."}],
    [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "What is a cat?"},
        {"role": "assistant", "content": "A small animal that meows."},
    ],
]


@pytest.fixture(scope="module")
def model(tiny_model_path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float32)


@pytest.fixture(scope="module")
def expected_log_probs(model):
    """The log-probs `[num_tokens]` of token ids under a copy of the model in `eager`, 0 for the first."""
    config = copy.deepcopy(model.config)
    config._attn_implementation = "eager"
    eager = type(model)(config).eval()
    eager.load_state_dict(model.state_dict())

    @torch.no_grad()
    def compute(ids):
        log_probs = eager(input_ids=ids[None]).logits[0].log_softmax(-1)
        return torch.cat([torch.zeros(1), log_probs[:-1].gather(-1, ids[1:, None])[:, 0]])

    return compute


def prompts(mode, tokenizer):
    """A batch of the two chats without their answers, and the token ids of each."""
    questions = [chat[:-1] for chat in CHATS]
    texts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in questions]
    ids = [torch.tensor(tokenizer.encode(text, add_special_tokens=False)) for text in texts]
    rows = {
        "history": lambda: [ChatHistory(prompt=History.from_chats(chat), batch_size=()) for chat in questions],
        "text": lambda: [Text(prompt=text) for text in texts],
        "tokens": lambda: [Tokens(prompt=one) for one in ids],
    }[mode]()
    return lazy_stack([TensorDict({mode: one}) for one in rows]), ids


@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
@pytest.mark.parametrize("is_padded", [False, True])
def test_what_is_generated_is_what_the_model_would_say(model, tokenizer, expected_log_probs, mode, is_padded):
    policy = TransformersWrapper(
        model, tokenizer=tokenizer, input_mode=mode, generate_kwargs={"max_new_tokens": 4}, pad_output=is_padded
    )
    batch, ids = prompts(mode, tokenizer)
    assert policy(batch) is batch and policy.generate and policy.model is model
    assert policy.in_keys == [(mode, "prompt")] and all(key in batch for key in policy.out_keys if key != "text")
    assert set(batch["tokens"].padded) == {is_padded} == set(batch["masks"].padded)
    width, num_response = max(map(len, ids)), max(len(one) for one in batch["tokens"].as_list("response"))
    for row, prompt in zip(batch.unbind(0), ids, strict=True):
        left = width - len(prompt) if is_padded else 0
        whole, response = row["tokens", "full"], row["tokens", "response"]
        assert torch.equal(row["tokens", "prompt"][left:], prompt)
        assert torch.equal(whole, torch.cat([row["tokens", "prompt"], response]))
        mask = row["masks", "all_assistant_mask"]
        wanted = expected_log_probs(whole[row["masks", "all_attention_mask"]])
        sampled = row["log_probs", "full"][mask]
        torch.testing.assert_close(sampled, wanted[len(prompt) :], atol=1e-4, rtol=1e-4)
        if mode != "tokens":
            assert row["text"].full == tokenizer.decode(whole[left : left + len(prompt) + int(mask.sum())])
        if is_padded:
            assert len(whole) == width + num_response and not row["log_probs", "full"][~mask].any()


def test_several_samples_are_a_dimension_and_the_input_stays_as_it_was(model, tokenizer):
    batch, ids = prompts("history", tokenizer)
    options = {"tokenizer": tokenizer, "generate_kwargs": {"max_new_tokens": 3, "seed": None}}
    answered = TransformersWrapper(model, num_samples=3, return_log_probs=False, **options)(batch)
    assert answered.batch_size == (2, 3) and set(batch.keys()) == {"history"}
    assert "log_probs" not in answered and answered["history"].full.content[1][2][:2] == ["Be kind.", "What is a cat?"]
    for row, prompt in zip(answered.unbind(0), ids, strict=True):
        assert all(torch.equal(one["tokens", "prompt"], prompt) for one in row.unbind(0))
    apart = TransformersWrapper(model, inplace=False, **options)(batch[0])
    assert set(batch.keys()) == {"history"} and "history" in apart
    with pytest.raises(ValueError, match="num_samples"):
        TransformersWrapper(model, num_samples=2, inplace=True, **options)


@pytest.mark.parametrize("num_samples", [None, 4])
def test_answers_to_one_prompt_differ_if_the_policy_has_a_seed(model, num_samples):
    rows = [torch.tensor([7, 8, 9])] * (4 if num_samples is None else 1)

    def answers(seed):
        batch = lazy_stack([TensorDict(tokens={"prompt": row}) for row in rows])
        options = {"generate_kwargs": {"max_new_tokens": 2, "seed": seed}, "num_samples": num_samples}
        turns = TransformersWrapper(model, input_mode="tokens", **options)(batch).reshape(-1)
        return [tuple(turn["tokens", "response"].tolist()) for turn in turns.unbind(0)]

    drawn = answers(5)
    assert len(set(drawn)) == 4 and drawn[1:] == answers(6)[:3]


def test_an_attention_mask_leaves_the_mask_of_what_was_sampled(model):
    policy = TransformersWrapper(model, input_mode="tokens", generate=False)
    sampled = torch.tensor([[False, False, True, True], [False, True, True, False]])
    real = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
    entries = {"tokens": {"full": torch.ones(2, 4).long()}, "attention_mask": real}
    batch = TensorDict(entries | {"masks": {"all_assistant_mask": sampled}}, batch_size=[2])
    _, masks, _ = policy.scored_tokens(batch)
    assert [mask.tolist() for mask in masks] == [sampled[0].tolist(), sampled[1, :3].tolist()]


def test_a_collector_plays_with_it(model, tokenizer):
    policy = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 2})
    with LLMCollector(DatasetChatEnv(["Hi"]), policy, dialog_turns_per_batch=2) as collector:
        assert next(iter(collector))["tokens", "response"].shape == (2, 2)


@pytest.mark.parametrize("is_dense", [False, True])
@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
def test_scores_are_those_of_a_plain_model(model, tokenizer, expected_log_probs, mode, is_padded, is_dense):
    """Of a history the assistant's turns, its end token included; of text and of tokens without a mask all."""
    texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in CHATS]
    ids = [torch.tensor(tokenizer.encode(text, add_special_tokens=False)) for text in texts]
    policy = TransformersWrapper(model, tokenizer=tokenizer, input_mode=mode, generate=False, pad_output=is_padded)
    if mode == "tokens":
        batch = lazy_stack([TensorDict({"tokens": Tokens(full=one)}) for one in ids])
        if is_dense:
            padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=3, padding_side="left")
            real = torch.nn.utils.rnn.pad_sequence([torch.ones_like(one) for one in ids], batch_first=True).flip(1)
            batch = TensorDict({"tokens": Tokens(full=padded), "attention_mask": real}, batch_size=[2])
    else:
        given = History.from_chats(CHATS) if mode == "history" else texts
        batch = TensorDict({mode: {"history": ChatHistory, "text": Text}[mode](full=given)}, batch_size=[2])
        batch = batch if is_dense else batch.to_lazystack(0)
    assert policy(batch) is batch
    width = max(map(len, ids))
    for row, one, chat in zip(batch.unbind(0), ids, CHATS, strict=True):
        written = row["log_probs", "full"]
        if len(written) > len(one):
            assert len(written) == width and not written[: width - len(one)].any()
            written = written[width - len(one) :]
        is_scored = torch.ones(len(one), dtype=torch.bool)
        if mode == "history":
            answer = tokenizer.encode(f"{chat[-1]['content']}<|im_end|>", add_special_tokens=False)
            is_scored = torch.arange(len(one)) >= len(one) - len(answer) - 1
            is_scored &= torch.arange(len(one)) < len(one) - 1  # the template's new line
        torch.testing.assert_close(written.detach(), expected_log_probs(one) * is_scored, atol=1e-4, rtol=1e-4)
    assert (batch["log_probs", "full"].shape == (2, width)) if is_padded else True
    if mode != "tokens":
        assert batch["text"].full == texts and batch["text"].response is None
        again = policy(batch.exclude(mode).set(mode, batch[mode]))  # its tokens are there now
        assert again["log_probs"].as_list("full")[0].shape == batch["log_probs"].as_list("full")[0].shape


def test_tokens_that_were_sampled_are_scored_in_place_of_their_history(model, tokenizer):
    ids = torch.tensor([5, 6, 7, 8])
    row = TensorDict({"tokens": {"full": ids}, "history": ChatHistory(full=History.from_chats(CHATS[0]))})
    assert TransformersWrapper(model, tokenizer=tokenizer, generate=False)(row)["log_probs", "full"].shape == (4,)


def test_scores_and_distributions_are_torchrls(model, tokenizer, takes_long):
    from torchrl.modules.llm import TransformersWrapper as TorchRLTransformersWrapper
    from torchrl.modules.llm.policies import Tokens as TorchRLTokens

    batch = lazy_stack([TensorDict({"tokens": Tokens(full=torch.arange(n) + 5)}) for n in (4, 7)])
    theirs = TorchRLTransformersWrapper(model, tokenizer=tokenizer, input_mode="tokens", generate=False)
    rows = [TensorDict({"tokens": TorchRLTokens(full=row["tokens", "full"][None])}, batch_size=[1]) for row in batch]
    ours = TransformersWrapper(model, tokenizer=tokenizer, input_mode="tokens", generate=False)
    expected = [theirs(row)["log_probs"].get("full", as_list=True)[0] for row in rows]
    for written, wanted in zip(ours.log_prob(batch, as_list=True), expected, strict=True):
        torch.testing.assert_close(written[1:], wanted[1:], atol=1e-4, rtol=1e-4)
    padded = torch.nn.utils.rnn.pad_sequence([row["tokens", "full"] for row in batch], True, -100, "left")
    log_probs = ours.get_dist(batch).log_prob(padded)
    assert log_probs.shape == (2, 7) and not log_probs[0, :3].any()
    torch.testing.assert_close(log_probs[0, 4:], expected[0][1:], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(log_probs[1, 1:], expected[1][1:], atol=1e-4, rtol=1e-4)
    with pytest.raises(RuntimeError, match="get_new_version"):
        TransformersWrapper(model, tokenizer=tokenizer).get_dist(batch)


def loss_rows():
    generator = torch.Generator().manual_seed(0)
    rows = []
    for place, length in enumerate((5, 8, 6)):
        mask = torch.arange(length) >= 2
        rows.append(
            TensorDict(
                {
                    "tokens": Tokens(full=torch.randint(3, 40, (length,), generator=generator)),
                    "masks": Masks(all_assistant_mask=mask, all_attention_mask=torch.ones_like(mask)),
                    "log_probs": {"full": -torch.rand(length, generator=generator) * mask},
                    "advantage": torch.full((1, 1), 1.0 - place),
                }
            )
        )
    return lazy_stack(rows)


def test_torchrls_loss_takes_our_policy_and_our_rows(takes_long):
    """Their mean is over trained tokens, as ours: the objective and its gradient are the same."""
    from torchrl.objectives.llm import GRPOLoss as TorchRLGRPOLoss

    model = tiny_model()
    policy = TransformersWrapper(model, generate=False)
    gradients = []
    for make in (
        lambda **same: TorchRLGRPOLoss(policy, entropy_bonus=False, masking_strategy="rlhf", **same),
        lambda **same: GRPOLoss(policy, **same),
    ):
        loss = make(clip_epsilon=0.2, aggregation="token_mean")(loss_rows()).loss_objective.squeeze()
        loss.backward()
        gradients.append((loss.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]))
        model.zero_grad()
    for theirs, ours in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_arguments_that_contradict_each_other_are_refused(renderer):
    engine = ScriptedEngine(["a"], encode=renderer.encode)
    with pytest.raises(ValueError, match="one of 'history', 'text' or 'tokens'"):
        LLMWrapperBase(engine, renderer=renderer, input_mode="chat")
    with pytest.raises(ValueError, match=r"TransformersWrapper\(model, generate=False\)"):
        LLMWrapperBase(engine, renderer=renderer, generate=False)
    with pytest.raises(ValueError, match=r"conversation_mode must be one of .*got 'tokens'"):
        LLMWrapperBase(engine, renderer=renderer, conversation_mode="tokens")
    for inplace in ("emtpy", 1):
        with pytest.raises(ValueError, match=rf"inplace must be one of .*got {inplace!r}"):
            LLMWrapperBase(engine, renderer=renderer, inplace=inplace)
    with pytest.raises(ValueError, match="return_log_probs must be True"):
        TransformersWrapper(tiny_model(), generate=False, return_log_probs=False)
    with pytest.raises(TypeError, match=r"model must be an engine, .*got 'name'"):
        LLMWrapperBase("name", renderer=renderer)
    with pytest.raises(TypeError, match=r"model must be an engine, .*got Linear"):
        vLLMWrapper(torch.nn.Linear(1, 1), renderer=renderer)
    with pytest.raises(TypeError, match="Expected History object"):
        LLMWrapperBase(engine, renderer=renderer)(TensorDict(history={"prompt": "Hi"}))
    with pytest.raises(ValueError, match=r"'tokens', 'full'.*tokenizer="):
        TransformersWrapper(tiny_model(), generate=False)(TensorDict(history=ChatHistory(prompt=None)))


LOUD = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}!\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant!\n{% endif %}"
)


def test_two_templates_are_refused(renderer, tokenizer):
    engine = ScriptedEngine(["a"], encode=renderer.encode)
    templates = {"chat_template": LOUD, "chat_template_name": "chatml"}
    both = "chat_template and chat_template_name each choose the template"
    with pytest.raises(ValueError, match=both):
        LLMWrapperBase(engine, tokenizer=tokenizer, **templates)
    with pytest.raises(ValueError, match=both):
        History.from_chats(CHATS).apply_chat_template(tokenizer, **templates)
    for name, template in templates.items():
        with pytest.raises(ValueError, match=f"renderer and {name} each choose the template"):
            LLMWrapperBase(engine, renderer=renderer, **{name: template})


def test_a_template_of_a_new_version_replaces_that_of_the_old_one(renderer, tokenizer):
    engine = ScriptedEngine(["a<|im_end|>"], encode=renderer.encode)

    def prompt_of(policy):
        prompt = History.from_chats([CHATS[0][:-1]])
        turn = policy(TensorDict(history=ChatHistory(prompt=prompt, batch_size=(1,)), batch_size=(1,)))
        return turn[0]["text"].prompt

    loud = LLMWrapperBase(engine, tokenizer=tokenizer, chat_template=LOUD)
    written = "<|im_start|>user!\nAre you happy?<|im_end|>\n<|im_start|>assistant!\n"
    assert prompt_of(loud) == written == prompt_of(loud.get_new_version(generate_kwargs={"max_new_tokens": 3}))
    named = loud.get_new_version(chat_template_name="chatml")
    assert prompt_of(named).endswith("<|im_start|>user\nAre you happy?<|im_end|>\n<|im_start|>assistant\n")
    assert prompt_of(named.get_new_version(chat_template=LOUD)) == written
    assert prompt_of(LLMWrapperBase(engine, renderer=renderer).get_new_version(chat_template=LOUD)) == written


def test_a_tokenizer_of_a_new_version_replaces_that_of_the_old_one(renderer, tokenizer):
    other = copy.deepcopy(tokenizer)
    policy = LLMWrapperBase(ScriptedEngine([[1]]), renderer=renderer).get_new_version(tokenizer=other)
    assert policy.tokenizer is policy.renderer.tokenizer is other


def test_a_new_version_has_the_tokenizer_of_its_engine(tokenizer):
    class TokenizingEngine(ScriptedEngine):
        def __init__(self):
            super().__init__([[1]])
            self.tokenizer = copy.deepcopy(tokenizer)

        def get_tokenizer(self):
            return self.tokenizer

    first, second = TokenizingEngine(), TokenizingEngine()
    policy = vLLMWrapper(first)
    assert policy.get_new_version(pad_output=True).renderer.tokenizer is first.tokenizer
    assert policy.get_new_version(model=second).renderer.tokenizer is second.tokenizer
    given = vLLMWrapper(first, tokenizer=tokenizer).get_new_version(model=second)
    assert given.renderer.tokenizer is tokenizer


class OwnEngine(ScriptedEngine):
    """An engine that a policy starts by the name of a model."""

    started: ClassVar[list] = []

    @classmethod
    def from_pretrained(cls, model):
        cls.started.append(cls([[1]]))
        return cls.started[-1]

    def get_tokenizer(self):
        return None

    def shutdown(self):
        self.is_ended = True


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"generate": False}, "generate=False needs"),
        ({"input_mode": "histroy"}, "input_mode must be"),
        ({"num_samples": 0}, "num_samples must be"),
        ({"num_samples": 2.5}, r"num_samples must be a whole number, got 2\.5"),
        ({"generate_kwargs": {"temperature": -1}}, "temperature must be"),
        ({"chat_template_name": "nope"}, "chat_template_name must be"),
    ],
)
def test_no_engine_starts_for_arguments_that_are_refused(monkeypatch, wrong, message):
    monkeypatch.setattr("llmrl.engines.AsyncVLLM", OwnEngine)
    monkeypatch.setattr(OwnEngine, "started", [])
    with pytest.raises(ValueError, match=message):
        vLLMWrapper("model", **wrong)
    assert OwnEngine.started == []


def test_an_own_engine_ends_if_its_policy_is_refused(monkeypatch):
    monkeypatch.setattr("llmrl.engines.AsyncVLLM", OwnEngine)
    monkeypatch.setattr(OwnEngine, "started", [])
    with pytest.raises(ValueError, match="needs a renderer or a tokenizer"):  # the engine has none
        vLLMWrapper("model")
    with pytest.raises(TypeError, match="needs an engine that scores tokens"):
        ScoringVLLMWrapper("model", generate=False)
    assert [engine.is_ended for engine in OwnEngine.started] == [True, True]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"n": 2}, "num_samples="),
        ({"num_beams": 4}, "cannot be trained on"),
        ({"do_sample": False, "temperature": 0.7}, "do_sample"),
        ({"do_sample": True, "temperature": 0.0}, "do_sample"),
        ({"max_tokens": 3, "max_new_tokens": 4}, "twice"),
        ({"temperature": -0.1}, "temperature must be non-negative"),
        ({"temperature": 0.001}, "temperature must be 0 .greedy., or 0.01 or more, got 0.001"),
        ({"temperature": float("inf")}, "temperature must be"),
        ({"temperature": "1"}, "temperature must be a number, got '1'"),
        ({"max_new_tokens": 2.5}, "max_new_tokens must be a whole number, got 2.5"),
        ({"max_new_tokens": None}, "max_new_tokens must be a whole number, got None"),
        ({"top_k": 1.5}, "top_k must be a whole number"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty must be positive"),
        ({"seed": 0.5}, "seed must be a whole number or None"),
        ({"seed": -1}, "seed must be in"),
        ({"stop": [""]}, "stop must be non-empty strings"),
        ({"stop": [7]}, "stop must be non-empty strings"),
        ({"stop_token_ids": [-1]}, "stop_token_ids must be non-negative token ids"),
    ],
)
def test_generation_arguments_are_known_or_refused(given, message):
    """Whatever engine they go to: vLLM, say, samples at 0.01 where less is asked, and takes the seed -1 for none."""
    with pytest.raises((ValueError, TypeError), match=message):
        sampling_from_kwargs(given)


def test_what_is_so_anyway_may_be_said():
    given = {"do_sample": False, "n": 1, "num_beams": 1, "early_stopping": False, "logprobs": True, "max_tokens": 3}
    sampling = sampling_from_kwargs({**given, "include_stop_str_in_output": True})
    assert (sampling.temperature, sampling.max_new_tokens) == (0.0, 3)


@pytest.mark.parametrize("masking_strategy", ["rlhf", "generic"])
def test_a_teacher_that_is_the_policy_teaches_nothing_or_is_refused(masking_strategy):
    policy = TransformersWrapper(tiny_model(), generate=False)
    key = ("next", "teacher_log_probs", "full")
    loss = DistillationLoss(policy, masking_strategy=masking_strategy)
    assert abs(float(loss(write_log_probs(policy, loss_rows(), key, assistant_only=False)).loss_distill)) < 1e-6
    scorer = RetrieveLogProb(policy, log_probs_full_key=key, assistant_only=False)
    assert abs(float(loss(scorer(loss_rows())).loss_distill)) < 1e-6
    trained_only = write_log_probs(policy, loss_rows(), key)
    if masking_strategy == "rlhf":
        assert abs(float(loss(trained_only).loss_distill)) < 1e-6
    else:
        with pytest.raises(ValueError, match="assistant_only=False"):
            loss(trained_only)


def test_what_a_batch_lacks_is_named():
    rows = loss_rows()
    for missing, read in (
        ("('rollout', 'rollout_id')", KLPenalty(coeff=0.1, other_log_prob_key=("log_probs", "full"))),
        ("('next', 'teacher_log_probs', 'full')", DistillationLoss()),
    ):
        with pytest.raises(KeyError) as error:
            read(rows)
        assert missing in str(error.value).replace("\\", "") and "it has" in str(error.value)


def test_supervised_losses_take_conversations_without_tokens(model, tokenizer, expected_log_probs):
    chats = [
        [{"role": "user", "content": "2 + 2 ="}, {"role": "assistant", "content": answer}] for answer in ("4", "Four!")
    ]
    policy = TransformersWrapper(model, tokenizer=tokenizer, generate=False, chat_template_name="chatml")
    batch = TensorDict(history=ChatHistory(full=History.from_chats(chats), batch_size=(2,)), batch_size=(2,))
    losses = SFTLoss(policy, reduction="none", normalize_by_seq_length=False)(batch).loss_sft
    same = SFTLoss(policy, tokenizer=tokenizer, tokenizer_kwargs={"chat_template_name": "llama4"}, reduction="sum")
    for loss, answer in zip(losses.tolist(), ("4", "Four!"), strict=True):
        prompt = "<|im_start|>user\n2 + 2 =<|im_end|>\n<|im_start|>assistant\n"
        given = tokenizer.encode(prompt, add_special_tokens=False)
        written = tokenizer.encode(f"{answer}<|im_end|>", add_special_tokens=False)
        assert loss == pytest.approx(
            -float(expected_log_probs(torch.tensor([*given, *written]))[len(given) :].sum()), abs=1e-4
        )
    assert same(batch).loss_sft != losses.sum() and "tokens" not in batch


def test_an_id_is_judged_by_the_tokenizer_as_it_is_now(tokenizer):
    """Ids may be added after policies have asked how many there are; one beyond them is the engine's error."""
    tokenizer = copy.deepcopy(tokenizer)
    batch, _ = prompts("history", tokenizer)
    added = len(tokenizer)  # the embedded tokenizer leaves out no id

    def said(token_id):
        return LLMWrapperBase(ScriptedEngine([[token_id, 2]]), tokenizer=tokenizer)(batch.clone())["tokens", "response"]

    with pytest.raises(EngineError, match=f"an id of 0 to {added - 1}"):
        said(added)
    tokenizer.add_tokens(["<added>"])
    assert said(added)[0].tolist() == [added, 2]
    with pytest.raises(EngineError, match=f"an id of 0 to {added}"):
        said(added + 1)
