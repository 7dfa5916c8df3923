"""`AnswerText`: the text of an answer while it is sampled."""

from __future__ import annotations

from collections.abc import Sequence

from llmrl.rendering.base import Renderer
from llmrl.rendering.reasoning import NO_MARKS, NUM_END_TOKENS
from llmrl.rendering.tool_calls import TOOL_CALL_OPENINGS

_UNFINISHED = "\ufffd"  # decoded text of an incomplete character
_WINDOW_TOKENS = 8  # each new token is decoded with those before it; the window moves on after this many tokens


class AnswerText:
    """Reasoning and content of an answer while it is sampled, as far as no later token can change them.

    Text is held back if it may begin a mark, a call or a stop string, follows the opening of a call, or is white space
    at the ends. So the parsed message of the whole answer (`Renderer.parse`) begins with this text, up to white space.

    Args:
        renderer: renderer of the model.
        prompt_ids: `[num_prompt_tokens]` ids of the prompt, which may end within reasoning.
        stop: stop strings of the request.

    Example:
        >>> from llmrl.rendering import make_renderer
        >>> from transformers import AutoTokenizer
        >>> from llmrl.testing import ensure_embedded_model
        >>> renderer = make_renderer(AutoTokenizer.from_pretrained(ensure_embedded_model()))
        >>> text = AnswerText(renderer)
        >>> text.update(renderer.encode('I add. <tool_call>{"name": '))
        >>> text.content
        'I add.'
    """

    def __init__(self, renderer: Renderer, *, prompt_ids: Sequence[int] = (), stop: Sequence[str] = ()) -> None:
        answer_format = getattr(getattr(renderer, "writer", None), "answer_format", NO_MARKS)
        self.reasoning = ""
        """Reasoning so far."""
        self.content = ""
        """Content so far."""
        self._renderer = renderer
        self._marks = renderer.thought_marks
        end = renderer.decode(prompt_ids[-NUM_END_TOKENS:])
        self._is_open = renderer.thought_marks is not None and renderer.thought_marks.is_open_at_end(end)
        self._stop = tuple(stop)
        self._answer_opening = answer_format.opening.strip()
        openings = TOOL_CALL_OPENINGS.get(getattr(renderer, "tool_parser", ""), ("",))
        self._ends = (*openings, *filter(None, [answer_format.closing.strip()]))
        self._end_ids = frozenset(getattr(renderer, "end_ids", renderer.stop_token_ids))
        self._written = _Written(renderer)
        self._reasoning_start: int | None = None  # positions in the text; None while unknown
        self._content_start: int | None = None
        self._is_content_marked = False  # whether text before the answer was skipped
        self._num_searched = 0

    def is_of(self, token_ids: Sequence[int]) -> bool:
        """Return whether a completion begins with the tokens read so far."""
        read = self._written.token_ids
        return list(token_ids[: len(read)]) == read

    @property
    def num_characters(self) -> int:
        """Number of characters of reasoning and content so far."""
        return len(self.reasoning) + len(self.content)

    def update(self, token_ids: Sequence[int]) -> None:
        """Read the tokens so far, `[num_tokens]`, which begin with the tokens of the last update."""
        new = token_ids[len(self._written.token_ids) :]
        is_text = self._end_ids.isdisjoint(new)  # after an end token, the parsed answer follows
        if self._written.add(new, is_text=is_text):
            self._split()

    def num_tokens(self, num_content: int | None = None) -> int:
        """Return the number of tokens up to the end of the content, or of its first `num_content` characters.

        If there is no such content, return the number of tokens up to the end of the reasoning.
        """
        if num_content is None:
            num_content = len(self.content)
        start = self._content_start if num_content else self._reasoning_start
        if start is None:
            return 0
        end = start + (num_content or len(self.reasoning))
        again = _Written(self._renderer)
        for count, token in enumerate(self._written.token_ids, start=1):
            again.add([token])
            if len(again.text) >= end:
                return count
        return len(self._written.token_ids)

    def _split(self) -> None:
        text = self._written.text
        if self._content_start is None and self._reasoning_start is None:
            self._open()
        if self._content_start is None and self._reasoning_start is not None and self._marks is not None:
            start, closing = self._reasoning_start, self._marks.closing
            found = text.find(closing, max(start, self._num_searched - len(closing)))
            self._num_searched = len(text)
            end = found if found >= 0 else len(text) - self._num_held((closing, *self._stop))
            said = text[start:end].lstrip("\n")
            self._reasoning_start = start + len(text[start:end]) - len(said)
            self.reasoning = said.rstrip("\n")
            if found >= 0:
                self._content_start = found + len(closing)
        if self._content_start is not None:
            self._read_content()

    def _open(self) -> None:
        """Determine whether the answer begins with reasoning, once the text suffices."""
        if self._marks is None:
            self._content_start = 0
            return
        text = self._written.text.lstrip()
        num_space = len(self._written.text) - len(text)
        if text.startswith(self._marks.opening):
            self._reasoning_start = num_space + len(self._marks.opening)
        elif not any(mark.startswith(text) for mark in (self._marks.opening, self._marks.closing)):
            if self._is_open or text.startswith(self._marks.closing):
                self._reasoning_start = 0
            else:
                self._content_start = 0
        elif text == self._marks.closing:
            self._reasoning_start = 0

    def _read_content(self) -> None:
        text = self._written.text
        start = self._content_start
        assert start is not None
        if not self._is_content_marked:
            rest = text[start:]
            if self._reasoning_start is not None:
                rest = rest.lstrip("\n")  # as `ThoughtMarks.split`
            bare = rest.lstrip()
            if self._answer_opening and self._answer_opening.startswith(bare[: len(self._answer_opening)]):
                if len(bare) < len(self._answer_opening):
                    return
                rest = bare[len(self._answer_opening) :]
            if not rest.strip():
                return
            self._is_content_marked = True
            self._content_start = self._num_searched = start = len(text) - len(rest)
        longest = max(map(len, self._ends), default=0)
        begin = max(start, self._num_searched - longest)
        ends = [place for mark in self._ends if (place := text.find(mark, begin)) >= 0]
        if not ends:
            self._num_searched = len(text)
            ends = [len(text) - self._num_held((*self._ends, *self._stop))]
        ends += [place for stop in self._stop if (place := text.find(stop, start)) >= 0]
        self.content = max(self.content, text[start : min(ends)].rstrip(), key=len)

    def _num_held(self, marks: Sequence[str]) -> int:
        """Return how many characters at the end of the text may begin one of the marks."""
        text, num_held = self._written.text, 0
        for mark in filter(None, marks):
            place = text.find(mark[0], max(0, len(text) - len(mark)))
            while place >= 0 and not mark.startswith(text[place:]):
                place = text.find(mark[0], place + 1)
            if place >= 0:
                num_held = max(num_held, len(text) - place)
        return num_held


class _Written:
    """Tokens and their text, as far as later tokens cannot change it."""

    def __init__(self, renderer: Renderer) -> None:
        self.token_ids: list[int] = []
        self.text = ""
        self._renderer = renderer
        self._num_decoded = 0  # number of tokens with complete text
        self._window = 0  # first token of the window, since a token's text may depend on those before
        self._window_text = ""  # complete text of the tokens from there
        self._num_before = 0  # number of decoded tokens before the last addition

    def add(self, token_ids: Sequence[int], *, is_text: bool = True) -> bool:
        """Add tokens, and decode them unless they end within a character; return whether there is more text."""
        self.token_ids += token_ids
        if not is_text:
            return False
        if self._num_decoded - self._window >= _WINDOW_TOKENS:
            self._window = self._num_before
            self._window_text = self._renderer.decode(self.token_ids[self._window : self._num_decoded])
        text = self._renderer.decode(self.token_ids[self._window :])
        if len(text) <= len(self._window_text) or text.endswith(_UNFINISHED):
            return False
        self.text += text[len(self._window_text) :]
        self._num_before, self._num_decoded, self._window_text = self._num_decoded, len(self.token_ids), text
        return True
