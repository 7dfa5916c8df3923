"""The policy behind a URL: the engine answers the requests of agents, recorded token by token."""

from llmrl.endpoint.requests import ModelAnswer, ModelReply, ModelRequest, RefusedRequest
from llmrl.endpoint.server import EndpointServer, Sessions
from llmrl.endpoint.session import Session, SessionLimits
from llmrl.endpoint.tree import TurnTree

__all__ = [
    "EndpointServer",
    "ModelAnswer",
    "ModelReply",
    "ModelRequest",
    "RefusedRequest",
    "Session",
    "SessionLimits",
    "Sessions",
    "TurnTree",
]
