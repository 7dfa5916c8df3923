"""Parsing of text that chat templates wrote, and detection of the assistant's turns in such text."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from llmrl.data.chats import flatten
from llmrl.data.message import Message, text_of

_MARKED_CONTENT = (
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}"
)
# With these marks, a template defines which text the mask of the assistant's tokens covers.
_GENERATION_MARKS = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")


@dataclass(frozen=True, slots=True)
class TemplateFamily:
    """Format of a turn in a family of chat templates: `start role between content end`."""

    start: str
    between: str
    end: str
    begin: str = ""
    """Text at the beginning of a conversation."""
    after: str = ""
    """Text between turns."""
    other_ends: tuple[str, ...] = ()
    """Further tokens that end a turn."""
    roles: tuple[tuple[str, str], ...] = ()
    """Pairs of a role's name in the template and its name in llmrl, if they differ."""

    @property
    def pattern(self) -> re.Pattern[str]:
        """Pattern of one turn; the last turn may lack its end."""
        start = re.escape(self.start)
        between = re.escape(self.between)
        end = "|".join(map(re.escape, (self.end, *self.other_ends)))
        return re.compile(rf"{start}([^\n<]*?){between}(.*?)(?:({end})|(?={start})|\Z)", re.DOTALL)

    @property
    def chat_template(self) -> str:
        """Template that writes contents only (no tools, calls or reasoning), and marks answers as generated."""
        theirs = {our: their for their, our in self.roles}
        return (
            f"{{{{ {self.begin!r} }}}}{{% set roles = {theirs!r} %}}{{% for message in messages %}}"
            f"{{{{ {self.start!r} + roles.get(message['role'], message['role']) + {self.between!r} }}}}"
            f"{_MARKED_CONTENT}{{{{ {self.end + self.after!r} }}}}{{% endfor %}}"
            f"{{% if add_generation_prompt %}}{{{{ {self.start!r} + roles.get('assistant', 'assistant') "
            f"+ {self.between!r} }}}}{{% endif %}}"
        )


def _plain_turns(*, end: str) -> str:
    return (
        "{% for message in messages %}{% if message['role'] == 'assistant' %}"
        "{{ 'Assistant:' }}{% generation %}{{ ' ' + message['content'] }}{% endgeneration %}"
        f"{{{{ {end} }}}}"
        "{% else %}{{ ('User: ' if message['role'] == 'user' else '') + message['content'] + '\n\n' }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
    )


FAMILIES = {
    "chatml": TemplateFamily("<|im_start|>", "\n", "<|im_end|>", after="\n", other_ends=("<|endoftext|>",)),
    "llama3": TemplateFamily("<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>", begin="<|begin_of_text|>"),
    "llama4": TemplateFamily("<|header_start|>", "<|header_end|>\n\n", "<|eot|>", begin="<|begin_of_text|>"),
    "gemma": TemplateFamily(
        "<start_of_turn>", "\n", "<end_of_turn>", begin="<bos>", after="\n", roles=(("model", "assistant"),)
    ),
}
# Templates without marks in their text, which therefore cannot be parsed.
_TEMPLATES = {
    "dialogpt": "{% for message in messages %}{% if message['role'] != 'system' %}"
    + _MARKED_CONTENT
    + "{{ eos_token }}{% endif %}{% endfor %}",
    "falcon": _plain_turns(end="'\n\n'"),
    "deepseek": "{{ bos_token }}" + _plain_turns(end="eos_token"),
}
_WITHOUT_OWN = tuple(_TEMPLATES)
# Registered by `add_chat_template`: parts of models' names, and parsers.
_MODEL_NAMES: dict[str, Sequence[str]] = {}
_READERS: dict[str, Callable[[str], Any]] = {}
# Names that use a family's template. TorchRL's templates of these names have generation marks, which are kept.
_ALIASES = {"qwen": "chatml", "smollm2": "chatml", "chatml_format": "chatml", "llama": "llama4"}
_MISTRAL = re.compile(r"\[INST\]\s?(.*?)\s?\[/INST\](.*?)(?=\[INST\]|\Z)", re.DOTALL)
_MISTRAL_END = "</s>"
_MISTRAL_TOOLS = re.compile(r"\[AVAILABLE_TOOLS\].*?\[/AVAILABLE_TOOLS\]", re.DOTALL)


def template_named(name: str) -> str:
    r"""Return the chat template of a family or a model, which writes contents only, or one that was added.

    Templates with TorchRL's names mark answers without the end of their turn, so masks exclude it, as in TorchRL.

    Raises ValueError if the name is unknown.

    Example:
        >>> has_generation_marks(template_named("qwen")), has_generation_marks(template_named("chatml"))
        (True, False)
    """
    if name in _TEMPLATES:
        return _TEMPLATES[name]
    family = FAMILIES.get(_ALIASES.get(name, name))
    if family is None:
        known = sorted([*FAMILIES, *_ALIASES, *_TEMPLATES])
        raise ValueError(f"chat_template_name must be one of {known}, got {name!r}.")
    if name in _ALIASES:
        return family.chat_template
    return _GENERATION_MARKS.sub("", family.chat_template)


def has_generation_marks(template: str) -> bool:
    """Return whether a template marks the text that the assistant generates with `{% generation %}` blocks."""
    return _GENERATION_MARKS.search(template) is not None


def template_of_model(model: str, *, has_own: bool) -> str | None:
    """Return the template for histories of a model; None means the tokenizer's own template, if `has_own`.

    Example:
        >>> "eos_token" in template_of_model("microsoft/DialoGPT-medium", has_own=False)
        True
    """
    model = model.lower()
    for name, parts in _MODEL_NAMES.items():
        if any(part.lower() in model for part in parts):
            return _TEMPLATES[name]
    if has_own:
        return None
    # Masks include the end of the turn unless a template with marks is requested by name.
    return _GENERATION_MARKS.sub("", template_named(next((name for name in _WITHOUT_OWN if name in model), "chatml")))


def add_chat_template(
    template_name: str,
    template: str,
    inverse_parser: Callable[[str], Any] | None = None,
    model_family_keywords: Sequence[str] | None = None,
) -> None:
    """Register a template by name for `chat_template_name=`, in this process.

    Args:
        template_name: name of the template; an existing one is replaced.
        template: Jinja text.
        inverse_parser: function that parses a rendered text into a `History`, for `History.from_text`.
        model_family_keywords: parts of models' names; histories of these models are rendered with
            the template. Policies use it only by name.

    Example:
        >>> add_chat_template("loud", "{% for message in messages %}{{ message['content'] + '!' }}{% endfor %}")
        >>> "'!'" in template_named("loud")
        True
    """
    _TEMPLATES[template_name] = template
    _MODEL_NAMES[template_name] = tuple(model_family_keywords or ())
    if inverse_parser is not None:
        _READERS[template_name] = inverse_parser
    else:
        _READERS.pop(template_name, None)  # of the replaced template


def parse_templated(text: str, *, family: str | None = None) -> tuple[list[Message], list[bool]]:
    r"""Parse a templated text into messages, and return for each whether its turn was ended.

    A generation prompt at the end is left out. Contents are returned verbatim: text that a template
    added to them (tool schemas, calls, reasoning) is not parsed.

    Args:
        text: rendered text with its special tokens.
        family: `chatml` (Qwen, SmolLM2), `llama3`, `llama4`, `gemma`, `mistral`, or an added
            template with a parser; by default the family of the first mark in the text.

    Raises ValueError if the family is unknown, or the text has no message in its form, or others that are not read.

    Example:
        >>> parse_templated("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHel")
        ([{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Hel'}], [True, False])
    """
    known = sorted([*FAMILIES, "mistral", *_READERS])
    if family in _READERS:
        [chat] = flatten(_READERS[family](text).chats)
        return list(chat), [bool(message.get("is_complete", True)) for message in chat]
    if family is not None:
        family = _ALIASES.get(family, family)
        if family not in known:
            raise ValueError(f"family must be one of {known}, got {family!r}.")
    else:
        marks = {name: text.find(parts.start) for name, parts in FAMILIES.items()} | {"mistral": text.find("[INST]")}
        found = {name: place for name, place in marks.items() if place >= 0}
        if not found:
            raise ValueError(f"the text has no marks of any of {known}: {text[:80]!r}; pass messages instead.")
        family = min(found, key=found.__getitem__)
    turns = _mistral_turns(text) if family == "mistral" else _turns(text, FAMILIES[family])
    if turns and turns[-1][0] == "assistant" and not turns[-1][1] and not turns[-1][2]:
        turns.pop()
    if not turns:
        raise ValueError(f"the text has no turn as {family!r} writes it: {text[:80]!r}.")
    return [{"role": role, "content": content} for role, content, _ in turns], [is_ended for *_, is_ended in turns]


def _turns(text: str, family: TemplateFamily) -> list[tuple[str, str, bool]]:
    roles = dict(family.roles)
    return [
        (roles.get(role.strip(), role.strip()), content, ended is not None)
        for role, content, ended in (match.groups() for match in family.pattern.finditer(text))
    ]


def _mistral_turns(text: str) -> list[tuple[str, str, bool]]:
    turns = []
    unread = [text.partition("[INST]")[0].replace("<s>", "")]
    for user, answer in _MISTRAL.findall(text):
        content, ended, after = answer.partition(_MISTRAL_END)
        turns += [("user", user, True), ("assistant", content.removeprefix(" "), bool(ended))]
        unread.append(after)
    others = "".join(_MISTRAL_TOOLS.sub("", piece).strip() for piece in unread)
    if others and turns:
        raise ValueError(
            "only the questions and answers of Mistral's texts can be read, and the text has others (a system "
            f"prompt or a tool's result), {others[:80]!r}; pass messages instead."
        )
    return turns


def assistant_spans(chat: Sequence[Message], render: Callable[[Sequence[Message], bool], str]) -> list[tuple[int, int]]:
    """Return the `(start, end)` character spans of the assistant's turns in the whole rendering.

    The conversation is rendered up to each answer, with and without it. Raises ValueError if the template does not only
    append text for later messages. The span of an unfinished message (`is_complete` false) ends with its content.
    `render` receives messages and whether to add the generation prompt, and returns the text.

    Example:
        >>> render = lambda chat, is_prompt: "".join(f"{m['role'][0]}:{m['content']};" for m in chat) + "a:" * is_prompt
        >>> assistant_spans([{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}], render)
        [(6, 8)]
    """
    whole = render(chat, False)
    spans = []
    for index, message in enumerate(chat):
        if message["role"] != "assistant":
            continue
        answered = render(chat[: index + 1], False)
        prompt = render(chat[:index], True) if index else _opening(answered, render)
        if not answered.startswith(prompt) or not whole.startswith(answered):
            raise ValueError(
                f"the template writes the assistant's turn (message {index}) differently once others follow, so one "
                "rendering has no mask; collect with llmrl.rendering.Conversation, which forks the row instead."
            )
        end = len(answered) if message.get("is_complete", True) else _end_of_content(message, answered, len(prompt))
        spans.append((len(prompt), end))
    return spans


def _opening(answered: str, render: Callable[[Sequence[Message], bool], str]) -> str:
    """Return the text before the answer in a conversation that begins with the answer."""
    asked: list[Message] = [{"role": "user", "content": "a"}]
    header = render(asked, True).removeprefix(render(asked, False))
    return answered[: answered.find(header) + len(header)]


def _end_of_content(message: Message, answered: str, start: int) -> int:
    """Return the end of an unfinished message's content; the template wrote the text after it."""
    *_, last_line = text_of(message.get("content")).strip().split("\n")
    if not last_line:
        return start
    place = answered.rfind(last_line, start)
    if place < 0:
        raise ValueError(f"the template does not write the end of an unfinished answer, {last_line[-80:]!r}.")
    return place + len(last_line)
