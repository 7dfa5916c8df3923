"""Plays the environments that come with verifiers, unmodified, and compares the rows with what the engine sampled.

    python test/helpers/verifiers_environments.py CHECKOUT [NAME …]

`CHECKOUT` is one of https://github.com/PrimeIntellect-ai/verifiers. It takes minutes: each environment is installed
into a virtual environment of its own. Data sets of the hub and nltk's corpora are replaced by the small ones that are
written here, under the paths at which the packages look for them; their code is not touched. Answers are scripted, so
that what each environment should pay is known; the table is in `docs/how-to/other-environments.md`.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from endpoint_agents import LoggingEngine, trained_spans
from rendering_families import family_renderer

from llmrl.collectors import LLMCollector
from llmrl.data import Rollout, RolloutStatus
from llmrl.envs import VerifiersEnv
from llmrl.policies import LLMWrapperBase
from llmrl.testing import ensure_embedded_model

END = "<|im_end|>"
"""Ends an answer in the template of Qwen 2.5, which has tools."""


@dataclass(frozen=True, kw_only=True)
class Example:
    """An environment, what answers it, and what that earns."""

    package: str
    answer: Callable[[str], str]
    """The text that follows a prompt."""
    reward: Callable[[Rollout], float]
    """The reward that a rollout with these answers must have."""
    config: dict[str, Any] = field(default_factory=dict)
    requirements: tuple[str, ...] = ()
    num_rollouts: int = 4


def last_turn(prompt: str) -> str:
    """The text since the last turn of the user or a tool."""
    return prompt.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]


def call(name: str, /, **arguments: object) -> str:
    """An answer that calls a tool."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def reverse(prompt: str) -> str:
    """The right answer of reverse-text."""
    return f"<reversed_text>{last_turn(prompt)[::-1]}</reversed_text>"


def sort(prompt: str) -> str:
    """The right answers of alphabet-sort, from all that the user has said."""
    turns = re.findall(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", prompt, re.DOTALL)
    names = [re.search(r" name: (.*)", turn)[1].split("\n")[0].split(", ") for turn in turns]
    by_first = "by FIRST" in turns[0]

    def key(name: str) -> str:
        cut = next((place for place in range(1, len(name)) if name[place].isupper()), len(name))
        return name[:cut] if by_first else name[cut:]

    tag = "alphabetical_sorted" if len(turns) == 1 else "combined_alphabetical_sorted"
    lines = sorted((name for part in names for name in part), key=key)
    if len(turns) > 1:
        lines = [f"{name} // new name!" if name in names[-1] else name for name in lines]
    return f"<{tag}>\n" + "\n".join(lines) + f"\n</{tag}>"


def look_up(prompt: str) -> str:
    """Calls glossary's tool, then repeats what it said."""
    if (result := re.search(r"<tool_response>\n(.*?)\n</tool_response>", prompt, re.DOTALL)) is not None:
        return f"<answer>{result[1]}</answer>"
    return call("facts_lookup", name=re.search(r'look up "(.*?)"', prompt)[1])


def note(prompt: str) -> str:
    """Calls scratchpad's shared tool, then repeats what it said."""
    if (result := re.search(r"<tool_response>\n(.*?)\n</tool_response>", prompt, re.DOTALL)) is not None:
        return result[1]
    return call("scratchpad_roundtrip", word=re.search(r'word="(.*?)"', prompt)[1])


def propose_or_solve(prompt: str) -> str:
    """A proposal, or the solution of it."""
    return "So it is 15." if "What is 7 + 8?" in last_turn(prompt) else '{"problem": "What is 7 + 8?", "answer": 15}'


def payoff(rollout: Rollout) -> float:
    """What a hand of Kuhn poker pays if both players check: one chip to the higher card, dealt by the hand's seed."""
    cards = random.Random(rollout.columns["info"]["seed"]).sample(["J", "Q", "K"], 2)
    is_first_higher = "JQK".index(cards[0]) > "JQK".index(cards[1])
    return 1.0 if is_first_higher == (rollout.role == "player0") else -1.0


def examples(folder: Path, judge_url: str) -> dict[str, Example]:
    """What is played, by name."""
    judge = {"id": "reference", "model": "judge", "base_url": judge_url, "api_key_var": "NO_KEY"}
    return {
        "reverse_text": Example(
            package="reverse_text",
            answer=reverse,
            reward=lambda rollout: 1.0,
            config={"taskset": {"dataset_name": str(folder / "reverse")}},
        ),
        "alphabet_sort": Example(package="alphabet_sort", answer=sort, reward=lambda rollout: 1.0),
        "wordle": Example(
            package="wordle",
            answer=lambda prompt: "[crane]",
            reward=lambda rollout: 1.0,
            requirements=("verifiers[ta]",),
        ),
        "kuhn_poker": Example(package="kuhn_poker", answer=lambda prompt: "I [check].", reward=payoff, num_rollouts=8),
        "glossary (a tool)": Example(package="glossary", answer=look_up, reward=lambda rollout: 1.0),
        "glossary (a tool and a judge)": Example(
            package="glossary",
            answer=look_up,
            reward=lambda rollout: 2.0,
            config={"taskset": {"task": {"judges": [judge]}}},
        ),
        "scratchpad (a shared tool with state)": Example(package="scratchpad", answer=note, reward=lambda rollout: 1.0),
        "proposer_solver": Example(
            package="proposer_solver",
            answer=propose_or_solve,
            reward=lambda rollout: float(rollout.role == "solver"),
            config={"n": 1, "proposer": {"harness": {"id": "llmrl_chat"}}},
        ),
        "gsm8k (a verifier of its own)": Example(
            package="gsm8k", answer=lambda prompt: "It is\n#### 15", reward=lambda rollout: 1.0
        ),
    }


def write_data(folder: Path) -> None:
    """Write stand-ins of the hub's data sets and of nltk's corpora where the packages look for them."""

    def write(path: str, *rows: object) -> None:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))

    write("reverse/train.jsonl", *({"prompt": text} for text in ("hello world", "the cat", "a dog's house")))
    names = [
        "AdaLovelace",
        "AlanTuring",
        "BarbaraLiskov",
        "DonaldKnuth",
        "EdsgerDijkstra",
        "FrancesAllen",
        "GraceHopper",
    ]
    names += ["HedyLamarr", "JohnBackus", "KenThompson", "LeslieLamport", "NiklausWirth", "RichardHamming", "TonyHoare"]
    names += ["VintCerf", "WhitfieldDiffie"]
    write("kalomaze/alphabetic-arxiv-authors-it1/train.jsonl", *({"names": names[::-1]} for _ in range(4)))
    write("openai/gsm8k/main/test.jsonl", *({"question": f"{n} + {15 - n}?", "answer": "#### 15"} for n in range(4)))
    write(
        "openai/gsm8k/README.md",
        "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: test\n    path: main/test.jsonl\n---",
    )
    write("nltk/corpora/words/en", "crane")
    write("nltk/corpora/words/en-basic", "crane")
    tagger = "nltk/taggers/averaged_perceptron_tagger_eng/averaged_perceptron_tagger_eng"
    write(f"{tagger}.weights.json", {})
    write(f"{tagger}.tagdict.json", {"crane": "NN"})
    write(f"{tagger}.classes.json", ["NN"])


def play(example: Example, checkout: Path) -> tuple[list[Rollout], LoggingEngine, VerifiersEnv]:
    """Play an environment as it is."""
    renderer = family_renderer(str(ensure_embedded_model()), "qwen25")

    def answer(prompt_ids: list[int]) -> str:
        return example.answer(renderer.decode(prompt_ids)) + END

    engine = LoggingEngine(answer, encode=renderer.encode, decode=renderer.decode, max_model_len=4096)
    folder = checkout / "environments" / example.package
    env = VerifiersEnv(
        example.package, requirements=[*example.requirements, str(folder)], config=example.config, repeats=2
    )
    policy = LLMWrapperBase(engine, renderer=renderer, generate_kwargs={"max_new_tokens": 512})
    with LLMCollector(env, policy=policy, groups_per_batch=1, max_concurrent_rollouts=4) as collector:
        return collector.play(example.num_rollouts), engine, env


def num_inexact(rollouts: list[Rollout], engine: LoggingEngine) -> int:
    """The number of requests to the engine that no row holds as they were sampled, and of rows with anything else."""
    trained: Counter[Any] = Counter()
    for rollout in rollouts:
        if rollout.conversation is not None:
            trained += trained_spans(rollout.conversation.reconcile())
    logged = Counter(engine.log)
    return (trained - logged).total() + (logged - trained).total()


@contextlib.contextmanager
def model_that_says(text: str):
    """The URL of a server with OpenAI's API that always answers the same."""
    message = {"role": "assistant", "content": text}
    reply = {"id": "1", "object": "chat.completion", "created": 0, "model": "judge"}
    body = json.dumps({**reply, "choices": [{"index": 0, "finish_reason": "stop", "message": message}]}).encode()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()


def main() -> None:
    """Print the table."""
    checkout, *chosen = sys.argv[1:]
    folder = Path(tempfile.mkdtemp(prefix="llmrl-verifiers-"))
    write_data(folder)
    os.chdir(folder)
    os.environ["NLTK_DATA"] = str(folder / "nltk")
    os.environ["HF_HUB_OFFLINE"] = "1"
    print("| environment | rollouts | turns | completed | paid as expected | answers sampled | inexact | seconds |")
    print("|---|---|---|---|---|---|---|---|")
    with model_that_says("yes") as judge_url:
        for name, example in examples(folder, judge_url).items():
            if chosen and not any(word in name for word in chosen):
                continue
            started = time.perf_counter()
            try:
                rollouts, engine, env = play(example, Path(checkout).absolute())
            except Exception as error:
                print(f"| {name} | {type(error).__name__}: {str(error)[-300:]!r} |")
                continue
            completed = [rollout for rollout in rollouts if rollout.status is RolloutStatus.COMPLETED]
            paid = [one for one in completed if abs(one.reward - example.reward(one)) < 1e-6 and one.is_scored]
            cells = [name, len(rollouts), sum(one.num_turns for one in rollouts), len(completed), len(paid)]
            cells += [len(engine.log), num_inexact(rollouts, engine), f"{time.perf_counter() - started:.0f}"]
            print(f"| {' | '.join(map(str, cells))} |", flush=True)
            for rollout in rollouts:
                if rollout not in paid:
                    print(
                        f"    {rollout.role} {rollout.status.name} {rollout.reward} {rollout.breakdown} {rollout.error}"
                    )
            env.close()


if __name__ == "__main__":
    main()
