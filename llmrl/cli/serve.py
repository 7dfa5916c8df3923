"""`llmrl serve`: a model as a server with the APIs that agents use; conversations are saved if a folder is given."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import signal
import sys
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

from rich.console import Console

from llmrl._utils.garbage import search_rarely
from llmrl._utils.types import Tokenizer
from llmrl.collectors.completing import Completer
from llmrl.data import Rollout, RolloutStatus
from llmrl.endpoint import EndpointServer, Session, SessionLimits, TurnTree
from llmrl.endpoint.open_sessions import OpenSessions
from llmrl.endpoint.server import LOOPBACK
from llmrl.engines import Completion, SamplingConfig
from llmrl.engines.base import check_supported
from llmrl.engines.token_stream import TokenStream
from llmrl.policies import LLMWrapperBase
from llmrl.runs.run_folder import RunFolder, holds_run

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 10.0
# The engine's thread waits this long for the interpreter with each request that it sends while this thread computes.
_SWITCH_SECONDS = 5e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """Settings of a server.

    Raises:
        ValueError: if the key is empty, or if other machines can reach the address and there is no key.
        FileExistsError: if `out` contains a run.
    """

    name: str
    """Model name for clients."""
    host: str
    port: int
    """Port; 0 selects a free one."""
    api_key: str | None
    out: Path | None

    def __post_init__(self) -> None:
        check_key(self.host, self.api_key)
        if self.out is not None and holds_run(self.out):
            raise FileExistsError(f"{self.out} already contains a run; choose another folder.")


class Recorder:
    """Saves ended sessions in a run's folder, beside the tokenizer, with which a viewer decodes their tokens."""

    def __init__(self, path: Path, tokenizer: Tokenizer | None) -> None:
        self._folder = RunFolder(path, trackers=())
        self._steps = itertools.count(1)
        if tokenizer is not None:
            self._folder.save_tokenizer(tokenizer)

    def add(self, session: Session) -> None:
        """Write a session if it has any answers; warn if that fails, because the others can still be saved."""
        try:
            self._write(session)
        except OSError as error:
            logger.warning("the conversation %s could not be saved", session.session_id, exc_info=error)

    def _write(self, session: Session) -> None:
        tree = session.tree
        if not tree.turns:
            return
        rewards = session.replies.rewards_in(session.tree)
        rollout = Rollout(
            rollout_id=session.session_id,
            group_id=session.session_id,
            sample_index=0,
            group_size=1,
            conversation=tree,
            messages=tree.messages,
            turns=tree.to_records(),
            status=RolloutStatus.COMPLETED,
            num_turns=tree.num_turns,
            num_completion_tokens=session.num_completion_tokens,
            info=session.record(),
            reward=sum(rewards.values()),
            is_scored=bool(rewards),
        )
        self._folder.log_evaluation(next(self._steps), "serve", [rollout])

    def close(self) -> None:
        """Close the folder."""
        self._folder.close()


async def serve(settings: ServeSettings, policy: LLMWrapperBase, console: Console, *, until: asyncio.Event) -> None:
    """Serve a policy until `until` is set; raise OSError if the port is taken."""
    completer = Completer(policy, num_retries=2)
    numbers = itertools.count()
    engine = policy.engine
    limits = SessionLimits(max_prompt_tokens=engine.max_model_len - 1)
    check = lru_cache(maxsize=256)(partial(check_supported, engine))  # clients repeat their parameters

    def open_session(name: str) -> Session:
        async def complete(
            prompt_ids: list[int], sampling: SamplingConfig, *, stream: TokenStream | None = None
        ) -> Completion:
            request = f"{next(numbers)}"
            return await completer.complete(prompt_ids, sampling, name=request, routing_key=name, stream=stream)

        tree = TurnTree(policy.renderer, mode=policy.conversation_mode)
        return Session(name, tree, complete, policy.sampling, limits, does_client_sample=True, check_sampling=check)

    recorder = None if settings.out is None else Recorder(settings.out, policy.tokenizer)
    sessions = OpenSessions(
        open_session, api_key=settings.api_key, on_end=(lambda session: None) if recorder is None else recorder.add
    )
    server = EndpointServer(sessions, model_names=[settings.name])
    collect_as_before = search_rarely(server)
    try:
        await server.start(settings.host, settings.port)
        console.print(f"{settings.name} is served at [bold]{server.url}/v1[/bold] until Ctrl-C")
        while not until.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(until.wait(), _LOOK_SECONDS)
            sessions.end_idle()
    finally:
        collect_as_before()
        sessions.end_all()
        await server.close()
        if recorder is not None:
            recorder.close()
            console.print(f"saved: [bold]llmrl view {settings.out}[/bold]", soft_wrap=True)


def check_key(host: str, api_key: str | None) -> None:
    """Raise ValueError if the key is empty, or if other machines can reach the address and there is no key."""
    if not api_key and host not in LOOPBACK:
        raise ValueError(
            f"--host {host} can be reached from other machines: set a key that clients must send with --api-key."
        )
    if api_key == "":
        raise ValueError("--api-key is empty: give a key that clients must send, or leave --api-key out for none.")


def stop_signal() -> asyncio.Event:
    """Return an event of the running loop that Ctrl-C or SIGTERM sets."""
    until = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, until.set)
    return until


def run(settings: ServeSettings, policy: LLMWrapperBase, console: Console) -> None:
    """Serve until Ctrl-C or SIGTERM."""

    async def main() -> None:
        await serve(settings, policy, console, until=stop_signal())

    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        asyncio.run(main())
    finally:
        sys.setswitchinterval(before)
