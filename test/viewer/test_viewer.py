"""A run folder becomes one page that opens without a network, and a table on the terminal."""

from __future__ import annotations

import io
import json
import math
import os
import shlex
import shutil

import openai
import pytest
import torch
from opened_pages import opened
from rich.console import Console
from tensordict import NonTensorData, TensorDict
from typer.testing import CliRunner

from llmrl.cli.app import app
from llmrl.cli.chat import said
from llmrl.collectors import LLMCollector
from llmrl.data import Rollout
from llmrl.data.state_file import DamagedFileError
from llmrl.envs import AgentEnv, DatasetChatEnv, MessageChatEnv, MessageEnv, MessageStep
from llmrl.policies import LLMWrapperBase
from llmrl.runs.run_folder import RunFolder
from llmrl.testing import ScriptedEngine
from llmrl.transforms import RubricReward
from llmrl.viewer import RunPage, follow, last_run, print_run, read_run, write_page
from llmrl.watch.findings import Finding
from llmrl.watch.live_view import LiveView


def right(completion, answer):
    return float(answer in completion)


def write_run(path, env, renderer, tokenizer, *, num_steps=2):
    folder = RunFolder(path)
    folder.save_tokenizer(tokenizer)
    engine = ScriptedEngine(["it is 2<|im_end|>", "it is 3<|im_end|>"], encode=renderer.encode)
    with LLMCollector(env, policy=LLMWrapperBase(engine, renderer=renderer), groups_per_batch=4) as collector:
        for step, batch in zip(range(1, num_steps + 1), collector, strict=False):
            trainer = [row.get(("log_probs", "full")) + 0.25 for row in batch.unbind(0)]
            folder.tokens.write(step, batch, trainer)
            folder.log_rollouts(step, "train", [rollout.to_record() for rollout in collector.rollouts])
            folder.log_metrics(step, {"reward_mean": collector.report.mean_reward, "num_rows": 1.0})
        folder.log_evaluation(num_steps, "eval/sums", collector.rollouts[:4])
    folder.log_metrics(num_steps, {"eval/sums/reward": 0.5})
    folder.log_metrics(num_steps + 1, {"reward_mean": 0.0})  # a step that was skipped has fewer metrics
    interval = {"mean": 0.5, "interval": [0.4, 0.6]}
    folder.write_summary({"before": {"accuracy": 0.25}, "evaluation": {"pass@1": interval, "by": {"right": None}}})
    folder.close()
    return folder


@pytest.fixture(scope="module")
def run_path(tmp_path_factory, renderer, tokenizer):
    sums = [{"query": f"1 + {b} =", "answer": str(1 + b)} for b in (1, 2)]
    env = DatasetChatEnv(sums, repeats=4).append_transform(RubricReward(right))
    path = tmp_path_factory.mktemp("run")
    write_run(path, env, renderer, tokenizer)
    return path


def test_tokens_come_back_as_they_were_trained_on(run_path):
    run = read_run(run_path)
    assert len(run.rollouts) == 36 and len(run.rows) == 36
    [row] = run.rows[1, "train", run.rollouts[0]["rollout_id"]]
    texts = [run.token_texts[token_id] for token_id in row.token_ids]
    sampled = "".join(text for text, loss_mask in zip(texts, row.loss_mask, strict=True) if loss_mask)
    assert sampled.removesuffix("<|im_end|>") == run.rollouts[0]["messages"][-1]["content"]
    differences = [b - a for a, b in zip(row.log_probs, row.trainer_log_probs, strict=True)]
    assert differences == pytest.approx([0.25] * len(differences), abs=1e-5)
    assert {v for v, loss_mask in zip(row.versions, row.loss_mask, strict=True) if loss_mask} == {0}
    held_out = run.rollouts[-1]
    [row] = run.rows[2, "eval/sums", held_out["rollout_id"]]
    texts = [
        run.token_texts[token_id] for token_id, trained in zip(row.token_ids, row.loss_mask, strict=True) if trained
    ]
    assert held_out["split"] == "eval/sums" and held_out["columns"]["answer"] in ("2", "3")
    assert "".join(texts).removesuffix("<|im_end|>") == held_out["messages"][-1]["content"]
    assert all(math.isnan(value) for value in row.trainer_log_probs)


def test_trainer_log_probs_are_one_a_token(tmp_path, run_path):
    rows = TensorDict({"tokens": TensorDict({"full": torch.arange(3)[None]}, [1])}, [1])
    with pytest.raises(ValueError, match=r"shape \(2,\) for a row of 3"):
        RunFolder(tmp_path / "run").tokens.write(1, rows, [torch.zeros(2)])


def test_what_a_kill_cut_short_or_repeated_is_read_once(tmp_path, run_path):
    shutil.copytree(run_path, tmp_path / "run")
    path = tmp_path / "run" / "rollouts.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines, lines[0], lines[1][:40]]))
    assert len(read_run(tmp_path / "run").rollouts) == len(lines)
    assert len(read_run(tmp_path / "run", max_rollouts=3).rollouts) == 3


def test_records_of_an_earlier_version_are_read(tmp_path):
    write_hand_made(tmp_path / "run").close()
    path = tmp_path / "run/rollouts.jsonl"
    optional = ("role", "turns", "is_scored", "error", "reward_breakdown", "columns", "num_turns")
    record = {name: value for name, value in json.loads(path.read_text()).items() if name not in optional}
    path.write_text(json.dumps(record) + "\n")
    assert [one["rollout_id"] for one in read_run(tmp_path / "run").rollouts] == ["one"]
    console = Console(file=io.StringIO(), width=120)
    print_run(read_run(tmp_path / "run"), console=console)
    assert "best of step 1: one  reward 1.00" in console.file.getvalue()
    del record["status"]
    path.write_text(json.dumps(record) + "\n")
    assert read_run(tmp_path / "run").rollouts == []


def test_tokens_of_steps_that_are_not_kept_are_not_read(tmp_path, run_path):
    shutil.copytree(run_path, tmp_path / "run")
    (tmp_path / "run/tokens/000001.npz").write_bytes(b"damaged")
    (tmp_path / "run/tokens/1x.npz").write_bytes(b"not of a run")
    run = read_run(tmp_path / "run", max_rollouts=3)
    assert {step for step, _, _ in run.rows} == {record["step"] for record in run.rollouts} == {2}
    with pytest.raises(DamagedFileError, match="000001"):
        read_run(tmp_path / "run")


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no run"):
        read_run(tmp_path)
    with pytest.raises(ValueError, match="at least 1"):
        read_run(tmp_path, max_rollouts=0)


def test_the_terminal_shows_curves_statuses_and_conversations(run_path):
    console = Console(file=io.StringIO(), width=100)
    print_run(read_run(run_path), console=console)
    text = console.file.getvalue()
    for words in ("reward_mean", "num_rows", "pass@1 0.5 (0.4 … 0.6)", "completed", "1 + 1 =", "train: 32"):
        assert words in text


def test_the_page_needs_nothing_from_elsewhere(run_path, tmp_path):
    text = write_page([read_run(run_path)], tmp_path / "page.html").read_text()
    assert "http:" not in text and "https:" not in text and "src=" not in text
    assert "</script>" not in text.partition('id="head">')[2].partition("</script>")[0]


class Echo(MessageEnv):
    """Calls a tool in its first turn; its answers hold what would break a careless page."""

    async def init(self):
        return [{"role": "user", "content": "<script>document.title = 'broken'</script> & more"}]

    async def step(self, message):
        return MessageStep([{"role": "tool", "content": "</script> result"}], reward=1.0, is_done=True)


def wait_until_drawn(chart):
    """Wait for a chart, which is drawn once it is seen."""
    chart.locator("polyline").first.wait_for(state="attached")


@pytest.fixture
def page(page_of_run):
    """The page as it opens."""
    page_of_run.goto(page_of_run.url.partition("#")[0])
    page_of_run.reload()
    page_of_run.wait_for_selector("body[data-ready]")
    return page_of_run


@pytest.fixture(scope="module")
def page_of_run(run_path, tmp_path_factory, own_programs):
    """The page in headless Chromium."""
    path = write_page([read_run(run_path)], tmp_path_factory.mktemp("page") / "page.html")
    with opened(path) as page:
        yield page


def test_the_summary_is_read_as_numbers(page):
    text = page.inner_text("#summary").replace("\n", " ")
    assert "accuracy before 0.25" in text and "pass@1 0.5 (0.4 … 0.6)" in text and "right –" in text


def test_a_step_of_training_says_how_it_is_computed_again(page, run_path):
    page.select_option("#split", "train")
    command = f"llmrl replay {shlex.quote(str(run_path))} --step 2"
    assert page.locator("#groups code").all_inner_texts() == [command]
    page.select_option("#split", "eval/sums")
    assert page.locator("#groups code").count() == 0


def test_filters_narrow_the_list(page):
    assert "36 found" in page.inner_text("#found")
    page.select_option("#split", "train")
    page.fill("#reward-from", "1")
    assert "16 found, mean reward 1" in page.inner_text("#found")
    page.fill("#step-from", "2")
    assert "8 found" in page.inner_text("#found")
    page.fill("#search", "nothing like it")
    assert "None found" in page.inner_text("#found")
    page.click("#clear")
    assert "36 found" in page.inner_text("#found") and page.url.endswith("#")


def test_a_rollout_opens_and_its_tokens_say_what_is_known(page):
    page.select_option("#split", "train")
    page.select_option("#order", "played")
    page.click(".item >> nth=0")
    page.wait_for_selector("#rollout h2")
    assert "1 + 1 =" in page.inner_text("#rollout")
    assert page.inner_text(".expected").split() == ["expected", "answer", "2"]
    assert page.locator(".siblings button").count() == 4
    page.click("#rollout .tabs >> text=tokens")
    trained = page.locator(".token.trained")
    assert "".join(trained.all_inner_texts()).startswith("it is")
    trained.first.hover()
    tip = page.inner_text("#tip")
    assert "log-prob" in tip and "importance ratio 1.284" in tip and "policy version 0" in tip
    page.locator(".token.context").first.hover()
    assert "not trained" in page.inner_text("#tip")
    for mode in ("log-prob", "importance ratio", "advantage", "policy version"):
        page.click(f"#rollout .tabs >> text={mode}")
        assert page.locator(f'[aria-pressed=true] >> text="{mode}"').count() == 1
    page.click("#rollout .tabs >> text=importance ratio")
    assert "color-mix" in page.locator(".token.trained").first.get_attribute("style")
    for key in ("ArrowDown", "j"):  # and what is shown of it stays
        before = page.inner_text("#rollout h2")
        page.focus("#list")
        page.keyboard.press(key)
        page.wait_for_function("before => document.querySelector('#rollout h2').innerText !== before", arg=before)
        assert page.locator('[aria-pressed=true] >> text="importance ratio"').count() == 1


def test_tokens_of_held_out_rollouts_are_there_and_not_said_to_be_trained(page):
    page.select_option("#split", "eval/sums")
    page.click(".item >> nth=0")
    page.click("#rollout .tabs >> text=tokens")
    page.wait_for_selector(".token.trained")
    assert "were sampled; faint" in page.inner_text("#rollout .legend") and "are trained" not in page.inner_text(
        "#rollout"
    )


def place_of_cursor(figure):
    line = figure.locator("line.cursor")
    return line.get_attribute("visibility"), line.get_attribute("x1")


def test_charts_have_axes_and_share_a_cursor(page):
    reward = page.locator('figure[data-metric="reward"]')
    wait_until_drawn(reward)
    assert float(reward.locator("text.left").all_text_contents()[0]) == 0
    assert reward.locator("text.below").all_text_contents() == ["1", "2", "3"]
    zero = reward.locator("line.zero")
    assert zero.count() == 1
    # Train over held out, in one chart: 0.5 of each at step 2, at one place.
    at_2 = reward.locator("polyline").first.get_attribute("points").split()[1]
    assert at_2 == ",".join(f"{float(reward.locator('circle').get_attribute(name)):.1f}" for name in ("cx", "cy"))
    page.click("#curves .section:has-text('All other') summary")
    other = page.locator('figure[data-metric="num_rows"]')
    other.scroll_into_view_if_needed()
    other.locator("line.cursor").wait_for(state="attached")
    reward.locator("svg").hover(position={"x": 60, "y": 50})
    page.wait_for_function("document.querySelectorAll('line.cursor[visibility=visible]').length >= 2")
    assert place_of_cursor(reward) == place_of_cursor(other)
    assert page.inner_text("#at-step") == "step 1" and reward.locator(".reading").first.inner_text() == "0.5"


def test_a_chart_begins_at_zero_where_that_is_honest(page):
    script = "([v, i]) => { const s = verticalScale(v, %s); return [s.note, i.map(s.place), s.place(0), s.ticks]; }"
    cases = [([0.0, 4.0], ""), ([0.97, 0.99], "not from 0"), ([-1.0, 2.0], ""), ([3.0, 3.0], ""), ([0.0, 0.0], "")]
    for values, note in [*cases, ([1e-9, 1e9], "")]:
        said, places, zero, ticks = page.evaluate(script % "false", [values, values])
        assert said == note and all(0 <= place <= 1 for place in places)
        assert (zero == 0) == (min(values) >= 0 and note == "") and 2 <= len(ticks) <= 6
        said, places, _, ticks = page.evaluate(script % "true", [values, values])
        if min(values) > 0:
            assert said == "log" and all(0 <= place <= 1 for place in places)
            assert all(math.log10(tick) == pytest.approx(round(math.log10(tick))) for tick in ticks)
        else:
            assert said == "has values ≤ 0: linear"


def test_smoothing_is_a_mean_with_weights_that_fall(page):
    values = [1.0, 0.0, 4.0, 2.0, -3.0]
    points = page.evaluate("values => smoothed(values.map((value, step) => [step, value]), 0.6)", values)
    for place, (step, value) in enumerate(points):
        weights = [0.6 ** (place - earlier) for earlier in range(place + 1)]
        expected = sum(w * v for w, v in zip(weights, values, strict=False)) / sum(weights)
        assert step == place and value == pytest.approx(expected)
    page.locator("#smooth").fill("0.6")
    reward = page.locator('figure[data-metric="reward"]')
    reward.locator("polyline.raw").first.wait_for(state="attached")
    assert reward.locator("polyline.raw").count() == 1 and "smooth=0.6" in page.url


def test_every_state_has_a_link(page):
    svg = page.locator('figure[data-metric="reward"] svg')
    svg.click(position={"x": svg.bounding_box()["width"] - 12, "y": 60})  # step 3, of which there are no rollouts
    assert page.inner_text("#step-title") == "Step 3" and "None found" in page.inner_text("#found")
    page.keyboard.press("[")
    assert page.inner_text("#step-title") == "Step 2" and "20 found" in page.inner_text("#found")
    assert "5 groups of step 2, 0 without signal" in page.inner_text("#groups-title")
    page.locator("#groups .cell").first.click()
    page.wait_for_selector("#rollout h2")
    page.click("#rollout .tabs >> text=tokens")
    page.click("#rollout .tabs >> text=log-prob")
    other = page.context.new_page()
    other.goto(page.url)
    other.wait_for_selector("body[data-ready]")
    for selector in ("#step-title", "#found", "#rollout"):
        assert other.inner_text(selector) == page.inner_text(selector)
    assert other.locator('[aria-pressed=true] >> text="log-prob"').count() == 1
    other.close()
    page.go_back()
    page.wait_for_selector("text=Choose a rollout")
    page.evaluate("location.hash = '#rollout=no%20such&stepFrom=%E0%A4%A&nothing=1&tab=nowhere'")
    page.wait_for_selector("text=not in this page")
    page.evaluate("location.hash = '#stepFrom=x&stepTo=x&order=__proto__&smooth=x&problem=99'")  # to no existing place
    page.wait_for_function("document.querySelector('#found').innerText.startsWith('None found')")
    page.click("#clear")
    page.evaluate("location.hash = '#order=__proto__&tab=tokens&shade=constructor&row=-1.5'")
    page.click(".item >> nth=0")
    page.wait_for_selector(".tokens")


def test_one_problem_is_followed_over_time(page):
    page.click(".item >> nth=0")
    page.click("#rollout .tabs >> text=same problem")
    question = page.inner_text(".item[aria-selected=true] .question")
    assert page.locator(".history .group").count() == 3  # two steps, and the evaluation
    page.click("text=list them")
    page.wait_for_selector("#problem-filter:visible")
    assert question in page.inner_text("#problem-filter")
    assert {*page.locator(".item .question").all_inner_texts()} == {question}
    page.click("#problem-filter")
    assert "36 found" in page.inner_text("#found")


def test_bars_narrow_the_list(page):
    bars = page.locator(".distribution").first.locator(".bar")
    bars.last.click()
    assert "18 found, mean reward 1" in page.inner_text("#found")


def test_the_bars_of_right_and_wrong_stand_over_their_numbers(page):
    figure = page.locator(".distribution").first
    bars = [bar.bounding_box() for bar in figure.locator(".bar rect:not(.reach)").all()]
    numbers = [text.bounding_box() for text in figure.locator("svg > text").all()]
    assert figure.locator("svg > text").all_text_contents() == ["0", "1"]
    for bar, number in zip(bars, numbers, strict=True):
        assert abs(bar["x"] + bar["width"] / 2 - number["x"] - number["width"] / 2) < 2


def test_an_axis_has_two_numbers_at_least(page):
    lengths = page.evaluate(
        """() => [2, 3, 4, 6].flatMap((most) => Array.from({ length: 300 }, (_, last) =>
             [1, 7, 1000].map((first) => ticksOf(first, first + last + 1, most, true).length))).flat()"""
    )
    assert min(lengths) >= 2 and max(lengths) <= 8


def is_opening_in_sight(page):
    return page.evaluate("() => document.getElementById('rollout').getBoundingClientRect().top < innerHeight * 0.6")


def test_keys_scroll_to_what_they_select(page):
    for key in ("j", "k", "t"):
        page.evaluate("scrollTo(0, 0)")
        assert not is_opening_in_sight(page)
        page.keyboard.press(key)
        page.wait_for_function(
            "() => document.getElementById('rollout').getBoundingClientRect().top < innerHeight * 0.6"
        )
        page.wait_for_selector("#rollout h2")


def test_the_page_is_the_same_in_every_encoding_of_the_machine(run_path, tmp_path, monkeypatch):
    run = read_run(run_path)
    expected = write_page([run], tmp_path / "page.html").read_bytes()
    monkeypatch.setattr("io.text_encoding", lambda encoding, stacklevel=2: encoding or "latin-1")
    assert write_page([run], tmp_path / "page.html").read_bytes() == expected


def test_a_notebook_shows_the_page_in_its_cell(page, run_path):
    other = page.context.new_page()
    other.set_content(f"<p>a cell</p>{RunPage(run_path)._repr_html_()}")
    cell = other.frame_locator("iframe")
    cell.locator("body[data-ready]").wait_for(state="attached")
    cell.locator(".item").first.click()
    cell.locator("#rollout h2").wait_for()
    cell.locator("#search").fill("no such text")
    assert "None found" in cell.locator("#found").inner_text() and other.url == "about:blank"
    other.close()


CODE = "x = 1\nprint(x)"
MESSAGES = [
    {"role": "user", "content": "Say **what** `x` is."},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "I look.",
        "tool_calls": [
            {"type": "function", "function": {"name": "run", "arguments": {"code": CODE, "limit": math.nan}}}
        ],
    },
    {"role": "tool", "name": "run", "content": "Error: run failed with NameError"},
    {"role": "assistant", "content": "# Result\n\n1. a\n2. b\n\n```py\nx < 2\n```\nso **3 * 4** and a*b*c, _d_"},
]


def write_hand_made(path, *, reward=1.0, rows=()):
    """A run of one rollout, its metrics and what was found of it."""
    folder = RunFolder(path, trackers=())
    rollout = Rollout(rollout_id="one", group_id="g", sample_index=0, group_size=1, reward=reward, is_scored=True)
    rollout.messages, rollout.num_completion_tokens = tuple(MESSAGES), 7
    folder.log_rollouts(1, "train", [rollout.to_record()])
    folder.log_metrics(1, {"reward_mean": reward, "ESS": 0.97})
    folder.log_metrics(2, {"reward_mean": reward / 2, "ESS": 0.98})
    finding = Finding("answers_cut", "broken", "75 % of the answers were cut.", ("too few tokens", "no end"), "best")
    folder.health.write(1, [finding], [rollout.to_record()])
    folder.health.write(2, [])
    if rows:
        folder.tokens.write(1, rows)
    return folder


def row_of(index, ids, trained):
    mask = torch.tensor(trained, dtype=torch.bool)
    columns = {"tokens": {"full": torch.tensor(ids)}, "masks": {"all_assistant_mask": mask}}
    columns |= {"log_probs": {"full": -0.5 * mask}, "policy_versions": {"full": mask.long()}}
    return TensorDict({**columns, "rollout": {"rollout_id": NonTensorData("one"), "row_index": torch.tensor(index)}})


@pytest.fixture(scope="module")
def hand_made(page_of_run, tmp_path_factory):
    """The page of two runs that were written by hand."""
    rows = [row_of(0, [1, 2, 3, 4], [0, 0, 1, 1]), row_of(1, [1, 2, 9, 8, 7], [0, 0, 0, 1, 1])]
    paths = [tmp_path_factory.mktemp("runs") / name for name in ("first", "second")]
    write_hand_made(paths[0], rows=rows).close()
    write_hand_made(paths[1], reward=0.25).close()
    other = page_of_run.context.new_page()
    errors = []
    other.on("pageerror", lambda error: errors.append(str(error)))
    other.goto(write_page([read_run(path) for path in paths], paths[0] / "view.html").as_uri())
    other.wait_for_selector("body[data-ready]")
    yield other
    assert not errors
    other.close()


def test_messages_are_rendered_with_calls_and_errors(hand_made):
    hand_made.select_option("#run", "0")
    hand_made.click(".item >> nth=0")
    hand_made.wait_for_selector(".message.tool")
    assert hand_made.locator(".message.user strong").inner_text() == "what"
    arguments = hand_made.locator(".argument")
    assert arguments.nth(0).locator("pre").inner_text() == CODE and arguments.nth(1).inner_text() == "limit = NaN"
    assert hand_made.locator(".message.tool.failed").count() == 1
    answer = hand_made.locator(".message.assistant").last
    assert answer.locator("pre").inner_text() == "x < 2" and answer.locator("ol li").all_inner_texts() == ["a", "b"]
    assert answer.locator("strong").inner_text() == "3 * 4" and "a*b*c, _d_" in answer.inner_text().replace(
        "\u200b", ""
    )
    assert hand_made.evaluate("markdown('**a** '.repeat(9000)).querySelector('strong')") is None  # long: as it is
    hand_made.click("#rollout >> text=plain")
    assert answer.locator(".text").inner_text() == MESSAGES[-1]["content"]


def test_rows_of_a_rollout_are_a_tree(hand_made):
    hand_made.select_option("#run", "0")
    hand_made.click(".item >> nth=0")
    hand_made.click("#rollout .tabs >> text=tokens")
    assert "keeps 2 of row 1" in hand_made.locator(".row").nth(1).inner_text()
    hand_made.locator(".row").nth(1).click()
    assert hand_made.locator(".token").count() == 5


async def branch(row, model):
    """Asks, goes on in two ways at once, and asks another agent."""
    create = openai.AsyncOpenAI(base_url=model.base_url, api_key=model.api_key).chat.completions.create
    messages = [{"role": "user", "content": row["query"]}]
    answer = await create(model=model.name, messages=messages)
    messages.append({"role": "assistant", "content": answer.choices[0].message.content})
    for text in ("Why?", "Go on."):
        await create(model=model.name, messages=[*messages, {"role": "user", "content": text}])
    system = {"role": "system", "content": "You check <b>sums</b>."}
    await create(model=model.name, messages=[system, {"role": "user", "content": "Right?"}])
    return 1.0


def test_the_turns_of_an_agent_are_a_tree(page_of_run, tmp_path, renderer, tokenizer):
    write_run(tmp_path / "run", AgentEnv(branch, [{"query": "1 + 1 ="}]), renderer, tokenizer, num_steps=1)
    other = page_of_run.context.new_page()
    errors = []
    other.on("pageerror", lambda error: errors.append(str(error)))
    other.goto(write_page([read_run(tmp_path / "run")], tmp_path / "page.html").as_uri())
    other.select_option("#split", "train")
    other.click(".item >> nth=0")
    turns = other.locator(".turns .row")
    shown = [text.replace("\n", " ") for text in turns.all_inner_texts()]
    asked = ["user 1 + 1 =", "user Why?", "user Go on.", "system You check <b>sums</b>. user Right?"]
    assert [text for text, part in zip(shown, asked, strict=True) if part not in text] == []
    labels = ["turn 1 root", "turn 2 from 1", "└ turn 3 from 1", "turn 4 root"]
    assert [text for text, label in zip(shown, labels, strict=True) if not text.startswith(label)] == []
    ends = ["tokens in row 1", "tokens in row 1", "tokens in row 2", "tokens in row 3"]
    assert [text for text, end in zip(shown, ends, strict=True) if not text.endswith(end)] == []
    assert turns.locator("i.trained").count() == 4 and turns.locator("i.sampled").count() == 0
    # The branch is read from its root, and its tokens are those of its row.
    turns.nth(2).click()
    assert other.evaluate("document.activeElement.dataset.focus") == "turn 2" and "turn=2" in other.url
    assert other.locator(".message.user .markdown").all_inner_texts() == ["1 + 1 =", "Go on."]
    other.locator(".turn-title button").last.click()
    assert other.locator(".row[aria-pressed=true]").inner_text().replace("\n", " ").startswith("└ row 2")
    text = "".join(other.locator(".token").all_inner_texts())
    assert "1 + 1 =" in text and "Go on." in text and "Why?" not in text
    # Of an evaluation nothing is trained.
    other.select_option("#split", "eval/sums")
    other.click(".item >> nth=0")
    other.click("#rollout .tabs >> text=conversation")
    other.wait_for_selector(".turns i.sampled")
    assert all(text.endswith("not trained") for text in turns.all_inner_texts()) and turns.count() == 4
    other.set_viewport_size({"width": 390, "height": 800})
    assert other.evaluate("document.documentElement.scrollWidth") <= 390
    assert not errors
    other.close()


def test_runs_are_drawn_over_each_other(hand_made):
    reward = hand_made.locator('figure[data-metric="reward"]')
    wait_until_drawn(reward)
    assert [text.split()[0] for text in reward.locator(".key").all_inner_texts()] == ["first", "second"]
    colours = [line.get_attribute("style") for line in reward.locator("polyline").all()]
    assert len(set(colours)) == 2 and hand_made.inner_text("h1") == "first, second"
    hand_made.select_option("#run", "1")
    assert "1 found, mean reward 0.25" in hand_made.inner_text("#found")


def write_game(path):
    """A run of one group of a game: equal rewards within each role, and a rollout without a score."""
    folder = RunFolder(path, trackers=())
    records = []
    for place, (role, reward) in enumerate([("a", 1.0), ("a", 1.0), ("b", 0.5), ("b", 0.5), ("b", None)]):
        rollout = Rollout(rollout_id=f"g/{place}", group_id="g", sample_index=place, group_size=5, role=role)
        rollout.is_scored, rollout.reward = reward is not None, reward or 0.0
        records.append(rollout.to_record())
    folder.log_rollouts(1, "train", records)
    folder.log_metrics(1, {"reward_mean": 0.75})
    folder.close()
    return read_run(path)


def test_rewards_are_compared_within_a_role_and_without_those_that_were_not_given(page, tmp_path):
    other = page.context.new_page()
    other.goto(write_page([write_game(tmp_path / "run")], tmp_path / "page.html").as_uri())
    other.wait_for_selector("body[data-ready]")
    assert "5 found, mean reward 0.75" in other.inner_text("#found")
    assert "2 groups of step 1, 2 without signal" in other.inner_text("#groups-title")
    assert [text.strip() for text in other.locator("#groups .mean").all_inner_texts()] == ["0.5", "1"]
    other.close()


def test_the_terminal_leaves_rollouts_without_a_score_out_of_means_and_extremes(tmp_path):
    run = write_game(tmp_path / "run")
    console = Console(file=io.StringIO(), width=120)
    print_run(run, console=console)
    said = console.file.getvalue()
    assert "train: 5" in said and " 0.750" in said and "worst of step 1: g/3  reward 0.50" in said


def test_many_runs_leave_their_curves_on_the_first_screen(page, tmp_path):
    runs = []
    for number in range(8):
        folder = write_hand_made(tmp_path / f"run {number}")
        finding = Finding(
            "answers_cut", "broken", "75 % of the answers were cut.", ("too few tokens", "no end"), "best"
        )
        folder.health.write(2, [finding])
        folder.write_summary({"before": {f"task {task}": 0.5 for task in range(9)}})
        folder.close()
        runs.append(read_run(folder.path))
    other = page.context.new_page()
    other.goto(write_page(runs, tmp_path / "page.html").as_uri())
    reward = other.locator('figure[data-metric="reward"]')
    wait_until_drawn(reward)
    box = reward.bounding_box()
    assert box["y"] + box["height"] < other.viewport_size["height"]
    assert "75 % of the answers" in other.inner_text("#health") and "task 8" in other.inner_text("#summary")
    other.close()


def test_health_is_shown_with_causes_and_rollouts(hand_made):
    assert "fine" in hand_made.locator(".health").first.inner_text()  # of the last step
    hand_made.locator(".timeline").first.click(position={"x": 3, "y": 3})
    finding = hand_made.locator(".finding").first
    assert "75 % of the answers were cut." in finding.inner_text() and finding.locator("li").count() == 2
    finding.locator("button.chip").click()
    hand_made.wait_for_selector("#rollout h2")
    assert hand_made.inner_text("#rollout h2") == "one"


def test_a_page_follows_its_run_until_it_ends(tmp_path):
    folder = write_hand_made(tmp_path / "run")
    pages = follow([tmp_path / "run"], tmp_path / "page.html", interval=0.01)
    path, is_live = next(pages)
    first = path.read_text()
    folder.log_metrics(3, {"reward_mean": 0.5})
    assert is_live and next(pages) == (path, True) and path.read_text() != first
    second = path.read_text()
    folder.health.write(3, [])
    assert next(pages) == (path, True) and path.read_text() != second
    folder.close()
    assert list(pages) == [(path, False)]


def test_a_run_that_ends_while_it_is_read_is_read_again(tmp_path, monkeypatch):
    folder = write_hand_made(tmp_path / "run")

    def end_meanwhile(_):
        folder.log_metrics(3, {"reward_mean": 0.5})
        folder.close()

    monkeypatch.setattr("llmrl.viewer.run_data.recorded_tokenizer", end_meanwhile)
    pages = follow([tmp_path / "run"], tmp_path / "page.html", interval=0.01)
    assert [is_live for _, is_live in pages] == [True, False]


def test_a_live_page_loads_what_is_new_and_stays_where_it_was(tmp_path, page_of_run):
    folder = write_hand_made(tmp_path / "run")
    path = write_page([read_run(tmp_path / "run")], tmp_path / "page.html")
    other = page_of_run.context.new_page()
    other.clock.install()
    other.goto(f"{path.as_uri()}#rollout=1%3Aone&tab=record")
    other.wait_for_selector("#live:visible")
    assert "2 steps" in other.inner_text("#counts")
    folder.log_metrics(3, {"reward_mean": 0.5})
    folder.close()
    write_page([read_run(tmp_path / "run")], path)
    other.clock.run_for(6000)
    other.wait_for_selector("text=3 steps")
    other.wait_for_selector("#rollout pre")
    assert '"rollout_id": "one"' in other.inner_text("#rollout pre") and not other.is_visible("#live")
    other.close()


def test_the_last_run_is_viewed_where_none_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "there is no run in" in CliRunner().invoke(app, ["view"]).stderr
    for place, name in enumerate(("b", "a")):
        write_hand_made(tmp_path / "runs" / name).close()
        for path in (tmp_path / "runs" / name).iterdir():
            os.utime(path, (place, place))
    assert last_run().name == "a"
    result = CliRunner().invoke(app, ["view"])
    assert result.exit_code == 0 and (tmp_path / "runs/a/view.html").exists() and "view.html" in result.stdout
    result = CliRunner().invoke(app, ["view", "runs/a", "runs/b", "--out", "both.html"])
    assert result.exit_code == 0 and "<title>a, b</title>" in (tmp_path / "both.html").read_text()


def test_a_narrow_window_has_no_sideways_scroll(page):
    page.set_viewport_size({"width": 390, "height": 800})
    try:
        page.click(".item >> nth=0")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        page.evaluate("scrollTo(0, 0)")
        page.locator(".item").nth(1).click()  # the rollout below the list comes into sight
        page.wait_for_function("document.querySelector('#rollout h2').getBoundingClientRect().bottom < innerHeight")
    finally:
        page.set_viewport_size({"width": 1300, "height": 900})


def test_hostile_content_is_shown_as_text(tmp_path, renderer, tokenizer, page):
    env = MessageChatEnv(lambda item: Echo())
    write_run(tmp_path / "run", env, renderer, tokenizer, num_steps=1)
    path = write_page([read_run(tmp_path / "run")], tmp_path / "page.html")
    other = page.context.new_page()
    other.goto(path.as_uri())
    other.wait_for_selector("body[data-ready]")
    other.click(".item >> nth=0")
    other.wait_for_selector(".message.tool")
    assert other.title() == "run" and "<script>" in other.inner_text(".message.user")
    other.close()


def test_no_name_in_a_run_becomes_a_script(tmp_path, run_path, page):
    shutil.copytree(run_path, tmp_path / "run")
    attack = '"><img src=x onerror=document.body.dataset.hit=1><script>document.body.dataset.hit=1</script>'
    folder = RunFolder(tmp_path / "run", resume=True, trackers=[])
    folder.log_metrics(9, {attack: 1.0, f"reward_mean{attack}": 2.0})
    folder.write_summary({attack: {attack: attack}})
    records = [json.loads(line) for line in (run_path / "rollouts.jsonl").read_text().splitlines()]
    with (tmp_path / "run" / "rollouts.jsonl").open("w") as file:
        for record in records:
            hostile = {name: attack if isinstance(value, str) else value for name, value in record.items()}
            hostile |= {
                "reward_breakdown": {attack: 1.0},
                "messages": [{"role": attack, "name": attack, "content": attack}],
            }
            file.write(json.dumps(hostile) + "\n")
    path = write_page([read_run(tmp_path / "run")], tmp_path / "page.html")
    other = page.context.new_page()
    other.goto(path.as_uri())
    other.wait_for_selector("body[data-ready]")
    for summary in other.locator("#curves .section:not([open]) > summary").all():
        summary.click()
    other.wait_for_selector("figure[data-metric^='reward_mean']")
    other.click(".item >> nth=0")
    other.wait_for_selector("#rollout h2")
    assert other.evaluate("document.body.dataset.hit ?? null") is None
    assert other.locator("img, main script").count() == 0
    other.click("#rollout .tabs >> text=record")
    assert other.locator("img, main script").count() == 0
    # And if something became one, it would not run.
    image = "<img src=x onerror=document.body.dataset.hit=1>"
    with other.expect_console_message(lambda message: "Content Security Policy" in message.text):
        other.evaluate(f"document.body.insertAdjacentHTML('beforeend', '{image}')")
    other.wait_for_timeout(200)
    assert other.evaluate("document.body.dataset.hit ?? null") is None
    other.close()


HOSTILE = "[/red] a\x1b]52;c;aGk=\x07\x1b[2J \u202etxt\u2066 \x9b31m [link=file:///x]b[/link]"


def test_a_terminal_obeys_nothing_that_a_run_says(tmp_path, run_path):
    shutil.copytree(run_path, tmp_path / "run")
    RunFolder(tmp_path / "run", resume=True, trackers=[]).log_metrics(9, {HOSTILE: 1.0})
    record = json.loads((run_path / "rollouts.jsonl").read_text().splitlines()[0])
    messages = [{"role": "user", "content": HOSTILE}, {"role": "assistant", "content": HOSTILE}]
    hostile = {**record, "rollout_id": HOSTILE, "reason": HOSTILE, "status": HOSTILE, "messages": messages}
    with (tmp_path / "run" / "rollouts.jsonl").open("w") as file:
        file.write(json.dumps(hostile) + "\n")
    printed = io.StringIO()
    print_run(read_run(tmp_path / "run"), console=Console(file=printed, width=400, force_terminal=False))
    view = LiveView(1, console=Console(file=printed, width=400, force_terminal=False))
    view.show_sample(hostile)
    printed.write(said({"role": "assistant", "content": HOSTILE}))
    text = printed.getvalue()
    assert text.count("[/red] a\\x1b]52;c;aGk=\\x07\\x1b[2J \\u202etxt\\u2066 \\x9b31m [link=file:///x]b[/link]") >= 8
    assert not set(text) & set("\x1b\x07\x9b\u202e\u2066")


def test_ten_thousand_rollouts_open_fast_and_draw_few(tmp_path, run_path, page, takes_long):
    shutil.copytree(run_path, tmp_path / "run")
    lines = (run_path / "rollouts.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    with (tmp_path / "run" / "rollouts.jsonl").open("w") as file:
        for copy in range(10_000 // len(records)):
            for record in records:
                file.write(json.dumps({**record, "rollout_id": f"{copy}/{record['rollout_id']}"}) + "\n")
        file.write("\n".join([*lines, ""]))
    path = write_page([read_run(tmp_path / "run")], tmp_path / "page.html")
    other = page.context.new_page()
    other.goto(path.as_uri())
    other.wait_for_selector("body[data-ready]", timeout=60_000)
    assert "10,0" in other.inner_text("#counts")
    assert other.locator(".item").count() < 60
    other.click(".item >> nth=0")  # of the copies no rows were trained
    other.wait_for_selector("text=Nothing of it was trained")
    other.close()
