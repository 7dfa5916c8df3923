"""The loop that engines run on; it knows nothing of engines and lives with the other helpers of asynchronous code."""

from __future__ import annotations

from llmrl.data.background_loop import BackgroundLoop, Mailbox

__all__ = ["BackgroundLoop", "Mailbox"]
