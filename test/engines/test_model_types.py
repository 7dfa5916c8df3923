"""Models with which an engine does not start, or does not take weights: each is refused by its configuration."""

import transformers
from causal_types import causal_types
from engine_halves import enlarged, is_shown, page_rows, wrapper_types

from llmrl.engines.vllm.model_types import problem_of


def test_what_the_page_says_of_engines_is_what_is_refused(takes_long):
    names = {**causal_types(), **wrapper_types()}
    for model_type, row in page_rows().items():
        if row["engine"].startswith("refused: ImportError"):  # the class itself needs a package
            continue
        config = enlarged(model_type, getattr(transformers, names[model_type])).to_dict()
        problem = problem_of(config | {"architectures": [row["class"]]}, dtype="bfloat16", is_cpu=True)
        assert (problem is None) == is_shown(row["engine"]), (model_type, row["engine"], problem)
