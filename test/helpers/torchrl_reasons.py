"""Why cases of TorchRL's own test files do not pass unchanged, and what the page on moving says to write instead."""

from __future__ import annotations

# Names that llmrl does not have, with the reason; what is not here counts as a private name.
ELSEWHERE: dict[str, str] = {}
# (file, case, reason) of what is not run.
NOT_RUN: tuple[tuple[str, str, str], ...] = ()
# (file, pattern of cases, reason, changes of lines that the page gives)
REASONS: tuple[tuple[str, str, str, tuple[tuple[str, str], ...]], ...] = ()
