"""A chat template is a program that came with a model: one that does not end is ended."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time

import pytest
from typer.testing import CliRunner

from llmrl._utils.cpu_limit import CpuLimitError, call_within
from llmrl.cli.app import app
from llmrl.data import History, template_limit
from llmrl.data.template_limit import SlowTemplateError
from llmrl.rendering import make_renderer

LOOPS = "{% for a in range(99999) %}" * 4 + "{% set b = a %}" + "{% endfor %}" * 4
HANGING = LOOPS + "{% for message in messages %}{{ message.content }}{% endfor %}"
SLOW_AFTER_TOOLS = (
    "{% for message in messages %}{% if message.role == 'tool' %}" + LOOPS + "{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


@pytest.fixture(autouse=True)
def short_limit(monkeypatch):
    monkeypatch.setattr(template_limit, "TEMPLATE_SECONDS", 0.3)


@pytest.mark.slow
@pytest.mark.parametrize("command", [["serve"], ["chat", "--model"]])
def test_a_model_whose_template_hangs_is_refused_by_serve_and_chat(model_path, tmp_path, command):
    folder = tmp_path / "model"
    shutil.copytree(model_path, folder)
    (folder / "chat_template.jinja").write_text(HANGING)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    result = CliRunner().invoke(app, [*command, str(folder)])
    assert result.exit_code == 2
    assert "template was still computing after 0.3 s" in " ".join(result.output.replace("│", " ").split())


@pytest.mark.slow
@pytest.mark.parametrize("template", [HANGING, SLOW_AFTER_TOOLS])
def test_a_renderer_of_a_template_that_hangs_is_not_made(renderer, template):
    with pytest.raises(SlowTemplateError, match="loops within loops"):
        make_renderer(renderer.tokenizer, chat_template=template)


@pytest.mark.slow
def test_text_of_a_history_is_bounded_too(renderer):
    with pytest.raises(SlowTemplateError):
        History.from_chats([{"role": "user", "content": "?"}]).apply_chat_template(
            renderer.tokenizer, chat_template=HANGING, tokenize=False
        )


@pytest.mark.slow
def test_calls_of_several_threads_are_ended_each_and_no_other():
    def loop():
        while True:
            pass

    def end(seconds, outcomes):
        try:
            outcomes.append(call_within(loop if seconds else lambda: time.sleep(0.5), seconds or 0.2))
        except CpuLimitError as error:
            outcomes.append(str(error))
        sum(range(100_000))  # nothing is raised after the call

    outcomes = []
    threads = [threading.Thread(target=end, args=(seconds, outcomes)) for seconds in (0.1, 0.2, 0.3, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(str, outcomes)) == ["None", *(f"it computed for more than 0.{n} s" for n in (1, 2, 3))]
    assert call_within(lambda: 3, 5.0) == 3
    with pytest.raises(ZeroDivisionError):
        call_within(lambda: 1 // 0, 5.0)


def test_a_limit_holds_in_a_fork_of_a_process_that_has_calls_in_progress():
    has_begun, may_end = threading.Event(), threading.Event()

    def wait():
        has_begun.set()
        may_end.wait(30)

    def compute():
        end = time.thread_time() + 1
        while time.thread_time() < end:
            pass

    thread = threading.Thread(target=call_within, args=(wait, 30.0))
    thread.start()
    assert has_begun.wait(30)
    if (pid := os.fork()) == 0:
        code = 1
        try:
            call_within(compute, 0.05)
        except CpuLimitError:
            code = 0
        finally:
            os._exit(code)
    may_end.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


class SlowToDelete:
    def __del__(self):
        end = time.thread_time() + 0.5
        while time.thread_time() < end:
            pass


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_limit_that_a_finalizer_swallowed_is_enforced_again():
    def delete_slowly():
        SlowToDelete()  # the exception is raised in here, where Python drops it
        while True:
            pass

    with pytest.raises(CpuLimitError):
        call_within(delete_slowly, 0.1)
