"""What tests of the endpoint share: sessions on scripted engines, and agents that do at random what agents do."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter

from rendering_families import TOOLS

from llmrl.endpoint import Session, SessionLimits, TurnTree
from llmrl.endpoint.dialects import chat
from llmrl.endpoint.dialects.reading import parse_body
from llmrl.endpoint.session import ASIDE
from llmrl.engines import SamplingConfig
from llmrl.testing import ScriptedEngine

SAMPLING = SamplingConfig(max_new_tokens=512)


class LoggingEngine(ScriptedEngine):
    """Keeps what it was given and what it sampled, as it was when it left the engine."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, log_prob=lambda ids: [-0.001 * (1 + token % 89) for token in ids], **kwargs)
        self.log = []

    async def generate(self, prompt_ids, sampling, **kwargs):
        completion = await super().generate(prompt_ids, sampling, **kwargs)
        self.log.append((tuple(prompt_ids), tuple(completion.token_ids)))
        return completion


def make_session(renderer, engine, *, sampling=SAMPLING, **limits):
    limits.setdefault("max_prompt_tokens", engine.max_model_len - 1)
    tree = TurnTree(renderer)
    return Session("test", tree, engine.generate, sampling, SessionLimits(**limits))


def read(body):
    """A request as a server reads it, and its digest."""
    text = json.dumps(body).encode()
    return chat.read(parse_body(text)), hashlib.sha256(text).digest()


async def ask(session, body, **kwargs):
    """The answer as a client reads it."""
    exchange = session.begin(*read(body), **kwargs)
    await asyncio.wait({exchange.task})
    reply = session.deliver(exchange)
    exchange.leave()
    return json.loads(json.dumps(chat.write(reply)))


def trained_spans(reconciliation):
    """Each run of trained tokens with all before it: what the engine was given and what it sampled, if all is right."""
    spans = Counter()
    for row in reconciliation.rows:
        ids, mask = row.columns.token_ids, row.columns.loss_mask
        start = 0
        while start < len(ids):
            end = start
            while end < len(ids) and mask[end]:
                end += 1
            if end > start:
                spans[tuple(ids[:start]), tuple(ids[start:end])] += 1
                log_probs = row.columns.log_probs[start:end]
                assert log_probs == [-0.001 * (1 + token % 89) for token in ids[start:end]]
            start = end + 1
        assert all(mask[place] or row.columns.log_probs[place] == 0 for place in range(len(ids)))
    return spans


class RandomAgent:
    """Asks as agents do: on and on, from earlier on, with an edited or compacted history, again, all at once.

    Args:
        session: it asks this.
        draw: a function of a sequence, which gives one of it.
    """

    OPERATIONS = (
        "go on", "go on", "go on", "branch", "edit", "compact", "drop reasoning", "sub-agent", "repeat", "parallel",
        "hang up", "lose", "two answers", "stop", "aside", "other tools",
    )  # fmt: skip

    def __init__(self, session, engine, draw):
        self.session, self.engine, self.draw = session, engine, draw
        self.histories = [[{"role": "user", "content": "Begin."}]]
        self.last_body = None
        self.num_asked = 0

    async def play(self, operations):
        for operation in operations:
            await getattr(self, "do_" + operation.replace(" ", "_").replace("-", "_"))()

    def body(self, messages, **more):
        self.last_body = {"model": "policy", "messages": messages, "tools": list(TOOLS), **more}
        return self.last_body

    async def continue_(self, messages, **more):
        self.num_asked += 1
        answer = await ask(self.session, self.body(messages, **more))
        for choice in answer["choices"]:
            message = {key: value for key, value in choice["message"].items() if value is not None}
            message.setdefault("content", "")
            following = [*messages, message]
            # Results of parallel calls come back in any order.
            for call in reversed(message.get("tool_calls", [])):
                following.append({"role": "tool", "tool_call_id": call["id"], "content": f"result {self.num_asked}"})
            if "tool_calls" not in message:
                following.append({"role": "user", "content": f"And {self.num_asked}?"})
            self.histories.append(following)

    def history(self):
        return self.draw(self.histories[-3:])

    async def do_go_on(self):
        await self.continue_(self.histories[-1])

    async def do_branch(self):
        await self.continue_(self.draw(self.histories))

    async def do_edit(self):
        history = [dict(message) for message in self.history()]
        answers = [message for message in history if message["role"] == "assistant"]
        if answers:
            edited = self.draw(answers)
            edited["content"] = self.draw(("", "edited ", "  ")) + edited["content"][: self.draw((0, 5, 500))]
        await self.continue_(history)

    async def do_compact(self):
        await self.continue_([{"role": "user", "content": "In short: much was said."}, *self.history()[-1:]][:1])

    async def do_drop_reasoning(self):
        await self.continue_(
            [{key: v for key, v in message.items() if key != "reasoning_content"} for message in self.history()]
        )

    async def do_sub_agent(self):
        await self.continue_([{"role": "user", "content": f"You are agent {self.draw((1, 2))}. Help."}])

    async def do_other_tools(self):
        self.num_asked += 1
        await ask(self.session, {**self.body(self.history()), "tools": []})

    async def do_repeat(self):
        if self.last_body is not None:
            first = await ask(self.session, self.last_body, is_repeated=True)
            num_sampled = len(self.engine.log)
            assert await ask(self.session, self.last_body, is_repeated=True) == first
            assert len(self.engine.log) == num_sampled

    async def do_parallel(self):
        history = self.history()
        await asyncio.gather(*(self.continue_(history) for _ in range(3)), self.do_sub_agent())

    async def do_hang_up(self):
        """The client goes while tokens are sampled, and does not come again."""
        self.engine.hang_next()
        self.num_asked += 1
        body = self.body([*self.history(), {"role": "user", "content": f"gone {self.num_asked}"}])
        exchange = self.session.begin(*read(body))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        exchange.leave()
        self.last_body = None  # who repeats it waits for an engine that hangs

    async def do_lose(self):
        """The client goes before its answer is sent, and asks again, or not."""
        self.num_asked += 1
        body = self.body([*self.history(), {"role": "user", "content": f"lost {self.num_asked}"}])
        exchange = self.session.begin(*read(body))
        await asyncio.wait({exchange.task})
        exchange.leave()
        if self.draw((True, False)):
            num_sampled = len(self.engine.log)
            await ask(self.session, body)
            assert len(self.engine.log) == num_sampled

    async def do_two_answers(self):
        await self.continue_(self.history(), n=2)

    async def do_stop(self):
        await self.continue_(self.history(), stop=["two"], temperature=0.1)

    async def do_aside(self):
        await ask(self.session, {**self.body(self.history()), "model": f"policy{ASIDE}"})
