"""Extraction of answers from completions: tags and numbers, in linear time.

GSM8K answers (Cobbe et al. 2021, https://arxiv.org/abs/2110.14168) are the number after `####`.
"""

from __future__ import annotations

import re
from decimal import Decimal

# A minus between two numbers is a subtraction; elsewhere it is a sign, also of an amount of money: -$5.
_NUMBER = re.compile(r"((?<![0-9)])-(?:\\?[$€£¥])?)?([0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)")
_MINUS_SIGNS = str.maketrans(dict.fromkeys("\u2212\ufe63\uff0d", "-"))
_MAX_DIGITS = 100


def extract_tag(text: str, tag: str) -> str | None:
    """Return the text between the last closing `tag` and the opening one before it, or None.

    Example:
        >>> extract_tag("<think>2 + 2</think> <answer> 4 </answer>", "answer"), extract_tag("4", "answer")
        ('4', None)
    """
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, max(end, 0))
    return text[start + len(tag) + 2 : end].strip() if 0 <= start < end else None


def extract_tags(text: str, tag: str) -> list[str]:
    """Return the texts between each opening `tag` and the next closing one.

    Example:
        >>> extract_tags("<answer>4</answer> or <answer> 5</answer><answer>", "answer")
        ['4', '5']
    """
    parts = (part.split(f"</{tag}>", 1) for part in text.split(f"<{tag}>")[1:])
    return [part[0].strip() for part in parts if len(part) == 2]


def extract_answer(completion: str, *, reasoning: bool) -> str | None:
    """Return the answer in a completion: with `reasoning` the `<answer>` block, otherwise the text after `</think>`.

    Example:
        >>> extract_answer("<think>…</think>It is 4.", reasoning=False)
        'It is 4.'
    """
    answer = completion.rpartition("</think>")[2]
    return (extract_tag(answer, "answer") if reasoning else answer.strip()) or None


def last_number(text: str) -> Decimal | None:
    """Return the last number in a text, with or without thousands separators, or None.

    Example:
        >>> last_number("48 + 24 = 1,072.50 dollars"), last_number("It lost -$5."), last_number("no idea")
        (Decimal('1072.50'), Decimal('-5'), None)
    """
    numbers = _NUMBER.findall(text.translate(_MINUS_SIGNS))
    if not numbers or len(numbers[-1][1]) > _MAX_DIGITS:
        return None
    sign, digits = numbers[-1]
    return Decimal(sign[:1] + digits.replace(",", ""))  # without the sign of a currency


def has_gsm8k_answer(completion: str, *, reasoning: bool = False) -> bool:
    """Return whether there is an answer: an `<answer>` block with `reasoning`, otherwise a number.

    Example:
        >>> has_gsm8k_answer("It is 5."), has_gsm8k_answer("no idea")
        (True, False)
    """
    given = extract_answer(completion, reasoning=reasoning)
    return given is not None and (reasoning or last_number(given) is not None)


def is_gsm8k_right(completion: str, answer: str, *, reasoning: bool = False) -> bool:
    """Return whether the last number of the answer equals the last number of the reference.

    Example:
        >>> is_gsm8k_right("So it is $1,200.00.", "3 * 400 = 1200 #### 1,200")
        True
    """
    given = extract_answer(completion, reasoning=reasoning)
    number = last_number(given or "")
    return number is not None and number == last_number(answer.rpartition("####")[2])
