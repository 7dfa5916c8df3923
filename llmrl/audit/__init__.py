"""Audit of an environment before a run: rewards of worthless answers, and faults that would disturb a run."""

from __future__ import annotations

from llmrl.audit.answers import Answer, Kind, answers_for
from llmrl.audit.checks import diagnose_played
from llmrl.audit.contract import Contract, check_env
from llmrl.audit.play import Audit, audit
from llmrl.audit.played import Played

__all__ = ["Answer", "Audit", "Contract", "Kind", "Played", "answers_for", "audit", "check_env", "diagnose_played"]
