"""`PythonInterpreter`: runs Python code of the model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Unpack

from llmrl._utils.types import Tokenizer
from llmrl.data import MalformedToolCall, Message, text_of
from llmrl.sandbox.launch import Isolation
from llmrl.sandbox.service import PythonExecutorService, PythonResult
from llmrl.tools.sandboxes import SandboxExecutor
from llmrl.tools.session import ToolSession
from llmrl.tools.tool import Tool, ToolError, only_text, text_parameters
from llmrl.tools.transform import OutputOptions, ToolTransform

if TYPE_CHECKING:
    from ray.actor import ActorHandle

_FENCED = re.compile(r"```(?:python|py)[^\S\n]*\n(.*?)^[^\S\n]*```", re.DOTALL | re.MULTILINE)
_DESCRIPTION = "Run Python code; what it prints is the answer."
_PARAMETERS = text_parameters("code", "Python source.")


class PythonInterpreter(ToolTransform):
    r"""Runs Python code of the model, from fenced blocks or calls of the tool `python`.

    Code runs in a `PythonExecutorService`: in a confined process, which is killed after a timeout.

    Args:
        tokenizer: ignored; for compatibility with TorchRL.
        tool_name: role of the answers.
        persistent: whether the code of a conversation shares variables.
        timeout: seconds per piece of code.
        services: `"ray"` for a service of TorchRL's service registry; a local one by default.
        service_name, namespace: name and namespace of the shared service.
        calls: `fenced` for Python blocks in the message, `tool_call` for the tool `python`.
        executor: a local service to share, or a `SandboxExecutor`, with which `persistent` code
            shares only files; by default a new service.
        isolation: isolation that the new service requires (`PythonExecutorService`).
        **output: `tool_parser`, `max_output_chars` and `truncate_side`, as for `ToolTransform`.

    Raises ValueError if `calls` or `services` is unknown, if both an executor and a service are
    given, or if the shared service is not registered.

    Example:
        >>> from tensordict import TensorDict
        >>> from llmrl.data import ChatHistory
        >>> from llmrl.envs import ChatEnv
        >>> interpreter = PythonInterpreter()
        >>> env = ChatEnv().append_transform(interpreter)
        >>> data = env.reset(TensorDict({"query": "What is 7 squared?"}))
        >>> block = "Let me compute that.\n```python\nprint(7 ** 2)\n```"
        >>> full = data["history"].prompt.append({"role": "assistant", "content": block})
        >>> data["history"] = ChatHistory(full=full, batch_size=())
        >>> env.step(data)["next", "history"].prompt.chats[-1]
        {'role': 'tool', 'content': 'Code block 1 executed successfully:\n49\n'}
        >>> interpreter.close()
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None = None,
        tool_name: str = "tool",
        persistent: bool = False,
        timeout: float = 10.0,
        services: Literal["ray"] | None = None,
        service_name: str = "python_executor",
        namespace: str | None = None,
        *,
        calls: Literal["fenced", "tool_call"] = "fenced",
        executor: PythonExecutorService | SandboxExecutor | None = None,
        isolation: Isolation = "auto",
        **output: Unpack[OutputOptions],
    ) -> None:
        if calls not in ("fenced", "tool_call"):
            raise ValueError(f"calls must be 'fenced' or 'tool_call', got {calls!r}.")
        if services not in (None, "ray"):
            raise ValueError(f"services must be 'ray' or None, got {services!r}.")
        if services is not None and executor is not None:
            raise ValueError("both services and executor are given; give only one, because code runs in one of them.")
        super().__init__(tool_name=tool_name, timeout=timeout, **output)
        self.persistent = persistent
        self.services = services
        self.calls = calls
        self._isolation = isolation
        self._executor = executor
        self._is_executor_ours = executor is None
        self._remote = None if services is None else _find_service(service_name, namespace)
        self._set_tools(self._make_tools())

    def _make_tools(self) -> list[Tool]:
        if self.calls == "fenced":
            return []
        return [Tool("python", _DESCRIPTION, _PARAMETERS, self._run_tool, release=self._release, keeps_time=True)]

    @property
    def executor(self) -> PythonExecutorService | SandboxExecutor:
        """The local service, started on first use."""
        if self._executor is None:
            self._executor = PythonExecutorService(timeout=self.timeout, isolation=self._isolation)
        return self._executor

    def close(self) -> None:
        """Close the local service, unless it is shared. May be called twice."""
        super().close()
        if self._executor is not None and self._is_executor_ours:
            self._executor.close()
            self._executor = None

    def __getstate__(self) -> dict[str, object]:
        return {**super().__getstate__(), "_executor": None, "_is_executor_ours": True}

    def _join(self, session: ToolSession) -> None:
        super()._join(session)
        if self.calls == "fenced" and self.persistent:
            session.on_release(self._release)

    def _release(self, conversation_id: str) -> None:
        if self._remote is not None:
            self._remote.release.remote(conversation_id)
        elif self._executor is not None:
            self._executor.release(conversation_id)

    async def answer(
        self, message: Message, malformed: Sequence[MalformedToolCall], session: ToolSession, *, turn: int
    ) -> list[Message]:
        """Return one tool message per block or call."""
        if self.calls == "tool_call":
            return await super().answer(message, malformed, session, turn=turn)
        answers = []
        # In order, because a block may use results of an earlier one.
        for number, code in enumerate(_FENCED.findall(text_of(message.get("content"))), 1):
            result = await self._execute(code, session.id)
            if result.is_success:
                self.count("answered", session)
                text = f"Code block {number} executed successfully:\n{result.stdout}"
            else:
                self.count(CodeFailed(result).outcome, session)
                text = f"Code block {number} failed:\n{_output(result)}"
            answers.append(self.tool_message(text))
        return answers

    async def _run_tool(self, arguments: dict[str, object], conversation_id: str) -> str:
        result = await self._execute(only_text(arguments, "code"), conversation_id)
        if not result.is_success:
            raise CodeFailed(result)
        return _output(result)

    async def _start(self) -> None:
        _ = self.executor  # starting it takes a moment

    async def _execute(self, code: str, conversation_id: str) -> PythonResult:
        session = conversation_id if self.persistent else None
        if self._remote is None:
            if self._executor is None:
                await self._loops.wait(self._start())
            return await self.executor.run(code, session=session, timeout=self.timeout)
        try:
            answer = await self._remote.execute.remote(code, session, self.timeout)
        except Exception as error:  # Ray raises various errors if the actor is gone
            return PythonResult(False, "", f"The Python service is out of order: {type(error).__name__}", -1, "died")
        return PythonResult(answer["success"], answer["stdout"], answer["stderr"], answer["returncode"])


class CodeFailed(ToolError):
    """Raised if the model's code failed."""

    def __init__(self, result: PythonResult) -> None:
        super().__init__(f"the code failed:\n{_output(result)}")
        self.outcome = "timeouts" if result.reason == "timeout" else "failed"


def _output(result: PythonResult) -> str:
    # The output before a failure is as useful as the error.
    return result.stdout + result.stderr


def _find_service(name: str, namespace: str | None) -> ActorHandle:
    from torchrl.services import get_services

    try:
        return get_services(backend="ray", namespace=namespace)[name]
    except KeyError:
        raise ValueError(
            f"service_name {name!r} is not registered with Ray; register a PythonExecutorService first: "
            "get_services(backend='ray').register(name, PythonExecutorService)."
        ) from None
