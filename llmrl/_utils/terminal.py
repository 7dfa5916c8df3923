"""Text of models and pages on a terminal."""

from __future__ import annotations

import unicodedata

_KEPT = "\n\t"
# Characters that turn the direction of what follows, so that text reads as what it is not (Boucher and Anderson, 2021,
# "Trojan Source"), and that join or hide: category Cf has them all.
_HIDDEN = ("Cc", "Cf", "Co", "Cs", "Cn", "Zl", "Zp")
_JOINERS = "\u200d\ufe0f"  # which emoji are made with


def printable(text: str) -> str:
    r"""Return the text with what a terminal would obey, hide or turn around written out.

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
