"""Scoring of verifiable instructions (Zhou et al. 2023, https://arxiv.org/abs/2311.07911)."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from llmrl._utils.arguments import KnownArguments
from llmrl._utils.imports import require

_MAX_CHARACTERS = 20_000
"""Maximum length of an answer, because some checks take quadratic time; longer answers follow no instruction."""
_RELATIONS: dict[str, Callable[[int, int], bool]] = {"at least": int.__ge__, "less than": int.__lt__}
_ABBREVIATIONS = (
    "mr mrs ms messrs dr prof gen maj col lt sen rep st jr sr jan feb aug sep sept oct nov dec inc co corp ltd bros "
    "ave ft vs a.d a.m p.m ph.d u.s u.s.a u.k u.n d.c n.y"
)
"""Common abbreviations that do not end a sentence in the original's sentence model; others, such as `e.g.`, do."""
_MAX_SENTENCES = 1000
"""Maximum number of sentences, because splitting takes quadratic time; longer answers fail checks of sentences."""


class _Instruction(Protocol):
    """A checker of the package `if_verifiable`."""

    def __init__(self, instruction_id: str) -> None: ...
    def build_description(self, **arguments: object) -> str: ...
    def get_instruction_args(self) -> dict[str, object] | None: ...
    def check_following(self, value: str) -> bool: ...


class _Detector(Protocol):
    def append(self, text: str) -> None: ...
    def detect(self) -> str: ...


class _DetectorFactory(Protocol):
    def create(self) -> _Detector: ...


class _SentenceTokenizer(Protocol):
    def tokenize(self, text: str) -> list[str]: ...


@dataclass(frozen=True, slots=True)
class IFEvalScoreData(KnownArguments):
    """The instructions that an answer follows."""

    inst_level_strict_acc: tuple[bool, ...]
    """Whether the unchanged answer follows each instruction."""
    inst_level_loose_acc: tuple[bool, ...]
    """Whether a variant of the answer, without its first line, last line or asterisks, follows each instruction."""

    @property
    def prompt_level_strict_acc(self) -> bool:
        """Whether all instructions are followed strictly."""
        return all(self.inst_level_strict_acc)

    @property
    def prompt_level_loose_acc(self) -> bool:
        """Whether all instructions are followed loosely."""
        return all(self.inst_level_loose_acc)


def check_instructions(instruction_id_list: Sequence[str], kwargs: Sequence[Mapping[str, object] | None]) -> None:
    """Raise ValueError if an instruction is unknown or does not accept its arguments."""
    if len(instruction_id_list) != len(kwargs):
        raise ValueError(
            f"kwargs must have one entry per instruction, got {len(kwargs)} for {len(instruction_id_list)}."
        )
    for name, arguments in zip(instruction_id_list, kwargs, strict=True):
        try:
            _checker(name, arguments or {})
        except (TypeError, ValueError, KeyError) as error:
            raise ValueError(f"instruction {name!r} does not take {arguments!r}: {error}") from error


def score_instructions(
    answer: str, instruction_id_list: Sequence[str], kwargs: Sequence[Mapping[str, object] | None]
) -> IFEvalScoreData:
    """Check an answer against its instructions, strictly and loosely.

    Example:
        >>> score_instructions("No commas here.", ["punctuation:no_comma"], [{}]).prompt_level_strict_acc
        True
    """
    return _score(answer, tuple(instruction_id_list), json.dumps([dict(arguments or {}) for arguments in kwargs]))


@functools.lru_cache(maxsize=256)
def _score(answer: str, names: tuple[str, ...], kwargs: str) -> IFEvalScoreData:
    # Cached, because four reward functions read the same result.
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
    except Exception:  # a checker that fails counts as not followed
        return False


def _checker(name: str, arguments: Mapping[str, object]) -> Callable[[str], bool]:
    # Rows of a table have all arguments of all instructions; those that do not apply are None.
    given = {key: value for key, value in arguments.items() if value is not None}
    if name in _OWN_CHECKS:
        return _OWN_CHECKS[name](**given)
    known = _known_checks()
    if name not in known:
        raise ValueError(f"unknown; it must be one of {sorted({*known, *_OWN_CHECKS})}.")
    instruction = known[name](name)
    instruction.build_description(**given)
    # The package draws missing or invalid arguments at random, so the reward would not be deterministic.
    used = instruction.get_instruction_args() or {}
    drawn = [key for key in used if key not in given or (isinstance(given[key], int) and given[key] != used[key])]
    if drawn:
        raise ValueError(f"{drawn} must be given, within their range.")
    return instruction.check_following


@functools.cache
def _known_checks() -> Mapping[str, type[_Instruction]]:
    return require("if_verifiable.ifeval", extra="envs").INSTRUCTION_DICT


# These checks replace the package's own, which download a sentence model, take quadratic time (placeholders), accept
# text without a detectable language, or count a random letter in place of a sign.


@functools.cache
def _languages() -> _DetectorFactory:
    langdetect = require("langdetect.detector_factory", extra="envs")
    factory = langdetect.DetectorFactory()
    # Detection is random: without a seed, the reward would not be deterministic.
    factory.set_seed(0)
    factory.load_profile(langdetect.PROFILES_DIRECTORY)
    return factory


def _is_in(answer: str, language: str) -> bool:
    detector = _languages().create()
    detector.append(answer)
    return detector.detect() == language  # raises for text without features, such as asterisks


def _response_language(language: str) -> Callable[[str], bool]:
    return lambda answer: _is_in(answer, language)


def _english_capital() -> Callable[[str], bool]:
    return lambda answer: answer.isupper() and _is_in(answer.lower(), "en")


def _english_lowercase() -> Callable[[str], bool]:
    return lambda answer: answer.islower() and _is_in(answer, "en")


@functools.cache
def _sentence_tokenizer() -> _SentenceTokenizer:
    punkt = require("nltk.tokenize.punkt", extra="envs")
    parameters = punkt.PunktParameters()
    parameters.abbrev_types = set(_ABBREVIATIONS.split())
    return punkt.PunktSentenceTokenizer(parameters)


def _sentences(answer: str) -> list[str]:
    if sum(map(answer.count, ".!?")) > _MAX_SENTENCES:
        raise ValueError(f"more than {_MAX_SENTENCES} sentences.")
    return _sentence_tokenizer().tokenize(answer)


def _number_of_sentences(num_sentences: int, relation: str) -> Callable[[str], bool]:
    is_right = _RELATIONS[relation]
    return lambda answer: is_right(len(_sentences(answer)), int(num_sentences))


def _capital_words(capital_frequency: int, capital_relation: str) -> Callable[[str], bool]:
    is_right = _RELATIONS[capital_relation]
    words_of = require("nltk.tokenize", extra="envs").NLTKWordTokenizer().tokenize

    def check(answer: str) -> bool:
        words = (word for sentence in _sentences(answer) for word in words_of(sentence))
        return is_right(sum(map(str.isupper, words)), int(capital_frequency))

    return check


def _letter_frequency(letter: str, let_frequency: int, let_relation: str) -> Callable[[str], bool]:
    is_right = _RELATIONS[let_relation]
    sign = letter.strip().lower()
    if len(sign) != 1:
        raise ValueError(f"letter must be one character, got {letter!r}.")
    return lambda answer: is_right(answer.lower().count(sign), int(let_frequency))


def _number_of_placeholders(num_placeholders: int) -> Callable[[str], bool]:
    def count(line: str) -> int:
        *closed, _ = line.split("]")  # a placeholder ends with the first closing bracket after an opening one
        return sum("[" in text for text in closed)

    return lambda answer: sum(map(count, answer.split("\n"))) >= int(num_placeholders)


_OWN_CHECKS: dict[str, Callable[..., Callable[[str], bool]]] = {
    "language:response_language": _response_language,
    "change_case:english_capital": _english_capital,
    "change_case:english_lowercase": _english_lowercase,
    "keywords:letter_frequency": _letter_frequency,
    "length_constraints:number_sentences": _number_of_sentences,
    "change_case:capital_word_frequency": _capital_words,
    "detectable_content:number_placeholders": _number_of_placeholders,
}
