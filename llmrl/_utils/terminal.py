"""Safe display of text from models and web pages on a terminal."""

from __future__ import annotations

import unicodedata

_KEPT = "\n\t"
# Category Cf includes characters that change the direction of text and can thereby mislead a reader
# (Boucher and Anderson, 2021, "Trojan Source").
_HIDDEN = ("Cc", "Cf", "Co", "Cs", "Cn", "Zl", "Zp")
_JOINERS = "\u200d\ufe0f"  # parts of emoji


def printable(text: str) -> str:
    r"""Return the text with control, hidden and direction-changing characters escaped.

    Example:
        >>> printable("a\x1b]52;c;aGk=\x07 \u202eb")
        'a\\x1b]52;c;aGk=\\x07 \\u202eb'
        >>> printable("two\nlines, é and 日本")
        'two\nlines, é and 日本'
    """
    if text.isascii() and text.replace("\n", "").replace("\t", "").isprintable():
        return text
    return "".join(
        character.encode("unicode_escape").decode()
        if unicodedata.category(character) in _HIDDEN and character not in _KEPT and character not in _JOINERS
        else character
        for character in text
    )
