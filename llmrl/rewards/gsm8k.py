"""Scoring of GSM8K (Cobbe et al. 2021, https://arxiv.org/abs/2110.14168): one number, after `####`."""

from __future__ import annotations

from llmrl.rewards.answers import extract_answer, last_number


def has_gsm8k_answer(completion: str, *, reasoning: bool = False) -> bool:
    """Return whether there is an answer at all: something within `<answer>`, or, in a plain completion, a number.

    Example:
        >>> has_gsm8k_answer("It is 5."), has_gsm8k_answer("no idea")
        (True, False)
    """
    given = extract_answer(completion, reasoning=reasoning)
    return given is not None and (reasoning or last_number(given) is not None)


def is_gsm8k_right(completion: str, answer: str, *, reasoning: bool = False) -> bool:
    """Return whether the answer's last number is the one that the reference ends with.

    Example:
        >>> is_gsm8k_right("So it is $1,200.00.", "3 * 400 = 1200 #### 1,200")
        True
    """
    given = extract_answer(completion, reasoning=reasoning)
    number = None if given is None else last_number(given)
    return number is not None and number == last_number(answer.rpartition("####")[2])
