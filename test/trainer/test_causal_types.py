"""Causal language models of the installed transformers are trained exactly, or refused by name.

One of each family and outcome is compared here; `python test/helpers/causal_types.py` compares all and writes the page.
"""

from __future__ import annotations

import re

import pytest
from causal_types import causal_types, compare, page_outcomes

OUTCOMES = page_outcomes()
# The last of the names that begin alike, which is the newest.
COMPARED = {(re.split(r"[\d_-]", name)[0], outcome): name for name, outcome in OUTCOMES.items()}


def test_the_page_names_every_causal_type_of_the_installed_transformers() -> None:
    assert list(OUTCOMES) == list(causal_types())


@pytest.mark.parametrize("model_type", COMPARED.values())
def test_a_causal_type_is_as_exact_as_the_page_says(model_type: str, takes_long: None) -> None:
    try:
        result = compare(model_type)
    except ImportError as error:
        pytest.skip(str(error))
    assert result.is_exact, result
    assert result.outcome == OUTCOMES[model_type], result.reason
