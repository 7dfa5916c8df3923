"""Plays tasks of tau2-bench with scripted answers: the task's own reference, and a refusal.

    python test/helpers/tau2_domains.py CHECKOUT [DOMAIN …]

`CHECKOUT` is one of https://github.com/sierra-research/tau2-bench; nothing in it is changed. The customer is a small
server with the API of OpenAI, which says its task's number, calls the customer's tools when it is asked to, and ends
the conversation when it reads the last words. The judge of statements about the conversation, which tau2 asks at
`OPENAI_BASE_URL`, is the same server.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from hub_rows import play
from verifiers_environments import call, num_inexact

from llmrl.envs import make_task_env

DOMAINS = ("mock", "retail", "airline", "telecom")
SPLITS = {"telecom": "small"}
NUM_TASKS = 12
LAST_WORDS = "That is all."
ASKED = "Please take step "
DONE = "I have done it."
READING = ("get_", "find_", "list_", "search_", "calculate", "transfer_to", "think")


def scenario(task):
    """What a task's customer is given, in one line."""
    given = task["user_scenario"]["instructions"]
    return " ".join(given.split() if isinstance(given, str) else " ".join(map(str, given.values())).split())


def told(task, prompt):
    """Whether a prompt is that of a task's customer; tau2 puts headings between the parts."""
    given = task["user_scenario"]["instructions"]
    parts = [given] if isinstance(given, str) else [part for part in given.values() if part]
    words = " ".join(prompt.split())
    return all(" ".join(part.split()) in words for part in parts)


def changes(task):
    """Whether a task wants anything to be done; then nothing is paid for a refusal."""
    criteria = task["evaluation_criteria"]
    return "ACTION" in criteria.get("reward_basis", ()) or any(
        not one["name"].startswith(READING) for one in criteria["actions"]
    )


def expected(prompt):
    """The statements that a judge of tau2 is asked about."""
    return ast.literal_eval(prompt.partition("expectedOutcomes:")[2].strip())


def judged(statement):
    """A judge's answer, which agrees with everything."""
    return {"expectedOutcome": statement, "reasoning": "It agrees with everything.", "metExpectation": True}


class Customer(BaseHTTPRequestHandler):
    """Answers as the customer's model."""

    tasks = ()
    fault = ""

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        messages = request["messages"]
        if self.fault == "refuses":
            self.send_error(401, "no such key")
            return
        if request["model"].startswith("gpt"):
            self.say(request, json.dumps({"results": list(map(judged, expected(messages[-1]["content"])))}))
            return
        [task] = [task for task in self.tasks if told(task, messages[0]["content"])]
        last = messages[-1]
        if last["role"] == "tool":
            self.say(request, DONE)
        elif (asked := last["content"].partition(ASKED)[2]) != "":
            action = task["evaluation_criteria"]["actions"][int(asked.split(".")[0])]
            function = {"name": action["name"], "arguments": json.dumps(action["arguments"])}
            self.say(request, None, tool_calls=[{"id": f"step-{asked}", "type": "function", "function": function}])
        else:
            self.say(
                request, "###STOP###" if LAST_WORDS in last["content"] else f"I am the customer of <{task['id']}>."
            )

    def say(self, request, said, **calls):
        """Send an answer."""
        message = {"role": "assistant", "content": said, **calls}
        answer = {
            "id": "chat",
            "object": "chat.completion",
            "created": 0,
            "model": request["model"],
            "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls" if calls else "stop"}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
        }
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


@contextlib.contextmanager
def customers(tasks, fault=""):
    """The arguments of a model that plays the customers of tasks."""
    handler = type("Own", (Customer,), {"tasks": tasks, "fault": fault})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        os.environ |= {"OPENAI_API_KEY": "none", "OPENAI_BASE_URL": f"http://127.0.0.1:{server.server_port}/v1"}
        yield {
            "model": "openai/customer",
            "api_base": f"http://127.0.0.1:{server.server_port}/v1",
            "api_key": "none",
            "num_retries": 0,
        }
        server.shutdown()


def reference(tasks):
    """A policy that makes the calls of its task's reference, has the customer make theirs, and says what is wanted."""

    def answer(prompt):
        [name] = re.findall(r"I am the customer of <([^>]*)>", prompt)[:1]
        criteria = tasks[name]["evaluation_criteria"]
        actions = criteria["actions"] or []
        done = prompt.count("<tool_response>\n") + prompt.count(DONE)
        if done < len(actions):
            is_own = actions[done].get("requestor", "assistant") == "assistant"
            return call(actions[done]["name"], **actions[done]["arguments"]) if is_own else f"{ASKED}{done}."
        return " ".join([*(criteria.get("communicate_info") or []), LAST_WORDS])

    return answer


def playable(checkout, domain):
    """Tasks that begin at the beginning, with a complete reference.

    Of tasks with one text, which a customer cannot tell apart, it is the longest.
    """
    folder = Path(checkout) / "data" / "tau2" / "domains" / domain
    split = json.loads((folder / "split_tasks.json").read_text())[SPLITS.get(domain, "base")]
    found = {}
    for task in json.loads((folder / "tasks.json").read_text()):
        if task["id"] not in split:
            continue
        criteria = task["evaluation_criteria"] or {}
        actions = criteria.get("actions") or []
        takers = {one.get("requestor", "assistant") for one in actions}
        checked = {one["env_type"] for one in criteria.get("env_assertions") or []}
        if not actions or ("user" in checked - takers) or (task.get("initial_state") or {}).get("message_history"):
            continue
        known = found.setdefault(scenario(task), task)
        if len(actions) > len(known["evaluation_criteria"]["actions"]):
            found[scenario(task)] = task
    return list(found.values())


def main() -> None:
    """Print a row for each domain."""
    checkout, *domains = sys.argv[1:]
    print("| domain | tasks | reference | refusal | as expected | turns | inexact | s |")
    for domain in domains or DOMAINS:
        began = time.monotonic()
        tasks = {task["id"]: task for task in playable(checkout, domain)[:NUM_TASKS]}
        wanted = (dict.fromkeys(tasks, 1.0), {name: float(not changes(task)) for name, task in tasks.items()})
        answers = (reference(tasks), lambda prompt: f"I cannot help you. {LAST_WORDS}")
        paid, right, turns, inexact = [], 0, 0, 0
        with customers(tuple(tasks.values())) as user:
            for answer, rewards in zip(answers, wanted, strict=True):
                env = make_task_env(
                    f"tau2:{domain}", SPLITS.get(domain, "base"), folder=checkout, user=user, task_ids=list(tasks)
                )
                rollouts, engine = play(env, answer, len(tasks), max_model_len=65536, max_turns=60)
                env.close()
                for one in rollouts:
                    is_right = one.is_scored and one.reward == rewards[one.columns["task_id"]]
                    right += is_right
                    if not is_right:
                        print(f"    {one.columns['task_id']}: {one.reward} {one.breakdown} {one.info} {one.error}")
                paid.append(dict(Counter(one.reward for one in rollouts)))
                turns += sum(one.num_turns for one in rollouts)
                inexact += num_inexact(rollouts, engine)
        counts = (len(tasks), *paid, f"{right} of {2 * len(tasks)}", turns, inexact)
        print(f"| {domain} | {' | '.join(map(str, counts))} | {time.monotonic() - began:.0f} |", flush=True)


if __name__ == "__main__":
    main()
