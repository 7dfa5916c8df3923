"""Plays tasks of MiniWoB++ with scripted answers: one that does the task, and one that does something else.

python test/helpers/miniwob_tasks.py [TASK …]
"""

from __future__ import annotations

import re
import sys
import time

from hub_rows import play
from verifiers_environments import call, num_inexact

from llmrl.data import RolloutStatus
from llmrl.envs import make_task_env

NUM_PROBLEMS = 2


def click(selector):
    return call("click", selector=selector)


def enter(selector, text):
    return call("type_text", selector=selector, text=text)


def named(tag, words):
    return click(f'{tag}:text-is("{words}")')


def quoted(said):
    return re.findall(r'"([^"]*)"', said.partition("\n")[0])


def listed(said):
    """The words of `Select a, b and click Submit.`"""
    return re.search(r"Select (.*) and click Submit", said)[1].split(", ")


def ticked(said):
    return [click(f'label:text-is("{words}") input') for words in listed(said) if words != "nothing"]


def other(said, pattern, right):
    """Another of what the page shows; None if there is nothing else."""
    return next((found for found in re.findall(pattern, said) if found != right), None)


def others(said):
    """The ids of the boxes that are not to be ticked; half of them right pay a half."""
    boxes = re.findall(r'id="(ch\d+)">([^<]*)<', said)
    return [box for box, words in boxes if words not in listed(said)]


def date(said):
    month, day, year = re.search(r"Enter (\d+)/(\d+)/(\d+)", said).groups()
    return f"{year}-{month}-{day}"


def cell(said):
    [name] = re.search(r"Enter the value of (.*?) into", said).groups()
    return re.search(rf"<td>{re.escape(name)}</td><td>(.*?)</td>", said)[1]


def result(said):
    first, sign, second = re.search(r"(\d+)\s*([-+x])\s*(\d+)\s*=", re.sub("<[^>]*>", "", said)).groups()
    return str({"+": int.__add__, "-": int.__sub__, "x": int.__mul__}[sign](int(first), int(second)))


def word(said):
    number = int(re.search(r"Find the (\d+)", said)[1])
    return re.sub("<[^>]*>", " ", said.partition("<p")[2]).split(">")[-1].split()[number - 1].strip(".,")


SUBMIT = click("#subbtn")
RIGHT = {
    "click-test": lambda said: [SUBMIT],
    "click-test-2": lambda said: [named("button", "ONE")],
    "click-button": lambda said: [named("button", quoted(said)[0])],
    "click-link": lambda said: [named(".alink", quoted(said)[0])],
    "click-dialog": lambda said: [click(".ui-dialog-titlebar-close")],
    "click-dialog-2": lambda said: [
        click(".ui-dialog-titlebar-close") if quoted(said) == ["x"] else named(".ui-dialog button", quoted(said)[0])
    ],
    "click-tab": lambda said: [click(f"text={re.search('Tab #[0-9]', said)[0]}")],
    "click-checkboxes": lambda said: [*ticked(said), SUBMIT],
    "click-option": lambda said: [*ticked(said), SUBMIT],
    "choose-list": lambda said: [
        enter("select", re.search("Select (.*) from the list", said)[1]),
        click("text=Submit"),
    ],
    "enter-text": lambda said: [enter("#tt", quoted(said)[0]), SUBMIT],
    "enter-password": lambda said: [enter("#password", quoted(said)[0]), enter("#verify", quoted(said)[0]), SUBMIT],
    "enter-date": lambda said: [enter("#tt", date(said)), SUBMIT],
    "login-user": lambda said: [enter("#username", quoted(said)[0]), enter("#password", quoted(said)[1]), SUBMIT],
    "focus-text": lambda said: [click("#tt")],
    "read-table": lambda said: [enter("#tt", cell(said)), SUBMIT],
    "simple-arithmetic": lambda said: [enter("#math-answer", result(said)), SUBMIT],
    "find-word": lambda said: [enter("#answer-input", word(said)), SUBMIT],
}
WRONG = {
    "click-test": lambda said: [],
    "click-test-2": lambda said: [named("button", "TWO")],
    "click-button": lambda said: [
        *([named("button", found)] if (found := other(said, r"<button>([^<]*)</button>", quoted(said)[0])) else [])
    ],
    "click-link": lambda said: [named(".alink", other(said, r'class="alink">([^<]*)<', quoted(said)[0]))],
    "click-dialog": lambda said: [],
    "click-dialog-2": lambda said: [named(".ui-dialog button", "Cancel" if quoted(said) != ["Cancel"] else "OK")],
    "click-tab": lambda said: [click("text=Tab #1" if "Tab #1" not in said.partition("\n")[0] else "text=Tab #2")],
    "click-checkboxes": lambda said: [*(click(f"#{box}") for box in others(said)), SUBMIT],
    "click-option": lambda said: [SUBMIT],
    "choose-list": lambda said: [
        enter("select", other(said, "<option[^>]*>([^<]*)<", re.search("Select (.*) from the list", said)[1])),
        click("text=Submit"),
    ],
    "enter-text": lambda said: [enter("#tt", "wrong"), SUBMIT],
    "enter-password": lambda said: [enter("#password", "wrong"), enter("#verify", "wrong"), SUBMIT],
    "enter-date": lambda said: [enter("#tt", "1999-12-31"), SUBMIT],
    "login-user": lambda said: [enter("#username", "wrong"), enter("#password", quoted(said)[1]), SUBMIT],
    "focus-text": lambda said: [],
    "read-table": lambda said: [enter("#tt", "wrong"), SUBMIT],
    "simple-arithmetic": lambda said: [enter("#math-answer", "1000"), SUBMIT],
    "find-word": lambda said: [enter("#answer-input", "wrong"), SUBMIT],
}


def first_user(prompt):
    """The first message of the user."""
    return prompt.partition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]


def played(task, plans, **options):
    """The rollouts of a task, and the number of inexact rows."""
    env = make_task_env(f"miniwob:{task}", **options)
    rollouts, engine = play(env, lambda prompt: followed(plans[task], prompt), NUM_PROBLEMS)
    env.close()
    return rollouts, num_inexact(rollouts, engine)


def followed(plan, prompt):
    """The next call of a plan, which reads the first message of the user."""
    calls = plan(first_user(prompt))
    done = prompt.count("<tool_response>\n")
    return calls[done] if done < len(calls) else "I am done."


def main() -> None:
    """Print a row for each task."""
    print("| task | right answers | wrong ones | turns | inexact | s |")
    for task in sys.argv[1:] or RIGHT:
        began = time.monotonic()
        right, inexact = played(task, RIGHT)
        wrong, more = played(task, WRONG)
        rewards = [
            [one.reward if one.status is RolloutStatus.COMPLETED else one.error for one in part]
            for part in (right, wrong)
        ]
        turns = sum(one.num_turns for one in (*right, *wrong))
        print(
            f"| {task} | {rewards[0]} | {rewards[1]} | {turns} | {inexact + more} | {time.monotonic() - began:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
