"""Web tasks of MiniWoB++ in Chromium: the package's pages, and pages that go wrong."""

from __future__ import annotations

import contextlib
import shutil
import time

import psutil
import pytest
from hub_rows import play
from miniwob_tasks import RIGHT, WRONG, click, first_user, followed
from verifiers_environments import num_inexact

from llmrl.data import RolloutStatus
from llmrl.envs import MiniWoBEnv, make_task_env
from llmrl.envs.hubs.miniwob import package_pages
from llmrl.envs.hubs.virtual_env import InstallError
from llmrl.tools.browser_pages import find_chromium

pytestmark = [
    pytest.mark.usefixtures("own_programs"),
    pytest.mark.skipif(find_chromium() is None, reason="no Chromium is installed on this machine"),
]
PAGE = """<script src="../core/core.js"></script><script>
var genProblem = () => {{ document.getElementById('query').textContent = 'Press {name}.'; }};
window.onload = () => core.startEpisode();
</script><body><div id="wrap"><div id="query"></div><div id="area">
<button id="go" onclick="{script}">go</button></div></div></body>"""
SCRIPTS = {
    "fine": "core.endEpisode(0.5, true)",
    "hangs": "while (true) {}",
    "prints": "document.getElementById('area').append('y'.repeat(3e6)); console.log('z'.repeat(3e6)); "
    "setTimeout(() => core.endEpisode(1), 100)",
    "nan": "core.endEpisode(0 / 0)",
    "leaves": "location.href = 'http://127.0.0.1:9/'",
    "kills": "",
}
REASONS = {"hangs": "the page", "nan": "finite", "leaves": "WOB_DONE_GLOBAL", "kills": "the page"}


@pytest.fixture(scope="module")
def package():
    try:
        return package_pages()
    except InstallError as error:
        pytest.skip(f"miniwob cannot be installed here: {error}")


@pytest.fixture(scope="module")
def pages(package, tmp_path_factory):
    """A folder with tasks of one button, of which most go wrong."""
    folder = tmp_path_factory.mktemp("pages")
    for name in ("core", "miniwob"):
        (folder / name).mkdir()
    shutil.copy(package / "core" / "core.js", folder / "core")
    for name, script in SCRIPTS.items():
        (folder / "miniwob" / f"{name}.html").write_text(PAGE.format(name=name, script=script))
    return folder


def end_browsers():
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended with another
            if "chrom" in process.name():
                process.kill()


@pytest.mark.parametrize("task", ["click-checkboxes", "choose-list"])
def test_a_task_pays_for_what_was_asked_and_for_nothing_else(package, task):
    env = make_task_env(f"miniwob:{task}", "test")
    plans = {}

    def answer(prompt):
        plan = plans.setdefault(first_user(prompt), (RIGHT, WRONG)[len(plans) % 2][task])
        return followed(plan, prompt)

    rollouts, engine = play(env, answer, 2, at_once=1)
    env.close()
    assert sorted(one.reward for one in rollouts) == [0.0, 1.0]
    assert all(one.status is RolloutStatus.COMPLETED and one.is_scored for one in rollouts)
    assert num_inexact(rollouts, engine) == 0


def test_a_seed_is_a_problem_and_splits_differ(package):
    def said(split, number):
        env = MiniWoBEnv("click-checkboxes", split=split, num_problems=2)
        texts = [env.reset()["history"].prompt.content[1] for _ in range(number)]
        env.close()
        return texts

    train = said("train", 3)
    assert train[0] == train[2] != train[1] and not set(train) & set(said("test", 2))
    assert train[0].startswith("Select ") and '<input type="checkbox"' in train[0]


def test_a_page_that_goes_wrong_ends_its_rollout_and_the_next_is_played(pages):
    faults = [name for name in SCRIPTS if name != "fine"]
    env = MiniWoBEnv([task for fault in faults for task in (fault, "fine")], pages=pages, num_problems=1, timeout=8.0)
    sizes = []

    def answer(prompt):
        sizes.append(len(prompt))
        if "<tool_response>\n" in prompt:
            time.sleep(2 * ("Press prints." in prompt))  # the page's own timer ends the task
            return "I am done."
        if "Press kills." in prompt:
            end_browsers()
        return click("#go")

    rollouts, engine = play(env, answer, 2 * len(faults), at_once=1)
    env.close()
    assert num_inexact(rollouts, engine) == 0 and max(sizes) < 20_000
    for fault, wrong, fine in zip(faults, rollouts[::2], rollouts[1::2], strict=True):
        assert (fine.status, fine.reward) == (RolloutStatus.COMPLETED, 0.5), (fault, fine.error)
        if fault == "prints":
            assert (wrong.status, wrong.reward) == (RolloutStatus.COMPLETED, 1.0), wrong.error
        else:
            assert not wrong.is_scored and REASONS[fault] in wrong.error, (fault, wrong.error)


def test_what_is_no_task_is_refused_by_name(pages):
    with pytest.raises(ValueError, match="MiniWoB has no task 'fin'; did you mean 'fine'"):
        MiniWoBEnv("fin", pages=pages)
    with pytest.raises(ValueError, match="num_problems must be at least 1"):
        MiniWoBEnv("fine", pages=pages, num_problems=0)
