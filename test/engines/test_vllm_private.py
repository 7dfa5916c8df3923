"""What llmrl uses of vLLM beyond its top-level names is there, and its executor gets the messages of every worker."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest

from llmrl.engines.vllm import private as vllm_private
from llmrl.engines.vllm.arguments import require_vllm_version

pytestmark = pytest.mark.usefixtures("imports_vllm")


@pytest.mark.parametrize("name", sorted(vllm_private._MODULES))
def test_vllm_has_the_name(name):
    found = getattr(vllm_private, name)
    assert found is getattr(vllm_private, name) is not None
    # A test before this one in the process may have called the plug-in, which replaces some of them.
    assert getattr(found, "__module__", "vllm").startswith(("vllm", vllm_private.__name__))


def test_an_untried_version_with_all_names_is_warned_of(monkeypatch):
    monkeypatch.setattr("vllm.__version__", "0.99.0")
    with pytest.warns(UserWarning, match=r"tried with vLLM 0.31 and 0.32, found 0.99.0.*weight_transfer=False"):
        require_vllm_version()


def test_an_untried_version_that_lacks_a_name_is_refused_by_it(monkeypatch):
    monkeypatch.setattr("vllm.__version__", "0.99.0")
    monkeypatch.setitem(vllm_private._MODULES, "NewName", "vllm.config")
    monkeypatch.setitem(vllm_private._MODULES, "OtherName", "vllm.no_such_module")
    monkeypatch.setitem(vllm_private._MEMBERS, "outputs.CompletionOutput", ("text", "new_field"))
    lacking = r"vllm.config.NewName, vllm.no_such_module.OtherName, vllm.outputs.CompletionOutput.new_field"
    with pytest.raises(ImportError, match=rf"lacks {lacking}\. Install"):
        require_vllm_version()


def test_unused_names_are_not_handed_on():
    with pytest.raises(AttributeError, match="has no attribute 'LLM'"):
        vllm_private.LLM  # noqa: B018


def test_the_executor_is_found_by_name_in_the_engines_process():
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    executor = resolve_obj_by_qualname(vllm_private.EXECUTOR)
    assert issubclass(executor, MultiprocExecutor)
    assert pickle.loads(pickle.dumps(executor)) is executor


def test_an_answer_of_one_worker_is_given_when_all_have_answered():
    asked = []

    def queue(index):
        def dequeue(timeout=None):
            asked.append(index)
            return f"answer {index}"

        return SimpleNamespace(dequeue=dequeue, name=f"queue {index}")

    queues = vllm_private._AllAnswers([queue(0), queue(1), queue(2)])
    for one in queues:  # as vLLM does, which stops at the first error
        assert one.dequeue(timeout=1.0) == "answer 0"
        assert one.name == "queue 0"
        break
    assert asked == [0, 1, 2]
    assert [one.dequeue() for one in queues] == ["answer 0", "answer 1", "answer 2"]
