"""Every class of instruction has answers that follow it and answers that do not."""

from __future__ import annotations

import pytest

from llmrl.rewards import check_instructions, score_instructions
from llmrl.rewards.ifeval import _OWN_CHECKS, _known_checks, _score

ENGLISH = "This is a plain English sentence about the weather in the north of the country today."
CASES = {
    "change_case:capital_word_frequency": (
        {"capital_frequency": 2, "capital_relation": "at least"},
        "A BIG DAY",
        "big",
    ),
    "change_case:english_capital": ({}, ENGLISH.upper(), ENGLISH),
    "change_case:english_lowercase": ({}, ENGLISH.lower(), ENGLISH),
    "combination:repeat_prompt": ({"prompt_to_repeat": "Say hi."}, "Say hi. Hi!", "Hi!"),
    "combination:two_responses": ({}, "one thing\n******\nanother thing", "one thing"),
    "detectable_content:number_placeholders": ({"num_placeholders": 2}, "[name] lives in [city]", "[name] lives"),
    "detectable_content:postscript": ({"postscript_marker": "P.S."}, "Bye.\nP.S. Call me.", "Bye."),
    "detectable_format:constrained_response": ({}, "My answer is yes.", "Yes."),
    "detectable_format:json_format": ({}, '```json\n{"a": 1}\n```', "a: 1"),
    "detectable_format:multiple_sections": (
        {"section_spliter": "Section", "num_sections": 2},
        "Section 1\nfirst\nSection 2\nsecond",
        "Section 1\nfirst",
    ),
    "detectable_format:number_bullet_lists": ({"num_bullets": 2}, "* one\n* two", "* one"),
    "detectable_format:number_highlighted_sections": ({"num_highlights": 2}, "*one* and *two*", "*one*"),
    "detectable_format:title": ({}, "<<A day>>\nIt rained.", "A day\nIt rained."),
    "keywords:existence": ({"keywords": ["rain", "sun"]}, "Rain and sun.", "Rain."),
    "keywords:forbidden_words": ({"forbidden_words": ["rain"]}, "Sun.", "Rain."),
    "keywords:frequency": ({"keyword": "rain", "frequency": 2, "relation": "at least"}, "rain, rain", "rain"),
    "keywords:letter_frequency": (
        {"letter": "e", "let_frequency": 3, "let_relation": "at least"},
        "eleven",
        "two",
    ),
    "language:response_language": ({"language": "de"}, "Heute regnet es im ganzen Norden des Landes.", ENGLISH),
    "length_constraints:nth_paragraph_first_word": (
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "then"},
        "First this.\n\nThen that.",
        "First this.\n\nNow that.",
    ),
    "length_constraints:number_paragraphs": ({"num_paragraphs": 2}, "one\n***\ntwo", "one"),
    "length_constraints:number_sentences": (
        {"num_sentences": 3, "relation": "less than"},
        "Mr. A. Smith paid 3.50 euros! Really?",
        "One. Two. Three.",
    ),
    "length_constraints:number_words": ({"num_words": 3, "relation": "at least"}, "one two three", "one two"),
    "punctuation:no_comma": ({}, "one and two", "one, two"),
    "startend:end_checker": ({"end_phrase": "The end."}, "It rained. The end.", "It rained."),
    "startend:quotation": ({}, '"It rained."', "It rained."),
}


def test_cases_cover_every_class():
    assert set(CASES) == set(_known_checks()) and len(CASES) == 25


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_following_and_failing_answers_are_distinguished(name):
    kwargs, following, failing = CASES[name]
    # Tables of all rows name every argument of every instruction.
    kwargs = {**kwargs, "absent": None}
    assert score_instructions(following, [name], [kwargs]).prompt_level_strict_acc
    assert not score_instructions(failing, [name], [kwargs]).prompt_level_loose_acc


# Sentences and words in capitals as the original counts them, with the model of sentences that it downloads.
COUNTS = [
    ("Mr. A. Smith paid 3.50 euros! Really?", 2, 1),
    ("He came at 5 p.m. on Sunday. It rained.", 2, 0),
    ("The U.S. Army and the U.K. Navy met in Washington D.C. in Jan. 1990. NATO did not.", 2, 4),
    ("Bring fruit (e.g. apples), i.e. something sweet. Nothing else!", 4, 0),
    ("Wait... what?! No. YES.", 4, 1),
    ("1. First point\n2. Second point\n3. Third: DONE", 4, 1),
    ("IT'S 5 O'CLOCK. I CAN'T GO-ON. OK", 3, 8),
    ("Dear Dr. Jones,\n\nThanks for your letter. Yours, Prof. M. Curie Ph.D. from Paris", 2, 1),
    ('"Stop!" she said. "Why?" he asked. (Nobody knew.) END', 6, 1),
    ("Visit https://example.org/a.b?c=d. It is v1.2.3. USA/UK trade, HTML5 and A4.", 3, 3),
    ("She works at Acme Inc. in Boston. I'M GONNA WIN. X&Y = Z.", 3, 8),
]


@pytest.mark.parametrize(("answer", "num_sentences", "num_capital"), COUNTS)
def test_sentences_and_capital_words_are_counted_as_the_original_does(answer, num_sentences, num_capital):
    def follows(name, **kwargs):
        return score_instructions(answer, [name], [kwargs]).prompt_level_strict_acc

    for name, count, number, relation in (
        ("length_constraints:number_sentences", num_sentences, "num_sentences", "relation"),
        ("change_case:capital_word_frequency", num_capital, "capital_frequency", "capital_relation"),
    ):
        assert follows(name, **{number: count, relation: "at least"})
        assert not follows(name, **{number: count + 1, relation: "at least"})
        assert follows(name, **{number: count + 1, relation: "less than"})


@pytest.mark.parametrize(
    ("letter", "following", "failing"),
    [("#", "# A\n## B", "## B"), ("!", "Oh! No! Yes!", "Oh! No!"), ("E", "eleven", "seven")],
)
def test_a_sign_is_counted_like_a_letter(letter, following, failing):
    kwargs = {"letter": letter, "let_frequency": 3, "let_relation": "at least"}
    for answer, is_followed in ((following, True), (failing, False)):
        scores = set()
        for _ in range(5):
            _score.cache_clear()
            scores.add(score_instructions(answer, ["keywords:letter_frequency"], [kwargs]).prompt_level_strict_acc)
        assert scores == {is_followed}


@pytest.mark.parametrize("name", [name for name, (kwargs, _, _) in CASES.items() if kwargs])
def test_arguments_that_would_be_drawn_at_random_are_refused(name):
    kwargs = CASES[name][0]
    for key, value in kwargs.items():
        with pytest.raises(ValueError, match=name):
            check_instructions([name], [{other: kwargs[other] for other in kwargs if other != key}])
        if "relation" in key:
            with pytest.raises(ValueError, match=name):
                check_instructions([name], [{**kwargs, key: "exactly"}])
        if isinstance(value, int) and name not in _OWN_CHECKS:
            with pytest.raises(ValueError, match=f"{name}.*{key}.*must be given"):
                check_instructions([name], [{**kwargs, key: -1}])


def test_sentences_without_number_cost_no_time_without_number():
    name, kwargs = "length_constraints:number_sentences", {"num_sentences": 1, "relation": "at least"}
    assert not score_instructions("! " * 9_000, [name], [kwargs]).prompt_level_loose_acc


def test_loose_forgives_an_opening_line_a_closing_line_and_asterisks():
    data = score_instructions("Sure:\n**My answer is yes.**", ["startend:end_checker"], [{"end_phrase": "yes."}])
    assert data.inst_level_loose_acc == (True,)
    assert not score_instructions("Sure, yes:\nfine", ["punctuation:no_comma"], [{}]).prompt_level_strict_acc
    assert score_instructions("Sure, yes:\nfine", ["punctuation:no_comma"], [{}]).prompt_level_loose_acc


@pytest.mark.parametrize("answer", ["", "   \n", "a" * 200_000])
def test_nothing_and_too_much_follow_no_instruction(answer):
    data = score_instructions(answer, ["punctuation:no_comma"], [{}])
    assert not data.prompt_level_strict_acc and not data.prompt_level_loose_acc


def test_a_score_is_the_same_each_time():
    scores = set()
    for _ in range(5):
        _score.cache_clear()
        scores.add(score_instructions("Ja no si", ["language:response_language"], [{"language": "de"}]))
    assert len(scores) == 1


@pytest.mark.parametrize("answer", ["*****", "12 34", "https://example.org"])
def test_a_text_in_no_language_follows_no_rule_of_language(answer, caplog):
    for name in ("language:response_language", "change_case:english_capital", "change_case:english_lowercase"):
        kwargs = {"language": "en"} if name.startswith("language") else {}
        assert not score_instructions(answer, [name], [kwargs]).prompt_level_loose_acc
    assert not caplog.records
