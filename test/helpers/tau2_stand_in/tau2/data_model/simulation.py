from types import SimpleNamespace


class TextRunConfig(SimpleNamespace):
    """The settings of a conversation."""
