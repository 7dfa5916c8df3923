"""Conversations with tools, played by hand: what a policy would write is given."""

from __future__ import annotations

from tensordict import TensorDict

from llmrl.data import ChatHistory
from llmrl.envs import ChatEnv
from llmrl.rendering.tool_calls import make_tool_call


class Chat:
    """One conversation of an environment with these transforms."""

    def __init__(self, *transforms, query="Go."):
        self.env = ChatEnv()
        for transform in transforms:
            transform.reset_parent()  # of an earlier conversation
            self.env = self.env.append_transform(transform)
        self.data = self.env.reset(TensorDict({"query": query}))

    @property
    def tool_names(self):
        """Names of the tools that the prompt shows."""
        return [schema["function"]["name"] for schema in self.data["tools"]]

    def say(self, content="", calls=()):
        """The assistant says and calls this; the messages that answer."""
        message = {"role": "assistant", "content": content}
        if calls:
            message["tool_calls"] = [make_tool_call(name, arguments) for name, arguments in calls]
        history = self.data["history"].prompt.append(message)
        self.data["history"] = ChatHistory(full=history, batch_size=())
        following = self.env.step(self.data).pop("next")
        for key in ("history", "tools", "tool_state"):
            if key in following:
                self.data[key] = following[key]
        return following["history"].prompt.chats[len(history.chats) :]

    def call(self, name, /, **arguments):
        """The text that answers one call."""
        (message,) = self.say(calls=[(name, arguments)])
        return message["content"]
