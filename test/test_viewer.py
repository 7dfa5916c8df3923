"""A run folder becomes one page that opens without a network, and a table on the terminal."""

from __future__ import annotations

import io
import json
import shutil

import pytest
import torch
from rich.console import Console
from tensordict import TensorDict

from llmrl.cli.chat import said
from llmrl.collectors import LLMCollector
from llmrl.envs import DatasetChatEnv, MessageChatEnv, MessageEnv, MessageStep
from llmrl.policies import LLMWrapperBase
from llmrl.runs.live_view import LiveView
from llmrl.runs.run_folder import RunFolder
from llmrl.runs.viewer import print_run, read_run, write_page
from llmrl.testing import ScriptedEngine
from llmrl.transforms import RubricReward

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


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
            folder.log_metrics(
                step, {"reward_mean": collector.report.mean_reward, "num_rows": 1.0, "odd": float("nan")}
            )
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
    assert len(run.rollouts) == 32 and len(run.rows) == 32
    [row] = run.rows[1, run.rollouts[0]["rollout_id"]]
    texts = [run.token_texts[token_id] for token_id in row.token_ids]
    sampled = "".join(text for text, loss_mask in zip(texts, row.loss_mask, strict=True) if loss_mask)
    assert sampled.removesuffix("<|im_end|>") == run.rollouts[0]["messages"][-1]["content"]
    differences = [b - a for a, b in zip(row.log_probs, row.trainer_log_probs, strict=True)]
    assert differences == pytest.approx([0.25] * len(differences), abs=1e-5)
    assert {v for v, loss_mask in zip(row.versions, row.loss_mask, strict=True) if loss_mask} == {0}


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
    text = write_page(read_run(run_path), tmp_path / "page.html").read_text()
    assert "http:" not in text and "https:" not in text and "src=" not in text
    assert "</script>" not in text.partition('id="head">')[2].partition("</script>")[0]


class Echo(MessageEnv):
    """Calls a tool in its first turn; its answers hold what would break a careless page."""

    async def init(self):
        return [{"role": "user", "content": "<script>document.title = 'broken'</script> & more"}]

    async def step(self, message):
        return MessageStep([{"role": "tool", "content": "</script> result"}], reward=1.0, is_done=True)


@pytest.fixture(scope="module")
def page(run_path, tmp_path_factory):
    """The page in headless Chromium."""
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    playwright = pytest.importorskip("playwright.sync_api")
    path = write_page(read_run(run_path), tmp_path_factory.mktemp("page") / "page.html")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_context(viewport={"width": 1300, "height": 900}).new_page()
        errors = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(path.as_uri())
        page.wait_for_selector("body[data-ready]")
        yield page
        assert not errors
        browser.close()


def test_the_summary_is_read_as_numbers(page):
    text = page.inner_text("#summary").replace("\n", " ")
    assert "accuracy before 0.25" in text and "pass@1 0.5 (0.4 … 0.6)" in text and "right –" in text


def test_filters_narrow_the_list(page):
    assert "32 found" in page.inner_text("#found")
    page.fill("#reward-from", "1")
    assert "16 found, mean reward 1" in page.inner_text("#found")
    page.fill("#step-from", "2")
    assert "8 found" in page.inner_text("#found")
    page.fill("#search", "nothing like it")
    assert "None found" in page.inner_text("#found")
    page.evaluate("document.getElementById('filters').reset()")
    page.dispatch_event("#filters", "input")
    assert "32 found" in page.inner_text("#found")


def test_a_rollout_opens_and_its_tokens_say_what_is_known(page):
    page.click(".item >> nth=0")
    page.wait_for_selector("#rollout h2")
    assert "1 + 1 =" in page.inner_text("#rollout")
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
        assert page.locator(f'[role=tab][aria-selected=true] >> text="{mode}"').count() == 1
    page.click("#rollout .tabs >> text=importance ratio")
    assert "color-mix" in page.locator(".token.trained").first.get_attribute("style")


def test_the_arrow_keys_go_through_the_list(page):
    page.click(".item >> nth=0")
    first = page.inner_text("#rollout h2")
    page.focus("#list")
    page.keyboard.press("ArrowDown")
    page.wait_for_function("first => document.querySelector('#rollout h2').innerText !== first", arg=first)


def test_a_narrow_window_has_no_sideways_scroll(page):
    page.set_viewport_size({"width": 390, "height": 800})
    try:
        page.click(".item >> nth=0")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        page.evaluate("scrollTo(0, 0)")
        page.click(".item >> nth=1")  # the rollout below the list comes into sight
        page.wait_for_function("document.querySelector('#rollout h2').getBoundingClientRect().bottom < innerHeight")
    finally:
        page.set_viewport_size({"width": 1300, "height": 900})


def test_hostile_content_is_shown_as_text(tmp_path, renderer, tokenizer, page):
    env = MessageChatEnv(lambda item: Echo())
    write_run(tmp_path / "run", env, renderer, tokenizer, num_steps=1)
    path = write_page(read_run(tmp_path / "run"), tmp_path / "page.html")
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
    path = write_page(read_run(tmp_path / "run"), tmp_path / "page.html")
    other = page.context.new_page()
    other.goto(path.as_uri())
    other.wait_for_selector("body[data-ready]")
    other.click("#more-curves-box summary")
    other.wait_for_selector("#more-curves figure")
    other.click(".item >> nth=0")
    other.wait_for_selector("#rollout h2")
    assert other.evaluate("document.body.dataset.hit ?? null") is None
    assert other.locator("img, main script").count() == 0
    # And if something became one, it would not run.
    refused = []
    other.on("console", lambda message: refused.append(message.text))
    other.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=document.body.dataset.hit=1>')")
    other.wait_for_timeout(200)
    assert other.evaluate("document.body.dataset.hit ?? null") is None
    assert any("Content Security Policy" in text for text in refused)
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


def test_ten_thousand_rollouts_open_fast_and_draw_few(tmp_path, run_path, page):
    shutil.copytree(run_path, tmp_path / "run")
    lines = (run_path / "rollouts.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    with (tmp_path / "run" / "rollouts.jsonl").open("w") as file:
        for copy in range(10_000 // len(records)):
            for record in records:
                file.write(json.dumps({**record, "rollout_id": f"{copy}/{record['rollout_id']}"}) + "\n")
        file.write("\n".join([*lines, ""]))
    path = write_page(read_run(tmp_path / "run"), tmp_path / "page.html")
    other = page.context.new_page()
    other.goto(path.as_uri())
    other.wait_for_selector("body[data-ready]", timeout=10_000)
    assert "10,0" in other.inner_text("#counts")
    assert other.locator(".item").count() < 60
    other.click(".item >> nth=0")  # of the copies no rows were trained
    other.wait_for_selector("text=Nothing of it was trained")
    other.close()
