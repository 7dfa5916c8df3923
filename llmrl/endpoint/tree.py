"""The tree of a session's turns, and its training rows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from llmrl.data import Message, ToolSchema, text_of
from llmrl.endpoint.forms import grammar_of
from llmrl.endpoint.requests import AnswerForm
from llmrl.engines import Completion
from llmrl.policies.base import answered
from llmrl.rendering import Conversation, Reconciliation, Renderer, reconcile
from llmrl.rendering.answer_text import AnswerText
from llmrl.rendering.conversation import Mode
from llmrl.rendering.rows import count_turns, turns_by_row
from llmrl.rendering.tool_calls import Json, ToolCall
from llmrl.rendering.turn import TurnNode

ChainKey = int
"""Hash of the tools, a message and all messages before it."""


@dataclass(slots=True, eq=False)
class RecordedTurn:
    """A prompt and one answer."""

    conversation: Conversation
    """Conversation after the answer."""
    completion: Completion
    prompt_key: ChainKey

    @property
    def node(self) -> TurnNode:
        """Tokens of the turn and its parents."""
        node = self.conversation.node
        assert node is not None
        return node


class TurnTree:
    """The turns of one rollout; a request continues one of them, or begins a new conversation.

    A request that contains a recorded answer continues it as sampled, even if ids, white space or
    the format of arguments have changed. If the client edited or shortened its history, the request
    is rendered again and continues the turn with the longest common prefix of tokens, if any. Each
    sampled token is therefore trained once. `mode` is that of `Conversation.start`.
    """

    def __init__(self, renderer: Renderer | None, *, mode: Mode = "auto") -> None:
        # Threshold 0: an edit discards no end of an answer, because another continuation begins a row.
        self._root = Conversation.start(renderer, mode=mode, fork_threshold_tokens=0)
        self.turns: list[RecordedTurn] = []
        """Turns in the order of their answers."""
        self._by_chain: dict[ChainKey, RecordedTurn] = {}
        self._calls: dict[str, ToolCall] = {}
        # Turns that clients stopped reading, by the keys of their prompts, with prompt and text.
        self._stopped: dict[ChainKey, list[tuple[RecordedTurn, Conversation, AnswerText]]] = {}

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> tuple[Conversation, ChainKey]:
        """Return the conversation that these messages continue, prompted with them, and their key.

        Raises RenderingError if the template refuses the messages.
        """
        messages = [self._own(message) for message in messages]
        keys = chain_keys(messages, tools)
        last = max(_answers(messages), default=-1)
        turn = None
        if last >= 0:
            turn = self._by_chain.get(keys[last + 1]) or self._cut_stopped(keys[last], messages[last])
        if turn is None:
            return self._compared(messages, tools), keys[-1]
        # Keep the recorded messages, and add only the new ones.
        messages = [*turn.conversation.messages, *messages[last + 1 :]]
        return turn.conversation.with_prompt(messages, tools=tools), keys[-1]

    def num_known(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> int:
        """Return the number of messages up to the recorded answer that they continue, or 0."""
        messages = [self._own(message) for message in messages]
        num_known = max(_answers(messages), default=-1) + 1
        return num_known if chain_keys(messages[:num_known], tools)[-1] in self._by_chain else 0

    @property
    def _renderer(self) -> Renderer:
        renderer = self._root.renderer
        assert renderer is not None
        return renderer

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text; thread-safe."""
        return self._renderer.encode(text)

    def count_tokens(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> int:
        """Return a prompt's number of tokens; thread-safe. Raises RenderingError as `prompt` does."""
        messages = [self._own(message) for message in messages]
        return len(self._renderer.render(messages, tools=tools, add_generation_prompt=True))

    def grammar(self, form: AnswerForm, tools: Sequence[ToolSchema], *, may_call: bool) -> str:
        """Return the grammar of a form; thread-safe. Raises ValueError if the template has none."""
        return grammar_of(form, self._renderer, tools, may_call=may_call)

    def _compared(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> Conversation:
        """Return the prompt as a continuation of the turn with the longest prefix of it, if any."""
        prompted = self._root.with_prompt(messages, tools=tools)
        shown = prompted.prompt_ids
        longest: RecordedTurn | None = None
        for turn in self.turns:
            num_tokens = turn.conversation.num_tokens
            if num_tokens >= len(shown) or (longest is not None and num_tokens <= longest.conversation.num_tokens):
                continue
            # Compare the last token first: other conversations mostly differ there, which avoids a copy.
            sampled = turn.completion.token_ids
            if sampled and shown[num_tokens - 1] != sampled[-1]:
                continue
            if shown[:num_tokens] == turn.conversation.prompt_ids:
                longest = turn
        return prompted if longest is None else longest.conversation.with_prompt(messages, tools=tools)

    @staticmethod
    def turn(prompted: Conversation, prompt_key: ChainKey, completion: Completion) -> RecordedTurn:
        """Return a turn that is not yet in the tree."""
        return RecordedTurn(answered(prompted, completion), completion, prompt_key)

    def add(self, turn: RecordedTurn, visible: Message) -> None:
        """Add a turn; `visible` is the answer as sent: without a stop string, with the sent call ids."""
        self.turns.append(turn)
        self._by_chain[hash((turn.prompt_key, _message_key(visible)))] = turn
        own = turn.conversation.messages[-1].get("tool_calls") or ()
        self._calls.update(zip((call["id"] for call in visible.get("tool_calls") or ()), own, strict=False))

    def add_stopped(self, turn: RecordedTurn, visible: Message, prompted: Conversation, text: AnswerText) -> None:
        """Add a turn that its client stopped reading; `visible` and `text` hold the part that was sent.

        If a later request shows that the client has seen less of it, the turn is cut there.
        """
        self.add(turn, visible)
        self._stopped.setdefault(turn.prompt_key, []).append((turn, prompted, text))

    def _cut_stopped(self, prompt_key: ChainKey, message: Message) -> RecordedTurn | None:
        """Return the stopped turn that begins with this answer, cut where the answer ends."""
        seen = text_of(message.get("content")).strip()
        if not seen:
            return None
        for turn, prompted, text in self._stopped.get(prompt_key, ()):
            place = text.content.find(seen)
            is_continued = any(other.node.parent is turn.node for other in self.turns)
            if place < 0 or text.content[:place].strip() or is_continued:
                continue
            completion = turn.completion.cut(text.num_tokens(place + len(seen)), prompted.num_tokens)
            turn.conversation, turn.completion = answered(prompted, completion), completion
            self._by_chain[hash((prompt_key, _message_key(message)))] = turn
            return turn
        return None

    def answer_text(self, prompted: Conversation, stop: Sequence[str]) -> AnswerText:
        """Return the reader of an answer to a prompt while it is sampled."""
        return AnswerText(self._renderer, prompt_ids=prompted.prompt_ids, stop=stop)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids."""
        return self._renderer.decode(token_ids)

    def _own(self, message: Message) -> Message:
        """Return a client's message with the model's own call ids, and a result with its function's name."""
        if message["role"] == "tool" and (call := self._calls.get(message.get("tool_call_id", ""))) is not None:
            return _with_own_id({**message, "name": call["function"]["name"]}, "tool_call_id", call)
        calls = message.get("tool_calls")
        if not calls or not any(call.get("id") in self._calls for call in calls):
            return message
        return {**message, "tool_calls": [self._own_call(call) for call in calls]}

    def _own_call(self, call: ToolCall) -> ToolCall:
        known = self._calls.get(call.get("id", ""))
        return call if known is None else _with_own_id(call, "id", known)

    # As a conversation

    @property
    def leaf_turns(self) -> list[RecordedTurn]:
        """Turns without a child, in the order of their answers."""
        parents = {id(turn.node.parent) for turn in self.turns}
        return [turn for turn in self.turns if id(turn.node) not in parents]

    @property
    def leaves(self) -> list[TurnNode]:
        """Nodes of the leaf turns, each with the tokens of its parents."""
        return [turn.node for turn in self.leaf_turns]

    @property
    def messages(self) -> tuple[Message, ...]:
        """Messages of the last answered conversation; empty before the first answer."""
        return self.turns[-1].conversation.messages if self.turns else ()

    @property
    def num_turns(self) -> int:
        """Number of answers."""
        return len(self.turns)

    def reconcile(self) -> Reconciliation:
        """Return the training rows of all turns."""
        return reconcile(self.leaves)

    def count_turns(self) -> dict[str, int]:
        """Return the counts of `reconcile` without rows, as `Conversation.count_turns` does."""
        return count_turns(self.leaves)

    def places(self) -> dict[int, int]:
        """Return each turn's place in the order of `Row.turn_starts`, by the `id` of its node."""
        return {id(node): place for place, node in enumerate(self._nodes())}

    def parents(self) -> list[int]:
        """Return, for each place, the place of the previous answer in its conversation, or -1."""
        places = self.places()
        return [places.get(id(node.parent), -1) for node in self._nodes()]

    def _nodes(self) -> list[TurnNode]:
        nodes = (node for leaf in self.leaves for turns in turns_by_row(leaf) for node, _ in turns)
        return list({id(node): node for node in nodes}.values())

    def to_records(self) -> list[dict[str, object]]:
        """Return the turns in the order of their answers, for display; none if they are one conversation.

        Each has its `parent` (an index, or None for a root), the `messages` it adds, its numbers of kept, added and
        sampled tokens, and the index of the training `row` that trains its sampled tokens.
        """
        if len(leaves := self.leaves) < 2:
            return []
        rows: dict[int, int] = {}
        num_rows = 0
        for turns in (turns for leaf in leaves for turns in turns_by_row(leaf)):
            trained = [turn for turn, _ in turns if id(turn) not in rows and turn.num_completion_tokens]
            rows.update((id(turn), num_rows) for turn in trained)
            num_rows += bool(trained)
        places = {id(turn.node): place for place, turn in enumerate(self.turns)}
        records: list[dict[str, object]] = []
        for turn in self.turns:
            node = turn.node
            messages = turn.conversation.messages
            parent = places.get(id(node.parent))
            num_known = 0
            if parent is not None:  # the parent's last message is the answer with the same index here
                num_answers = len(_answers(self.turns[parent].conversation.messages))
                num_known = _answers(messages)[:num_answers][-1] + 1
            records.append(
                {
                    "parent": parent,
                    "messages": messages[num_known:],
                    "num_kept_tokens": node.num_kept_tokens,
                    "num_context_tokens": node.num_context_tokens,
                    "num_completion_tokens": node.num_completion_tokens,
                    "row": rows.get(id(node)),
                }
            )
        return records


def _with_own_id(entry: Message, key: str, call: ToolCall) -> dict[str, Json]:
    """Return a call or result with the own id of the model's call, if any, in place of the client's."""
    own = {name: value for name, value in entry.items() if name != key}
    if call.get("id") is not None:
        own[key] = call["id"]
    return own


def chain_keys(messages: Iterable[Message], tools: Sequence[ToolSchema]) -> list[ChainKey]:
    """Return the keys of the tools and of each message with all before it: `[num_messages + 1]`."""
    keys = [hash(_sorted_json(tools))]
    for message in messages:
        keys.append(hash((keys[-1], _message_key(message))))
    return keys


def _answers(messages: Sequence[Message]) -> list[int]:
    return [place for place, message in enumerate(messages) if message["role"] == "assistant"]


def _message_key(message: Message) -> int:
    """Return a hash of a message's meaning; answers count by content, reasoning and calls."""
    content = text_of(message.get("content"))
    if message["role"] != "assistant":
        return hash((message["role"], content, message.get("tool_call_id"), message.get("name")))
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    reasoning = (message.get("reasoning_content") or "").strip()
    return hash(("assistant", content.strip(), reasoning, _sorted_json(calls)))


def _sorted_json(value: object) -> str:
    return json.dumps(value, sort_keys=True)
