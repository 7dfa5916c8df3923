"""Your own sandbox: five methods, the tests of its contract, and tools that run in it. No model is needed.

This sandbox is a folder with ordinary processes and confines nothing. It stands for a container or a provider's
machine; the methods would then call that provider's client.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
from pathlib import Path

from llmrl import AsyncVLLM, DatasetChatEnv, LLMCollector, RolloutLimits, RubricReward, ensure_embedded_model
from llmrl.policies import LLMWrapperBase
from llmrl.rendering import TemplateRenderer
from llmrl.testing import ScriptedEngine, check_sandbox
from llmrl.tools import FileReadTool, Sandboxes, SandboxResult, ShellTool, ToolTransform


class FolderSandbox:
    folder: Path | None = None

    async def start(self) -> None:
        self.folder = Path(tempfile.mkdtemp())

    async def run(self, argv, *, stdin=b"", timeout=30.0) -> SandboxResult:
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), asyncio.subprocess.PIPE)
        try:
            process = await asyncio.create_subprocess_exec(*argv, cwd=self.folder, start_new_session=True, **pipes)
        except OSError as error:
            return SandboxResult(127, "", str(error))
        telling = asyncio.ensure_future(process.communicate(stdin))
        _, late = await asyncio.wait([telling], timeout=timeout)
        if late:
            os.killpg(process.pid, signal.SIGKILL)
        stdout, stderr = (text.decode(errors="replace") for text in await telling)
        return SandboxResult(process.returncode, stdout, stderr, bool(late))

    async def put(self, path, data) -> None:
        (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / path).write_bytes(data)

    async def get(self, path) -> bytes:
        return (self.folder / path).read_bytes()

    async def close(self) -> None:
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


async def has_sorted(conversation_sandbox) -> float:  # a reward function can use the conversation's own sandbox
    result = await conversation_sandbox.sandbox.run(["sort", "-c", "sorted.txt"])
    return float(result.exit_code == 0)


# The answers of a model.
ANSWERS = (
    '<tool_call>{"name": "shell", "arguments": {"command": "printf \'b\\na\\n\' | sort > sorted.txt"}}</tool_call>',
    '<tool_call>{"name": "file_read", "arguments": {"path": "sorted.txt"}}</tool_call>',
    "Done.",
)


def main(engine: AsyncVLLM | None) -> None:
    asyncio.run(check_sandbox(FolderSandbox))
    print("the contract holds")

    sandboxes = Sandboxes(FolderSandbox)
    env = DatasetChatEnv([{"query": "Write b and a into sorted.txt, sorted."}])
    env = env.append_transform(ToolTransform([ShellTool(sandboxes), FileReadTool(sandboxes)]))
    env = env.append_transform(RubricReward(has_sorted))
    renderer = TemplateRenderer.from_pretrained(str(ensure_embedded_model()))
    scripted = ScriptedEngine([f"{answer}<|im_end|>" for answer in ANSWERS], encode=renderer.encode)
    policy = LLMWrapperBase(scripted, renderer=renderer)
    with LLMCollector(env, policy=policy, groups_per_batch=1, limits=RolloutLimits(max_turns=4)) as collector:
        [rollout] = collector.play(1)  # each conversation has a sandbox, which is closed after scoring
    for message in rollout.messages:
        print(f"{message['role']}: {message['content']}")
    print("reward:", rollout.reward)


if __name__ == "__main__":
    main(None)
