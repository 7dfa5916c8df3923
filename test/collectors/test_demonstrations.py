"""Conversations of a file as training rows: what is trained, what is refused, and the SFT script that learns them."""

from __future__ import annotations

import csv
import json
import math

import pytest
import torch
from rendering_families import TOOLS, family_renderer
from script_configs import composed, script_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from llmrl.collectors import Demonstrations
from llmrl.config.imitation import SFTConfig
from llmrl.config.launch import prepared
from llmrl.objectives import SFTLoss
from llmrl.rendering import RenderingError, TemplateRenderer, demonstrate
from llmrl.trainer import TransformersWrapper

CALL = {"type": "function", "id": "abcdefghi", "function": {"name": "add", "arguments": {"a": 1}}}
CHAT = (
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "two words"},
)
CALLING = (
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "abcdefghi", "content": "3"},
    {"role": "assistant", "content": "It is 3"},
)
THINKING = tuple({**one, "reasoning_content": "hm"} if one["role"] == "assistant" else one for one in CHAT)
MISCALLING = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}
# What a model of the family samples to say this, by the family's published template.
ENDS = {
    "chatml": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "mistral": "</s>",
    "gemma4": "<turn|>",
    "glm45": "<|user|>",
    "command_r7b": "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",
}
OPENINGS = {"glm45": "\n<think></think>\n", "command_r7b": "<|START_RESPONSE|>"}
CALLS = {
    "chatml": '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>',
    "llama3": '{"name": "add", "parameters": {"a": 1}}<|eom_id|>',
    "mistral": '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}, "id": "abcdefghi"}]</s>',
    "gemma4": "<|tool_call>call:add{a:1}<tool_call|><|tool_response>",
}


def trained_texts(renderer, conversation):
    """The runs of trained tokens of each row, as text."""
    texts = []
    for row in conversation.reconcile().rows:
        columns, run = row.columns, []
        for token, is_trained in [*zip(columns.token_ids, columns.loss_mask, strict=True), (0, False)]:
            if is_trained:
                run.append(token)
            elif run:
                texts.append(renderer.decode(run))
                run = []
    return texts


@pytest.mark.parametrize("family", ENDS)
def test_what_the_assistant_says_is_trained_to_the_token_that_ends_it_and_nothing_else(model_path, family):
    renderer = family_renderer(model_path, family)
    opening, end = OPENINGS.get(family, ""), ENDS[family]
    conversation = demonstrate(renderer, CHAT)
    assert trained_texts(renderer, conversation) == [f"{opening}hello{end}", f"{opening}two words{end}"]
    assert conversation.messages == CHAT
    (row,) = conversation.reconcile().rows
    assert all(math.isnan(one) == is_trained for one, is_trained in zip(
        row.columns.log_probs, row.columns.loss_mask, strict=True))  # fmt: skip
    context = demonstrate(renderer, [CHAT[0], {**CHAT[1], "weight": 0}, *CHAT[2:]])
    assert trained_texts(renderer, context) == [f"{opening}two words{end}"]


@pytest.mark.parametrize("family", CALLS)
def test_calls_are_trained_as_the_template_writes_them_and_results_are_not(model_path, family):
    renderer = family_renderer(model_path, family)
    said, answer = trained_texts(renderer, demonstrate(renderer, CALLING, tools=TOOLS))
    assert (said, answer) == (CALLS[family], f"It is 3{ENDS[family]}")


def test_thoughts_that_a_template_drops_later_are_trained_where_they_are_shown(model_path):
    renderer = family_renderer(model_path, "qwen3")
    conversation = demonstrate(renderer, THINKING)
    thought = "<think>\nhm\n</think>\n\n"
    assert trained_texts(renderer, conversation) == [f"{thought}hello<|im_end|>", f"{thought}two words<|im_end|>"]
    within = [CHAT[0], {"role": "assistant", "content": "<think>hm</think>hello"}]  # as many data sets have it
    assert trained_texts(renderer, demonstrate(renderer, within)) == ["<think>hm</think>hello<|im_end|>"]
    _, second = conversation.reconcile().rows
    assert renderer.decode(second.columns.token_ids).count("<think>") == 1


def test_what_cannot_be_said_so_by_the_model_is_refused(model_path):
    with pytest.raises(RenderingError, match=r"messages\[1\] does not survive .* 'hello'.*in place of.*'hm'"):
        demonstrate(family_renderer(model_path, "chatml"), THINKING)  # it does not write thoughts
    template = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    )
    renderer = TemplateRenderer(AutoTokenizer.from_pretrained(model_path), chat_template=template)
    with pytest.raises(
        RenderingError, match=r"asks for messages\[1\] with a prompt that ends with .*<think>.*cannot be"
    ):
        demonstrate(renderer, CHAT)


@pytest.fixture(scope="module")
def renderer(model_path):
    return TemplateRenderer(AutoTokenizer.from_pretrained(model_path))


def written(path, *rows):
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{'messages': 1}", r"said\.jsonl:2 is not a line of JSON"),
        ({"chat": []}, "row 1 of the conversations cannot be trained on: it has no 'messages'"),
        ({"messages": "hello"}, "row 1 of the conversations cannot be trained on: messages must be a sequence"),
        ({"messages": [{"content": "a"}]}, r"row 1 .* messages\[0\] has no 'role'"),
        ({"messages": [{"role": "assistant"}]}, r"row 1 .* has neither 'content' nor 'tool_calls'"),
        ({"messages": CHAT[:1]}, "row 1 .* nothing to train: no assistant message"),
        ({"messages": [CHAT[0], {**CHAT[1], "weight": 0}]}, "row 1 .* nothing to train"),
        ({"messages": [CHAT[0], {"role": "assistant", "tool_calls": ["add"]}]}, "row 1 .* a tool call must be"),
        ({"messages": [CHAT[0], MISCALLING]}, "row 1 .* arguments of a call of 'f', is not valid JSON"),
    ],
)
def test_a_conversation_that_cannot_be_trained_on_is_named_before_training(tmp_path, renderer, row, message):
    path = written(tmp_path / "said.jsonl", {"messages": CHAT}, row)
    with pytest.raises((ValueError, TypeError), match=message):
        Demonstrations(path, renderer, conversations_per_batch=2)


def test_arguments_may_be_json_in_a_string(renderer):
    def rows(arguments):
        call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
        said = [CALLING[0], {"role": "assistant", "content": None, "tool_calls": [call]}]
        return Demonstrations([{"messages": said, "tools": TOOLS}], renderer, conversations_per_batch=1).all_rows()

    assert rows('{"a": 1}')[0]["tokens", "full"].tolist() == rows({"a": 1})[0]["tokens", "full"].tolist()


def test_a_logged_request_and_its_response_are_a_conversation(renderer):
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    logged = {
        "request": {
            "model": "any",
            "messages": [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}],
            "tools": TOOLS,
        },
        "response": {"choices": [{"message": {"role": "assistant", "content": None, "tool_calls": [call]}}]},
    }
    rows = Demonstrations([logged], renderer, conversations_per_batch=1).all_rows()
    expected = Demonstrations([{"messages": CALLING[:2], "tools": TOOLS}], renderer, conversations_per_batch=1)
    assert rows[0]["tokens", "full"].tolist() == expected.all_rows()[0]["tokens", "full"].tolist()


def test_what_is_too_long_is_left_out_and_reported(renderer):
    long = [CHAT[0], {"role": "assistant", "content": "word " * 100}]
    rows = [{"messages": CHAT}, {"messages": long}, {"messages": CHAT[:2]}]
    with pytest.warns(UserWarning, match=r"1 of 3 conversations are longer than max_tokens=100 .* left out: rows 1\."):
        kept = Demonstrations(rows, renderer, conversations_per_batch=2, max_tokens=100)
    assert kept.all_rows().shape == (2,)
    with pytest.raises(ValueError, match="all 1 conversations are longer than max_tokens=9"):
        Demonstrations(rows[:1], renderer, conversations_per_batch=2, max_tokens=9)


def test_batches_go_on_from_a_saved_place_and_end_after_the_last_epoch(renderer):
    rows = [{"messages": [{"role": "user", "content": str(n)}, CHAT[1]]} for n in range(5)]

    def made(**options):
        return Demonstrations(rows, renderer, conversations_per_batch=2, seed=3, **options)

    drawn = [[row["rollout", "group_id"] for row in batch.unbind(0)] for batch in made(num_epochs=2)]
    assert [len(batch) for batch in drawn] == [2] * 5
    for epoch in range(2):
        of_epoch = [one for batch in drawn for one in batch if one.startswith(f"demonstrations/{epoch}/")]
        assert sorted(one.rpartition("/")[2] for one in of_epoch) == list("01234")
    first, second = made(num_epochs=2), made(num_epochs=2)
    batches = iter(first)
    for _ in range(2):
        next(batches)
    second.load_state_dict(first.state_dict())
    rest = [[row["rollout", "group_id"] for row in batch.unbind(0)] for batch in second]
    assert rest == drawn[2:]
    with pytest.raises(ValueError, match="digest"):
        Demonstrations(rows[::-1], renderer, conversations_per_batch=2, seed=3).load_state_dict(first.state_dict())


def test_the_loss_is_the_mean_over_what_the_assistant_says(tiny_model_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_path)
    batch = next(iter(Demonstrations([{"messages": CHAT}], TemplateRenderer(tokenizer), conversations_per_batch=1)))
    model = AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float32)
    loss = SFTLoss(TransformersWrapper(model, generate=False), reduction="token_mean")(batch).loss_sft
    text = tokenizer.apply_chat_template(list(CHAT), tokenize=False).removesuffix("\n")
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    spans = [(text.index(said), text.index(said) + len(said)) for said in ("hello<|im_end|>", "two words<|im_end|>")]
    is_said = torch.tensor([any(a <= s and e <= b for a, b in spans) for s, e in encoded["offset_mapping"]])
    ids = torch.tensor(encoded["input_ids"])
    reference = AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float64, attn_implementation="eager")
    log_p = reference(ids[None]).logits[0].log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
    assert float(loss.detach()) == pytest.approx(-float(log_p[is_said[1:]].mean().detach()), rel=1e-5)


@pytest.mark.usefixtures("takes_long")
def test_a_script_that_is_stopped_goes_on_to_the_same_weights_and_logs_the_held_out_loss(tiny_model_path, tmp_path):
    script = script_of("sft")
    rows = [
        {"messages": [{"role": "user", "content": str(n)}, {"role": "assistant", "content": "one"}]} for n in range(5)
    ]
    said, others = written(tmp_path / "said.jsonl", *rows), written(tmp_path / "others.jsonl", *rows[:2])

    def run(name, *overrides):
        entries = (
            *(f"run.path={tmp_path / name}", "run.trackers=[]", f"model.path={tiny_model_path}", "eval.num_problems=0"),
            *("run.checkpoint_every=2", "train.learning_rate=1e-3", "collect.groups_per_batch=2", "eval.every=2"),
            *(f"conversations.path={said}", f"conversations.held_out={others}", "eval.metric=eval/loss", *overrides),
        )
        cfg = composed("sft", *entries)
        script.main(prepared(cfg, SFTConfig))
        weights = AutoModelForCausalLM.from_pretrained(tmp_path / name / "model").state_dict()
        with (tmp_path / name / "metrics.csv").open(newline="") as file:
            return weights, list(csv.DictReader(file))

    whole, _ = run("whole", "train.num_steps=4")
    run("stopped", "train.num_steps=3")  # the checkpoint is of step 2
    resumed, metrics = run("stopped", "train.num_steps=4", "resume=true")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert [int(row["step"]) for row in metrics if row["policy_version"]] == [1, 2, 3, 4]
    losses = [float(row["eval/loss"]) for row in metrics if row["eval/loss"]]
    assert len(losses) >= 3 and losses == sorted(losses, reverse=True) and losses[0] > losses[-1] + 0.1
    assert (tmp_path / "stopped/model-best/config.json").exists()
