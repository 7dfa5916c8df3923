"""Models' own chat templates: which are taken, and with which tools."""

from __future__ import annotations

import pytest
from real_templates import PUBLISHED, real_tokenizer

from llmrl.rendering import RenderingError, TemplateRenderer

# Of turns that are several messages, or whose contents are lists of parts.
REFUSED = {"gptoss", "idefics3", "llava_next", "muse_glimmer", "smolvlm"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_template_is_taken_or_refused_as_known(takes_long, model_path, name):
    if name in REFUSED:
        with pytest.raises(RenderingError):
            TemplateRenderer(real_tokenizer(model_path, name))
        return
    renderer = TemplateRenderer(real_tokenizer(model_path, name))
    assert renderer.render([{"role": "user", "content": "a"}], add_generation_prompt=True)
