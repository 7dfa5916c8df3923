"""Cost of rendering and bookkeeping per turn, early and late in a conversation, and of TorchRL's History."""

from __future__ import annotations

import copy
import statistics
import time
from typing import Any

from rich.console import Console
from rich.table import Table

NUM_REPEATS = 9
NUM_TURNS = 128
EARLY, LATE, LAST = 4, 64, 128
GOAL_LATE_TO_EARLY = 1.3
GOAL_STORED = 1.1
GOAL_MESSAGE_SHARE = 0.01
# Speed of the embedded model on two cores with many requests in flight; a larger model makes the share smaller.
TOKENS_PER_SECOND = 900.0
QUESTION = "Go on, then: what else is there to say about this, and why does it matter?"
ANSWER = "There is a good deal more to say about it, and most of it matters because people do not expect it.<|im_end|>"
COLUMNS = ("token_ids", "loss_mask", "log_probs", "versions")


def ours(renderer: Any, mode: str) -> tuple[list[float], Any]:
    """Return the seconds of each turn, from prompt to tensors, and the final conversation."""
    from llmrl.rendering import Conversation

    answer_ids = renderer.encode(ANSWER)
    log_probs, versions = [-0.5] * len(answer_ids), [0] * len(answer_ids)
    conversation: Any = Conversation.start(renderer, mode=mode)
    messages: tuple[Any, ...] = ({"role": "user", "content": QUESTION},)
    seconds = []
    for _ in range(NUM_TURNS):
        started = time.perf_counter()
        conversation = conversation.with_prompt(messages)
        _ = conversation.prompt_ids
        conversation = conversation.with_completion(answer_ids, log_probs=log_probs, versions=versions)
        for column in COLUMNS:
            conversation.tensor_view(column)
        messages = (*conversation.messages, {"role": "user", "content": QUESTION})
        seconds.append(time.perf_counter() - started)
    return seconds, conversation


def torchrl_history(tokenizer: Any) -> list[float]:
    """Return the seconds of each turn with TorchRL's ChatEnv and `History.apply_chat_template`."""
    from tensordict import TensorDict, set_list_to_stack
    from torchrl.data.llm import History
    from torchrl.envs.llm import ChatEnv
    from torchrl.modules.llm.policies import ChatHistory

    text = ANSWER.removesuffix("<|im_end|>")
    seconds = []
    with set_list_to_stack(True):
        env = ChatEnv(batch_size=(1,), input_mode="history", tokenizer=tokenizer)
        tensordict = env.reset(TensorDict({"query": [QUESTION]}, batch_size=(1,)))
        for _ in range(NUM_TURNS):
            started = time.perf_counter()
            prompt = tensordict["history"].prompt
            rendered = prompt.apply_chat_template(
                tokenizer=tokenizer, add_generation_prompt=True, tokenize=True, padding=False
            )
            assert rendered is not None
            answer = History(role="assistant", content=text, batch_size=(1,)).unsqueeze(-1)
            tensordict["history"] = ChatHistory(
                prompt=prompt, response=answer, full=prompt.extend(answer, inplace=False, dim=-1), batch_size=(1,)
            )
            tensordict = env.step(tensordict)["next"]
            question = History(role="user", content=QUESTION, batch_size=(1,)).unsqueeze(-1)
            tensordict["history"] = ChatHistory(
                prompt=tensordict["history"].prompt.extend(question, inplace=False, dim=-1), batch_size=(1,)
            )
            seconds.append(time.perf_counter() - started)
    return seconds


def stored_ratio(conversation: Any) -> float:
    """Return the number of tokens that the conversation and its turns store, relative to its length."""
    stores = {id(node.stored_columns): len(node.stored_columns) for node in conversation.node.ancestors()}
    stores[id(conversation.held.columns)] = len(conversation.held.columns)
    return sum(stores.values()) / conversation.num_tokens


def at(runs: list[list[float]], turn: int) -> float:
    """Return the median over runs and the five turns that end at `turn`."""
    return statistics.median(value for run in runs for value in run[turn - 5 if turn > 5 else 1 : turn])


def run() -> dict[str, Any]:
    """Measure alternately, so that a disturbance of the machine affects all cases alike."""
    from transformers import AutoTokenizer

    from llmrl.rendering import TemplateRenderer
    from llmrl.testing.embedded_model import ensure_embedded_model

    tokenizer = AutoTokenizer.from_pretrained(ensure_embedded_model())
    renderer = TemplateRenderer(tokenizer)
    # The same template, treated as one that rewrites a history with reasoning (`rewriting`), or any history (`always`).
    # If the history may be rewritten, each prompt is rendered again and compared.
    rewriting = copy.copy(renderer)
    rewriting.is_history_rewritten = True
    rewriting._rewriting_features = frozenset({frozenset({"reasoning"})})
    always = copy.copy(rewriting)
    always._rewriting_features = frozenset({frozenset()})
    runs: dict[str, list[list[float]]] = {"bridged": [], "message mode": [], "rendered afresh": []}
    stored = 0.0
    for _ in range(NUM_REPEATS):
        seconds, conversation = ours(renderer, "token")
        runs["bridged"].append(seconds)
        stored = stored_ratio(conversation)
        runs["message mode"].append(ours(rewriting, "message")[0])
        runs["rendered afresh"].append(ours(always, "message")[0])
    runs["TorchRL ChatEnv + History"] = [torchrl_history(tokenizer)]

    generation_seconds = len(renderer.encode(ANSWER)) / TOKENS_PER_SECOND
    late_to_early = at(runs["bridged"], LATE) / at(runs["bridged"], EARLY)
    message_share = (at(runs["message mode"], LAST) - at(runs["bridged"], LAST)) / generation_seconds
    afresh_share = (at(runs["rendered afresh"], LAST) - at(runs["bridged"], LAST)) / generation_seconds

    table = Table(title="Milliseconds per turn: prompt, completion, tensors")
    for title in ("", f"turn {EARLY}", f"turn {LATE}", f"turn {LAST}", f"{LATE} ÷ {EARLY}"):
        table.add_column(title, justify="right" if title else "left")
    medians: dict[str, float] = {}
    for name, seconds_of_runs in runs.items():
        values = [at(seconds_of_runs, turn) for turn in (EARLY, LATE, LAST)]
        table.add_row(name, *(f"{1e3 * value:.3f}" for value in values), f"{values[1] / values[0]:.2f}")
        for turn, value in zip((EARLY, LATE, LAST), values, strict=True):
            medians[f"{name}, turn {turn}, ms"] = round(1e3 * value, 4)
    console = Console(width=110)
    console.print(table)
    console.print(f"Stored tokens relative to the final length: {stored:.3f} (goal {GOAL_STORED}).")
    console.print(
        f"Additional time at turn {LAST}, relative to generating the answer at {TOKENS_PER_SECOND:.0f} tokens/s: "
        f"message mode without rewriting {message_share:+.2%} (goal {GOAL_MESSAGE_SHARE:.0%}), "
        f"rendering each prompt again {afresh_share:+.2%}."
    )
    medians |= {
        "stored_tokens_over_length": round(stored, 4),
        "message_mode_share_of_generation": round(message_share, 5),
        "rendered_afresh_share_of_generation": round(afresh_share, 5),
        "assumed_tokens_per_second": TOKENS_PER_SECOND,
    }
    return {
        "name": "token_cost",
        "ratio": round(late_to_early, 4),
        "ratio_of": f"seconds of rendering and bookkeeping at turn {LATE} to those at turn {EARLY}",
        "goal": GOAL_LATE_TO_EARLY,
        "met": late_to_early <= GOAL_LATE_TO_EARLY and stored <= GOAL_STORED and message_share <= GOAL_MESSAGE_SHARE,
        "medians": medians,
    }
