"""Every example runs, on the session's engine, and prints something."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from llmrl import VLLMWeightSyncScheme, get_model_metadata

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(path, vllm_engine, capsys, request):
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    version = vllm_engine.policy_version
    module.main(vllm_engine)
    assert capsys.readouterr().out.strip()
    if vllm_engine.policy_version != version:  # it trained: put the weights back for whoever comes next
        sender = VLLMWeightSyncScheme().create_sender()
        model = request.getfixturevalue("reference_model")
        sender.register_model(model)
        sender.init_all_workers_group(get_model_metadata(model), vllm_engine)
        sender.update_weights()
        vllm_engine.policy_version = version
