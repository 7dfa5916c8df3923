"""Scoring of verifiable instructions (Zhou et al. 2023, https://arxiv.org/abs/2311.07911)."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmrl._imports import require

_MAX_CHARACTERS = 20_000
"""Some checks cost the square of the length; an answer beyond this follows no instruction."""
_RELATIONS: dict[str, Callable[[int, int], bool]] = {"at least": int.__ge__, "less than": int.__lt__}
_SENTENCE_END = re.compile(r"[.!?]+[\"')\]]*(?=\s|$)")
_ABBREVIATION = re.compile(r"\b(?:Mr|Mrs|Ms|Dr|Prof|St|Jr|Sr|vs|etc|e\.g|i\.e|[A-Z])\.(?=\s)")


@dataclass(frozen=True, slots=True)
class IFEvalScoreData:
    """Which instructions an answer follows."""

    inst_level_strict_acc: tuple[bool, ...]
    """Each instruction, on the answer as it is."""
    inst_level_loose_acc: tuple[bool, ...]
    """Each instruction, on the best of the answer without its first line, last line or asterisks."""

    @property
    def prompt_level_strict_acc(self) -> bool:
        """All instructions, strictly."""
        return all(self.inst_level_strict_acc)

    @property
    def prompt_level_loose_acc(self) -> bool:
        """All instructions, loosely."""
        return all(self.inst_level_loose_acc)


def check_instructions(instruction_id_list: Sequence[str], kwargs: Sequence[Mapping[str, Any] | None]) -> None:
    """Refuse instructions that no checker knows, or whose arguments it does not take.

    Raises:
        ValueError: naming the instruction.

    Example:
        >>> check_instructions(["punctuation:no_comma"], [{}])
    """
    if len(instruction_id_list) != len(kwargs):
        raise ValueError(
            f"kwargs must have one entry an instruction, got {len(kwargs)} for {len(instruction_id_list)}."
        )
    for name, arguments in zip(instruction_id_list, kwargs, strict=True):
        try:
            _checker(name, arguments or {})
        except (TypeError, ValueError, KeyError) as error:
            raise ValueError(f"instruction {name!r} does not take {arguments!r}: {error}") from error


def score_instructions(
    answer: str, instruction_id_list: Sequence[str], kwargs: Sequence[Mapping[str, Any] | None]
) -> IFEvalScoreData:
    """Check an answer against its instructions, strictly and loosely.

    Example:
        >>> score_instructions("No commas here.", ["punctuation:no_comma"], [{}]).prompt_level_strict_acc
        True
    """
    return _score(answer, tuple(instruction_id_list), json.dumps([dict(arguments or {}) for arguments in kwargs]))


@functools.lru_cache(maxsize=256)
def _score(answer: str, names: tuple[str, ...], kwargs: str) -> IFEvalScoreData:
    # Four reward functions read one scoring.
    if len(answer) > _MAX_CHARACTERS or not answer.strip():
        return IFEvalScoreData((False,) * len(names), (False,) * len(names))
    checkers = [_checker(name, arguments) for name, arguments in zip(names, json.loads(kwargs), strict=True)]
    variants = [variant for variant in _variants(answer) if variant.strip()]
    strict = tuple(_follows(checker, answer) for checker in checkers)
    loose = tuple(any(_follows(checker, variant) for variant in variants) for checker in checkers)
    return IFEvalScoreData(strict, loose)


def _variants(answer: str) -> list[str]:
    lines = answer.split("\n")
    cut = [answer, "\n".join(lines[1:]), "\n".join(lines[:-1]), "\n".join(lines[1:-1])]
    return list(dict.fromkeys([text.strip() for text in cut] + [text.replace("*", "").strip() for text in cut]))


def _follows(checker: Callable[[str], bool], answer: str) -> bool:
    try:
        return bool(checker(answer))
    except Exception:  # a checker that stumbles over an answer does not find it followed
        return False


def _checker(name: str, arguments: Mapping[str, Any]) -> Callable[[str], bool]:
    # Tables of all rows list every argument of every instruction, None where it does not apply.
    given = {key: value for key, value in arguments.items() if value is not None}
    if name in _OWN_CHECKS:
        return _OWN_CHECKS[name](**given)
    known = _known_checks()
    if name not in known:
        raise ValueError(f"unknown; it must be one of {sorted({*known, *_OWN_CHECKS})}.")
    instruction = known[name](name)
    instruction.build_description(**given)
    return instruction.check_following


@functools.cache
def _known_checks() -> dict[str, Any]:
    return require("if_verifiable.ifeval", extra="envs").INSTRUCTION_DICT


# These are done here. The package's own need tokenizer data that it downloads, or, for placeholders, the square of the
# answer's length; and a text whose language cannot be told, a row of asterisks say, follows its rules of language.


@functools.cache
def _languages() -> Any:
    langdetect = require("langdetect.detector_factory", extra="envs")
    factory = langdetect.DetectorFactory()
    # Detection draws at random: unseeded, one answer has two rewards.
    factory.set_seed(0)
    factory.load_profile(langdetect.PROFILES_DIRECTORY)
    return factory


def _is_in(answer: str, language: str) -> bool:
    detector = _languages().create()
    detector.append(answer)
    return detector.detect() == language  # a text without any feature raises: it is in no language


def _response_language(language: str) -> Callable[[str], bool]:
    return lambda answer: _is_in(answer, language)


def _english_capital() -> Callable[[str], bool]:
    return lambda answer: answer.isupper() and _is_in(answer.lower(), "en")


def _english_lowercase() -> Callable[[str], bool]:
    return lambda answer: answer.islower() and _is_in(answer, "en")


def _number_of_sentences(num_sentences: int, relation: str) -> Callable[[str], bool]:
    return lambda answer: _RELATIONS[relation](_count_sentences(answer), int(num_sentences))


def _capital_words(capital_frequency: int, capital_relation: str) -> Callable[[str], bool]:
    def check(answer: str) -> bool:
        num_capital = sum(word.isupper() for word in re.findall(r"[\w'-]+", answer))
        return _RELATIONS[capital_relation](num_capital, int(capital_frequency))

    return check


def _number_of_placeholders(num_placeholders: int) -> Callable[[str], bool]:
    def count(line: str) -> int:
        num_found, start = 0, line.find("[")
        while start >= 0 and (end := line.find("]", start)) >= 0:
            num_found, start = num_found + 1, line.find("[", end)
        return num_found

    return lambda answer: sum(map(count, answer.split("\n"))) >= int(num_placeholders)


def _count_sentences(text: str) -> int:
    text = _ABBREVIATION.sub(lambda match: match[0][:-1], text)
    return sum(bool(re.search(r"\w", part)) for part in _SENTENCE_END.split(text))


_OWN_CHECKS: dict[str, Callable[..., Callable[[str], bool]]] = {
    "language:response_language": _response_language,
    "change_case:english_capital": _english_capital,
    "change_case:english_lowercase": _english_lowercase,
    "length_constraints:number_sentences": _number_of_sentences,
    "change_case:capital_word_frequency": _capital_words,
    "detectable_content:number_placeholders": _number_of_placeholders,
}
